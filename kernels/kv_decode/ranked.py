"""`kv_decode_ranked`: attention of one step over the pages of a cache that rank highest by bounds of their keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import native
from kernels.kv_decode import KV, in_cpp, kv_decode
from kernels.kv_decode.pages import Listed, page_list
from kernels.registry import ran


class Ranked(NamedTuple):
    """The arguments of `page_list`, which documents their shapes, for one token whose pages are not yet chosen."""

    q: Tensor
    bounds: Tensor
    starts: Tensor
    lengths: Tensor
    page: int
    pages: Tensor
    most: int
    behind: int = 0
    scale: float | None = None

    def listed(self, impl: str = "auto") -> Listed:
        """The positions of the chosen pages."""
        return page_list(**self._asdict(), impl=impl)


def kv_decode_ranked(
    q: Tensor,
    cache: KV,
    ranked: Ranked,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """The result of `kv_decode` for the positions that `page_list` chooses.

    For caches in 16 bits (or float32) the C++ kernel does both in one call: some threads read the pages already chosen
    for some heads while the pages of other heads are being chosen, and no tensor for `most` pages is allocated.

    Args:
        q: [B, H_q, 1, D], the queries for the keys of the cache; `ranked` holds the queries that rank the pages.
        cache, scale, softcap: as in `kv_decode`.
        impl: "reference", "cpu" or "auto", for both parts. "cpu" reads caches that are not quantised in one call.

    Returns:
        [B, H_q, 1, D_v] in q's dtype.

    Raises:
        ValueError: arguments that do not match, or an implementation that does not support them.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if impl in ("auto", "cpu") and in_cpp(q) and _fits(q, cache, ranked):
        of, D = ranked.q, ranked.q.shape[-1]
        isa = native.kv_decode_isa(q.dtype)
        ran("kv_decode_ranked", f"cpu {isa}")
        most = min(ranked.most, ranked.bounds.shape[2])
        by = D**-0.5 if ranked.scale is None else ranked.scale
        how = (*ranked[2:4], ranked.pages, ranked.page, most, ranked.behind, by, scale, float(softcap or 0), isa)
        return torch.ops.workbench.kv_decode_ranked(q, cache.k, cache.v, of, ranked.bounds, *how)
    ran("kv_decode_ranked", "page_list, kv_decode")
    listed = ranked.listed(impl)
    return kv_decode(q, cache, listed.lengths, indices=listed.indices, scale=scale, softcap=softcap, impl=impl)


def _fits(q: Tensor, cache: KV, ranked: Ranked) -> bool:
    """Does the single call support these arguments? If not, the two ops run, which report invalid arguments."""
    k, v, of, bounds = cache.k, cache.v, ranked.q, ranked.bounds
    if cache.bits != 16 or cache.tail_k is not None or cache.params_k is not None or q.dim() != 4 or k.dim() != 4:
        return False
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or of.dim() != 4 or bounds.dim() != 4:
        return False
    (B, H_q, T_q, D), shape = q.shape, k.shape
    dense = k.dtype == v.dtype == bounds.dtype == of.dtype == q.dtype and k.stride(3) == v.stride(3) == 1
    heads = shape == v.shape and shape[0] == B and shape[3] == D and shape[1] > 0 and H_q % shape[1] == 0
    same = of.shape[:3] == q.shape[:3] and bounds.shape[:2] == shape[:2] and bounds.shape[3] == 2 * of.shape[3]
    rows = all(t.shape == shape[:2] for t in (ranked.starts, ranked.lengths, ranked.pages))
    return T_q == 1 and dense and heads and same and rows and q.stride(3) == bounds.stride(3) == 1


@native.shapes_of("kv_decode_ranked")
def _(q, k, v, ranking, bounds, starts, lengths, pages, page, most, behind, ranking_scale, scale, softcap, isa):
    return q.new_empty(q.shape)
