"""The order of sums over micro-batches, the same for any number of processes: by slices of the calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

SLICES = 8  # most slices of the calibration; processes beyond this number have no micro-batches


@dataclass(frozen=True)
class Place:
    """The place of a micro-batch in the calibration.

    A slice is a series of neighbouring micro-batches. Their results are summed up inside each slice, and the sums of
    the slices are added in order. Floating-point sums depend on their order; this order does not depend on the number
    of processes, because each process has whole slices.

    Args:
        number: the number of the micro-batch.
        slice: the number of its slice.
        size: the number of micro-batches in this slice; 0 if unknown.
        start: the number of tokens in the slices before this one.
        window, windows: the number of windows in the micro-batches before this one, and in this one; 0 if unknown.
    """

    number: int = 0
    slice: int = 0
    size: int = 0
    start: int = 0
    window: int = 0
    windows: int = 0


def places(stacked: Sequence[Tensor]) -> list[Place]:
    """The places of micro-batches [batch, T], in order."""
    count = min(SLICES, len(stacked))
    slices = [number * count // len(stacked) for number in range(len(stacked))]
    sizes, tokens = [0] * count, [0] * count
    for x, own in zip(stacked, slices, strict=True):
        sizes[own] += 1
        tokens[own] += x.numel()
    starts = [0, *accumulate(tokens)]
    windows = [0, *accumulate(len(x) for x in stacked)]
    return [
        Place(number, own, sizes[own], starts[own], windows[number], len(stacked[number]))
        for number, own in enumerate(slices)
    ]


def rank_of(place: Place, slices: int, ranks: int) -> int:
    """The process that has the slice of this place: neighbouring slices go to one process."""
    return place.slice * ranks // slices
