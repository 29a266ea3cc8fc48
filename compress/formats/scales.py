"""Scales stored in a few bits: integers or shifts that share a 16-bit factor, powers of two, or 8-bit floats."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.formats.stored import FLOATS, Stored
from kernels.int_matmul import pack_bits, unpack_bits

SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LEAST = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126}  # above 0, and not flushed to it
INTEGERS = {"int6": 6, "int8": 8}  # signed codes, and a bfloat16 factor for each super-block of a row
SHIFTS = {"shift4": 4}  # the factor of a super-block, the largest of its scales, divided by a power of two (rounded up)
TILES = {"tile16": 16}  # powers of two, each shared by the groups of this number of rows at the same columns
# Bits of a scale that is not stored in 16 bits.
SCALE_BITS = {**INTEGERS, **SHIFTS, **{kind: 8 / rows for kind, rows in TILES.items()}, "e8m0": 8, "e4m3": 8}
SCALE_KINDS = (*SCALE_DTYPES, *INTEGERS, *SHIFTS, "e8m0", *TILES, "e4m3")
SUPER_BLOCK = 512  # columns at most that share the factor of their scales
LARGEST_E4M3 = 448.0


def bits_in_groups(spec: Mapping[str, Any], float_bits: int) -> float:
    """Bits per weight of codes of `bits` with scales and zero points for groups of `group_size`; without codes, of
    floats. The factors of nested scales are those of the shape, if the specification has one."""
    bits, group, kind = spec.get("bits") or float_bits, spec.get("group_size"), spec.get("scales", "")
    if not group:
        return bits
    scale = SCALE_BITS.get(kind, 8 if spec.get("double_quant") else 16)
    factor = 0.0
    if kind in INTEGERS or kind in SHIFTS:
        columns = spec.get("shape", (0, SUPER_BLOCK))[1]
        factor = 16 / (super_groups(columns // group, group) * group if columns >= group else SUPER_BLOCK)
    return bits + (scale + (0 if spec.get("symmetric", True) else bits)) / group + factor


def super_groups(groups: int, group_size: int) -> int:
    """Groups of a row that share a factor: the most that divide the row and span at most SUPER_BLOCK columns."""
    return max(n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * group_size <= SUPER_BLOCK))


@dataclass(frozen=True)
class ScaleRule:
    """The rule for the scales of a weight's groups: all results of `rounded` can be stored, and none is 0.

    Attributes:
        kind: one of SCALE_KINDS.
        factor: for int6, int8 and shift4, bfloat16 [out, super-blocks]; for e4m3, float32 without dimensions; for
            tile16, the scales themselves, float32 [out, groups]; else None.
        groups: the number of groups of a row.
        half: for e8m0: a scale is rounded up to the next power of two if the scale times this number reaches it.
    """

    kind: str
    factor: Tensor | None = None
    groups: int = 0
    half: float = 1.5

    @classmethod
    def fit(cls, kind: str, cover: Tensor, group_size: int, largest: float = 6.0) -> "ScaleRule":
        """The rule for a weight, fixed before any of its scales is chosen.

        Args:
            cover: [out, groups], scales with which the grid just covers each group of the original weight.
            largest: the grid's largest value, which decides where the powers of two of the OCP Microscaling
                specification change: a block's exponent is that of its largest weight minus that of this value.
        """
        out, groups = cover.shape
        if kind in INTEGERS or kind in SHIFTS:
            size = cover.abs().view(out, -1, super_groups(groups, group_size)).amax(-1)
            factor = (size / ((1 << (INTEGERS[kind] - 1)) - 1) if kind in INTEGERS else size).bfloat16()
            return cls(kind, torch.where(factor == 0, torch.ones_like(factor), factor), groups)
        if kind == "e4m3":
            factor = cover.abs().amax() / LARGEST_E4M3
            return cls(kind, torch.where(factor > 0, factor, torch.ones_like(factor)), groups)
        power = cls("e8m0", None, groups, max(1.5, largest / 2 ** math.floor(math.log2(largest))))
        if kind in TILES:
            rows = TILES[kind]
            tiles = torch.nn.functional.pad(cover.abs(), (0, 0, 0, -out % rows)).view(-1, rows, groups).amax(1)
            return cls(kind, power.rounded(tiles).repeat_interleave(rows, 0)[:out], groups)
        return replace(power, kind=kind)

    @classmethod
    def of(cls, scales: "NestedScales | None", scale: Tensor | None) -> "ScaleRule | None":
        """The rule that a stored weight's scales [out, groups] follow: `scales`, or else floats; None without any."""
        if scale is None:
            return None
        kind = str(scale.dtype).removeprefix("torch.") if scales is None else scales.kind
        factor = scale.float() if kind in TILES else None if scales is None else scales.factor
        return cls(kind, factor, scale.shape[1])

    def rounded(self, scale: Tensor) -> Tensor:
        """Scales [..., out, groups], float32, as they will be stored; in a floating dtype 1 in place of 0, and LEAST in
        place of what is too small."""
        return self._rounded(scale, self._factors())

    def of_group(self, group: int) -> Callable[[Tensor], Tensor]:
        """`rounded` for the scales [..., out] of one group."""
        factors = self._factors()
        own = factors[:, group] if factors is not None and factors.dim() else factors
        return lambda scale: self._rounded(scale, own)

    def stored(self, scale: Tensor) -> "NestedScales | None":
        """Codes of scales [out, groups] that follow the rule; None for floats, which need no codes."""
        if self.kind in SCALE_DTYPES:
            return None
        if self.kind in INTEGERS:
            bits = INTEGERS[self.kind]
            codes = (scale / self._factors()).round() + (1 << (bits - 1))
            return NestedScales(self.kind, pack_bits(codes.reshape(1, -1), bits)[0], self.factor)
        if self.kind in SHIFTS:
            codes = (self._factors() / scale).log2().round()
            return NestedScales(self.kind, pack_bits(codes.reshape(1, -1), SHIFTS[self.kind])[0], self.factor)
        if self.kind == "e8m0" or self.kind in TILES:
            codes = (scale[:: TILES.get(self.kind, 1)].log2().round() + 127).to(torch.uint8)
            return NestedScales(self.kind, codes.flatten(), None)
        codes = (scale / self.factor).to(torch.float8_e4m3fn).view(torch.uint8)
        return NestedScales(self.kind, codes.flatten(), self.factor)

    def _factors(self) -> Tensor | None:
        """The factors: [out, groups] for integers and shifts, no dimensions for e4m3."""
        if self.kind not in INTEGERS and self.kind not in SHIFTS:
            return self.factor
        return self.factor.float().repeat_interleave(self.groups // self.factor.shape[1], 1)

    def _rounded(self, scale: Tensor, factor: Tensor | None) -> Tensor:
        if self.kind in SCALE_DTYPES:
            rounded = scale.to(SCALE_DTYPES[self.kind]).float()
            least = torch.where(scale == 0, 1.0, LEAST[self.kind])
            return torch.where(rounded == 0, torch.where(scale < 0, -least, least), rounded)
        if self.kind in INTEGERS:
            top = (1 << (INTEGERS[self.kind] - 1)) - 1
            codes = (scale / factor).round().clamp(-top - 1, top)
            return torch.where(codes == 0, torch.where(scale < 0, -1.0, 1.0), codes) * factor
        if self.kind in SHIFTS:  # the higher of two powers, which covers the group; a power itself stays itself
            down = ((factor / scale.abs().clamp(min=2.0**-126)).log2() + 1e-4).floor()
            return factor * torch.exp2(-down.clamp(0, (1 << SHIFTS[self.kind]) - 1))
        if self.kind in TILES:
            return factor.expand_as(scale)
        if self.kind == "e8m0":
            return torch.exp2((scale.abs().clamp(min=2.0**-126) * self.half).log2().floor().clamp(-127, 127))
        small = (scale.abs() / factor).clamp(2.0**-9, LARGEST_E4M3)
        return small.to(torch.float8_e4m3fn).float() * factor


@dataclass(frozen=True)
class NestedScales:
    """Stored scales [out, groups].

    Attributes:
        kind: one of SCALE_KINDS that is no floating dtype of 16 or 32 bits.
        codes: uint8, row by row of W: for int6 and int8 packed by `pack_bits` as one row, with the middle added; for
            shift4 likewise, the exponent of the divisor; for e8m0 and, tile by tile, for tile16 the exponent plus 127;
            for e4m3 the bits of the float.
        factor: as in `ScaleRule`.
    """

    kind: str
    codes: Tensor
    factor: Tensor | None

    def expand(self, out: int, groups: int) -> Tensor:
        """The scales, float32 [out, groups]."""
        if self.kind in INTEGERS:
            bits = INTEGERS[self.kind]
            codes = unpack_bits(self.codes[None], bits, out * groups).view(out, groups).float() - (1 << (bits - 1))
            return codes * self.factor.float().repeat_interleave(groups // self.factor.shape[1], 1)
        if self.kind in SHIFTS:
            codes = unpack_bits(self.codes[None], SHIFTS[self.kind], out * groups).view(out, groups).float()
            return torch.exp2(-codes) * self.factor.float().repeat_interleave(groups // self.factor.shape[1], 1)
        if self.kind == "e8m0":
            return torch.exp2(self.codes.float() - 127).view(out, groups)
        if self.kind in TILES:
            tiles = torch.exp2(self.codes.float() - 127).view(-1, groups)
            return tiles.repeat_interleave(TILES[self.kind], 0)[:out]
        return (self.codes.view(torch.float8_e4m3fn).float() * self.factor).view(out, groups)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by the names of the buffers of formats."""
        both = {"scale_codes": self.codes, "scale_factor": self.factor}
        return {name: tensor for name, tensor in both.items() if tensor is not None}


def scales_spec(kind: str) -> dict[str, Any]:
    """The entry for scales in a format's specification: empty if they are floats of 16 or 32 bits."""
    return {} if kind in ("", *SCALE_DTYPES) else {"scales": kind}


def read_scales(stored: Stored, group_size: int) -> tuple[Tensor, NestedScales | None]:
    """The scales of a stored weight [out, groups], and their `NestedScales` if they are not floats (else None)."""
    out, groups, kind = stored.out, stored.columns // group_size, stored.spec.get("scales")
    if kind is None:
        return stored.tensor("scale", (out, groups), FLOATS), None
    if kind not in SCALE_KINDS or kind in SCALE_DTYPES:
        raise ValueError(f"`scales` (={kind!r}) of a stored weight is not a kind of scales that this workbench knows")
    bits, factor = (INTEGERS | SHIFTS).get(kind), None
    if bits:
        factor = stored.tensor("scale_factor", (out, None), torch.bfloat16)
        if not factor.shape[1] or groups % factor.shape[1]:
            raise ValueError(f"`scale_factor` {list(factor.shape)} of a stored weight must divide its {groups} groups")
    elif kind == "e4m3":
        factor = stored.tensor("scale_factor", (), torch.float32)
    count = -(-out // TILES.get(kind, 1)) * groups
    codes = stored.tensor("scale_codes", (-(-count // 8) * bits if bits else count,), torch.uint8)
    scales = NestedScales(kind, codes, factor)
    return scales.expand(out, groups), scales
