"""A table for each row of a weight: weighted k-means in one dimension, for all rows at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ELEMENTS = 1 << 21  # elements that are clustered at once
STEPS = 100  # largest number of Lloyd's iterations
PIECES = 8  # pieces for each entry, from which the first runs are composed
PAIRS = 1 << 18  # pairs of edges of pieces that are compared at once: the size of caches


@dataclass(frozen=True)
class Sorted:
    """Rows in ascending order, with running sums, so that the cost of any run of neighbours is found in one step.

    x: [rows, n] float64, ascending. order: [rows, n], original places. weight, moment: [rows, n + 1], sums of the
    weights and of weight * x of the elements before each place.
    """

    x: Tensor
    order: Tensor
    weight: Tensor
    moment: Tensor

    @classmethod
    def of(cls, W: Tensor, importance: Tensor) -> "Sorted":
        x, order = W.double().sort(1)
        w = importance.double().gather(1, order)
        w = w + 1e-9 * w.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny  # none is without weight
        sums = [torch.nn.functional.pad(one.cumsum(1), (1, 0)) for one in (w, w * x)]
        return cls(x, order, *sums)

    def means(self, edges: Tensor) -> Tensor:
        """Weighted mean of each run [rows, k], between neighbouring edges [rows, k + 1]; for an empty run the element
        at its edge."""
        weight, moment = self.weight.gather(1, edges).diff(dim=1), self.moment.gather(1, edges).diff(dim=1)
        at = self.x.gather(1, edges[:, :-1].clamp_max(self.x.shape[1] - 1))
        return torch.where(edges.diff(dim=1) > 0, moment / weight.clamp_min(1e-300), at)

    def codes(self, edges: Tensor) -> Tensor:
        """The number of the run in which each element lies, uint8 [rows, n], in the order of the weight."""
        places = torch.arange(self.x.shape[1], device=self.x.device).expand_as(self.order).contiguous()
        run = torch.searchsorted(edges[:, 1:-1].contiguous(), places, right=True)
        return torch.zeros_like(self.order, dtype=torch.uint8).scatter_(1, self.order, run.to(torch.uint8))


def kmeans_rows(W: Tensor, importance: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Centres of each row that minimise Σ importance * (w - centre)², very nearly.

    Clusters of one dimension are runs of the sorted row, so that a step of Lloyd's iteration takes a search for the
    middles between centres and differences of running sums: k log n operations instead of k n. It starts from the best
    runs of short pieces, eight for each entry, which dynamic programming finds.

    Args:
        W, importance: [rows, n].
        entries: a power of two.

    Returns:
        codes uint8 [rows, n], ascending with the weight, and the centres [rows, entries] in float32.
    """
    found = [_kmeans(*part, entries) for part in _parts(W, importance)]
    return torch.cat([codes for codes, _ in found]), torch.cat([table for _, table in found])


def nested_rows(W: Tensor, importance: Tensor, seed_bits: int, bits: int) -> tuple[Tensor, list[Tensor]]:
    """`kmeans_rows` for 2^seed_bits centres, whose clusters are then repeatedly cut in two.

    The upper bits of a code are the code of the level before. Each cut is the best one of its cluster.

    Returns:
        codes of `bits` bits, uint8 [rows, n], and the centres [rows, 2^b] of each level b = seed_bits, ..., bits.
    """
    found = []
    for part in _parts(W, importance):
        rows = Sorted.of(*part)
        edges = [_best_edges(rows, 1 << seed_bits)]
        for _ in range(seed_bits, bits):
            edges.append(cut(rows, edges[-1]))
        found.append((rows.codes(edges[-1]), [rows.means(level).float() for level in edges]))
    tables = [torch.cat(level) for level in zip(*(tables for _, tables in found), strict=True)]
    return torch.cat([codes for codes, _ in found]), tables


