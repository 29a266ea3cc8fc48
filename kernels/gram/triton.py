"""Upper tiles of XᵀX on tensor cores, float32 sums, added to H in a fixed order. See README.md for layout and cost."""

from kernels.capability import has_shared, multiprocessors, on_its_device
from kernels.interpreter import prepare

prepare()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.tuning import Compilation, configuration  # noqa: E402

LEAST = 256  # least number of tokens in a split that justifies a launch of the second kernel

# "chunk" tokens are summed inside the tensor cores, which round towards zero; beyond, float32 additions round to
# nearest
SQUARE = {"rows": 128, "columns": 128, "tokens": 64, "chunk": 4096, "num_warps": 4, "num_stages": 3}
WIDE = {**SQUARE, "columns": 256, "num_warps": 8, "num_stages": 4}
WIDE_SHARED = 114_688  # bytes that WIDE takes on sm_80 and sm_89; an RTX 4090 has 101,376 (sm_90 takes and has more)
EXACT = {**SQUARE, "rows": 64, "columns": 64, "tokens": 32}  # for float32, tensor cores support only TF32
CANDIDATES = [
    SQUARE,
    WIDE,
    {**SQUARE, "num_warps": 8},
    {**SQUARE, "tokens": 32, "num_stages": 5},
    {**WIDE, "num_stages": 3},
]


@triton.jit
def _tile(program, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile of a program, by linear index: column block j has COLUMNS/ROWS * (j + 1) row blocks, top to bottom."""
    RATIO: tl.constexpr = COLUMNS // ROWS
    q = program // RATIO
    j = ((tl.sqrt(8.0 * q + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > q, j - 1, j)  # the root may be off by one
    j = tl.where((j + 1) * (j + 2) // 2 <= q, j + 1, j)
    return program - RATIO * (j * (j + 1) // 2), j


@triton.jit
def upper(
    x,
    out,
    tokens,
    width,
    columns,
    stride,
    tokens_per_split,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """out += one tile of xᵀx: of H [columns, columns], or of the workspace [splits, tiles, ROWS, COLUMNS]."""
    i, j = _tile(tl.program_id(0), ROWS, COLUMNS)
    rows, cols, t = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TOKENS)
    first = tl.program_id(1) * tokens_per_split
    last = tl.minimum(first + tokens_per_split, tokens)
    x += first.to(tl.int64) * stride
    left, right = t[:, None] * stride + rows[None, :], t[:, None] * stride + cols[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for token in range(first, last, TOKENS):
        here = token + t[:, None] < last
        a = tl.load(x + left, mask=here & (rows[None, :] < width), other=0.0)  # [TOKENS, ROWS]
        b = tl.load(x + right, mask=here & (cols[None, :] < width), other=0.0)  # [TOKENS, COLUMNS]
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        x += TOKENS * stride
    if SPLIT:
        out += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (ROWS * COLUMNS)
        _add(out, total, COLUMNS, 0, 0, ROWS, COLUMNS)
    else:
        _add(out, total, columns, i * ROWS, j * COLUMNS, columns, columns)


@triton.jit
def _add(out, total, stride, row, column, last_row, last_column):
    """out[row:, column:] += total, a quarter of the columns at a time: all at once would not fit in the registers."""
    ROWS: tl.constexpr = total.shape[0]
    COLUMNS: tl.constexpr = total.shape[1]
    left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    if COLUMNS <= 64:
        _add_part(out, left, stride, row, column, last_row, last_column)
        _add_part(out, right, stride, row, column + COLUMNS // 2, last_row, last_column)
    else:
        _add(out, left, stride, row, column, last_row, last_column)
        _add(out, right, stride, row, column + COLUMNS // 2, last_row, last_column)


@triton.jit
def _add_part(out, part, stride, row, column, last_row, last_column):
    rows, cols = row + tl.arange(0, part.shape[0])[:, None], column + tl.arange(0, part.shape[1])[None, :]
    at, inside = out + (rows.to(tl.int64) * stride + cols), (rows < last_row) & (cols < last_column)
    tl.store(at, tl.load(at, mask=inside, other=0.0) + part, mask=inside)


@triton.jit
def gather(parts, H, splits, tiles, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLAB: tl.constexpr):
    """H += the splits' tiles, first to last; each program adds SLAB rows of one tile."""
    i, j = _tile(tl.program_id(0), ROWS, COLUMNS)
    row, col = tl.program_id(1) * SLAB + tl.arange(0, SLAB), tl.arange(0, COLUMNS)
    rows, cols = i * ROWS + row, j * COLUMNS + col
    inside = (rows[:, None] < columns) & (cols[None, :] < columns)
    part = parts + tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS) + row[:, None] * COLUMNS + col[None, :]
    total = tl.zeros((SLAB, COLUMNS), tl.float32)
    for _ in range(splits):
        total += tl.load(part)
        part += tiles * (ROWS * COLUMNS)
    at = H + rows.to(tl.int64)[:, None] * columns + cols[None, :]
    tl.store(at, tl.load(at, mask=inside) + total, mask=inside)


