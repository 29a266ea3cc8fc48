"""The pages of a cache that a query reads, as a list for `kv_decode`: those with the largest bounds of attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import native
from kernels.registry import ran


class Listed(NamedTuple):
    """Positions that one token reads: the first `lengths` [B, H_kv] int64 entries of `indices` [B, H_kv, n] int64, in
    ascending order; the entries after them are undefined."""

    indices: Tensor
    lengths: Tensor


def page_list(
    q: Tensor,
    bounds: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    page: int,
    pages: Tensor,
    most: int,
    behind: int = 0,
    scale: float | None = None,
    impl: str = "auto",
) -> Listed:
    """The positions of each row's last page, and of the other pages that rank highest by bounds of their keys (Quest,
    Tang et al., 2024, arXiv:2406.10774, algorithm 1).

    No key of a page has a score above Σ_d max(q_d low_d, q_d high_d). Pages are ranked by the softmax of this bound
    over the row's pages, averaged over the query heads that share a kv head; of equal pages the first ones are read.

    Args:
        q: [B, H_q, 1, D], float32, float16 or bfloat16.
        bounds: [B, H_kv, P, 2 D] in q's dtype: for every page the smallest element of each channel, then the largest.
            Pages are counted from each row's first position.
        starts, lengths: [B, H_kv] int32 or int64: rows are positions starts to starts + lengths, in P pages at most.
        page: number of positions in a page; a row's last page may have fewer.
        pages: [B, H_kv] int64: number of pages to read, the last page included; that page is always read.
        most: the largest number that `pages` may hold, which determines the size of the list.
        behind: number of positions after a row's last one that are in the list too, such as the next token's.
        scale: factor of the scores; None: D^-1/2.
        impl: "reference" (plain torch, any device), "cpu" (C++) or "auto".

    Raises:
        ValueError: arguments that do not match, or an implementation that does not support them.
    """
    B, H_q, T, D = q.shape
    if T != 1 or bounds.dim() != 4 or bounds.shape[0] != B or bounds.shape[3] != 2 * D or H_q % bounds.shape[1]:
        raise ValueError(
            f"`q` {tuple(q.shape)} must be [B, H_q, 1, D], and `bounds` {tuple(bounds.shape)} [B, H_kv, P, 2 D]"
        )
    if bounds.dtype != q.dtype:
        raise ValueError(f"`bounds` ({bounds.dtype}) must be in the dtype of `q` ({q.dtype})")
    takes = q.device.type == "cpu" and q.dtype != torch.float64 and native.why_not() is None
    impl = _chosen(impl, takes)
    scale, most = D**-0.5 if scale is None else scale, min(most, bounds.shape[2])
    if impl == "cpu":
        isa = native.kv_decode_isa(q.dtype)
        ran("page_list", f"cpu {isa}")
        arguments = (q.contiguous(), bounds, starts, lengths, pages, page, most, behind, scale, isa)
        return Listed(*torch.ops.workbench.kv_page_list(*arguments))
    ran("page_list", impl)
    scores = page_scores(q, bounds, lengths, page=page, scale=scale)[:, :, 0]
    return list_of(scores, starts, lengths, page=page, pages=pages, most=most, behind=behind, impl="reference")


def page_scores(q: Tensor, bounds: Tensor, lengths: Tensor, *, page: int, scale: float) -> Tensor:
    """The scores by which `page_list` ranks pages, for any number of tokens: [B, H_kv, T, P] float32; 0 for pages after
    a row's last one. The arguments are those of `page_list`."""
    rows = q.unflatten(1, (bounds.shape[1], -1)).float()  # [B, H_kv, G, T, D]
    rows = torch.cat([rows.clamp(max=0), rows.clamp(min=0)], -1)
    logits = (rows.flatten(2, 3) @ bounds.float().mT).unflatten(2, rows.shape[2:4]) * scale
    at = torch.arange(0, bounds.shape[2] * page, page, device=q.device)
    outside = at >= lengths[..., None]  # [B, H_kv, P]
    weights = logits.masked_fill(outside[:, :, None, None], torch.finfo(torch.float32).min).softmax(-1).mean(2)
    return weights.masked_fill(outside[:, :, None], 0)


