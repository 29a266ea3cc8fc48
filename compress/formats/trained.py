"""Differentiable views of weights that are stored as codes with a scale per group of columns."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.formats.base import Format, Trainable

EDGE = 0.499  # of a step: the largest distance of a weight from its code at which it is rounded to it
OUTSIDE = 0.51  # distance from which another code is the nearest; steps of tables are not all equal


class TrainedGroups(Trainable):
    """w = values(round(code + offset)) * scale * exp(factor), group by group along `in`.

    Args:
        codes: [out, in] integers in the order of their values.
        scale: [out, groups] float32, as stored; must not be 0.
        levels: number of codes.
        values: gives for codes [out, groups, group_size] (float32) their values before scaling, and the distance to
            their neighbours, both broadcastable to the codes, in float32.
        round_scale: rounds scales [out, groups], in float32, as for storage; None: scales do not change.
        store: makes the format from codes [out, in] (uint8) and scales [out, groups] (as `round_scale` gives them).
        original: see `Format.trainable`.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        *,
        levels: int,
        values: Callable[[Tensor], tuple[Tensor, Tensor | float]],
        round_scale: Callable[[Tensor], Tensor] | None,
        store: Callable[[Tensor, Tensor], Format],
        original: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.levels, self.values, self.round_scale, self.store = levels, values, round_scale, store
        self.grouped = (*scale.shape, codes.shape[1] // scale.shape[1])  # (out, groups, group_size)
        self.register_buffer("codes", codes.float().view(self.grouped))
        self.register_buffer("scale", scale)
        self.offsets = nn.Parameter(self._sides(original).view(codes.shape))
        self.factors = nn.Parameter(torch.zeros_like(scale)) if round_scale else None
        self.register_buffer("unit", None)

    def fix_codes(self) -> None:
        """From now on only the scales are trained: the values before scaling are computed once."""
        with torch.no_grad():
            self.unit = self.values(_round(self.codes + self.offsets.view(self.grouped), self.levels))[0]
        self.offsets.requires_grad_(False)

    def scales(self) -> Tensor:
        """[out, groups] float32, as they would be stored; gradients pass straight through their rounding."""
        if self.factors is None:
            return self.scale
        scale = self.scale * self.factors.exp()
        return scale + (self.round_scale(scale.detach()) - scale).detach()

    def weight(self) -> Tensor:
        scale = self.scales()
        if self.unit is not None:
            return (self.unit * scale[..., None]).view(self.offsets.shape)
        latent = self.codes + self.offsets.view(self.grouped)
        return _Rounded.apply(latent, scale[..., None], self.levels, self.values).view(self.offsets.shape)

    def stored(self) -> Format:
        with torch.no_grad():
            codes = _round(self.codes + self.offsets.view(self.grouped), self.levels).to(torch.uint8)
            scale = self.scale if self.factors is None else self.round_scale(self.scale * self.factors.exp())
            return self.store(codes.view(self.offsets.shape), scale)

    def _sides(self, original: Tensor | None) -> Tensor:
        """The place of each weight in its step; 0, the middle, if the original is not known, or if it lies outside of
        the step: error feedback chose such a code to make up for others, and at the edge the first updates would undo
        it."""
        if original is None:
            return torch.zeros_like(self.codes)
        values, step = self.values(self.codes)
        wanted = original.float().view(self.grouped) / self.scale[..., None]
        place = (wanted - values) / step
        return place.masked_fill_(place.abs() > OUTSIDE, 0.0).clamp_(-EDGE, EDGE)


class TrainedFloats(Trainable):
    """w = W + offset * rms(W), rounded to the dtype in which it is stored; the weights that are not kept stay 0.

    Args:
        W: a tensor as stored, which is a weight [out, in] or a vector.
        keep: bool, of W's shape, the weights that pruning left, all others of which are 0; None: all.
        store: makes the format from a weight [out, in] of W's dtype.
    """

    def __init__(self, W: Tensor, keep: Tensor | None = None, store: Callable[[Tensor], Format] | None = None) -> None:
        super().__init__()
        self.store = store
        self.register_buffer("start", W.float())
        self.register_buffer("keep", None)
        self.dtype, self.size = W.dtype, self.start.square().mean().sqrt().clamp_min(1e-8).item()
        self.offsets, self.factors = nn.Parameter(torch.zeros_like(self.start)), None
        if keep is not None:
            self.keep_zeros(keep)

    def keep_zeros(self, kept: Tensor) -> None:
        self.keep = kept if self.keep is None else self.keep & kept
        super().keep_zeros(kept)

    def collect(self, gradient: Tensor) -> None:
        by_offsets = gradient.to(torch.float32, copy=True).mul_(self.size)  # in place: several times as fast
        if self.keep is not None:
            by_offsets.mul_(self.keep)
        self.offsets.grad = by_offsets if self.offsets.grad is None else self.offsets.grad.add_(by_offsets)

    @property
    def learns(self) -> int:
        return self.offsets.numel() if self.keep is None else int(self.keep.count_nonzero())

    def weight(self) -> Tensor:
        return _as_stored(torch.add(self.start, self.offsets, alpha=self.size), self.dtype)

    def stored(self) -> Format:
        with torch.no_grad():
            return self.store(self.weight().to(self.dtype))


class TrainedFactors(Trainable):
    """W = L R, where both factors are rounded to the dtype in which they are stored, and move in units of their root
    mean squares: `offsets` is the move of L, `factors` that of R.

    Args:
        left, right: [out, rank] and [rank, in], as stored.
        store: makes the format from both factors.
    """

    def __init__(self, left: Tensor, right: Tensor, store: Callable[[Tensor, Tensor], Format]) -> None:
        super().__init__()
        self.dtype, self.store = left.dtype, store
        self.register_buffer("left", left.float())
        self.register_buffer("right", right.float())
        self.offsets, self.factors = (nn.Parameter(torch.zeros_like(x)) for x in (self.left, self.right))

    def _moved(self) -> tuple[Tensor, Tensor]:
        both = ((self.left, self.offsets), (self.right, self.factors))
        left, right = (x + x.square().mean().sqrt() * move for x, move in both)
        return _as_stored(left, self.dtype), _as_stored(right, self.dtype)

    def weight(self) -> Tensor:
        left, right = self._moved()
        return left @ right

    def stored(self) -> Format:
        with torch.no_grad():
            left, right = self._moved()
            return self.store(left.to(self.dtype), right.to(self.dtype))


class _Rounded(torch.autograd.Function):
    """values(round(latent)) * scale; the gradient of the rounding is the slope of the line through its steps."""

    @staticmethod
    def forward(ctx, latent: Tensor, scale: Tensor, levels: int, values: Callable) -> Tensor:
        unit, step = values(_round(latent, levels))
        ctx.save_for_backward(unit, scale, step if isinstance(step, Tensor) else None)
        return unit * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (unit, scale, step), (of_latent, of_scale, *_) = ctx.saved_tensors, ctx.needs_input_grad
        by_scale = (grad * unit).sum(-1, keepdim=True) if of_scale else None
        by_latent = grad * (scale if step is None else scale * step) if of_latent else None
        return by_latent, by_scale, None, None


def _as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in float32 as it is in another dtype; gradients pass straight through."""
    if dtype == torch.float32 or not x.requires_grad:
        return x.to(dtype).to(x.dtype)
    return x + (x.detach().to(dtype) - x).detach()


def _round(latent: Tensor, levels: int) -> Tensor:
    return latent.round().clamp_(0, levels - 1)