@on_its_device
def gram(x: Tensor, H: Tensor) -> None:
    """H += XᵀX; x [tokens, in] float32, bfloat16 or float16, H [in, in] float32 contiguous."""
    tokens, columns = x.shape
    if x.stride(1) != 1 or x.stride(0) % 16 or columns % 16 or x.data_ptr() % 16:
        x = F.pad(
            x, (0, -columns % 16)
        ).contiguous()  # 16-byte loads need it; a copy of X is cheap compared with the products
    c = configuration("gram", key(x.dtype, columns), heuristic(x.dtype, columns, x.device))
    j = triton.cdiv(columns, c["columns"])
    tiles = c["columns"] // c["rows"] * j * (j + 1) // 2
    splits = max(1, min(2 * multiprocessors(x.device) // tiles, tokens // LEAST))
    per_split = min(c["chunk"], triton.cdiv(tokens, splits * c["tokens"]) * c["tokens"])
    out = H if splits == 1 else torch.zeros(splits, tiles, c["rows"], c["columns"], device=x.device)
    for part in x.split(splits * per_split):
        upper[tiles, splits](
            part,
            out,
            part.shape[0],
            x.shape[1],
            columns,
            x.stride(0),
            per_split,
            SPLIT=splits > 1,
            ROWS=c["rows"],
            COLUMNS=c["columns"],
            TOKENS=c["tokens"],
            num_warps=c["num_warps"],
            num_stages=c["num_stages"],
        )
    if splits > 1:
        gather[tiles, c["rows"] // 8](out, H, splits, tiles, columns, ROWS=c["rows"], COLUMNS=c["columns"], SLAB=8)


def key(dtype: torch.dtype, columns: int) -> str:
    """The key of the launch configuration."""
    return f"{dtype.itemsize * 8} bits n{triton.next_power_of_2(columns)}"


def heuristic(dtype: torch.dtype, columns: int, device: torch.device | None = None) -> dict:
    if dtype == torch.float32:
        return EXACT
    return WIDE if columns >= 8192 and (device is None or has_shared(device, WIDE_SHARED)) else SQUARE


def shipped() -> list[Compilation]:
    found = [
        _compilation("bf16 128x128", "bf16", SQUARE),
        _compilation("bf16 128x128 odd columns", "bf16", SQUARE, odd=True),
        _compilation("bf16 128x128 split", "bf16", SQUARE, split=True),
        _compilation("bf16 128x256", "bf16", WIDE),
        _compilation("fp16 128x256", "fp16", WIDE),
        _compilation("fp32 64x64", "fp32", EXACT),
        _compilation("fp32 64x64 split", "fp32", EXACT, split=True),
    ]
    found.append(
        Compilation(
            name="gram gather",
            kernel=gather,
            arguments={"parts": "*fp32", "H": "*fp32", "splits": "i32", "tiles": "i32", "columns": "i32"},
            constants={"ROWS": SQUARE["rows"], "COLUMNS": SQUARE["columns"], "SLAB": 8},
            multiple_of_16=("columns",),
        )
    )
    return found


def _compilation(name: str, dtype: str, c: dict, split: bool = False, odd: bool = False) -> Compilation:
    integers = ("tokens", "width", "columns", "stride", "tokens_per_split")
    return Compilation(
        name=f"gram {name}",
        kernel=upper,
        arguments={"x": f"*{dtype}", "out": "*fp32", **dict.fromkeys(integers, "i32")},
        constants={"SPLIT": split, "ROWS": c["rows"], "COLUMNS": c["columns"], "TOKENS": c["tokens"]},
        num_warps=c["num_warps"],
        num_stages=c["num_stages"],
        multiple_of_16=tuple(i for i in integers if i != "tokens" and not (odd and i == "columns")),
        expects=() if dtype == "fp32" else ("HGMMA",),
    )
