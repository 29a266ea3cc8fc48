"""Small floating-point formats: a sign, e bits of exponent and m of mantissa; their values, and rounding to them."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDINGS = ("nearest", "up", "down", "zero", "stochastic")


@dataclass(frozen=True)
class Float:
    """A binary floating-point format.

    Attributes:
        exponent, mantissa: their numbers of bits.
        specials: whether the largest exponent is reserved for infinity and NaN, as in IEEE 754; False: it holds numbers
            like the others, as in the formats of the OCP Microscaling specification (e2m1, e2m3, e3m2).
        lost: the number of largest magnitudes that mean NaN instead: 1 in e4m3fn.
    """

    exponent: int
    mantissa: int
    specials: bool = False
    lost: int = 0

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def smallest_exponent(self) -> int:
        """The smallest exponent of normal numbers."""
        return 1 - self.bias

    @property
    def largest(self) -> float:
        top = (1 << self.exponent) - 1 - self.bias - self.specials
        return (2 - 2.0**-self.mantissa * (1 + self.lost)) * 2.0**top

    def values(self) -> Tensor:
        """All finite values, ascending, with one zero: float32 [at most 2^(1 + exponent + mantissa)]."""
        positive = [] if self.exponent else [0.0]
        step = 2.0 ** (self.smallest_exponent - self.mantissa)
        for place in range(1 << (self.exponent + self.mantissa)):
            exponent, fraction = divmod(place, 1 << self.mantissa)
            whole = fraction if exponent == 0 else (fraction + (1 << self.mantissa)) * 2 ** (exponent - 1)
            positive.append(whole * step)
        kept = torch.tensor([v for v in positive if 0 < v <= self.largest])
        return torch.cat([-kept.flip(0), torch.zeros(1), kept])

    def round(self, x: Tensor, rounding: str = "nearest", *, seed: int | None = None) -> Tensor:
        """x, float32 or float64, rounded to the format's values; numbers beyond the largest one become that value.

        Args:
            rounding: "nearest" (ties to the even mantissa), "up" and "down" (towards ± infinity), "zero", or
                "stochastic": up with the probability of the distance from below, in units of the step.
            seed: for stochastic rounding; None: torch's own generator.
        """
        if rounding not in ROUNDINGS:
            raise ValueError(f"`rounding` (={rounding!r}) must be one of {', '.join(ROUNDINGS)}")
        _, power = torch.frexp(x)  # x = fraction * 2^power, 1/2 <= |fraction| < 1
        power = (power - 1).clamp(min=self.smallest_exponent) - self.mantissa
        steps = torch.ldexp(x, -power)
        if rounding == "stochastic":
            generator = None if seed is None else torch.Generator(x.device).manual_seed(seed)
            below = steps.floor()
            draw = torch.rand(steps.shape, dtype=steps.dtype, device=steps.device, generator=generator)
            whole = below + (draw < steps - below)
        else:
            whole = {"nearest": steps.round, "up": steps.ceil, "down": steps.floor, "zero": steps.trunc}[rounding]()
        rounded = torch.ldexp(whole, power)
        return torch.where(rounded.abs() > self.largest, torch.full_like(x, self.largest).copysign(x), rounded)


E2M1, E2M3, E3M2 = Float(2, 1), Float(2, 3), Float(3, 2)
E4M3, E5M2 = Float(4, 3, lost=1), Float(5, 2, specials=True)
FLOATS = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3, "e5m2": E5M2}


def float_named(name: str) -> Float | None:
    """The format that a text such as e3m2 names; None if it names none.

    Formats of at most six bits have no infinities; wider ones lose their largest exponent, e4m3 only one value.
    """
    match = re.fullmatch(r"e([1-8])m(\d{1,2})", name)
    if match is None or int(match[2]) > 23:
        return None
    exponent, mantissa = int(match[1]), int(match[2])
    return FLOATS.get(name) or Float(exponent, mantissa, specials=1 + exponent + mantissa > 6)