def note_key(bounds: Tensor, key: Tensor, place: Tensor, page: int) -> None:
    """Update the bounds of a page with one more key of every row, in place.

    Args:
        bounds: [B, H_kv, P, 2 D], as in `page_list`. key: [B, H_kv, 1, D]. place: [B, H_kv] int64, the key's index in
            its row, from 0: the first key of a page replaces the page's bounds.
    """
    if key.device.type == "cpu" and key.dtype != torch.float64 and native.why_not() is None:
        ran("note_key", "cpu")
        torch.ops.workbench.kv_note_key(bounds, key, place, page)
        return
    ran("note_key", "reference")
    index = (place // page)[..., None, None].expand(*key.shape[:3], 2 * key.shape[3])
    low, high = bounds.gather(2, index).chunk(2, -1)
    joined = torch.cat([torch.minimum(key, low), torch.maximum(key, high)], -1)
    first = (place % page == 0)[..., None, None]
    bounds.scatter_(2, index, torch.where(first, torch.cat([key, key], -1), joined))


def list_of(
    scores: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    page: int,
    pages: Tensor,
    most: int,
    behind: int = 0,
    impl: str = "auto",
) -> Listed:
    """The list of `page_list`, for pages with given scores [B, H_kv, P] float32.

    Args:
        impl: as in `page_list`. Of equal scores, C++ takes the first pages, the reference any of them.
    """
    most = min(most, scores.shape[-1])
    takes = scores.device.type == "cpu" and scores.dtype == torch.float32 and native.why_not() is None
    if _chosen(impl, takes) == "cpu":
        ran("list_of", "cpu")
        return Listed(*torch.ops.workbench.kv_score_list(scores, starts, lengths, pages, page, most, behind))
    ran("list_of", "reference")
    n, place = lengths.long(), torch.arange(scores.shape[-1], device=scores.device)
    last = (n - 1).div(page, rounding_mode="floor")  # -1 for rows without a position
    scores = scores.masked_fill(place == last[..., None], torch.inf).masked_fill(place > last[..., None], -torch.inf)
    best = scores.topk(most, -1).indices
    used = torch.minimum(pages.clamp(1, best.shape[-1]), last + 1)
    rank = torch.arange(best.shape[-1], device=scores.device)
    chosen = best.masked_fill(rank >= used[..., None], scores.shape[-1]).sort(-1).values  # the last page is last
    offset = torch.arange(page, device=place.device)
    at = (starts.long()[..., None, None] + chosen[..., None] * page + offset).flatten(2)
    at = torch.nn.functional.pad(at, (0, behind))
    count, slot = used * page - (last + 1) * page + n, torch.arange(at.shape[-1], device=scores.device)
    after = slot - count[..., None]
    end = (starts + n)[..., None]
    return Listed(torch.where(after < 0, at, (end + after.clamp(max=behind - 1)).clamp(min=0)), count + behind)


def _chosen(impl: str, takes: bool) -> str:
    """ "cpu" or "reference"; takes: do the C++ kernels support the arguments?"""
    if impl == "auto":
        return "cpu" if takes else "reference"
    if impl not in ("reference", "cpu") or (impl == "cpu" and not takes):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto' or 'reference', or 'cpu' where the C++ kernels run")
    return impl


@native.shapes_of("kv_page_list")
def _(q, bounds, starts, lengths, pages, page, most, behind, scale, isa):
    indices = q.new_empty(*bounds.shape[:2], most * page + behind, dtype=torch.int64)
    return indices, indices.new_empty(indices.shape[:2])


@native.shapes_of("kv_score_list")
def _(scores, starts, lengths, pages, page, most, behind):
    indices = scores.new_empty(*scores.shape[:2], most * page + behind, dtype=torch.int64)
    return indices, indices.new_empty(indices.shape[:2])
