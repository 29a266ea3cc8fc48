"""Indices into a small table, with a scale per group of columns; the scales as floats, or quantised once more."""

from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.scales import SCALE_DTYPES, NestedScales, ScaleRule, read_scales, scales_spec
from compress.formats.stored import FLOATS, Stored
from compress.formats.trained import TrainedGroups
from kernels.lut_matmul import (
    BITS,
    Codebook,
    dequantize,
    look_up,
    lut_matmul,
    pack_codebook,
    panels_fit,
    to_panels,
    to_rows,
    unpack_codebook,
)
from kernels.w4a8_matmul import holds_integers

SCALES = 256  # scales that share an absmax


class ScaleCodes(NamedTuple):
    """Scales in 8 bits: scale = dynamic_map()[code] * absmax of its block + offset.

    codes: uint8 [n], row by row of W; absmax: float32 [ceil(n / 256)]; offset: float32, no dimensions: the mean of all.
    """

    codes: Tensor
    absmax: Tensor
    offset: Tensor

    def expand(self, out: int, groups: int) -> Tensor:
        """The scales, float32 [out, groups]."""
        return dequantize_scales(self).view(out, groups)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by the names of the format's buffers."""
        return {f"scale_{field}": tensor for field, tensor in self._asdict().items()}


BUFFERS = ("scale_codes", "scale_absmax", "scale_offset", "scale_factor")  # buffers of ScaleCodes and of NestedScales


