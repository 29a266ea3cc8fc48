"""The inputs that the kernel of overlapped.py supports, and its launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.capability import gpu, multiprocessors
from kernels.packed_matmul.weight import MAGIC, TYPES, PackedWeight
from kernels.tuning import Compilation

TOKENS, ROWS, COLUMNS, WARPS, UNROLLED = (32, 64, 128, 256), 128, 64, 8, 4
STAGES = {32: 8, 64: 8, 128: 8, 256: 4}  # stages that fit in shared memory, at most 8; a multiple of UNROLLED
_left_out = False


@contextmanager
def left_out(leave: bool = True) -> Iterator[None]:
    """While the block runs, no product uses this kernel, not even where it was tuned; with `leave=False`, it may."""
    global _left_out
    before, _left_out = _left_out, leave
    try:
        yield
    finally:
        _left_out = before


def takes(w: PackedWeight, dtype: torch.dtype) -> bool:
    """Can the kernel multiply activations of this dtype by this weight, on its GPU?"""
    return fits(w, dtype) and runs(w.codes.device)


def runs(device: torch.device) -> bool:
    """Does the kernel run on this device? It uses wgmma, which only compute capability 9.0 has."""
    here = device.type == "cuda" and gpu(device.index or 0).capability == (9, 0)
    return here and find_spec("triton.experimental.gluon") is not None


def fits(w: PackedWeight, dtype: torch.dtype) -> bool:
    """Does it support this weight and activations of this dtype, and is it not left out? It needs 4 bits, symmetric or
    not, with scales that the dtype represents (float16: also bfloat16's, to 6e-8), for groups of whole tiles or for
    rows, and rows of a multiple of 16 bytes, for TMA."""
    held = {torch.bfloat16: (torch.bfloat16,), torch.float16: (torch.float16, torch.bfloat16)}.get(dtype, ())
    scaled = w.table is None and w.scale is not None and w.scale.dtype in held
    whole = w.group_size % COLUMNS == 0 or w.group_size == w.shape[1]
    return not _left_out and scaled and w.bits == 4 and whole and w.shape[1] % 32 == 0


def plans(w: PackedWeight, tokens: int) -> list[dict]:
    """Configurations worth timing."""
    block_m, processors = next((size for size in TOKENS if size >= tokens), TOKENS[-1]), multiprocessors(w.codes.device)
    if block_m == TOKENS[-1] and 2 * _programs(w, tokens, block_m) <= processors:
        block_m //= 2  # before splitting columns: float32 sums of 256 tokens spill when stored
    tiles, splits = -(-w.shape[1] // COLUMNS), 1
    while 2 * splits * _programs(w, tokens, block_m) <= processors and tiles >= 2 * UNROLLED * splits:
        splits *= 2
    found = [_plan(block_m, splits)]
    if splits > 1:
        found.append(_plan(block_m, 1))
    if block_m > 64:
        found.append(_plan(block_m // 2, 1))
    return found


def _programs(w: PackedWeight, tokens: int, block_m: int) -> int:
    return -(-w.shape[0] // ROWS) * -(-tokens // block_m)


def _plan(block_m: int, splits: int) -> dict:
    return {
        "kind": "overlapped", "block_n": ROWS, "block_m": block_m, "warps": WARPS, "stages": STAGES[block_m],
        "splits": splits, "pairs": False,
    }  # fmt: skip


def matmul(x: Tensor, w: PackedWeight, plan: dict) -> tuple[Tensor, int]:
    """Sums of the splits, float32 [splits, tokens, out], or with one split y [tokens, out] itself; and their number.

    x: bfloat16 or float16 [tokens, in], rows contiguous; w: `fits` is true, and its codes are aligned to 16 bytes.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from kernels.packed_matmul.overlapped import overlapped

    if x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    (tokens, columns), out = x.shape, w.shape[0]
    words = w.codes.view(torch.int32)
    per_split, splits = split(columns, plan["splits"])
    shape, dtype = ((tokens, out), x.dtype) if splits == 1 else ((splits, tokens, out), torch.float32)
    y = torch.empty(shape, dtype=dtype, device=x.device)
    of_x, of_codes = layouts()
    overlapped[(-(-tokens // plan["block_m"]), -(-out // ROWS), splits)](
        TensorDescriptor.from_tensor(x, [plan["block_m"], COLUMNS], of_x),
        TensorDescriptor.from_tensor(words, [ROWS, COLUMNS // 8], of_codes),
        w.scale, w.zero, y, tokens, out, columns, columns // w.group_size,
        0 if w.zero is None else w.zero.shape[1], per_split, MAGIC[x.dtype], **_constants(w, plan),
        num_warps=WARPS,
    )  # fmt: skip
    return y, splits


def split(columns: int, splits: int) -> tuple[int, int]:
    """Tiles of a split, a multiple of the unrolled loop's, and the number of splits: the plan's, or fewer."""
    tiles = -(-columns // COLUMNS)
    per_split = -(-tiles // (splits * UNROLLED)) * UNROLLED
    return per_split, -(-tiles // per_split)


def layouts() -> tuple:
    """The layouts of tiles of x and of codes in shared memory: swizzled, so that no two rows of a read share a bank."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return (
        NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2),
    )


def _constants(w: PackedWeight, plan: dict) -> dict:
    return {
        "GROUP": 0 if w.group_size == w.shape[1] else w.group_size, "BLOCK_N": ROWS, "BLOCK_M": plan["block_m"],
        "BLOCK_K": COLUMNS, "STAGES": plan["stages"], "WARPS": WARPS,
    }  # fmt: skip


def compilation(name: str, w: PackedWeight, plan: dict, dtype: torch.dtype) -> Compilation:
    """The compilation of a plan for activations of `dtype` with a weight on the meta device."""
    from kernels.packed_matmul.overlapped import overlapped

    of_x, of_codes = layouts()
    integers = ("M", "N", "K", "groups", "zero_bytes", "iterations", "magic")
    kind = TYPES[dtype].removeprefix("*")
    arguments = {
        "x": f"tensordesc<{kind}[{plan['block_m']}, {COLUMNS}],{of_x!r}>",
        "codes": f"tensordesc<i32[{ROWS}, {COLUMNS // 8}],{of_codes!r}>",
        "scale": TYPES[w.scale.dtype],
        "y": TYPES[dtype if plan["splits"] == 1 else torch.float32],
        **({} if w.zero is None else {"zero": "*u8"}),
        **dict.fromkeys(integers, "i32"),
    }
    constants = _constants(w, plan) | ({"zero": None} if w.zero is None else {})
    aligned = ("N", "K", "magic")
    return Compilation(name, overlapped, arguments, constants, WARPS, 1, aligned, ("HGMMA", "outstanding"))
