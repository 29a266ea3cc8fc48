"""Rounding of a linear's input to few bits, for weights in any format."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.floats import E2M1, E4M3, Float
from compress.transforms.base import Transform
from compress.transforms.permutation import check_order

FORMATS = ("int", "fp8", "mxfp4", "nvfp4")
FLOATS: dict[str, Float] = {"fp8": E4M3, "mxfp4": E2M1, "nvfp4": E2M1}
GROUPS = {"mxfp4": 32, "nvfp4": 16}  # columns that share a scale, for formats that fix them
SMALLEST = 2.0**-100  # least magnitude that is assumed for the largest value of a group


class Rounding(Transform):
    """x' = step * code, each code to nearest, with steps from the largest magnitude of a token or of its groups.

    Args:
        bits: of integers, whose codes are symmetric: -7 to 7 in 4 bits.
        format: "int", "fp8" (e4m3), "mxfp4" (e2m1, steps that are powers of two), "nvfp4" (e2m1, steps in e4m3 times a
            float32 of the token; NVIDIA has one of the tensor).
        group_size: columns that share a step; -1: a whole token.
        clip: the share of the largest magnitude that the largest code represents; values beyond it are clamped.
        step: float32 without dimensions: one step for all, or None for steps that are computed on each call.
        order: [in], the permutation in which columns are grouped; None: their own order.
        wide: the number of first groups in that order whose integers have 8 bits.
    """

    name: ClassVar[str] = "rounding"

    def __init__(
        self,
        bits: int,
        format: str = "int",
        *,
        group_size: int = -1,
        clip: float = 1.0,
        step: Tensor | None = None,
        order: Tensor | None = None,
        wide: int = 0,
    ) -> None:
        super().__init__()
        self.bits, self.format, self.clip, self.wide = bits, format, clip, wide
        self.group_size = GROUPS.get(format, group_size)
        self.register_buffer("step", step)
        self.register_buffer("order", order)

    @property
    def largest(self) -> float:
        """The largest code, outside of the wide groups."""
        return FLOATS[self.format].largest if self.format in FLOATS else largest_code(self.bits)

    @property
    def in_integers(self) -> bool:
        """Whether x' is exactly the integers that `kernels.w4a8_matmul` makes from x, times their steps."""
        return self.format == "int" and self.clip == 1.0 and self.order is None

    @property
    def in_float8(self) -> bool:
        """Whether x' is exactly the float8 that `kernels.w4a8_matmul` makes from x, times their steps."""
        return self.format == "fp8" and self.clip == 1.0 and self.order is None

    def forward(self, x: Tensor) -> Tensor:
        columns = x if self.order is None else x[..., self.order]
        groups = columns.float().unflatten(-1, (-1, x.shape[-1] if self.group_size == -1 else self.group_size))
        largest = groups.new_full((groups.shape[-2], 1), self.largest)
        largest[: self.wide] = largest_code(8)
        step, inverse = self._steps(groups, largest)
        codes = (groups * inverse).clamp(-largest, largest)
        codes = FLOATS[self.format].round(codes) if self.format in FLOATS else codes.round()
        rounded = (codes * step).flatten(-2).to(x.dtype)
        return rounded if self.order is None else torch.empty_like(rounded).index_copy_(-1, self.order, rounded)

    def _steps(self, groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and their inverses, [..., groups, 1] each, or one number; for integers as in `quantize_rows`.

        Args:
            groups: [..., groups of a token, columns]. largest: [groups, 1].
        """
        if self.step is not None:
            return self.step, 1 / self.step
        top = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
        if self.format == "mxfp4":  # OCP Microscaling 1.0, 6.3: the largest value's power of two, over the grid's
            step = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent - 3)
            return step, 1 / step
        if self.format == "nvfp4":
            step = top * (self.clip / largest)
            token = step.amax(-2, keepdim=True) / E4M3.largest
            step = E4M3.round((step / token).clamp_min(2.0**-9)) * token
            return step, 1 / step
        top = top if self.clip == 1 else top * self.clip
        return top / largest, largest / top

    def spec(self) -> dict[str, Any]:
        settings = {"bits": self.bits, "format": self.format, "group_size": self.group_size, "clip": self.clip}
        return {"transform": self.name, **settings, "wide": self.wide, "static": self.step is not None}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Rounding":
        settings = {key: spec[key] for key in ("group_size", "clip", "wide")}
        numbers = [spec["bits"], settings["group_size"], settings["wide"]]
        if [type(n) for n in numbers] != [int] * 3 or not 2 <= spec["bits"] <= 16 or spec["format"] not in FORMATS:
            raise ValueError(
                f"a stored rounding to `bits` (={spec['bits']!r}), {spec['format']!r}, {settings} is unknown"
            )
        if (order := tensors.get("order")) is not None:
            check_order(order)
        return cls(spec["bits"], spec["format"], **settings, step=tensors.get("step"), order=order)

    def extra_repr(self) -> str:
        return f"bits={self.bits}, format={self.format}, group_size={self.group_size}"


def largest_code(bits: int) -> float:
    """The largest of symmetric integer codes: 7 in 4 bits."""
    return 2.0 ** (bits - 1) - 1
