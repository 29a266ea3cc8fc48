"""`prompt_attention` and its implementations. See README.md."""

import torch
from torch import Tensor

from kernels import native
from kernels.prompt_attention import reference
from kernels.prompt_attention.rows import in_rows
from kernels.registry import ran

IMPLS = ("auto", "reference", "rows", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, window: int = 0, impl: str = "auto"
) -> Tensor:
    """Attention of every token of a prompt to itself and to earlier tokens.

    Args:
        query: [batch, heads, tokens, channels]; float32, bfloat16 or float16; any strides.
        key: [batch, kv heads, places, channels], same dtype. The tokens are at the last of the places; those before
            them are of tokens that were read earlier. Heads are a multiple of kv heads; heads that share a kv head
            are consecutive.
        value: [batch, kv heads, places, value channels], same dtype.
        scale: of the scores; None: 1 / sqrt(channels).
        window: number of places that a token sees, its own included; 0: all up to its own.
        impl: "reference" (float32, all scores at once), "rows" (torch's products for 128 queries at a time, see
            `in_rows`), "cpu" (C++, 16 bits on a CPU with AVX2 or NEON) or "auto": "cpu" if it supports the tensors,
            else "rows".

    Returns:
        [batch, tokens, heads, value channels] in the dtype, contiguous, as a projection reads it.

    Raises:
        ValueError: shapes or dtypes that do not match, or an implementation that does not exist or support them.
    """
    _check(query, key, value, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    use = _implementation(query, scale, impl)
    if use == "cpu":
        ran("prompt_attention", "cpu native")
        return torch.ops.workbench.prompt_attention_native(query, key, value, scale, window)
    ran("prompt_attention", use)
    return _op(query, key, value, scale, window, use)


def _check(query: Tensor, key: Tensor, value: Tensor, window: int) -> None:
    shapes = [tuple(t.shape) for t in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"`query`, `key` and `value` {shapes} must have four dimensions")
    (batch, heads, tokens, channels), k, v = shapes
    if k[::3] != (batch, channels) or k[2] < tokens or v[:3] != k[:3] or not k[1] or heads % k[1]:
        raise ValueError(
            f"`key` {k} and `value` {v} must be [{batch}, kv heads, {tokens} or more, {channels}] and alike, with kv "
            f"heads that divide the {heads} heads of `query`"
        )
    if window < 0:
        raise ValueError(f"`window` (={window}) must be a number of places, or 0 for all")
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        raise ValueError(
            f"`query` ({query.dtype}), `key` ({key.dtype}) and `value` ({value.dtype}) must be all float32, bfloat16 "
            "or float16"
        )


def _implementation(query: Tensor, scale: float, impl: str) -> str:
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.device.type == "cpu" and scale > 0
    cpu = fits and impl in ("auto", "cpu") and native.prompt_attention_runs()
    if impl == "cpu" and not cpu:
        raise ValueError(
            "`impl` (='cpu') needs bfloat16 or float16 on a CPU with AVX2 or NEON, the C++ kernels and `scale` > 0, "
            f"not {query.dtype} on {query.device} and {scale}; 'rows' works"
        )
    return impl if impl != "auto" else "cpu" if cpu else "rows"


@torch.library.custom_op("workbench::prompt_attention", mutates_args=())
def _op(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, use: str) -> Tensor:
    return (in_rows if use == "rows" else reference.prompt_attention)(query, key, value, scale, window)


@_op.register_fake
def _(query, key, value, scale, window, use):
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(batch, tokens, heads, value.shape[-1])


@native.shapes_of("prompt_attention_native")
def _(q, k, v, scale, window):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
