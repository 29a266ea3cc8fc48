"""Quest (Tang et al., 2024, arXiv:2406.10774): read the pages that a query may attend to, by bounds of their keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.growing import Growing
from compress.kv.reading.method import LayerQuery, Reading, Role
from compress.kv.storage import Slab, from_start
from compress.method import knob
from kernels.kv_decode import note_key, page_scores
from kernels.kv_decode.ranked import Ranked


@dataclass(frozen=True, kw_only=True)
class Quest(Reading):
    """Keeps everything, and lets each token read only the pages of positions that its query may attend to most.

    Of every page of keys the smallest and the largest element of each channel are kept; they bound the score of any key
    in the page: Σ_d max(q_d low_d, q_d high_d). The first layers read everything. The paper chooses for every query
    head; here query heads that share a kv head share the choice, by the mean of their softmaxes over the bounds,
    because the kernel reads the same positions for all of them. The page with the last tokens is always read.
    """

    page: int = knob(16, "positions that are chosen together", range=(1, 1024))
    full_layers: int = knob(2, "layers at the beginning that read everything", range=(0, 1024))

    name = "quest"
    source = "Tang et al. 2024, arXiv:2406.10774, algorithm 1"

    def roles(self, layers: int) -> list[Role]:
        return [Role(i < self.full_layers, i >= self.full_layers) for i in range(layers)]

    def page_bounds(self, slab: Slab) -> Growing:
        return bounds(slab, self.page)

    def scores(self, query: LayerQuery) -> Tensor:
        slab = query.slab
        edges, lengths = bounds(slab, self.page).view, slab.length - slab.starts
        return page_scores(query.queries, edges, lengths, page=self.page, scale=query.scaling)

    def listed(
        self, query: LayerQuery, starts: Tensor, lengths: Tensor, *, pages: Tensor, most: int, behind: int = 0
    ) -> Ranked:
        return Ranked(
            query.queries,
            bounds(query.slab, self.page).view,
            starts,
            lengths,
            page=self.page,
            pages=pages,
            most=most,
            behind=behind,
            scale=query.scaling,
        )


def bounds(slab: Slab, page: int) -> Growing:
    """The smallest and then the largest elements of the keys of every page, [B, H_kv, P, 2 D], kept beside the slab and
    updated here. Pages are counted from each row's first position; a row's last page may have fewer positions, and
    pages behind it are undefined."""
    new = slab.length - slab.noted
    if not slab.notes or new > page:
        keys = from_start(slab.keys_from(0), slab.starts)
        missing = -keys.shape[2] % page
        keys = torch.cat([keys, keys[:, :, -1:].expand(-1, -1, missing, -1)], 2) if missing else keys
        slab.notes = [Growing(torch.cat(keys.unflatten(2, (-1, page)).aminmax(dim=3), -1))]
    elif new:
        notes = slab.notes[0]
        for i, key in enumerate(slab.keys_from(slab.noted).split(1, 2), slab.noted):
            if notes.length * page <= i:
                notes.append(torch.cat([key, key], -1))  # one more page, for the rows that need it
            note_key(notes.view, key, (i - slab.starts).long().clamp(min=0), page)
    slab.noted = slab.length
    return slab.notes[0]
