"""A linear module whose 16-bit weight is laid out once for oneDNN: the fair 16-bit baseline on a CPU."""

import copy

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kernels.linear import better_in_float32
from kernels.linear.onednn import emulates, in_float32, lay_out, lays_out, product
from kernels.registry import ran


class PrepackedLinear(nn.Module):
    """Replaces nn.Linear for bfloat16 CPU tensors; cannot be moved, saved or compiled."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tokens: int = 1) -> None:
        """weight: [out, in]."""
        super().__init__()
        self.packed = lay_out(weight, tokens)
        self.plain = weight.detach().contiguous() if emulates(weight.dtype) else None  # for prompts
        self.bias, self._weight = bias, None

    @property
    def weight(self) -> Tensor:
        """[out, in], for code that reads a linear's weight (Mamba's); computed at the first call, and then kept."""
        if self._weight is None:
            self._weight = self.packed.to_dense() if self.plain is None else self.plain
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        if self.plain is not None and better_in_float32(x, self.plain, self.bias):
            ran("linear", "cpu float32")
            return in_float32(x.contiguous(), self.plain, self.bias)
        ran("linear", "cpu prepacked")
        return product(x, self.packed, self.bias)


def prepack(model: nn.Module, tokens: int = 1) -> nn.Module:
    """A copy of a bfloat16 CPU model with every linear prepacked for products with about this many tokens.

    If oneDNN has no such products on this processor, the linears are unchanged.
    """
    model = copy.deepcopy(model)
    if not lays_out(next(model.parameters()).dtype):
        return model
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, Conv1D):
            weight = module.weight.t() if type(module) is Conv1D else module.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PrepackedLinear(weight, module.bias, tokens))
    return model
