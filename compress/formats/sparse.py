"""Shared code of the formats of sparse weights: zeros are not stored, but are put back in memory if the device has no
product that is faster without them."""

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup
from compress.formats.trained import TrainedFloats, TrainedGroups
from kernels.sparse_matmul import SparseRows, skips_zeros, sparse_matmul, starts_of

MOST_KEPT = 0.85  # share of the entries up to which zeros are skipped; with more, the mask takes what their bytes save


class _Unstored:
    """A weight in its layout for products, beside the stored weight; it is not part of the state."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        pass

    def _load_from_state_dict(self, state_dict, prefix, *args):
        pass


class _UnstoredDense(_Unstored, Dense):
    pass


class _UnstoredInts(_Unstored, IntGroup):
    pass


class Sparse(Format):
    """A weight of which only the kept entries are stored: floats, or integer codes on a grid that holds 0.

    16-bit floats are multiplied as they are stored, where a CPU has loops for it (`kernels.sparse_matmul`). Else the
    weight is multiplied with its zeros in place (`plain`, counted as resident and not as stored), by the fastest
    product of the dense format. `starts` is not stored: see `SparseRows`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_module("plain", None)
        self.register_buffer("starts", None, persistent=False)
        self._laid_out_for: tuple[torch.dtype, torch.device] | None = None
        self.register_load_state_dict_post_hook(_lay_out_again)

    def expanded(self) -> Dense | IntGroup:
        """The same weight with its zeros, made from the stored entries."""
        raise NotImplementedError

    def keep(self) -> Tensor:
        """[out, in] bool: the stored entries."""
        raise NotImplementedError

    @classmethod
    def from_plain(cls, plain: Dense | IntGroup, keep: Tensor) -> "Sparse":
        """Store the entries in `keep` [out, in] bool of a weight that is 0 elsewhere."""
        raise NotImplementedError

    def floats(self) -> tuple[Tensor, Tensor] | None:
        """A mask of the kept entries, uint8 [out, ceil(in/8)], and these entries in order; None if they are codes."""
        raise NotImplementedError

    @property
    def rows(self) -> SparseRows | None:
        """The weight for the product without zeros; None if that is not used here."""
        return None if self.starts is None else SparseRows(*self.floats(), self.starts)

    def dequantize(self) -> Tensor:
        return self.expanded().dequantize()

    def trainable(self, original: Tensor | None = None) -> TrainedGroups | None:
        """Codes and scales of the kept entries are trained, if they are stored as codes; zeros stay."""
        keep = self.keep()
        view = self.expanded().trainable(None if original is None else original * keep)
        if view is not None:
            store = view.store
            view.store = lambda codes, scale: self.from_plain(store(codes, scale), keep)
            view.keep_zeros(keep)
        return view

    def trainable_floats(self) -> TrainedFloats | None:
        """The kept entries are trained, if they are stored as floats; zeros stay."""
        full, keep = self.expanded(), self.keep()
        if not isinstance(full, Dense):
            return None
        return TrainedFloats(full.weight, keep, lambda W: self.from_plain(Dense(W), keep))

    def matmul(self, x: Tensor) -> Tensor:
        rows = self.rows
        return self.plain.matmul(x) if rows is None else sparse_matmul(x.to(rows.dtype), rows).to(x.dtype)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        self._laid_out_for, self.plain, self.starts = (dtype, device), None, None
        stored = self.floats() if skips_zeros(dtype, device, self.shape[1]) else None
        if stored is not None:
            mask, values = stored
            if values.dtype == dtype and len(values) <= MOST_KEPT * self.shape[0] * self.shape[1]:
                self.starts = starts_of(mask)
                return
        full = self.expanded()
        self.plain = _UnstoredInts(full.packed) if isinstance(full, IntGroup) else _UnstoredDense(full.weight)
        self.plain.for_compute(dtype, device)

    def _apply(self, fn, recurse=True):
        # Its own, so that `kernels.support.deploy.cast` does not restore buffers that `for_compute` has made anew.
        return super()._apply(fn, recurse)


def _lay_out_again(weight: Sparse, _) -> None:
    """Lay the weight for products out again after loading."""
    if weight._laid_out_for is not None:
        weight.for_compute(*weight._laid_out_for)
