"""The record of a search for the best choice of every layer (`compress.search`)."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SearchPoint:
    """A whole model, as predicted. bytes: stored. loss: nats per token. decode, prefill: tokens per second, None if
    nothing was timed."""

    bytes: int
    loss: float
    decode: float | None = None
    prefill: float | None = None


@dataclass(frozen=True)
class SearchRound:
    """A model that was made. point: as predicted. factor: what the sum of the layers' losses was multiplied by.
    divergence: measured on windows that are not the calibration's, nats per token."""

    point: SearchPoint
    factor: float
    divergence: float


@dataclass(frozen=True)
class SearchRecord:
    """What was asked, predicted and measured.

    Attributes:
        max_bytes, min_decode, min_prefill, max_kl: the limits; None: there was none. Speeds are tokens per second.
        minimised: "loss", "bytes" or "decode" (which is maximised).
        rounds, kept: the models that were made, and the number of the one that was kept.
        front: the least losses for sizes between the smallest and the largest, within the limits of speed.
        choices: the methods. decode_ratio, prefill_ratio: by choice, how many times as fast as the original a model is
            in which all layers have it. original: its decode and prefill, tokens per second.
        layers: number of layers that have a choice. used: by choice, the number of linears that have it.
    """

    max_bytes: float | None
    min_decode: float | None
    min_prefill: float | None
    max_kl: float | None
    minimised: str
    rounds: tuple[SearchRound, ...]
    kept: int
    front: tuple[SearchPoint, ...] = ()
    choices: tuple[str, ...] = ()
    decode_ratio: dict[str, float] = field(default_factory=dict)
    prefill_ratio: dict[str, float] = field(default_factory=dict)
    original: tuple[float, float] | None = None
    layers: int = 0
    used: dict[str, int] = field(default_factory=dict)

    def sentences(self) -> list[str]:
        """What was asked, found and measured, for readers."""
        wishes = [
            f"at most {self.max_bytes / 1e6:.1f} MB" if self.max_bytes else "",
            f"decoding at {self.min_decode:.0f} tokens/s or more" if self.min_decode else "",
            f"prompts at {self.min_prefill:.0f} tokens/s or more" if self.min_prefill else "",
            f"a divergence of at most {self.max_kl:g} nats per token" if self.max_kl else "",
        ]
        aim = {"loss": "the least divergence", "bytes": "the fewest bytes", "decode": "the fastest decoding"}
        kept = self.rounds[self.kept]
        speeds = [
            f"{rate:.0f} tokens/s {what}"
            for rate, what in ((kept.point.decode, "of decoding"), (kept.point.prefill, "of prompts"))
            if rate
        ]
        predicted = ", ".join([f"{kept.point.bytes / 1e6:.1f} MB", *speeds])
        mix = ", ".join(f"{count} × {text}" for text, count in self.used.items() if count)
        return [
            f"Asked for: {', '.join(filter(None, wishes))}; within that {aim[self.minimised]}.",
            f"Found after {len(self.rounds)} round{'s' * (len(self.rounds) > 1)}: {predicted} are predicted; "
            f"the divergence on other windows of the calibration corpus is {kept.divergence:.4f} nats per token.",
            f"Linears by choice: {mix}.",
        ]
