"""The operations between the products of many tokens on a CPU: sums and norms, rotation and storage of keys, gates.

Inputs and outputs are in bfloat16 or float16, the residual stream in float32; everything is computed in float32 and
rounded once (`native/between.cpp`).
"""

import torch
from torch import Tensor

from kernels.step.program import ACTIVATIONS, Norm


def add_norm(
    residual: Tensor, added: Tensor | None, after: Norm | None, norm: Norm | None, y: Tensor, isa: str = "auto"
) -> Tensor:
    """Add a result, normalised by `after` if given, to the residual stream; y = the stream normalised by `norm`.

    Args:
        residual: float32 [..., n]; changed in place. added: the same shape in 16 bits, or None.
        norm: None leaves y unchanged. y: the same shape in 16 bits.

    Returns:
        y

    Raises:
        RuntimeError: tensors that do not match, or an instruction set that this machine does not have.
    """
    outer, eps = (None, 0.0) if after is None else (after.weight, after.eps)
    inner, inner_eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    torch.ops.workbench.add_norm(residual, added, outer, eps, inner, inner_eps, y, isa)
    return y


def gated(gate: Tensor, up: Tensor, activation: str, isa: str = "auto") -> Tensor:
    """activation(gate) * up, both of one shape in 16 bits; overwrites `gate`."""
    torch.ops.workbench.gate(gate, up, ACTIVATIONS.index(activation), gate, isa)
    return gate


def turn_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    norms: tuple[Norm | None, Norm | None],
    keys: Tensor,
    values: Tensor,
    slot: int,
    isa: str = "auto",
    *,
    neighbours: bool = False,
) -> None:
    """Rotate queries in place by their positions; write the rotated keys and the values into the cache.

    Args:
        q, k, v: [batch, tokens, heads * channels] in 16 bits.
        tables: cos and sin, float32 [positions, rotated channels]. positions: int64 [batch, tokens].
        norms: for the heads of q and of k, before the rotation: of each head, or of all together, which then change
            q and k in place.
        keys, values: the cache [batch, kv heads, places, channels]; slot: the place of the first token.
        neighbours: as in `kernels.step.program.Attention`; k is then changed, too.

    Raises:
        RuntimeError: tensors that do not match, or a cache without room.
    """
    channels = keys.shape[-1]
    if neighbours or any(norm is not None and norm.weight.numel() > channels for norm in norms):
        for x, norm in zip((q, k), norms, strict=True):
            if norm is not None:
                heads = (x if norm.weight.numel() > channels else x.unflatten(-1, (-1, channels))).float()
                x.copy_((heads * (heads.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight).view_as(x))
        norms = None, None
    if neighbours:
        places = slice(slot, slot + q.shape[1])
        for x in (q, k):
            _turn_neighbours(x.unflatten(-1, (-1, channels)), tables, positions)
        for cached, new in ((keys, k), (values, v)):
            cached[:, :, places] = new.unflatten(-1, (-1, channels)).transpose(1, 2)
        return
    query, key = norms
    eps = next((norm.eps for norm in norms if norm is not None), 0.0)
    weights = (None if norm is None else norm.weight for norm in (query, key))
    torch.ops.workbench.turn_store(q, k, v, *tables, positions, *weights, eps, keys, values, slot, isa)


def _turn_neighbours(x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor) -> None:
    """Rotate neighbouring channels of heads x [batch, tokens, heads, channels] together, in place."""
    n = tables[0].shape[1]
    cos, sin = (table[positions, None, : n // 2] for table in tables)
    first, second = x[..., 0:n:2].float(), x[..., 1:n:2].float()
    x[..., 0:n:2], x[..., 1:n:2] = first * cos - second * sin, second * cos + first * sin
