"""NF4 with double quantisation (QLoRA: Dettmers et al., 2023, arXiv:2305.14314): quantiles of a normal distribution."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import CodebookGroup, Format
from compress.grid.integer import check_group_size
from compress.method import knob
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import LayerStatistics
from kernels import lut_matmul

TABLES = {"nf4": lut_matmul.NF4, "fp4": lut_matmul.FP4}


@dataclass(frozen=True, kw_only=True)
class NF4(LayerwiseMethod):
    """Rounds each weight to one of 16 values, spaced for a normal distribution, times its group's maximum."""

    name: ClassVar[str] = "nf4"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "arXiv:2305.14314"

    group_size: int = knob(64, "columns that share a scale; -1 for a whole row", range=(-1, 1 << 20), describes=True)
    double_quant: bool = knob(
        True, "store scales in 8 bits, with one float32 for 256 of them; False: scales in float32"
    )
    table: str = knob(
        "nf4", "the 16 values: quantiles of a normal distribution, or 4-bit floats", choices=tuple(TABLES)
    )

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        check_group_size(self.group_size, name, shape)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        nested = self.double_quant
        return [CodebookGroup.spec_of(shape, bits=4, group_size=self.group_size, double_quant=nested)]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [nf4(W, group_size=self.group_size, double_quant=self.double_quant, table=self.table)]


def nf4(W: Tensor, *, group_size: int = 64, double_quant: bool = True, table: str = "nf4") -> CodebookGroup:
    """Round W [out, in] to a table of 16 values, scaled by the largest magnitude of each group of columns.

    Source: arXiv:2305.14314, section 3. The arithmetic is that of bitsandbytes on a CPU, to the bit: w is multiplied by
        the
    float32 inverse of its scale, and a value half-way between two entries goes to the lower one.
    """
    out, columns = W.shape
    group_size = columns if group_size == -1 else group_size
    groups = W.float().view(out, -1, group_size)
    scale = groups.abs().amax(-1)  # [out, groups]
    entries = TABLES[table].to(W.device)
    ascending, order = entries.sort(stable=True)  # 4-bit floats lie in the order of their bits
    unit = (groups * (1 / scale.clamp(min=1e-38))[..., None]).clamp(-1, 1)
    codes = order[torch.bucketize(unit, (ascending[:-1] + ascending[1:]) / 2)].view(out, columns)
    return CodebookGroup.from_codes(codes, entries, scale, group_size=group_size, double_quant=double_quant)
