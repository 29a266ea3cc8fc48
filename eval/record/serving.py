"""Sequences that decode together within a memory: predictions for combinations of stored weights and caches."""

from collections.abc import Sequence
from dataclasses import dataclass


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