def cut(rows: Sorted, edges: Tensor) -> Tensor:
    """Edges [rows, 2k + 1] after each run of `edges` [rows, k + 1] is cut at the place of the largest gain."""
    count, n = rows.x.shape
    runs = edges.shape[1] - 1
    places = torch.arange(1, n + 1, device=edges.device).expand(count, n).contiguous()  # a cut lies before this element
    run = torch.searchsorted(edges[:, 1:-1].contiguous(), places - 1, right=True)
    low, high = edges.gather(1, run), edges.gather(1, run + 1)
    gain = torch.zeros_like(rows.x)
    for start, end in ((low, places), (places, high)):
        weight = rows.weight.gather(1, end) - rows.weight.gather(1, start)
        moment = rows.moment.gather(1, end) - rows.moment.gather(1, start)
        gain += torch.where(end > start, moment.square() / weight.clamp_min(1e-300), 0.0)
    best = gain.new_full((count, runs), -torch.inf).scatter_reduce_(1, run, gain, "amax")
    is_best = gain == best.gather(1, run)
    at = edges[:, 1:].clone()  # an empty run is cut at its edge
    at.scatter_reduce_(1, run, torch.where(is_best, places, n), "amin")
    return torch.cat([torch.stack([edges[:, :-1], at], 2).flatten(1), edges[:, -1:]], 1)


def _kmeans(W: Tensor, importance: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    rows = Sorted.of(W, importance)
    edges = _best_edges(rows, entries)
    return rows.codes(edges), rows.means(edges).float()


def _best_edges(rows: Sorted, entries: int) -> Tensor:
    found = [_of_pieces(*part, entries) for part in _pieces(rows, PIECES * entries)]
    return _lloyd(rows, torch.cat(found))


def _pieces(rows: Sorted, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows, each cut into `count` short runs: their edges [some rows, count + 1], and the sums before each edge.

    The cuts lie by equal Σ importance^⅓ gap^⅔, the density of centres that is best for many of them (Panter and Dite,
    1951), so that pieces are short where the best runs are.
    """
    gaps = torch.nn.functional.pad(rows.x.diff(dim=1), (1, 0))
    density = (rows.weight.diff(dim=1).clamp_min(0).pow(1 / 3) * gaps.pow(2 / 3)).cumsum(1)
    steps = torch.arange(1, count, device=gaps.device) / count * density[:, -1:]
    edges = torch.searchsorted(density, steps)
    edges = torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=rows.x.shape[1])
    at_once = max(1, PAIRS // (count + 1) ** 2)
    sums = (edges, rows.weight.gather(1, edges), rows.moment.gather(1, edges))
    yield from zip(*(one.split(at_once) for one in sums), strict=True)


def _of_pieces(edges: Tensor, weight: Tensor, moment: Tensor, entries: int) -> Tensor:
    """Edges [rows, entries + 1] of the runs with the largest gain among all runs of whole pieces."""
    mass, lever = (one[:, :, None] - one[:, None, :] for one in (weight, moment))  # [rows, end, start]
    gain = torch.where(mass > 0, lever.square() / mass.clamp_min(1e-300), 0.0).float()
    gain.masked_fill_(torch.ones_like(gain[0], dtype=torch.bool).triu_(1), -torch.inf)
    best, starts = gain[:, :, 0], []  # best gain of the first runs, up to each edge
    for _ in range(1, entries):
        best, start = (gain + best[:, None, :]).max(2)
        starts.append(start)
    at = torch.full_like(edges[:, :1], edges.shape[1] - 1)
    chosen = [at]
    for start in reversed(starts):
        at = start.gather(1, at)
        chosen.append(at)
    return edges.gather(1, torch.cat([torch.zeros_like(at), *reversed(chosen)], 1))


def _lloyd(rows: Sorted, edges: Tensor) -> Tensor:
    for _ in range(STEPS):
        centres = rows.means(edges)
        middles = (centres[:, 1:] + centres[:, :-1]) / 2
        moved = torch.cat([edges[:, :1], torch.searchsorted(rows.x, middles), edges[:, -1:]], 1)
        if torch.equal(moved, edges):
            break
        edges = moved
    return edges


def _parts(W: Tensor, importance: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = max(1, ELEMENTS // W.shape[1])
    return list(zip(W.split(rows), importance.split(rows), strict=True))
