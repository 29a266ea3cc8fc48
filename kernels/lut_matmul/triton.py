"""`lut_matmul` with Triton, over the `rows` layout, by the kernels of `kernels.packed_matmul`."""

import torch
from torch import Tensor

from kernels.lut_matmul.layout import Codebook
from kernels.packed_matmul import launch
from kernels.packed_matmul.weight import PackedWeight
from kernels.tuning import Compilation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def key(w: Codebook, tokens: int) -> str:
    """The key by which a configuration is chosen; the number of tokens is rounded up to a power of two."""
    table = "row" if w.table.dim() == 2 else "tensor"
    return f"lut{w.bits} {table} g{w.group_size} {launch.shape_key(w, tokens)}"


def candidates(w: Codebook, tokens: int) -> list[dict]:
    """At most eight configurations worth timing, the heuristic's first."""
    return launch.candidates(_weight(w), tokens)


def lut_matmul(x: Tensor, w: Codebook) -> Tensor:
    """y [tokens, out] in x's dtype, from x [tokens, in] in float32, bfloat16 or float16 and `rows`."""
    assert w.layout == "rows"
    return launch.matmul(x, _weight(w), "lut_matmul", key(w, x.shape[0]))


def _weight(w: Codebook) -> PackedWeight:
    return PackedWeight(w.codes, w.table, w.scale, None, w.bits, w.group_size, w.shape)


def shipped() -> list[Compilation]:
    """The compilations that the heuristic selects, at representative widths (in = 4096) and dtypes."""
    nf4, of_16, of_8 = _meta(4, 64), _meta(4, None), _meta(3, None)
    cases = [("NF4", nf4, dtype, tokens) for dtype, tokens in ((BF16, 1), (FP16, 1), (BF16, 16), (BF16, 64))]
    cases += [(name, w, BF16, tokens) for name, w in (("16 a row", of_16), ("8 a row", of_8)) for tokens in (1, 64)]
    narrow = launch.compilation("lut_matmul NF4 bf16 m1 of 4096 rows", _meta(4, 64, 4096), BF16, 1)
    return [
        narrow,
        *(
            launch.compilation(f"lut_matmul {name} {launch.short(dtype)} m{m}", w, dtype, m)
            for name, w, dtype, m in cases
        ),
        launch.dequantise_compilation("lut_matmul dequantise 4 bits bf16", nf4, BF16),
        launch.dequantise_compilation("lut_matmul dequantise 3 bits fp32", _meta(3, 64), FP32),
    ]


def _meta(bits: int, group_size: int | None, out: int = 14336, columns: int = 4096) -> PackedWeight:
    """One table with scales; without a group size, a table for each row and no scales."""
    codes = torch.empty(out, columns // 8 * bits, dtype=torch.uint8, device="meta")
    if group_size is None:
        table, scale, group_size = torch.empty(out, 1 << bits, dtype=BF16, device="meta"), None, columns
    else:
        table = torch.empty(1 << bits, device="meta")
        scale = torch.empty(out, columns // group_size, dtype=BF16, device="meta")
    return PackedWeight(codes, table, scale, None, bits, group_size, (out, columns))
