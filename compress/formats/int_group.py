"""Integer codes of 2 to 8 bits, with a scale (and a zero point) per group of columns."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.scales import TILES, NestedScales, ScaleRule, read_scales, scales_spec
from compress.formats.stored import Stored
from compress.formats.trained import TrainedGroups
from kernels.int_matmul import (
    BITS,
    Packed,
    dequantize,
    int_matmul,
    look_up,
    pack,
    panels_fit,
    tiles_fit,
    to_panels,
    to_rows,
    to_tiles,
    unpack,
)


class IntGroup(Format):
    """w = scale * (code - zero), group by group along `in`.

    Buffers: `codes`, `scale` and, asymmetric, `zero`, laid out as in `kernels.int_matmul.Packed`. On a CPU the codes
    lie in panels for the C++ kernel, or without that kernel, up to 4 bits, in the tiles of torch's int4 kernel
    (activations and scales of the same 16-bit dtype); everywhere else, and in `state_dict`, in rows.

    If scales are stored in fewer bits (`NestedScales`), `scale_codes` and `scale_factor` hold them, and `scale` is
    expanded from these for the product: in the activations' dtype if that has 16 bits; it is not part of the state.
    """

    name: ClassVar[str] = "int_group"
    looks_up: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __init__(self, packed: Packed, scales: NestedScales | None = None) -> None:
        super().__init__()
        self.bits, self.group_size, self.shape = packed.bits, packed.group_size, packed.shape
        self._scale_dtype, self._kind = packed.scale.dtype, None if scales is None else scales.kind
        self.register_buffer("scale_codes", None if scales is None else scales.codes)
        self.register_buffer("scale_factor", None if scales is None else scales.factor)
        self._set(packed)
        self._set(self._rows())

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        *,
        bits: int,
        group_size: int,
        scale_dtype: str = "bfloat16",
        scales: NestedScales | None = None,
    ) -> "IntGroup":
        """From integers [out, in], scales [out, groups] and zero points [out, groups] (None: symmetric).

        Args:
            scales: the stored scales, if they are not in `scale_dtype`.
        """
        dtype = getattr(torch, scale_dtype) if scales is None else torch.float32
        return cls(pack(codes, scale.to(dtype), zero, bits=bits, group_size=group_size), scales)

    @property
    def scales(self) -> NestedScales | None:
        """The stored scales, if they are not floats of 16 or 32 bits."""
        return None if self._kind is None else NestedScales(self._kind, self.scale_codes, self.scale_factor)

    @property
    def packed(self) -> Packed:
        return Packed(self.layout, self.codes, self.scale, self.zero, self.bits, self.group_size, self.shape)

    @property
    def integers(self) -> Packed:
        return self.packed

    def keep_in(self, integers: Packed) -> None:
        self._set(integers)

    def dequantize(self) -> Tensor:
        return dequantize(self._rows())

    def matmul(self, x: Tensor) -> Tensor:
        return int_matmul(x, self.packed)

    @classmethod
    def stacks(cls, spec: dict[str, Any]) -> bool:
        return spec.get("scales") not in ("e4m3", *TILES)  # such scales are shared by rows

    def look_up(self, ids: Tensor) -> Tensor:
        return look_up(self.packed, ids)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        fits = self._kind is not None or dtype == self._scale_dtype
        if self._kind is not None:
            rows = self._rows()
            self._set(rows._replace(scale=rows.scale.to(dtype)) if dtype.itemsize == 2 else rows)
        if panels_fit(self.packed, dtype, device):
            self._lay_out("panels", dtype)
        elif tiles_fit(self.shape, self.bits, self.group_size, dtype, device) and fits:
            self._lay_out("tiles", dtype)
        else:
            self._lay_out("rows", dtype)

    def spec(self) -> dict[str, Any]:
        return self.spec_of(
            self.shape,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.zero is None,
            scale_dtype=self._kind or "",
        )

    @classmethod
    def spec_of(
        cls, shape: tuple[int, int], *, bits: int, group_size: int, symmetric: bool, scale_dtype: str = ""
    ) -> dict[str, Any]:
        """The `spec()` of a weight of this shape on such a grid; a `group_size` of -1 takes whole rows."""
        group_size = shape[1] if group_size == -1 else group_size
        grid = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
        return {"format": cls.name, "shape": list(shape), **grid, **scales_spec(scale_dtype)}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "IntGroup":
        stored = Stored(spec, tensors)
        bits, group_size = stored.number("bits", BITS), stored.group_size()
        codes = stored.packed("codes", stored.out, stored.columns, bits)
        groups = stored.columns // group_size
        zero = None if spec["symmetric"] else stored.packed("zero", stored.out, groups, bits)
        scale, scales = read_scales(stored, group_size)
        return cls(Packed("rows", codes, scale, zero, bits, group_size, stored.shape), scales)

    def trainable(self, original: Tensor | None = None) -> TrainedGroups:
        """Scales and codes are trained; zero points are not."""
        rows = self._rows()
        codes, zero = unpack(rows)
        centre = zero.float()[..., None]  # [out or 1, groups or 1, 1]
        rule = ScaleRule.of(self.scales, rows.scale)

        def store(codes: Tensor, scale: Tensor) -> IntGroup:
            points = None if rows.zero is None else zero
            packed = pack(codes, scale.to(rows.scale.dtype), points, bits=self.bits, group_size=self.group_size)
            return IntGroup(packed, rule.stored(scale))

        return TrainedGroups(
            codes,
            rows.scale.float(),
            levels=1 << self.bits,
            values=lambda codes: codes - centre,
            steps=None,
            round_scale=rule.rounded,
            store=store,
            original=original,
        )

    def _rows(self) -> Packed:
        """The weight in rows, with the stored scales."""
        rows = to_rows(self.packed)
        if self.scales is None:
            return rows
        return rows._replace(scale=self.scales.expand(self.shape[0], self.shape[1] // self.group_size))

    def _lay_out(self, layout: str, dtype: torch.dtype) -> None:
        if layout != self.layout:
            rows = self._rows()
            self._set(
                {"rows": lambda: rows, "panels": lambda: to_panels(rows), "tiles": lambda: to_tiles(rows, dtype)}[
                    layout
                ]()
            )

    def _set(self, packed: Packed) -> None:
        self.layout = packed.layout
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scale", packed.scale, persistent=self._kind is None)
        self.register_buffer("zero", packed.zero)

    def _apply(self, fn, recurse=True):
        # Devices change; dtypes do not: `.to(bfloat16)` is about the activations, and scales keep their stored dtype.
        move = lambda t: None if t is None else t.to(fn(t.new_empty(0)).device)  # noqa: E731
        self.scale_codes, self.scale_factor = move(self.scale_codes), move(self.scale_factor)
        self._set(self.packed._replace(codes=move(self.codes), scale=move(self.scale), zero=move(self.zero)))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        rows = self._rows()
        scales = {"scale": rows.scale} if self.scales is None else self.scales.tensors()
        for key, tensor in {"codes": rows.codes, **scales, "zero": rows.zero}.items():
            if tensor is not None:
                destination[prefix + key] = tensor

    def _load_from_state_dict(self, state_dict, prefix, *args):
        layout, dtype = self.layout, self.scale.dtype
        self._set(self._rows())
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self._kind is not None:
            self.for_compute(dtype, self.codes.device)
        else:
            self._lay_out(layout, dtype)
