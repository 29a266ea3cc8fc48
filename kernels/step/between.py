"""The operations between the products of many tokens on a CPU: sums and norms, rotary turns into the cache, gates.

Inputs and outputs are in bfloat16 or float16, the residual stream in float32; all is computed in float32 and rounded
once (`native/between.cpp`).
"""

import torch
from torch import Tensor

from kernels.step.program import ACTIVATIONS, Norm


def add_norm(
    residual: Tensor, added: Tensor | None, after: Norm | None, norm: Norm | None, y: Tensor, isa: str = "auto"
) -> Tensor:
    """Add a result to the residual stream, through the norm `after` if there is one; y = the stream through `norm`.

    Args:
        residual: float32 [..., n]; changed. added: the same shape in 16 bits, or None.
        norm: None leaves y as it is. y: the same shape in 16 bits.

    Returns:
        y

    Raises:
        RuntimeError: tensors that do not fit together, or an instruction set that this machine does not have.
    """
    outer, eps = (None, 0.0) if after is None else (after.weight, after.eps)
    inner, inner_eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    torch.ops.workbench.add_norm(residual, added, outer, eps, inner, inner_eps, y, isa)
    return y


def gated(gate: Tensor, up: Tensor, activation: str, isa: str = "auto") -> Tensor:
    """activation(gate) * up, both of one shape in 16 bits; takes the place of `gate`."""
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
) -> None:
    """Turn queries in place by their positions; put keys, turned, and values into the cache.

    Args:
        q, k, v: [batch, tokens, heads * channels] in 16 bits.
        tables: cos and sin, float32 [positions, turned channels]. positions: int64 [batch, tokens].
        norms: of the heads of q and of k before they are turned.
        keys, values: the cache [batch, kv heads, places, channels]; slot: the place of the first token.

    Raises:
        RuntimeError: tensors that do not fit together, or a cache without room.
    """
    query, key = norms
    eps = next((norm.eps for norm in norms if norm is not None), 0.0)
    weights = (None if norm is None else norm.weight for norm in (query, key))
    torch.ops.workbench.turn_store(q, k, v, *tables, positions, *weights, eps, keys, values, slot, isa)
