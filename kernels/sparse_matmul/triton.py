"""`sparse_matmul` with Triton: weights are loaded without their zeros and put to their places in registers, where
tensor cores multiply them as dense ones (Flash-LLM, arXiv:2309.10285)."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from kernels.capability import multiprocessors, on_its_device
from kernels.interpreter import prepare
from kernels.sparse_matmul.layout import SparseRows
from kernels.tuning import Compilation, configuration

prepare()

FEW = 64  # largest number of tokens for which weights are put to their places in registers


@triton.jit
def placed(mask, values, at, row, there, start, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] of W from column `start` on, and how many of its entries are kept in each row.

    mask: uint8 [rows, columns / 8]. at: int64 [ROWS], where the values of these columns begin.
    """
    byte = start // 8 + tl.arange(0, COLUMNS // 8)
    inside = there[:, None] & (byte < columns // 8)[None, :]
    bits = tl.load(mask + row[:, None].to(tl.int64) * (columns // 8) + byte[None, :], mask=inside, other=0)
    keep = (bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    keep = tl.reshape(keep, (ROWS, COLUMNS))
    before = tl.cumsum(keep, axis=1) - keep
    W = tl.load(values + at[:, None] + before, mask=keep == 1, other=0.0)
    return W, tl.sum(keep, axis=1)


@triton.jit
def few_kernel(
    x,
    mask,
    values,
    starts,
    y,
    tokens,
    x_row,
    rows,
    columns,
    share,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: ROWS rows, times `share` columns of all tokens. y: float32 [parts, tokens, rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    there = row < rows
    at = tl.load(starts + row, mask=there, other=0)
    for start in range(0, part * share, COLUMNS):  # the values of earlier parts are counted, not read
        byte = start // 8 + tl.arange(0, COLUMNS // 8)
        inside = there[:, None] & (byte < columns // 8)[None, :]
        bits = tl.load(mask + row[:, None].to(tl.int64) * (columns // 8) + byte[None, :], mask=inside, other=0)
        pairs = bits.to(tl.int32) - ((bits.to(tl.int32) >> 1) & 0x55)
        fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
        at += tl.sum((fours + (fours >> 4)) & 0x0F, axis=1)
    token = tl.arange(0, TOKENS)
    acc = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in range(part * share, min((part + 1) * share, columns), COLUMNS):
        W, kept = placed(mask, values, at, row, there, start, columns, ROWS, COLUMNS)
        at += kept
        column = start + tl.arange(0, COLUMNS)
        here = (token < tokens)[:, None] & (column < columns)[None, :]
        given = tl.load(x + token[:, None].to(tl.int64) * x_row + column[None, :], mask=here, other=0.0)
        acc = tl.dot(given, tl.trans(W), acc)
    place = (part * tokens + token[:, None]).to(tl.int64) * rows + row[None, :]
    tl.store(y + place, acc, mask=(token < tokens)[:, None] & there[None, :])


@triton.jit
def expand_kernel(mask, values, starts, W, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program: ROWS rows of W [rows, columns] with their zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    at = tl.load(starts + row, mask=there, other=0)
    for start in range(0, columns, COLUMNS):
        own, kept = placed(mask, values, at, row, there, start, columns, ROWS, COLUMNS)
        at += kept
        column = start + tl.arange(0, COLUMNS)
        place = W + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(place, own, mask=there[:, None] & (column < columns)[None, :])


@on_its_device
def dense_rows(values: Tensor, w: SparseRows) -> Tensor:
    """W [out, in] with its zeros. values: those of w, whose device is taken."""
    W = torch.empty(w.shape, dtype=w.dtype, device=values.device)
    rows, columns = w.shape
    expand_kernel[(triton.cdiv(rows, EXPAND["ROWS"]),)](w.mask, values, w.starts, W, rows, columns, **EXPAND)
    return W


@on_its_device
def sparse_matmul(x: Tensor, w: SparseRows) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype."""
    tokens, (rows, columns) = x.shape[0], w.shape
    if tokens > FEW:
        return linear(x, dense_rows(w.values, w))
    if not tokens:
        return x.new_empty(0, rows)
    x = x if x.stride(1) == 1 else x.contiguous()
    c = dict(configuration("sparse_matmul", key(w, tokens), heuristic(w, tokens)))
    parts = c.pop("parts")
    share = triton.cdiv(triton.cdiv(columns, c["COLUMNS"]), parts) * c["COLUMNS"]
    y = torch.empty(parts, tokens, rows, dtype=torch.float32, device=x.device)
    few_kernel[(triton.cdiv(rows, c["ROWS"]), parts)](
        x, w.mask, w.values, w.starts, y, tokens, x.stride(0), rows, columns, share, TOKENS=_padded(tokens), **c
    )
    return y.sum(0).to(x.dtype)


EXPAND = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}


def _padded(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))  # rows of a tile of tensor cores


def key(w: SparseRows, tokens: int) -> str:
    """The key of a configuration; the number of tokens is rounded up to a power of two."""
    return f"m{triton.next_power_of_2(max(tokens, 1))} n{w.shape[0]} k{w.shape[1]}"


def heuristic(w: SparseRows, tokens: int) -> dict[str, int]:
    """Tiles of 2048 weights, with enough parts for all multiprocessors."""
    tile = {"ROWS": 16, "COLUMNS": 128} if tokens <= 16 else {"ROWS": 32, "COLUMNS": 64}
    return _with_parts(w, {**tile, "num_warps": 4})


def candidates(w: SparseRows, tokens: int) -> list[dict[str, int]]:
    """Configurations worth timing, the heuristic's first."""
    first = heuristic(w, tokens)
    tiles = [(16, 64), (16, 256), (32, 64), (32, 128), (64, 64), (64, 128)]
    others = [_with_parts(w, {"ROWS": r, "COLUMNS": c, "num_warps": 8 if r * c > 4096 else 4}) for r, c in tiles]
    return [first, *(other for other in others if other != first), {**first, "parts": 2 * first["parts"]}]


def _with_parts(w: SparseRows, tile: dict[str, int]) -> dict[str, int]:
    programs, most = triton.cdiv(w.shape[0], tile["ROWS"]), triton.cdiv(w.shape[1], tile["COLUMNS"])
    return {**tile, "parts": max(1, min(most, triton.cdiv(4 * multiprocessors(w.mask.device), programs)))}


def shipped() -> list[Compilation]:
    """The compilations that the heuristic selects at 14336 x 4096, in bfloat16."""
    pointers = {"x": "*bf16", "mask": "*u8", "values": "*bf16", "starts": "*i64", "y": "*fp32"}
    meta = torch.device("meta")
    w = SparseRows(
        torch.empty(14336, 512, dtype=torch.uint8, device=meta),
        torch.empty(0, dtype=torch.bfloat16, device=meta),
        torch.empty(14337, dtype=torch.int64, device=meta),
    )
    found = []
    for tokens in (1, 16, 64):
        c = heuristic(w, tokens)
        found.append(
            Compilation(
                name=f"sparse_matmul m{tokens}",
                kernel=few_kernel,
                arguments=pointers | dict.fromkeys(("tokens", "x_row", "rows", "columns", "share"), "i32"),
                constants={"TOKENS": _padded(tokens), "ROWS": c["ROWS"], "COLUMNS": c["COLUMNS"]},
                num_warps=c["num_warps"],
                multiple_of_16=("x_row", "columns", "share"),
            )
        )
    found.append(
        Compilation(
            name="sparse_matmul expand",
            kernel=expand_kernel,
            arguments={"mask": "*u8", "values": "*bf16", "starts": "*i64", "W": "*bf16", "rows": "i32",
                       "columns": "i32"},
            constants={"ROWS": EXPAND["ROWS"], "COLUMNS": EXPAND["COLUMNS"]},
            num_warps=EXPAND["num_warps"],
            multiple_of_16=("columns",),
        )
    )  # fmt: skip
    return found
