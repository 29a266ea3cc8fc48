"""What a user asks of a compressed model: limits of its bytes, its speed and its divergence."""

import re
from dataclasses import dataclass

from eval.record.search import PROMPT
from kernels.support.errors import check_positive
from kernels.support.units import bytes_of

LIMITS = ("max_bytes", "min_decode", "min_prefill", "max_ttft", "max_kl")
UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Limits of a compressed model; what has no limit is optimised, in the order divergence, bytes, decoding.

    Attributes:
        max_bytes: of the whole stored model, with the weights that stay in 16 bits; and of its cache, if `fit` has
            choices for it.
        min_decode, min_prefill: tokens per second of one sequence, or with `times` multiples of the original's.
        max_kl: divergence from the original model, nats per token.
        times: are the two speeds multiples of the original's, in 16 bits on the same machine?
        max_ttft: seconds until the first token after a prompt of `prompt` tokens, with the full cache.
        prompt: tokens of the prompts that are timed.
    """

    max_bytes: float | None = None
    min_decode: float | None = None
    min_prefill: float | None = None
    max_kl: float | None = None
    times: bool = False
    max_ttft: float | None = None
    prompt: int = PROMPT

    def __post_init__(self) -> None:
        check_positive(prompt=self.prompt)
        limits = {name: getattr(self, name) for name in LIMITS}
        if all(limit is None for limit in limits.values()):
            raise ValueError(f"one of {', '.join(f'`{name}`' for name in limits)} must be given: they limit the search")
        if None not in (self.min_prefill, self.max_ttft):
            raise ValueError(
                f"`min_prefill` (={self.min_prefill!r}) and `max_ttft` (={self.max_ttft!r}) limit the same: give one"
            )
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < float("inf"):
                raise ValueError(f"`{name}` (={limit!r}) must be a number above 0")

    @property
    def timed(self) -> bool:
        """Does a limit, or what is optimised, concern time, so that choices must be timed?"""
        speeds = self.min_decode, self.min_prefill, self.max_ttft
        return any(limit is not None for limit in speeds) or self.minimises == "decode"

    @property
    def minimises(self) -> str:
        """What is optimised within the limits: "loss", "bytes" or "decode"; the loss if all have limits."""
        if self.max_kl is None:
            return "loss"
        if self.max_bytes is None:
            return "bytes"
        return "decode" if self.min_decode is None else "loss"

    def named(self, cost: str) -> str:
        """The parameter that limits a cost, by its name in `compress.search.program`."""
        if cost == "prefill":
            return "min_prefill" if self.max_ttft is None else "max_ttft"
        return {"bytes": "max_bytes", "loss": "max_kl", "decode": "min_decode"}[cost]

    def asked_rate(self, phase: str, rate: float) -> str:
        """A limit of speed for an error: the parameter and its tokens per second."""
        name = self.named(phase)
        how = f"{self.max_ttft:g} s for {self.prompt} tokens, " if name == "max_ttft" else ""
        return f"`{name}` (={how}{rate:.0f} tokens/s)"

    def least_rate(self, place: int, original: float) -> float | None:
        """The least tokens per second that keep the limits; None: there is none.

        Args:
            place: 0 for decoding, 1 for reading a prompt. original: tokens per second of the original model.
        """
        if place == 1 and self.max_ttft is not None:
            return self.prompt / self.max_ttft
        wish = (self.min_decode, self.min_prefill)[place]
        return wish * original if wish is not None and self.times else wish


def speed_of(name: str, text: str) -> tuple[float | None, bool]:
    """The number that a text means, and whether it is a multiple of the original's speed: 250, or 2x; None if empty.

    Raises:
        ValueError: it is neither.
    """
    if not text.strip():
        return None, False
    found = re.fullmatch(r"\s*([0-9.]+)\s*(x?)\s*", text)
    try:
        return float(found[1]), bool(found[2])
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` (={text!r}) must be tokens per second, such as 250, or a multiple of the original's speed, "
            "such as 2x"
        ) from None


def seconds_of(name: str, text: str) -> float | None:
    """The time that a text means: 200ms, or 0.2s; None if empty.

    Raises:
        ValueError: it is no time.
    """
    if not text.strip():
        return None
    found = re.fullmatch(r"\s*(\d*\.?\d+)\s*(ms|s)\s*", text)
    if not found or not float(found[1]):
        raise ValueError(f"`{name}` (={text!r}) must be a time above 0 with its unit, such as 200ms or 0.2s")
    return float(found[1]) * UNITS[found[2]]


def wishes_of(
    *,
    max_bytes: str = "",
    min_decode: str = "",
    min_prefill: str = "",
    max_ttft: str = "",
    prompt: int = PROMPT,
    max_kl: float = 0.0,
) -> Wishes:
    """The wishes that parameters of a notebook or a command line name; "" and 0: no limit.

    Raises:
        ValueError: a text has no meaning, or one speed is a multiple and the other is not.
    """
    (decode, by_decode), (prefill, by_prefill) = (
        speed_of("min_decode", min_decode),
        speed_of("min_prefill", min_prefill),
    )
    if None not in (decode, prefill) and by_decode != by_prefill:
        raise ValueError(
            f"`min_decode` (={min_decode!r}) and `min_prefill` (={min_prefill!r}) must both be tokens per second, or "
            "both multiples of the original's speed"
        )
    return Wishes(
        max_bytes=bytes_of(max_bytes, "max_bytes"),
        min_decode=decode,
        min_prefill=prefill,
        max_kl=max_kl or None,
        times=by_decode or by_prefill,
        max_ttft=seconds_of("max_ttft", max_ttft),
        prompt=prompt,
    )
