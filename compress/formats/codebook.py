"""Indices into a small table, with a scale per group of columns; the scales as they are, or quantised once more."""

from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compress.formats.base import Format
from kernels.lut_matmul import Codebook, dequantize, lut_matmul, pack_codebook, panels_fit, to_panels, to_rows

SCALES = 256  # scales that share an absmax


class ScaleCodes(NamedTuple):
    """Scales in 8 bits: scale = dynamic_map()[code] * absmax of its block + offset.

    codes: uint8 [n], row by row of W; absmax: float32 [ceil(n / 256)]; offset: float32, no dimensions: the mean of all.
    """

    codes: Tensor
    absmax: Tensor
    offset: Tensor


class CodebookGroup(Format):
    """w = table[code] * scale, group by group along `in`.

    Buffers: `codes` and `table` as `kernels.lut_matmul.Codebook` says, and either `scale` [out, groups] in float32, or
    `scale_codes`, `scale_absmax` and `scale_offset` (`ScaleCodes`, 8.125 bits a scale) with a `scale` beside them that
    was
    expanded for the product: in the activations' dtype if that has 16 bits, rounded as a dense weight's would be. On a
    CPU with the C++ kernel all lies in panels; in `state_dict`, in rows and without what was expanded.
    """

    name: ClassVar[str] = "codebook"

    def __init__(self, packed: Codebook, scales: ScaleCodes | None = None) -> None:
        super().__init__()
        self.bits, self.group_size, self.shape = packed.bits, packed.group_size, packed.shape
        self._laid_out_for: tuple[torch.dtype, torch.device] | None = None
        for field in ScaleCodes._fields:
            self.register_buffer(f"scale_{field}", None if scales is None else getattr(scales, field))
        self._set(packed)
        self._set(self.rows())

    @classmethod
    def from_codes(
        cls, codes: Tensor, table: Tensor, scale: Tensor, *, group_size: int, double_quant: bool = False
    ) -> "CodebookGroup":
        """From indices [out, in], a table [8], [16], [out, 8] or [out, 16] and scales [out, groups]."""
        packed = pack_codebook(codes, table.float(), scale.float(), group_size=group_size)
        return cls(packed, quantize_scales(packed.scale) if double_quant else None)

    @property
    def packed(self) -> Codebook:
        return Codebook(self.layout, self.codes, self.table, self.scale, self.bits, self.group_size, self.shape)

    @property
    def scales(self) -> ScaleCodes | None:
        """The scales in 8 bits, if that is how they are stored."""
        return None if self.scale_codes is None else ScaleCodes(self.scale_codes, self.scale_absmax, self.scale_offset)

    def dequantize(self) -> Tensor:
        return dequantize(self.rows())

    def matmul(self, x: Tensor) -> Tensor:
        return lut_matmul(x, self.packed)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        if self._laid_out_for == (dtype, device):
            return
        rows = self.rows()
        if self.scales is not None and dtype.itemsize == 2:
            rows = rows._replace(scale=rows.scale.to(dtype))
        self._set(to_panels(rows) if panels_fit(rows, dtype, device) else rows)
        self._laid_out_for = dtype, device

    def spec(self) -> dict[str, Any]:
        nested = self.scales is not None
        return self.spec_of(self.shape, bits=self.bits, group_size=self.group_size, double_quant=nested)

    @classmethod
    def spec_of(cls, shape: tuple[int, int], *, bits: int, group_size: int, double_quant: bool) -> dict[str, Any]:
        """The `spec()` of a weight of this shape; a `group_size` of -1 takes whole rows."""
        group_size = shape[1] if group_size == -1 else group_size
        settings = {"bits": bits, "group_size": group_size, "double_quant": double_quant}
        return {"format": cls.name, "shape": list(shape), **settings}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "CodebookGroup":
        shape = (spec["shape"][0], spec["shape"][1])
        packed = Codebook(
            "rows", tensors["codes"], tensors["table"], tensors.get("scale"), spec["bits"], spec["group_size"], shape
        )
        scales = (
            ScaleCodes(*(tensors[f"scale_{field}"] for field in ScaleCodes._fields)) if spec["double_quant"] else None
        )
        return cls(packed, scales)

    def rows(self) -> Codebook:
        """Rows, with the scales that are stored in float32."""
        rows = to_rows(self.packed) if self.layout == "panels" else self.packed
        return (
            rows if self.scales is None else rows._replace(scale=dequantize_scales(self.scales).view(self.shape[0], -1))
        )

    def _set(self, packed: Codebook) -> None:
        self.layout = packed.layout
        self.register_buffer("codes", packed.codes)
        self.register_buffer("table", packed.table)
        self.register_buffer("scale", packed.scale, persistent=self.scales is None)

    def _apply(self, fn, recurse=True):
        # Devices move; dtypes do not: `.to(bfloat16)` speaks of the activations, and scales keep what was stored.
        device = fn(self.table.new_empty(0)).device
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        rows = self.rows()
        stored = {"codes": rows.codes, "table": rows.table}
        if self.scales is None:
            stored["scale"] = rows.scale
        else:
            stored |= {f"scale_{field}": tensor for field, tensor in self.scales._asdict().items()}
        destination.update({prefix + name: tensor for name, tensor in stored.items()})

    def _load_from_state_dict(self, state_dict, prefix, *args):
        laid_out_for, self._laid_out_for = self._laid_out_for, None
        self._set(self.rows())
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._set(self.rows())
        if laid_out_for is not None:
            self.for_compute(*laid_out_for)


@cache
def dynamic_map() -> Tensor:
    """The signed dynamic data type of 8 bits (Dettmers et al., arXiv:2110.02861, section 1.3), [256], ascending.

    Zero bits after the sign count an exponent of ten, the next bit ends them, and those that are left cut [0.1, 1] into
    equal parts, of which each value is a middle: ±10^(i - 6) times 2^i values, for i = 0..6. Zero and one fill the
    rest.
    """
    positive = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6))
    values = torch.cat(positive)
    return torch.cat([-values, values, torch.tensor([0.0, 1.0])]).sort().values


def quantize_scales(scale: Tensor) -> ScaleCodes:
    """Double quantisation: float32 scales, of any shape, in 8 bits.

    Source: QLoRA (arXiv:2305.14314), section 3, as bitsandbytes does it on a CPU, whose codes these are bit for bit:
        the mean
    goes off first, the codes are those of `dynamic_map`, and a value is rounded to one of 65536 even steps before its
    nearest code is looked up, which moves it only where two codes are almost as near.
    """
    offset = scale.mean()
    values = (scale - offset).flatten()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % SCALES)).view(-1, SCALES)
    absmax = blocks.abs().amax(1)
    unit = (blocks * (1 / absmax)[:, None]).nan_to_num(-1)  # not a number where all scales are the same
    even = ((unit + 1) * 0.5 * 65535 + 0.5).floor() / 65535 * 2 - 1
    table = dynamic_map().to(scale.device)
    codes = torch.bucketize(even, (table[:-1] + table[1:]) / 2)
    return ScaleCodes(codes.to(torch.uint8).flatten()[: len(values)], absmax, offset)


def dequantize_scales(scales: ScaleCodes) -> Tensor:
    """The scales, float32 [n]."""
    values = dynamic_map().to(scales.codes.device)[scales.codes.long()]
    return values * scales.absmax.repeat_interleave(SCALES)[: len(values)] + scales.offset
