"""Launches the Triton kernels of `lut_matmul`, by the plans of `int_matmul`."""

from kernels.interpreter import interpreting, prepare

prepare()

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.int_matmul.layout import Packed  # noqa: E402
from kernels.int_matmul.triton import (  # noqa: E402
    aligned,
    as_words,
    blocks,
    divided,
    fitting_warps,
    gathered,
    outputs,
    slab_by_slab,
)
from kernels.int_matmul.triton import candidates as int_candidates  # noqa: E402
from kernels.int_matmul.triton import heuristic as int_heuristic  # noqa: E402
from kernels.lut_matmul.layout import Codebook  # noqa: E402
from kernels.lut_matmul.products import dequantise, few, many  # noqa: E402
from kernels.tuning import Compilation, configuration  # noqa: E402

MAGIC = 0x32103210  # the selector of PRMT that changes nothing, in both halves of a word
FUSED = (torch.bfloat16, torch.float16)


def packed(w: Codebook) -> Packed:
    """The integer weight of the same codes: what plans depend on."""
    scale = w.codes[:, : w.shape[1] // w.group_size] if w.scale is None else w.scale
    return Packed("rows", w.codes, scale, None, w.bits, w.group_size, w.shape)


def key(w: Codebook, tokens: int) -> str:
    table = "row" if w.table.dim() == 2 else "tensor"
    return f"lut{w.bits} {table} g{w.group_size} m{triton.next_power_of_2(tokens)} n{w.shape[0]} k{w.shape[1]}"


def heuristic(w: Codebook, tokens: int) -> dict:
    return int_heuristic(packed(w), tokens)


def candidates(w: Codebook, tokens: int) -> list[dict]:
    return int_candidates(packed(w), tokens)


def lut_matmul(x: Tensor, w: Codebook) -> Tensor:
    """y [tokens, out] in x's dtype, from x [tokens, in] in float32, bfloat16 or float16 and `rows`."""
    assert w.layout == "rows" and x.dim() == 2
    if x.shape[0] == 0:
        return x.new_empty(0, w.shape[0])
    plan = (
        configuration("lut_matmul", key(w, x.shape[0]), heuristic(w, x.shape[0]))
        if x.dtype in FUSED
        else {"kind": "dequantise"}
    )
    x = x if x.stride(1) == 1 else x.contiguous()
    scale = None if w.scale is None else w.scale.contiguous()
    w = w._replace(codes=aligned(w.codes), table=w.table.contiguous(), scale=scale)
    return {"few": _launch_few, "many": _launch_many, "dequantise": _launch_dequantise}[plan["kind"]](x, w, plan)


def _launch_few(x: Tensor, w: Codebook, plan: dict) -> Tensor:
    tokens, columns = x.shape
    cut, rows, unit = blocks(packed(w)), *as_words(w.codes)
    y = x.new_empty(tokens, w.shape[0])
    warps = fitting_warps(plan, cut, columns)
    step = warps * cut.columns
    grid = (triton.cdiv(tokens, plan["block_m"]), triton.cdiv(w.shape[0], plan["block_n"]))
    few[grid](
        x,
        rows,
        w.table,
        w.scale,
        y,
        tokens,
        *w.shape,
        x.stride(0),
        rows.shape[1] // unit,
        columns // w.group_size,
        triton.cdiv(columns, step),
        MAGIC,
        BITS=w.bits,
        GROUP=cut.group,
        SCALED=w.scale is not None,
        PER_ROW=w.table.dim() == 2,
        EVEN=columns % step == 0,
        UNIT=unit,
        BLOCK_N=plan["block_n"],
        BLOCK_M=plan["block_m"],
        BLOCK_K=cut.columns,
        V=cut.words,
        WARPS=warps,
        WORD_SCALES=cut.word_scales and w.scale is not None,
        PRMT=not interpreting(),
        num_warps=warps,
        num_stages=plan["stages"],
    )
    return y


def _launch_many(x: Tensor, w: Codebook, plan: dict) -> Tensor:
    tokens, columns = x.shape
    cut, rows, unit = blocks(packed(w)), *as_words(w.codes)
    if columns % cut.columns:  # without columns to add it would be a copy all the same
        x = torch.nn.functional.pad(x, (0, -columns % cut.columns))
    x = (
        x.view(tokens, -1, 4, cut.words, 4, 2).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
    )  # as `many` multiplies the columns
    iterations, splits = divided(plan, cut, columns)
    y, parts = outputs(x, w.shape[0], splits)
    grid = (triton.cdiv(tokens, plan["block_m"]), triton.cdiv(w.shape[0], plan["block_n"]), splits)
    many[grid](
        x,
        rows,
        w.table,
        w.scale,
        parts,
        tokens,
        *w.shape,
        x.shape[1],
        rows.shape[1] // unit,
        columns // w.group_size,
        iterations,
        MAGIC,
        BITS=w.bits,
        GROUP=cut.group,
        SCALED=w.scale is not None,
        PER_ROW=w.table.dim() == 2,
        UNIT=unit,
        BLOCK_N=plan["block_n"],
        BLOCK_M=plan["block_m"],
        BLOCK_K=cut.columns,
        V=cut.words,
        PRMT=not interpreting(),
        num_warps=plan["warps"],
        num_stages=plan["stages"],
    )
    return gathered(parts, y)


def _launch_dequantise(x: Tensor, w: Codebook, plan: dict) -> Tensor:
    columns = w.shape[1]

    def fill(first: int, part: Tensor) -> None:
        grid = (triton.cdiv(columns, 256), triton.cdiv(part.shape[0], 16))
        dequantise[grid](
            w.codes,
            w.table,
            w.scale,
            part,
            first,
            first + part.shape[0],
            columns,
            w.codes.shape[1],
            columns // w.group_size,
            w.group_size,
            1 << w.bits if w.table.dim() == 2 else 0,
            BITS=w.bits,
            SCALED=w.scale is not None,
            ROWS=16,
            COLUMNS=256,
            num_warps=4,
        )

    return slab_by_slab(x, w.shape, fill)


def shipped() -> list[Compilation]:
    """What the heuristic reaches, at representative widths (in = 4096) and dtypes."""
    found = [
        _compilation("NF4", dtype, tokens) for dtype, tokens in (("bf16", 1), ("fp16", 1), ("bf16", 16), ("bf16", 64))
    ]
    found += [_compilation(kind, "bf16", tokens) for kind in ("16 a row", "8 a row") for tokens in (1, 64)]
    for bits, dtype in ((4, "bf16"), (3, "fp32")):
        integers = ("first", "end", "K", "row_bytes", "groups", "group_size", "table_stride")
        arguments = {
            "codes": "*u8",
            "table": "*fp32",
            "scale": "*bf16",
            "out": f"*{dtype}",
            **dict.fromkeys(integers, "i32"),
        }
        constants = {"BITS": bits, "SCALED": True, "ROWS": 16, "COLUMNS": 256}
        aligned = ("first", "end", "K", "row_bytes", "group_size")
        found.append(
            Compilation(
                f"lut_matmul dequantise {bits} bits {dtype}", dequantise, arguments, constants, multiple_of_16=aligned
            )
        )
    return found


def _compilation(kind: str, dtype: str, tokens: int, out: int = 14336, columns: int = 4096) -> Compilation:
    bits, group_size, per_row = (3 if kind.startswith("8") else 4), (64 if kind == "NF4" else columns), kind != "NF4"
    codes, table = (torch.empty(out, n, dtype=torch.uint8, device="meta") for n in (columns // 8 * bits, 1 << bits))
    w = Codebook("rows", codes, table, None, bits, group_size, (out, columns))
    plan, cut = heuristic(w, tokens), blocks(packed(w))
    integers = ("M", "N", "K", "x_stride", "row_units", "groups", "iterations", "magic")
    arguments = {
        "x": f"*{dtype}",
        "codes": "*i32",
        "table": f"*{'bf16' if per_row else 'fp32'}",
        "scale": "*bf16",
        "y": "*fp32" if plan.get("splits", 1) > 1 else f"*{dtype}",
        **dict.fromkeys(integers, "i32"),
    }
    constants = {
        "BITS": bits,
        "GROUP": cut.group,
        "SCALED": not per_row,
        "PER_ROW": per_row,
        "UNIT": 4,
        "BLOCK_N": plan["block_n"],
        "BLOCK_M": plan["block_m"],
        "BLOCK_K": cut.columns,
        "V": cut.words,
        "PRMT": True,
    }
    if per_row:
        constants["scale"] = arguments.pop("scale") and None
    if plan["kind"] == "few":
        constants |= {"EVEN": True, "WARPS": plan["warps"], "WORD_SCALES": False}
    kernel, expects = (few, "HMMA") if plan["kind"] == "few" else (many, "HGMMA")
    aligned = ("N", "K", "x_stride", "row_units", "groups", "magic")
    return Compilation(
        f"lut_matmul {kind} {dtype} m{tokens}",
        kernel,
        arguments,
        constants,
        plan["warps"],
        plan["stages"],
        aligned,
        (expects,),
    )
