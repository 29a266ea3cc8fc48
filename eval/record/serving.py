"""Sequences that decode together within a memory: predictions for combinations of stored weights and caches, and the
record of the one that was made and measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.record.search import CLOSE

AIMS = ("sequences", "speed")


@dataclass(frozen=True)
class Combination:
    """Weights and caches in a memory, as predicted.

    Attributes:
        weights, cache: names of the recipes.
        weight_bytes: of all weights. cache_bytes: of each sequence's cache.
        room: bytes that are needed beside them, while a prompt is read or for the activations of a step.
        sequences: that fit into the memory; 0: not even one does.
        batch: sequences that decode together, for `tokens_per_s`; 0 if these do not fit.
        alone: tokens per second of one sequence. tokens_per_s: of all sequences together.
        bound: what limits the step of the batch: "memory" (its bandwidth) or "compute".
        least: bytes that one sequence needs.
        loss: divergence from the original, nats per token; None: not measured.
    """

    weights: str
    cache: str
    weight_bytes: int
    cache_bytes: int
    room: int
    sequences: int
    batch: int
    alone: float
    tokens_per_s: float
    bound: str
    least: int
    loss: float | None = None

    @property
    def fits(self) -> bool:
        """Whether a batch fits that can be decoded."""
        return self.batch > 0


def largest(found: Sequence[Combination]) -> Combination | None:
    """The one with the most sequences; the fastest of several; None if none fits."""
    return max((one for one in found if one.fits), key=lambda one: (one.sequences, one.tokens_per_s), default=None)


def fastest(found: Sequence[Combination]) -> Combination | None:
    """The one with the most tokens per second of all sequences; None if none fits."""
    return max((one for one in found if one.fits), key=lambda one: (one.tokens_per_s, one.sequences), default=None)


@dataclass(frozen=True)
class ServingRound:
    """Sequences that were decoded together. peak_bytes: of weights, caches and all that reading the prompts and the
    steps needed. cache_bytes: of all caches at the end. tokens_per_s: of all sequences, None if no step was timed."""

    sequences: int
    peak_bytes: int
    cache_bytes: int
    tokens_per_s: float | None


@dataclass(frozen=True)
class ServingRecord:
    """What was asked, predicted and measured.

    Attributes:
        memory: bytes. context: tokens of each prompt. max_kl: limit of the divergence; None: there was none.
        aim: "sequences" or "speed", which of them was maximised. device: whose bandwidth and arithmetic the speeds are.
        by_shapes: the combination that was chosen, as its shapes predict it.
        found: all combinations, with the bytes and losses of their weights and caches as measured; losses add up.
        kept: the number of the chosen one in `found`.
        divergence: of the chosen combination, measured; with its standard error, None for one window.
        tried: how many combinations were chosen and measured, one after the other. factor: measured divergence of the
            last one with no part in 16 bits over the sum of its losses; 1.0 if there was none.
        rounds: numbers of sequences that were decoded; the last one counts.
        weights, caches: the recipes by their names. windows, scored: windows, and tokens behind the context in each.
        batch: sequences that were to decode together; None: as many as fit, or an earlier version made the record.
    """

    memory: int
    context: int
    max_kl: float | None
    aim: str
    device: str
    by_shapes: Combination
    found: tuple[Combination, ...]
    kept: int
    divergence: float
    divergence_stderr: float | None
    tried: int
    factor: float
    rounds: tuple[ServingRound, ...]
    weights: dict[str, str] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)
    windows: int = 0
    scored: int = 0
    batch: int | None = None

    def broken(self) -> list[str]:
        """The limits that are not kept, in sentences."""
        said, last = list[str](), self.rounds[-1]
        if self.max_kl and self.divergence > self.max_kl * (1 + CLOSE):
            said.append(
                "The limit of the divergence is not kept: of the combinations that were made, this one is nearest to "
                f"it, with {self.divergence:.4f} nats per token."
            )
        if self.batch and last.sequences < self.batch:
            said.append(
                f"The number of sequences is not reached: of {self.batch:,} that were to decode together, "
                f"{last.sequences:,} did, because more took more than the memory."
            )
        if last.peak_bytes > self.memory:
            said.append(f"The memory is not kept: decoding took {last.peak_bytes / 1e6:,.1f} MB.")
        return said

    def sentences(self) -> list[str]:
        """What was asked, found and measured, for readers."""
        joined = "and" if self.batch else "with"
        limit = f" {joined} a divergence of at most {self.max_kl:g} nats per token" if self.max_kl else ""
        most = "most sequences" if self.aim == "sequences" else "most tokens per second"
        asked = f"the {most} of {self.context:,} tokens"
        if self.batch:
            more = "room for the most sequences" if self.aim == "sequences" else f"the {most}"
            asked = f"{self.batch:,} sequences of {self.context:,} tokens, with {more}"
        kept, last = self.found[self.kept], self.rounds[-1]
        return [
            f"A memory of {self.memory / 1e6:,.0f} MB is to hold {asked}{limit}. Of {len(self.found)} combinations of "
            f"weights and caches, {sum(one.fits for one in self.found)} fit.",
            f"The choice is weights {kept.weights} ({self.weights.get(kept.weights, 'as they are')}) and cache "
            f"{kept.cache} ({self.caches.get(kept.cache, 'as it is')}).",
            f"{last.sequences:,} sequences were decoded together in {last.peak_bytes / 1e6:,.1f} MB, with caches of "
            f"{last.cache_bytes / last.sequences / 1e6:,.2f} MB each. The divergence of the combination is "
            f"{self.divergence:.4f} nats per token, and the losses of its parts add up to {kept.loss or 0:.4f}.",
            *self.broken(),
        ]
