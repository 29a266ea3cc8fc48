"""Shared code of the formats of sparse weights: zeros are not stored, but are put back in memory if the device has no
sparse product."""

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup
from compress.formats.trained import TrainedGroups


class _Unstored:
    """A weight laid out for computing, beside the one that is stored: no part of the state."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        pass

    def _load_from_state_dict(self, state_dict, prefix, *args):
        pass


class _UnstoredDense(_Unstored, Dense):
    pass


class _UnstoredInts(_Unstored, IntGroup):
    pass


class Sparse(Format):
    """A weight of which only what is kept is stored: floats, or integer codes on a grid that holds 0.

    Multiplied with its zeros in place (`plain`, counted as resident and not as stored), by the fastest product of the
    dense
    format: on a CPU, and for one token on a GPU, a sparse product of the same weight is not faster.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_module("plain", None)
        self._laid_out_for: tuple[torch.dtype, torch.device] | None = None
        self.register_load_state_dict_post_hook(_lay_out_again)

    def expanded(self) -> Dense | IntGroup:
        """The same weight with its zeros, made of what is stored."""
        raise NotImplementedError

    def keep(self) -> Tensor:
        """[out, in] bool: what is stored."""
        raise NotImplementedError

    @classmethod
    def from_plain(cls, plain: Dense | IntGroup, keep: Tensor) -> "Sparse":
        """Store what `keep` [out, in] bool says of a weight that is 0 elsewhere."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        return self.expanded().dequantize()

    def trainable(self, original: Tensor | None = None) -> TrainedGroups | None:
        """Codes and scales of what is kept are trained, where it is stored in codes; zeros stay."""
        view, keep = self.expanded().trainable(original), self.keep()
        if view is not None:
            store = view.store
            view.store = lambda codes, scale: self.from_plain(store(codes, scale), keep)
            view.offsets.register_hook(lambda grad: grad * keep)
        return view

    def matmul(self, x: Tensor) -> Tensor:
        return self.plain.matmul(x)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        self._laid_out_for = dtype, device
        full = self.expanded()
        self.plain = _UnstoredInts(full.packed) if isinstance(full, IntGroup) else _UnstoredDense(full.weight)
        self.plain.for_compute(dtype, device)


def _lay_out_again(weight: Sparse, _) -> None:
    """What is multiplied follows what was loaded."""
    if weight._laid_out_for is not None:
        weight.for_compute(*weight._laid_out_for)
