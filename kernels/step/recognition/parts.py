"""Modules that blocks of many models share: linears, norms, gated MLPs, and how each is recognised."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kernels.step.program import Norm

MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATION = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class NotNative(Exception):
    """The model's pass cannot be run by `kernels.step`; the message says why."""


class Rows(nn.Module):
    """Some of the outputs of a linear that computes several products at once, as Phi-3's for queries, keys and values
    does, as if they came from a linear of their own.

    Args:
        whole: the linear, whose weight is shared. start, stop: the outputs.
    """

    def __init__(self, whole: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop
        self.in_features, self.out_features = whole.in_features, stop - start

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.start : self.stop]


def split(whole: nn.Module, sizes: Sequence[int]) -> list[Rows]:
    """A linear in parts of so many outputs."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Rows(whole, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def together(linears: Sequence[nn.Module]) -> nn.Module | None:
    """The linear of which these are all outputs, in order; None: there is none."""
    first = linears[0]
    return first.whole if isinstance(first, Rows) else None  # parts are made by `split`, and kept together


def linears_of_mlp(mlp: nn.Module) -> dict[str, Any]:
    if hasattr(mlp, "gate_up_proj"):
        gate, up = split(mlp.gate_up_proj, (mlp.gate_up_proj.out_features // 2,) * 2)
    else:
        gate, up = mlp.gate_proj, mlp.up_proj
    function = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    return {"gate": gate, "up": up, "down": mlp.down_proj, "activation": activation_of(function)}


def children_of(module: nn.Module) -> set[str]:
    """The names of a module's parts, without dropout, which does nothing in evaluation."""
    return {n for n, m in module.named_children() if not (isinstance(m, nn.Dropout) and not (m.training and m.p))}


def expect(module: nn.Module, children: set[str], name: str) -> None:
    if different := children_of(module) ^ children:
        raise unlike(name, different)


def unlike(name: str, different: set[str]) -> NotNative:
    return NotNative(f"{name} differs from a Llama's in {', '.join(sorted(different))}")


def norm_of(module: nn.Module) -> Norm:
    """The norm that a module computes: with its weight or 1 + its weight, whichever reproduces the module's output."""
    weight = getattr(module, "weight", None)
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None
    )
    if not isinstance(weight, Tensor) or eps is None or weight.dim() != 1:
        raise NotNative(f"a norm of an unknown kind ({type(module).__name__})")
    x = torch.linspace(-3, 2, len(weight), device=weight.device).sin()[None] + 0.5
    # In float32, and every channel by itself: in 16 bits, beside a weight of 1,648 as in Gemma 3, 1 more is nothing.
    given = copy.deepcopy(module).float()(x)
    for added in (0, 1):
        norm = Norm((weight.float() + added).contiguous(), eps)
        expected = x * (x.square().mean() + eps).rsqrt() * norm.weight
        if torch.allclose(given, expected, rtol=1e-4, atol=1e-6):
            return norm
    raise NotNative(f"a norm of an unknown kind ({type(module).__name__})")


def activation_of(function: Any) -> str:
    for name, ours in ACTIVATION.items():
        if type(function) is type(ACT2FN[name]):
            return ours
    raise NotNative(f"an activation of {type(function).__name__}")