class CodebookGroup(Format):
    """w = table[code] * scale, group by group along `in`.

    Buffers: `codes` and `table` as in `kernels.lut_matmul.Codebook`, and either `scale` [out, groups] as floats, or the
    buffers of `ScaleCodes` (8.125 bits a scale) or of `NestedScales`, with a `scale` beside them that was expanded for
    the product: in the activations' dtype if that has 16 bits, rounded like a dense weight. On a CPU with the C++
    kernel all buffers lie in panels; in `state_dict`, in rows and without the expanded scales.
    """

    name: ClassVar[str] = "codebook"
    looks_up: ClassVar[bool] = True

    def __init__(self, packed: Codebook, scales: ScaleCodes | NestedScales | None = None) -> None:
        super().__init__()
        self.bits, self.group_size, self.shape = packed.bits, packed.group_size, packed.shape
        self._laid_out_for: tuple[torch.dtype, torch.device] | None = None
        self.of_integers = False  # the table's values, if the kernel for rounded inputs reads the layout
        self._kind = getattr(scales, "kind", None)
        for name in BUFFERS:
            self.register_buffer(name, None if scales is None else scales.tensors().get(name))
        self._set(packed)
        self._set(self.rows())

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        table: Tensor,
        scale: Tensor,
        *,
        group_size: int,
        double_quant: bool = False,
        scale_dtype: str = "float32",
        scales: NestedScales | None = None,
    ) -> "CodebookGroup":
        """From indices [out, in], a table [2^bits] or [out, 2^bits] and scales [out, groups].

        Args:
            double_quant: scales in 8 bits, as bitsandbytes stores them.
            scales: the stored scales, if neither `double_quant` nor `scale_dtype` describes them.
        """
        dtype = SCALE_DTYPES[scale_dtype] if scales is None else torch.float32
        packed = pack_codebook(codes, table.float(), scale.to(dtype), group_size=group_size)
        return cls(packed, quantize_scales(packed.scale) if double_quant else scales)

    @property
    def packed(self) -> Codebook:
        return Codebook(self.layout, self.codes, self.table, self.scale, self.bits, self.group_size, self.shape)

    @property
    def integers(self) -> Codebook | None:
        return self.packed if self.of_integers else None

    @property
    def scales(self) -> ScaleCodes | NestedScales | None:
        """The stored scales, if they are not floats of 16 or 32 bits."""
        if self._kind is not None:
            return NestedScales(self._kind, self.scale_codes, self.scale_factor)
        return None if self.scale_codes is None else ScaleCodes(self.scale_codes, self.scale_absmax, self.scale_offset)

    def dequantize(self) -> Tensor:
        return dequantize(self.rows())

    def matmul(self, x: Tensor) -> Tensor:
        return lut_matmul(x, self.packed)

    def look_up(self, ids: Tensor) -> Tensor:
        return look_up(self.packed, ids)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        if self._laid_out_for == (dtype, device):
            return
        rows = self.rows()
        if self.scales is not None and dtype.itemsize == 2:
            rows = rows._replace(scale=rows.scale.to(dtype))
        self._set(to_panels(rows) if panels_fit(rows, dtype, device) else rows)
        self.of_integers = self.layout == "panels" and holds_integers(self.table)
        self._laid_out_for = dtype, device

    def spec(self) -> dict[str, Any]:
        return self.spec_of(
            self.shape,
            bits=self.bits,
            group_size=self.group_size,
            double_quant=isinstance(self.scales, ScaleCodes),
            scale_dtype=self._kind or "",
        )

    @classmethod
    def spec_of(
        cls, shape: tuple[int, int], *, bits: int, group_size: int, double_quant: bool = False, scale_dtype: str = ""
    ) -> dict[str, Any]:
        """The `spec()` of a weight of this shape; a `group_size` of -1 takes whole rows."""
        group_size = shape[1] if group_size == -1 else group_size
        settings = {"bits": bits, "group_size": group_size, "double_quant": double_quant}
        return {"format": cls.name, "shape": list(shape), **settings, **scales_spec(scale_dtype)}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        table = 32 * (1 << spec["bits"]) / prod(spec["shape"])  # one for all rows
        return super().expected_bits(spec, float_bits) + table

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "CodebookGroup":
        stored = Stored(spec, tensors)
        bits, group_size = stored.number("bits", BITS), stored.group_size()
        codes = stored.packed("codes", stored.out, stored.columns, bits)
        per_row = tensors["table"].dim() == 2
        table = stored.tensor("table", ((stored.out,) if per_row else ()) + (1 << bits,), FLOATS)
        if spec["double_quant"]:
            count = stored.out * (stored.columns // group_size)
            scale, scales = (
                None,
                ScaleCodes(
                    stored.tensor("scale_codes", (count,), torch.uint8),
                    stored.tensor("scale_absmax", (-(-count // SCALES),), torch.float32),
                    stored.tensor("scale_offset", (), torch.float32),
                ),
            )
        else:
            whole = group_size == stored.columns and spec.get("scales") is None  # the table may hold the weights
            scale, scales = read_scales(stored, group_size) if "scale" in tensors or not whole else (None, None)
        return cls(Codebook("rows", codes, table, scale, bits, group_size, stored.shape), scales)

    def trainable(self, original: Tensor | None = None) -> TrainedGroups:
        """Indices are trained, and scales unless they are double-quantised; the table is not."""
        rows = self.rows()
        ascending, order = rows.table.float().sort(dim=-1, stable=True)  # [levels], or for each row [out, levels]
        places = order.argsort(-1)  # places of the entries in `ascending`
        gaps = ascending.diff(dim=-1).clamp_min(1e-6)
        near = torch.cat([gaps[..., :1], (gaps[..., 1:] + gaps[..., :-1]) / 2, gaps[..., -1:]], -1)  # around each entry
        scale = torch.ones(self.shape[0], 1, device=rows.table.device) if rows.scale is None else rows.scale

        # The place of the first entry of each row's table, where rows have their own.
        apart = 0 if rows.table.dim() == 1 else rows.table.shape[1]
        first = apart * torch.arange(self.shape[0], device=rows.table.device, dtype=torch.int32)[:, None]

        def looked_up(table: Tensor, codes: Tensor) -> Tensor:
            index = codes.to(torch.int32).view(self.shape[0], -1) + first
            return table.reshape(-1).index_select(0, index.view(-1)).view(codes.shape)

        rule = ScaleRule.of(self.scales, rows.scale) if not isinstance(self.scales, ScaleCodes) else None

        def store(codes: Tensor, scale: Tensor) -> CodebookGroup:
            own = None if rows.scale is None else scale.to(rows.scale.dtype)
            packed = pack_codebook(looked_up(order, codes), rows.table, own, group_size=self.group_size)
            return CodebookGroup(packed, self.scales if rule is None else rule.stored(scale))

        return TrainedGroups(
            looked_up(places, unpack_codebook(rows)),
            scale.float(),
            levels=rows.table.shape[-1],
            values=lambda codes: looked_up(ascending, codes),
            steps=lambda codes: looked_up(near, codes),
            round_scale=None if rule is None else rule.rounded,
            store=store,
            original=original,
        )

    def rows(self) -> Codebook:
        """The weight in rows, with the stored scales."""
        rows = to_rows(self.packed) if self.layout == "panels" else self.packed
        if self.scales is None:
            return rows
        return rows._replace(scale=self.scales.expand(self.shape[0], self.shape[1] // self.group_size))

    def _set(self, packed: Codebook) -> None:
        self.layout = packed.layout
        self.register_buffer("codes", packed.codes)
        self.register_buffer("table", packed.table)
        self.register_buffer("scale", packed.scale, persistent=self.scales is None)

    def _apply(self, fn, recurse=True):
        # Devices change; dtypes do not: `.to(bfloat16)` is about the activations, and scales keep their stored dtype.
        device = fn(self.table.new_empty(0)).device
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        rows = self.rows()
        scales = {"scale": rows.scale} if self.scales is None else self.scales.tensors()
        stored = {"codes": rows.codes, "table": rows.table, **scales}
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

    The zero bits after the sign give an exponent of ten, the next bit ends them, and the remaining bits divide [0.1, 1]
    into equal parts, whose middles are the values: ±10^(i - 6) times 2^i values, for i = 0..6. Zero and one are the
    other two values.
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
    unit = (blocks * (1 / absmax)[:, None]).nan_to_num(-1)  # NaN if all scales are the same
    even = ((unit + 1) * 0.5 * 65535 + 0.5).floor() / 65535 * 2 - 1
    table = dynamic_map().to(scale.device)
    codes = torch.bucketize(even, (table[:-1] + table[1:]) / 2)
    return ScaleCodes(codes.to(torch.uint8).flatten()[: len(values)], absmax, offset)


def dequantize_scales(scales: ScaleCodes) -> Tensor:
    """The scales, float32 [n]."""
    values = dynamic_map().to(scales.codes.device)[scales.codes.long()]
    return values * scales.absmax.repeat_interleave(SCALES)[: len(values)] + scales.offset
