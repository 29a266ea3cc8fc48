"""In which order sums over micro-batches are taken, whatever the number of processes: by slices of the calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

SLICES = 8  # of the calibration at most; more processes than slices have no micro-batches


@dataclass(frozen=True)
class Place:
    """Where a micro-batch stands in the calibration.

    A slice is a run of neighbouring micro-batches. What they give is summed up inside each slice, and the slices' sums
    are added in order. Floating-point sums depend on the order in which they are taken; this one does not depend on the
    number of processes, each of which has whole slices.

    Args:
        number: of the micro-batch.
        slice: that it belongs to.
        size: micro-batches of this slice; 0 if that is not known.
        start: tokens in the slices before this one.
    """

    number: int = 0
    slice: int = 0
    size: int = 0
    start: int = 0


def places(stacked: Sequence[Tensor]) -> list[Place]:
    """The places of micro-batches [batch, T], in order."""
    count = min(SLICES, len(stacked))
    slices = [number * count // len(stacked) for number in range(len(stacked))]
    sizes, tokens = [0] * count, [0] * count
    for x, own in zip(stacked, slices, strict=True):
        sizes[own] += 1
        tokens[own] += x.numel()
    starts = [0, *accumulate(tokens)]
    return [Place(number, own, sizes[own], starts[own]) for number, own in enumerate(slices)]


def rank_of(place: Place, slices: int, ranks: int) -> int:
    """The process that has a slice of so many: neighbouring slices go to one process."""
    return place.slice * ranks // slices
