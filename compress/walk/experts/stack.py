"""The weights of a layer's experts as one tensor, so that one launch multiplies all experts' tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.linear import CompressedLinear
from kernels.int_matmul import Packed
from kernels.int_matmul.experts import split, stacked, takes


class ExpertStack:
    """The stored weights of a list of linears, one after the other; the linears keep views of it.

    It is made at the first product, and again when a linear was replaced, moved or laid out anew. A copy of a model
    starts without it.
    """

    def __init__(self) -> None:
        self._views: list[Packed] = []
        self._packed: Packed | None = None

    def __deepcopy__(self, memo: dict) -> "ExpertStack":
        return ExpertStack()

    def forget(self) -> None:
        """Drop the references to the memory, which then belongs to the linears alone."""
        self.__init__()

    @torch.compiler.disable
    def packed(self, linears: Sequence[nn.Module], x: Tensor) -> Packed | None:
        """[experts out, in], or None if these linears have to multiply x one by one: because no kernel takes their
        weights, they do more than multiply, or hooks watch the input of each."""
        if not all(map(_plain, linears)):
            return None
        parts = [linear.parts[0] for linear in linears]
        weights = [part.integers for part in parts]
        if self._packed is not None and all(map(_same, weights, self._views)):
            return self._packed
        self.forget()
        first = weights[0]
        if any(w.layout != "rows" or w[4:] != first[4:] or (w.zero is None) != (first.zero is None) for w in weights):
            return None
        if len({(w.scale.dtype, w.codes.device) for w in weights}) > 1 or not takes(first, x.dtype, x.device):
            return None
        self._packed = stacked(weights)
        self._views = split(self._packed, len(parts))
        for part, view in zip(parts, self._views, strict=True):
            part.keep_in(view)
        return self._packed


def pays(x: Tensor) -> bool:
    """Whether one launch for all experts is faster than one for each, on the device of x."""
    return x.is_cuda


def _same(a: Packed, b: Packed) -> bool:
    """Whether both hold the same tensor objects."""
    return a.codes is b.codes and a.scale is b.scale and a.zero is b.zero


def _plain(linear: nn.Module) -> bool:
    """Whether this linear is a product with stored integers and nothing else."""
    if type(linear) is not CompressedLinear or len(linear.parts) > 1 or not linear.parts[0].keeps:
        return False
    watched = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    return linear.transform is None and linear.bias is None and linear._dense is None and not watched
