"""What the pruning methods share: how much goes, in which pattern, and how what is left is stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.formats import Bitmap, Dense, Format, IntGroup, Sparse24Weight
from compress.method import LayerwiseMethod, knob
from compress.pruning.patterns import UNSTRUCTURED, kept, parse_pattern
from compress.statistics import LayerStatistics

HALF = 0.5  # of the weights: the usual ratio


@dataclass(frozen=True, kw_only=True)
class PruningMethod(LayerwiseMethod):
    """Keeps the weights of the largest scores, and stores 2:4 patterns as such and others with a bit for every place."""

    stage: ClassVar[str] = "sparsify"
    by_row: ClassVar[bool] = False  # are scores compared within each row, or over the whole matrix?

    ratio: float = knob(HALF, "of each linear's weights that go, below 1; a pattern N:M says it itself", range=(0, 1))
    pattern: str = knob(UNSTRUCTURED, "which may be kept: any (unstructured), or N of every M neighbours in a row (2:4, 4:8, ...)")

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = parse_pattern(self.pattern)
        if self.ratio >= 1:
            raise ValueError(f"`ratio` (={self.ratio}) of {self.name} must lie below 1: all weights would go")
        if pattern and self.ratio not in (HALF, implied := 1 - pattern[0] / pattern[1]):
            raise ValueError(f"`ratio` (={self.ratio}) of {self.name} is not that of `pattern` (={self.pattern!r}), which is "
                             f"{implied:g}: leave it out")  # fmt: skip

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        pattern = parse_pattern(self.pattern)
        if pattern and shape[1] % pattern[1]:
            raise ValueError(
                f"`pattern` (={self.pattern!r}) of {self.name} needs rows of a multiple of {pattern[1]} columns; {name} has "
                f"{shape[1]}: another M, or `skip`, would do"
            )

    def scores(self, W: Tensor, statistics: LayerStatistics) -> Tensor:
        """[out, in]: how much each weight matters; only their order counts."""
        raise NotImplementedError

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        keep = kept(self.scores(W, statistics), self.ratio, parse_pattern(self.pattern), by_row=self.by_row)
        return [store(Dense(W * keep), keep, self.pattern)]


def store(plain: Dense | IntGroup, keep: Tensor, pattern: str = UNSTRUCTURED) -> Format:
    """A weight that is 0 where `keep` [out, in] is false, in the least bytes: as it is, if little of it is 0."""
    if pattern == "2:4":
        return Sparse24Weight.from_plain(plain, keep)
    bits = plain.bits if isinstance(plain, IntGroup) else 16
    gone = 1 - keep.count_nonzero().item() / keep.numel()
    return Bitmap.from_plain(plain, keep) if bits * gone > 1 else plain


def kept_before(parts: Sequence[Format]) -> Tensor | None:
    """Mask [out, in] of what an earlier method of the recipe kept of a weight; None if none pruned it."""
    if len(parts) != 1:
        return None
    if isinstance(parts[0], Bitmap | Sparse24Weight):
        return parts[0].keep()
    zero = parts[0].weight == 0 if isinstance(parts[0], Dense) else None  # too little of it was 0 for a mask to pay
    return None if zero is None else ~zero


def stored_like(before: Sequence[Format], plain: IntGroup) -> Format:
    """A quantised weight in the pattern in which an earlier method of the recipe stored it, if one did."""
    keep = kept_before(before)
    if keep is None:
        return plain
    return store(plain, keep, "2:4" if isinstance(before[0], Sparse24Weight) else UNSTRUCTURED)
