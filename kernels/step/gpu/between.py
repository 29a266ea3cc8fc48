"""The operations between the products of a decoding step: Triton kernels on a GPU, plain torch elsewhere.

Everything is computed in float32; the residual stream stays in float32, and other results are rounded once. Where the
products that read a result round it to codes of one step for each token, `add_norm_codes` and `gated_codes` write these
in the same launch: the codes of the result in 16 bits, to the last bit.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from kernels.interpreter import triton_takes
from kernels.step.codes import Codes, Coding, coded
from kernels.step.program import Norm

IMPLS = ("auto", "reference", "triton")
_ACTIVATIONS = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "relu": relu}


def add_norm(
    residual: Tensor, added: Tensor | None, after: Norm | None, norm: Norm | None, y: Tensor, impl: str = "auto"
) -> Tensor:
    """Add a result, normalised by `after` if given, to the residual stream; y = the stream normalised by `norm`.

    Args:
        residual: float32 [batch, n], contiguous; changed in place. added: [batch, n] in 16 bits, or None.
        norm: None leaves y unchanged. y: [batch, n] in 16 bits, contiguous.
        impl: "reference", "triton" or "auto".

    Returns:
        y
    """
    if _by_triton(residual, impl):
        from kernels.step import triton

        triton.add_norm(residual, added, after, norm, y)
        return y
    if added is not None:
        residual.add_(added.float() if after is None else _normed(added.float(), after))
    return y if norm is None else y.copy_(_normed(residual, norm))


def add_norm_codes(
    residual: Tensor,
    added: Tensor | None,
    after: Norm | None,
    norm: Norm,
    dtype: torch.dtype,
    coding: Coding,
    impl: str = "auto",
) -> Codes:
    """The codes of the result of `add_norm` in a 16-bit dtype; the residual stream changes as there."""
    if _by_triton(residual, impl):
        from kernels.step import triton

        codes = Codes.empty(*residual.shape, coding, residual, dtype)
        triton.add_norm(residual, added, after, norm, codes, coding)
        return codes
    y = residual.new_empty(residual.shape, dtype=dtype)
    return coded(add_norm(residual, added, after, norm, y, "reference"), coding)


def turn_and_store(
    qkv: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    length: Tensor,
    norms: tuple[Norm | None, Norm | None],
    keys: Tensor,
    values: Tensor,
    impl: str = "auto",
    ends: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their position, after norms of the heads if given; write keys and values.

    Args:
        qkv: queries [batch, heads * channels], keys and values [batch, kv heads * channels], rows at any distance.
        tables: cos and sin, float32 [positions, channels], whose two halves are equal.
        length: int32 [batch, kv heads], tokens of the text, the new one included, whose place is the last.
        norms: for the heads of the queries and of the keys; both or neither.
        keys, values: the cache [batch, kv heads, positions, channels], contiguous; changed in place.
        impl: "reference", "triton" or "auto".
        ends: int32 [batch, kv heads], contiguous: positions of the cache in use, the new one included; None: `length`.

    Returns:
        the queries [batch, heads, channels]
    """
    if _by_triton(keys, impl):
        from kernels.step import triton

        return triton.turn_and_store(keys, values, qkv, tables, length, norms, ends)
    (batch, kv_heads, _, channels), device = keys.shape, keys.device
    q, k, v = (x.unflatten(1, (-1, channels)) for x in qkv)
    at = length[:, 0].long() - 1
    c, s = (table[at][:, None] for table in tables)

    def turned(x: Tensor, norm: Norm | None) -> Tensor:
        wide = x.float() if norm is None else _normed(x.float(), norm)
        first, second = wide.chunk(2, -1)
        return (wide * c + torch.cat([-second, first], -1) * s).to(x.dtype)

    slots = (length if ends is None else ends).long() - 1
    where = torch.arange(batch, device=device)[:, None], torch.arange(kv_heads, device=device), slots
    keys[where], values[where] = turned(k, norms[1]), v
    return turned(q, norms[0])


def gated(gate: Tensor, up: Tensor, activation: str, impl: str = "auto") -> Tensor:
    """activation(gate) * up, [batch, inner], from rows at any distance; activation: "silu", "gelu_tanh" or "relu"."""
    if _by_triton(gate, impl):
        from kernels.step import triton

        y = gate.new_empty(gate.shape)
        triton.gated(gate, up, activation, y)
        return y
    return (_ACTIVATIONS[activation](gate.float()) * up.float()).to(gate.dtype)


def gated_codes(gate: Tensor, up: Tensor, activation: str, coding: Coding, impl: str = "auto") -> Codes:
    """The codes of the result of `gated`, of at most MOST_GATED columns."""
    if _by_triton(gate, impl):
        from kernels.step import triton

        codes = Codes.empty(*gate.shape, coding, gate, gate.dtype)
        triton.gated(gate, up, activation, codes, coding)
        return codes
    return coded(gated(gate, up, activation, "reference"), coding)


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def _by_triton(x: Tensor, impl: str) -> bool:
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    takes = triton_takes(x.device)
    if impl == "triton" and not takes:
        raise ValueError(f"`impl` (='triton') needs triton on CUDA (on a CPU: TRITON_INTERPRET=1), not {x.device}")
    return takes and (impl == "triton" or x.is_cuda)
