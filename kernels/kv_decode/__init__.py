"""`kv_decode`: attention of one decoding step over a cache of 16, 8 (integers or e4m3), 4 or 2 bits. See README.md."""

import torch
from torch import Tensor

from kernels import native
from kernels.capability import described, too_old
from kernels.interpreter import triton_takes
from kernels.kv_decode.layout import (
    GROUPS,
    KV,
    VALUE_BITS,
    dequantize_kv,
    gathered,
    merge_parts,
    quantize_kv,
    quantize_kv_float8,
)
from kernels.kv_decode.pages import Listed, list_of, note_key, page_list, page_scores
from kernels.registry import ran

__all__ = [
    "GROUPS", "KV", "VALUE_BITS", "Listed", "dequantize_kv", "kv_decode", "list_of", "merge_parts", "note_key",
    "page_list", "page_scores", "quantize_kv", "quantize_kv_float8",
]  # fmt: skip

MAX_TOKENS = 8  # query tokens of one step
MAX_D = 256  # channels that the Triton kernels take
_FLOATS, _INTEGERS = (torch.float32, torch.float16, torch.bfloat16), (torch.int32, torch.int64)


def kv_decode(
    q: Tensor,
    cache: KV,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    indices: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_mass: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale q Kᵀ) V for the last tokens of every sequence, each kv head with its own range of positions.

    Row (b, h) of the cache is used from position starts[b, h] to starts[b, h] + lengths[b, h]; nothing outside is read.
    Left-packed caches leave `starts` out; right-packed ones pass positions - lengths. Positions count over the cache's
    main part and then its tail. The keys and values of this step's tokens are in the cache already: token t sees its
    range without the last T_q - 1 - t positions.

    Args:
        q: [B, H_q, T_q, D], float32, float16 or bfloat16; any strides, D contiguous; T_q from 1 to 8; query head i uses
            kv head i // (H_q / H_kv).
        cache: `KV`; where it is not quantised, and in its tail, in q's dtype. Values may have another number of
            channels than keys, D_v.
        lengths: [B, H_kv], int32 or int64: positions in use; 0 gives zeros.
        starts: the same, or None for zeros.
        indices: [B, H_kv, n], int32 or int64, positions that are read (sparse reading): ranges, and the step's own
            tokens, then refer to entries of this list, where entry j means position indices[b, h, j]. Entries in use
            must be positions of the cache, without repetition; on a GPU this is not checked.
        scale: factor of the scores; None: D^-1/2.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2.
        return_mass: also return the attention mass of each position, which eviction policies use as a score.
        return_lse: also return the log-sum-exp of the scores, with which `merge_parts` combines parts of a cache.
        impl: "reference" (float32, any device), "cpu" (C++ kernels, or plain torch where they cannot be built; reads
            the ranges only), "triton" (a GPU; D up to 256) or "auto". Only the reference reads a cache whose keys have
            a scale per token, or whose values have another number of channels than its keys; only the reference and
            the C++ kernel read one of 2 bits, or whose values have another number of bits than its keys.

    Returns:
        y [B, H_q, T_q, D_v] in q's dtype; with `return_mass` then mass [B, H_kv, positions, or n], float32:
        probabilities summed over the query heads of a kv head and over T_q, 0 outside the range; with `return_lse`
        then lse [B, H_q, T_q], float32: ln Σ exp(score), -inf where no position is seen.

    Raises:
        ValueError: arguments that do not match, or an implementation that does not exist or does not support them.
    """
    if softcap is not None or not _fits(q, cache, lengths, starts, indices):
        _check(q, cache, lengths, starts, indices, softcap)
    impl = _implementation(q, cache, impl)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    places = (lengths, starts, indices)
    arguments = (*cache[:6], *places, cache.bits, cache.group, scale, float(softcap or 0), return_mass, return_lse)
    if impl == "cpu" and not cache.float8 and native.why_not() is None:
        isa = native.kv_decode_isa(q.dtype)
        ran("kv_decode", f"cpu {isa}")
        y, mass, lse = torch.ops.workbench.kv_decode_native(q, *arguments, isa)
    else:
        ran("kv_decode", impl)
        y, mass, lse = _op(q, *arguments, impl)
    more = (*([mass] if return_mass else []), *([lse] if return_lse else []))
    return (y, *more) if more else y


@torch.library.custom_op("workbench::kv_decode", mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params_k: Tensor | None,
    params_v: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None,
    indices: Tensor | None,
    bits: int,
    group: int,
    scale: float,
    softcap: float,
    return_mass: bool,
    return_lse: bool,
    use: str,
) -> tuple[Tensor, Tensor, Tensor]:
    cache = KV(k, v, params_k, params_v, tail_k, tail_v, bits, group)
    if use == "triton":
        from kernels.kv_decode import triton as path

        if indices is not None and bits != 16:  # only 16-bit rows are read in place
            cache, indices = gathered(cache, indices, q.dtype), None
        y, mass, lse = path.kv_decode(q, cache, lengths, starts, indices, scale, softcap, return_mass, return_lse)
    else:
        cache = cache if indices is None else gathered(cache, indices, torch.float32 if use == "reference" else q.dtype)
        if use == "cpu":
            from kernels.kv_decode import cpu as path

            y, mass, lse = path.kv_decode(q, cache, lengths, starts, scale, softcap, return_mass, return_lse)
        else:
            from kernels.kv_decode import reference as path

            y, mass, lse = path.kv_decode(q, cache, lengths, starts, scale, softcap, return_mass)
    nothing = q.new_empty(0, dtype=torch.float32)
    return y, mass if return_mass else nothing, lse if return_lse else nothing.clone()


@_op.register_fake
def _(q, k, v, params_k, params_v, tail_k, tail_v, lengths, starts, indices, bits, group, scale, softcap, return_mass,
      return_lse, use):  # fmt: skip
    held = k.shape[2] + (0 if tail_k is None else tail_k.shape[2])
    mass = (k.shape[0], k.shape[1], held if indices is None else indices.shape[2]) if return_mass else (0,)
    lse = q.shape[:3] if return_lse else (0,)
    y = q.new_empty(*q.shape[:3], _value_channels(KV(k, v, bits=bits)))
    return y, *(q.new_empty(shape, dtype=torch.float32) for shape in (mass, lse))


def _implementation(q: Tensor, cache: KV, impl: str) -> str:
    """The implementation that runs: "reference", "cpu" or "triton".

    Raises:
        ValueError: `impl` does not exist or does not support these arguments.
    """
    if only := _only_reference(cache, q.shape[-1], impl in ("auto", "cpu") and in_cpp(q)):
        if impl not in ("auto", "reference"):
            what, other = only
            raise ValueError(f"`impl` (={impl!r}) has no kernel for {what}; 'reference' works, or {other}")
        return "reference"
    fits = q.shape[-1] <= MAX_D
    able = not (cache.float8 and too_old(q.device, float8=True))
    if impl == "auto":
        chosen = "triton" if q.device.type == "cuda" and triton_takes(q.device) and fits and able else None
        return chosen or ("cpu" if q.device.type == "cpu" else "reference")
    if impl not in ("reference", "cpu", "triton"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference', 'cpu' or 'triton'")
    if impl == "cpu" and q.device.type != "cpu":
        raise ValueError(f"`impl` (='cpu') needs tensors on a CPU, not on {q.device}")
    if impl == "triton" and not (fits and triton_takes(q.device)):
        raise ValueError(
            f"`impl` (='triton') needs a GPU with triton (on a CPU: TRITON_INTERPRET=1) and at most {MAX_D} channels; "
            f"`q` is {tuple(q.shape)} on {described(q.device)}"
        )
    if impl == "triton" and not able:
        raise ValueError(
            f"`impl` (='triton') reads float8 on a GPU that has it, not on {described(q.device, float8=True)}; "
            "'reference' works, or a cache of integers in 8 bits"
        )
    return impl


def _value_channels(cache: KV) -> int:
    return cache.v.shape[3]


def in_cpp(q: Tensor) -> bool:
    """Would the C++ kernel be used for these queries?"""
    return q.device.type == "cpu" and native.why_not() is None


def _only_reference(cache: KV, D: int, cpp: bool) -> tuple[str, str] | None:
    """(property of a cache that no kernel supports, supported alternative), or None. cpp: may the C++ kernel run?"""
    if cache.by_token:
        return "scales per token", "scales per channel"
    if cache.value_bits != cache.bits and not cpp:
        return f"values of {cache.value_bits} bits beside keys of {cache.bits}", "as many of both"
    if cache.bits == 2 and not cpp:
        return "2 bits", "4 bits"
    if _value_channels(cache) != D:
        return f"values of {_value_channels(cache)} channels beside keys of {D}", "as many of both"
    return None


def _fits(q: Tensor, cache: KV, lengths: Tensor, starts: Tensor | None, indices: Tensor | None) -> bool:
    """Are these arguments valid? A check of a few microseconds, for 16-bit caches; `_check` names the error."""
    if cache.bits != 16 or cache[2:6] != (None, None, None, None) or q.dim() != 4 or q.stride(3) != 1:
        return False
    k, v, dtype, device = cache.k, cache.v, q.dtype, q.device
    (B, H_q, T_q, D), shape = q.shape, k.shape
    if dtype not in _FLOATS or k.dtype != dtype or v.dtype != dtype or k.device != device or v.device != device:
        return False
    if len(shape) != 4 or shape != v.shape or shape[0] != B or shape[3] != D or k.stride(3) != 1 or v.stride(3) != 1:
        return False
    H_kv = shape[1]
    if H_kv == 0 or H_q % H_kv or not 1 <= T_q <= MAX_TOKENS:
        return False
    for t in (lengths, starts):
        if t is not None and (t.dtype not in _INTEGERS or t.device != device or t.shape != (B, H_kv)):
            return False
    if indices is not None and (indices.dtype not in _INTEGERS or indices.device != device or indices.dim() != 3):
        return False
    return indices is None or indices.shape[:2] == shape[:2]


def _check(
    q: Tensor, cache: KV, lengths: Tensor, starts: Tensor | None, indices: Tensor | None, softcap: float | None
) -> None:
    if q.dim() != 4 or q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or q.stride(-1) != 1:
        raise ValueError(
            f"`q` {q.dtype} {tuple(q.shape)} must be [B, H_q, T_q, D] in float32, float16 or bfloat16, D contiguous"
        )
    B, H_q, T_q, D = q.shape
    if not 1 <= T_q <= MAX_TOKENS:
        raise ValueError(
            f"`q` {tuple(q.shape)} must have 1 to {MAX_TOKENS} tokens; longer prompts are not a decode step"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"`softcap` (={softcap}) must be positive, or None for no cap")
    if cache.bits not in (16, 8, 4, 2):
        raise ValueError(f"`cache.bits` (={cache.bits}) must be 16 (not quantised), 8, 4 or 2")
    H_kv, S = cache.k.shape[1:3]
    D_v = _value_channels(cache) if cache.v.dim() > 3 else D
    if H_kv == 0 or H_q % H_kv:
        raise ValueError(f"`q`'s heads (={H_q}) must be a multiple of the cache's (={H_kv})")
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if cache.bits == 16:
        wanted["k"], wanted["v"] = ((B, H_kv, S, D), q.dtype), ((B, H_kv, S, D_v), q.dtype)
        if cache.tail_k is not None or cache.params_k is not None:
            raise ValueError("`cache.bits` (=16) goes without `params_k` and `tail_k`: append to k and v themselves")
    else:
        if cache.group not in GROUPS or S % cache.group or D * cache.bits % 8:
            raise ValueError(
                f"`cache.group` (={cache.group}) must be one of {', '.join(map(str, GROUPS))} and divide S (={S}); "
                f"{cache.bits} bits need a D (={D}) that {8 // cache.bits} divides"
            )
        groups, halves = S // cache.group, 8 // cache.bits
        wanted["k"] = ((B, H_kv, S, D // halves), torch.uint8)
        if cache.value_bits not in VALUE_BITS:
            raise ValueError(
                f"`cache.v` {tuple(cache.v.shape)} has codes of {cache.value_bits} bits, not of one of {VALUE_BITS}"
            )
        wanted["v"] = ((B, H_kv, groups, D_v, cache.group * cache.value_bits // 8), torch.uint8)
        wanted["params_k"] = ((B, H_kv, S, 2) if cache.by_token else (B, H_kv, groups, D, 2), torch.bfloat16)
        wanted["params_v"] = ((B, H_kv, S, 2), torch.bfloat16)
        if cache.float8:
            wanted |= dict.fromkeys(("params_k", "params_v"), ((B, H_kv, groups), torch.float32))
            if cache.bits != 8:
                raise ValueError(f"`cache.bits` (={cache.bits}) must be 8 of a cache whose `params_k` are scales alone")
        if cache.tail_k is not None:
            wanted |= {f"tail_{x}": ((B, H_kv, cache.tail_k.shape[2], n), q.dtype) for x, n in (("k", D), ("v", D_v))}
    for name, (shape, dtype) in wanted.items():
        t = getattr(cache, name)
        if t is None or t.shape != shape or t.dtype != dtype or t.device != q.device:
            found = "None" if t is None else f"{t.dtype} {tuple(t.shape)} on {t.device}"
            raise ValueError(f"`cache.{name}` must be {dtype} {shape} on {q.device}, not {found}")
        inner = 1 if cache.bits == 16 or (cache.float8 and name != "v") else 2
        dense = {"params_k": inner, "params_v": inner, "v": inner}.get(name, 1)
        if t.numel() and not _inner_contiguous(t, dense):
            raise ValueError(
                f"`cache.{name}` {tuple(t.shape)} with strides {t.stride()} must be contiguous in its last {dense}"
            )
    for name, t in (("lengths", lengths), ("starts", starts)):
        if t is not None and (
            t.shape != (B, H_kv) or t.dtype not in (torch.int32, torch.int64) or t.device != q.device
        ):
            raise ValueError(
                f"`{name}` must be int32 or int64 {(B, H_kv)} on {q.device}, not {t.dtype} {tuple(t.shape)} on "
                f"{t.device}"
            )
    if indices is not None and (
        indices.dim() != 3
        or indices.shape[:2] != (B, H_kv)
        or indices.dtype not in (torch.int32, torch.int64)
        or indices.device != q.device
    ):
        raise ValueError(
            f"`indices` must be int32 or int64 {(B, H_kv, 'n')} on {q.device}, not {indices.dtype} "
            f"{tuple(indices.shape)} on {indices.device}"
        )


def _inner_contiguous(t: Tensor, dims: int) -> bool:
    """Are the last `dims` dimensions of t contiguous?"""
    expected = 1
    for size, stride in zip(reversed(t.shape[-dims:]), reversed(t.stride()[-dims:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@native.shapes_of("kv_decode_native")
def _(q, k, v, params_k, params_v, tail_k, tail_v, lengths, starts, indices, bits, group, scale, softcap,
      return_mass, return_lse, isa):  # fmt: skip
    held = k.shape[2] + (0 if tail_k is None else tail_k.shape[2])
    mass = (k.shape[0], k.shape[1], held if indices is None else indices.shape[2]) if return_mass else (0,)
    lse = q.shape[:3] if return_lse else (0,)
    return q.new_empty(q.shape), *(q.new_empty(shape, dtype=torch.float32) for shape in (mass, lse))
