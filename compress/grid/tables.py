"""Grids that are tables: the values of the codes, ascending, before they are scaled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.floats import E2M1, E2M3, E3M2
from kernels.lut_matmul import NF4, normal_float

# The table of llama.cpp's IQ4_NL and IQ4_XS (`kvalues_iq4nl` of ggml): steps that grow with the distance from 0.
IQ4_NL = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])

# Learned by Lloyd's algorithm (`learn_table` in tests/compress/test_grids.py) on normal weights in groups of 32, with
# searched scales: a table like IQ4_NL, with fewer values.
NL3 = torch.tensor([-127.0, -76, -45, -18, 6, 32, 62, 104])
NL2 = torch.tensor([-127.0, -43, 19, 90])


@dataclass(frozen=True)
class Values:
    """A table, and the kind of its scales if the number format fixes it.

    Attributes:
        bits: of a code. table: float32 [at most 2^bits], ascending.
        scale_dtype, group_size: of the format; "" and None if a user chooses.
        source: the source of the values.
    """

    bits: int
    table: Tensor
    source: str
    scale_dtype: str = ""
    group_size: int | None = None


def _normal(positive: int, negative: int) -> Tensor:
    return normal_float(positive, negative)


def _odd(bits: int) -> Tensor:
    return torch.arange(1 - (1 << bits), 1 << bits, 2).float()


MX = "OCP Microscaling Formats 1.0"
TABLES: dict[str, Values] = {
    "nf4": Values(4, NF4, "arXiv:2305.14314"),
    "nf3": Values(3, _normal(4, 3), "quantiles as in arXiv:2305.14314"),
    "fp4": Values(4, E2M1.values(), "e2m1, " + MX),
    "iq4_nl": Values(4, IQ4_NL, "llama.cpp, kvalues_iq4nl"),
    "nl3": Values(3, NL3, "Lloyd's algorithm on normal weights"),
    "nl2": Values(2, NL2, "Lloyd's algorithm on normal weights"),
    "mxfp4": Values(4, E2M1.values(), MX, "e8m0", 32),
    "nvfp4": Values(4, E2M1.values(), "NVIDIA NVFP4: e4m3 scales and a float32 for the weight", "e4m3", 16),
    "fp6_e3m2": Values(6, E3M2.values(), MX),
    "fp6_e2m3": Values(6, E2M3.values(), MX),
    "mxfp6_e3m2": Values(6, E3M2.values(), MX, "e8m0", 32),
    "mxfp6_e2m3": Values(6, E2M3.values(), MX, "e8m0", 32),
    "binary": Values(1, torch.tensor([-1.0, 1.0]), "signs: arXiv:1603.05279, section 3.1"),
    "ternary": Values(2, torch.tensor([-1.0, 0.0, 1.0]), "arXiv:2402.17764"),
    "odd4": Values(4, _odd(4), "no zero: arXiv:2409.17870"),
    "odd3": Values(3, _odd(3), "no zero: arXiv:2409.17870"),
    "odd2": Values(2, _odd(2), "no zero: arXiv:2409.17870"),
}


def padded(table: Tensor, bits: int) -> Tensor:
    """The stored form of a table, [2^bits]: its last entry is repeated at the places that no code reaches."""
    return torch.cat([table, table[-1:].expand((1 << bits) - len(table))])
