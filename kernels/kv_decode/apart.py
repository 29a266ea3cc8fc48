"""The attention of one step over caches of different lengths: `kv_decode_apart`, each for some of a layer's heads, and
`kv_append_decode`, each with a new token, which is appended first."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.kv_decode import KV, _only_reference, in_cpp, kv_decode
from kernels.registry import ran


def kv_decode_apart(
    q: Tensor,
    caches: Sequence[KV],
    starts: Sequence[Tensor],
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The results of `kv_decode` for each cache and its heads, side by side.

    If heads keep very different numbers of positions, one tensor per head takes less memory than a tensor as long as
    the longest. On a CPU one call of the C++ kernel reads all caches: their spans are distributed together over the
    threads (the ragged batches of Lean Attention, Sanovar et al., 2024, arXiv:2405.10480), so that neither threads nor
    calls are wasted on short caches. On other devices, and if caches differ in bits or groups, they are read one after
    the other.

    Args:
        q: [B, H_q, T_q, D], as in `kv_decode`. Its heads are in the order of the caches, with the same number for each
            kv head.
        caches: each has its own kv heads, right-packed.
        starts: for each cache [B, H], int32 or int64: first positions of its rows, which end at its last position.
        scale, softcap: as in `kv_decode`.

    Returns:
        [B, H_q, T_q, D] in q's dtype.

    Raises:
        ValueError: arguments that do not match.
    """
    heads = [cache.k.shape[1] for cache in caches]
    if not heads or q.dim() != 4 or q.shape[1] % sum(heads):
        raise ValueError(f"`q` {tuple(q.shape)} must have a multiple of the caches' heads (={heads})")
    if not _alike(q, caches):
        queries = q.split([q.shape[1] // sum(heads) * count for count in heads], 1)
        how = {"scale": scale, "softcap": softcap}
        parts = zip(queries, caches, starts, strict=True)
        ys = [kv_decode(x, cache, cache.positions - start, starts=start, **how) for x, cache, start in parts]
        return torch.cat(ys, 1)
    columns: list[list[Tensor]] = [[cache.k for cache in caches], [cache.v for cache in caches], [], [], [], []]
    if caches[0].bits != 16:
        columns[2:4] = [cache.params_k for cache in caches], [cache.params_v for cache in caches]
        if any(cache.tail_k is not None for cache in caches):
            columns[4:] = (
                [_nothing(q, cache) if cache.tail_k is None else getattr(cache, name) for cache in caches]
                for name in ("tail_k", "tail_v")
            )
    isa, (bits, group) = native.kv_decode_isa(q.dtype), caches[0][6:8]
    ran("kv_decode", f"cpu {isa}")
    more = (bits, group, float(scale), float(softcap or 0), isa)
    return torch.ops.workbench.kv_decode_apart(q, *columns, list(starts), *more)


def _alike(q: Tensor, caches: Sequence[KV]) -> bool:
    """Can one call of the C++ kernel read all of these caches?"""
    if not in_cpp(q) or any(cache.bits == 8 and cache.float8 for cache in caches):
        return False
    first, D = caches[0], q.shape[-1]
    for cache in caches:
        if cache[6:8] != first[6:8] or cache.value_bits != first.value_bits:  # bits and group
            return False
        if _only_reference(cache, D, True) is not None:
            return False
    return True


def _nothing(q: Tensor, cache: KV) -> Tensor:
    return q.new_empty(*cache.k.shape[:2], 0, q.shape[-1])


@native.shapes_of("kv_decode_apart")
def _(q, k, v, params_k, params_v, tail_k, tail_v, starts, bits, group, scale, softcap, isa):
    return q.new_empty(q.shape)


def kv_append_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: Sequence[list[Tensor]],
    counts: list[int],
    *,
    bits: int,
    group: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Append a new token to every one of some caches, and attend to all positions of each, in one call of the C++
    kernel.

    Args:
        q: [H, n, D], the n query heads of every kv head. k, v: [H, 1, D], the new tokens in the form in which they are
            kept. The kv heads are those of the caches, in order.
        columns: keys, values, starts; and for codes also scales of keys and of values, and tails of both. One tensor
            for each cache: [1, heads, positions, D], and as in `kernels.step.cache_view.CacheView`, with room for one
            more position, which is written.
        counts: of each cache, the number of coded positions and of those after them, without the new one.
        bits, group: of the codes; 16 bits if there are none.
        scale, softcap: as in `kv_decode`.

    Returns:
        [H, n, D] in q's dtype.

    Raises:
        ValueError: tensors that do not match, or without room.
    """
    keys, values, starts, *coded = columns
    coded = coded or [[], [], [], []]
    isa, D = native.kv_decode_isa(q.dtype), q.shape[-1]
    ran("kv_decode", f"cpu {isa}")
    new = (x.reshape(-1, D).contiguous() for x in (k, v))
    more = (starts, counts, bits, group, float(scale), float(softcap or 0), isa)
    return torch.ops.workbench.kv_append_decode(q.reshape(1, -1, 1, D), *new, keys, values, *coded, *more).view(q.shape)


@native.shapes_of("kv_append_decode")
def _(q, new_k, new_v, k, v, params_k, params_v, tail_k, tail_v, starts, counts, bits, group, scale, softcap, isa):
    return q.new_empty(q.shape)
