"""Quest (Tang et al., 2024, arXiv:2406.10774): read the pages that a query may attend to, by bounds of their keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.reading.method import Glance, Reading, Role
from compress.kv.storage import Growing, Slab, from_start
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class Quest(Reading):
    """Keeps everything, and lets each token read only the pages of positions that its query may attend to most.

    Of every page of keys the smallest and the largest element of each channel are kept; they bound the score of any key
    in the page: Σ_d max(q_d low_d, q_d high_d). The first layers read everything. The paper chooses for every query
    head; here query heads that share a kv head share the choice, by the mean of their softmaxes over the bounds,
    because what one of them reads the kernel reads for all. The page with the last tokens is always read.
    """

    page: int = knob(16, "positions that are chosen together", range=(1, 1024))
    full_layers: int = knob(2, "layers at the beginning that read everything", range=(0, 1024))

    name = "quest"
    source = "Tang et al. 2024, arXiv:2406.10774, algorithm 1"

    def roles(self, layers: int) -> list[Role]:
        return [Role(i < self.full_layers, i >= self.full_layers) for i in range(layers)]

    def scores(self, glance: Glance) -> Tensor:
        slab = glance.slab
        logits = upper_bounds(glance.queries, *bounds(slab, self.page)) * glance.scaling
        at = torch.arange(0, logits.shape[-1] * self.page, self.page, device=logits.device)
        behind = at >= (slab.length - slab.starts)[..., None]  # [B, H, P]
        return logits.masked_fill(behind[:, :, None, None], torch.finfo(torch.float32).min).softmax(-1).mean(2)


def upper_bounds(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The most that a key of each page can score: queries [B, H_q, n, D], low, high [B, H_kv, P, D] -> [B, H_kv, G, n,
    P], float32."""
    grouped = queries.unflatten(1, (low.shape[1], -1))  # [B, H_kv, G, n, D]
    rows = grouped.flatten(2, 3)  # the heads that share keys are rows of one product
    found = rows.clamp(min=0) @ high.mT + rows.clamp(max=0) @ low.mT
    return found.float().unflatten(2, grouped.shape[2:4])


def bounds(slab: Slab, page: int) -> tuple[Tensor, Tensor]:
    """The smallest and largest elements of the keys of every page, [B, H_kv, P, D] each, kept beside the slab and
    brought up to date. Pages are counted from each row's first position; a row's last one may have fewer positions,
    and pages behind it mean nothing."""
    new = slab.length - slab.noted
    if not slab.notes or new > page:
        keys = from_start(slab.keys_from(0), slab.starts)
        missing = -keys.shape[2] % page
        keys = torch.cat([keys, keys[:, :, -1:].expand(-1, -1, missing, -1)], 2) if missing else keys
        slab.notes = [Growing(one) for one in keys.unflatten(2, (-1, page)).aminmax(dim=3)]
    elif new:
        for i, key in enumerate(slab.keys_from(slab.noted).split(1, 2), slab.noted):
            _add(slab, key, (i - slab.starts).long().clamp(min=0), page)
    slab.noted = slab.length
    return slab.notes[0].view, slab.notes[1].view


def _add(slab: Slab, key: Tensor, place: Tensor, page: int) -> None:
    """A further key [B, H, 1, D], which is number `place` [B, H] of its row."""
    index = (place // page)[..., None, None].expand(key.shape)
    first = (place % page == 0)[..., None, None]  # of its page
    for note, extreme in zip(slab.notes, (torch.minimum, torch.maximum), strict=True):
        if note.length * page <= slab.noted:
            note.append(key)  # for the rows that need it
        before = note.view.gather(2, index)
        note.view.scatter_(2, index, torch.where(first, key, extreme(before, key)))
