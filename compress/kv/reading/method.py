"""Sparse reading: a rule by which a query chooses the kept positions that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from compress.kv.growing import Growing
from compress.kv.policy import CacheMethod, Policy, check_budget, tokens_of
from compress.kv.storage import Slab
from compress.kv.support import storing_layers
from compress.method import Method, knob
from kernels.kv_decode import Listed, list_of
from kernels.kv_decode.ranked import Ranked


class Role(NamedTuple):
    """The role of a layer: whether it reads every position, and whether it chooses positions. A layer that does neither
    reads the positions that an earlier layer chose."""

    reads_all: bool
    chooses: bool


@dataclass
class LayerQuery:
    """The data of a layer when it chooses; T positions are kept, and the queries' own tokens come after them.

    Attributes:
        slab: the kept positions of H_kv heads.
        queries: [B, H_q, n, D], of these heads, rotated.
        scaling: the scaling of the attention.
        mass: [B, H_kv, n, T] float32: attention that each position got from each query, summed over the query heads of
            a kv head, counted from a row's first position; None if the layer has not attended yet.
    """

    slab: Slab
    queries: Tensor
    scaling: float
    mass: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Reading(CacheMethod):
    """Chooses which positions a query reads. Subclasses implement `roles` and `scores`.

    Passes of one token read sparsely, and so does everything behind a context in the long-context evaluation, questions
    too; prompts, in one piece or several, and further turns are read in full. The tokens of a pass are always read.
    """

    budget: float | int = knob(
        0.25,
        "what a query reads: a share of the kept positions (a float up to 1), or a number of positions per head",
        describes=True,
    )

    slot: ClassVar[str] = "reading"
    decides: ClassVar[str] = "which positions are read"
    page: ClassVar[int] = 1  # number of positions that are chosen together; a knob of some methods
    shares: ClassVar[bool] = False  # whether layers read another layer's choice; all must keep the same positions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self)

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if storing_layers(model):
            raise ValueError(
                f"{self.name} chooses positions for the queries of one layer, and several layers of "
                f"{type(model).__name__} read the same keys and values; a method that evicts positions works"
            )

    def roles(self, layers: int) -> list[Role]:
        """The role of each layer that keeps all positions."""
        raise NotImplementedError

    def scores(self, query: LayerQuery) -> Tensor:
        """The importance of each page for each query: [B, H_kv, n, pages] float32; pages are counted from each row's
        first position."""
        raise NotImplementedError

    def listed(
        self, query: LayerQuery, starts: Tensor, lengths: Tensor, *, pages: Tensor, most: int, behind: int = 0
    ) -> Listed | Ranked:
        """The positions that one token reads: those of each row's last page and of the others with the highest scores.
        Pages that are `Ranked` are chosen when they are read.

        Args:
            starts, lengths: [B, H_kv], of the rows. pages, most, behind: as in `kernels.kv_decode.page_list`.
        """
        scores = self.scores(query)[:, :, 0]
        return list_of(scores, starts, lengths, page=self.page, pages=pages, most=most, behind=behind)

    def page_bounds(self, slab: Slab) -> Growing | None:
        """Bounds of the keys of every page, if pages are ranked by these alone, as in
        `kernels.kv_decode.pages.page_list`, and `share` depends on the rows' lengths alone; else None."""
        return None

    def wanted(self, kept: Tensor) -> Tensor:
        """The number of positions that a query reads, given the number that a row keeps."""
        return tokens_of(self.budget, kept)

    def most(self, kept: int) -> int:
        """The same as `wanted`, for a Python number, so that the device need not be waited for."""
        return int(self.wanted(torch.tensor([kept])))

    def share(self, slab: Slab, length: int) -> tuple[Tensor, int]:
        """The number of a slab's first `length` positions that a query reads, [B, H_kv] int64, and its maximum."""
        return self.wanted((length - slab.starts).long()), self.most(length)

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for other in (*before, *after):
            if self.shares and isinstance(other, Policy):
                raise ValueError(
                    f"`recipe`: {self} lets layers read the positions that another layer chose, and {other} keeps "
                    "different positions in every layer; leave one out, or take a reading that chooses in every layer"
                )
        return super().within(before, after)
