"""Differentiable views of weights that are stored as codes with a scale per group of columns."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.formats.base import Format, Trainable

EDGE = 0.499  # of a step: the largest distance of a weight from its code at which it is rounded to it
OUTSIDE = 0.51  # distance from which another code is the nearest; steps of tables are not all equal
NEARER = 0.98  # of the distance to a code: a neighbour within it is clearly nearer, not by the rounding of a scale
CHOSEN = 0.02  # share of codes with a nearer neighbour from which error feedback, or training, has chosen the codes
REACH = 10.0  # steps by which an offset of 1 moves a code in `from_the_middle`


class TrainedGroups(Trainable):
    """w = values(round(code + reach * offset)) * scale * exp(factor), group by group along `in`; `reach` is 1, see
    `from_the_middle`.

    Args:
        codes: [out, in] integers in the order of their values.
        scale: [out, groups] float32, as stored; must not be 0.
        levels: number of codes.
        values: gives for codes [out, groups, group_size] (int32) their values before scaling, float32 in new memory.
        steps: gives for codes the distance of their values to the neighbours, float32 in new memory; None: 1.
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
        values: Callable[[Tensor], Tensor],
        steps: Callable[[Tensor], Tensor] | None,
        round_scale: Callable[[Tensor], Tensor] | None,
        store: Callable[[Tensor, Tensor], Format],
        original: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.levels, self.values, self.steps, self.round_scale, self.store = levels, values, steps, round_scale, store
        self.grouped = (*scale.shape, codes.shape[1] // scale.shape[1])  # (out, groups, group_size)
        self.register_buffer("codes", codes.to(torch.uint8).view(self.grouped))
        self.register_buffer("scale", scale)
        self.reach, self.chosen = 1.0, False
        self.offsets = nn.Parameter(self._sides(original).view(codes.shape))
        self.factors = nn.Parameter(torch.zeros_like(scale)) if round_scale else None
        self.register_buffer("unit", None)
        self.keep: Tensor | None = None

    def fix_codes(self) -> None:
        """From now on only the scales are trained: the values before scaling are computed once."""
        with torch.no_grad():
            self.unit = self.values(self.nearest())
        self.offsets.requires_grad_(False)

    def keep_zeros(self, kept: Tensor) -> None:
        self.keep = kept if self.keep is None else self.keep & kept
        super().keep_zeros(kept)

    def from_the_middle(self) -> None:
        """If error feedback or training has chosen the codes, all of them begin in the middle of their steps, and an
        offset of 1 moves its code by `REACH` steps.

        Such codes make up for each other's errors, which an update undoes that moves some of them because they lay at
        an edge. From the middle a code moves once many updates agree.
        """
        if self.chosen:
            self.reach = REACH
            with torch.no_grad():
                self.offsets.zero_()

    def nearest(self) -> Tensor:
        """The codes [out, groups, group_size] (int32) to which weights are rounded now.

        Raises:
            ValueError: an offset is NaN, so that training has failed.
        """
        moved = torch.add(self.codes, self.offsets.detach().view(self.grouped), alpha=self.reach)
        if moved.sum().isnan():  # as an integer it would be a code far outside of the grid
            raise ValueError("the training of stored codes failed: some of their offsets are NaN")
        return moved.round_().clamp_(0, self.levels - 1).to(torch.int32)

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
        return _Rounded.apply(self.offsets, scale, self)

    def collect(self, gradient: Tensor) -> None:
        gradient = gradient.detach().to(torch.float32).view(self.grouped)
        codes = self.nearest() if self.unit is None else None
        if self.factors is not None:
            by_factors = self.by_scale(gradient, codes).mul_(self.scale * self.factors.detach().exp())
            self.factors.grad = by_factors if self.factors.grad is None else self.factors.grad.add_(by_factors)
        if self.offsets.requires_grad:
            by_offsets = self.by_offsets(gradient, codes, self.scales().detach())
            if self.keep is not None:
                by_offsets.mul_(self.keep)
            self.offsets.grad = by_offsets if self.offsets.grad is None else self.offsets.grad.add_(by_offsets)

    def by_scale(self, gradient: Tensor, codes: Tensor | None) -> Tensor:
        """The gradient of scales [out, groups] from that of the grouped weight."""
        return (self.values(codes).mul_(gradient) if self.unit is None else self.unit * gradient).sum(-1)

    def by_offsets(self, gradient: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """The gradient of offsets [out, in] from that of the grouped weight, by the line through the steps."""
        by_codes = gradient * (self.reach * scale)[..., None]
        return (by_codes if self.steps is None else by_codes.mul_(self.steps(codes))).view(self.offsets.shape)

    def stored(self) -> Format:
        with torch.no_grad():
            codes = self.nearest().to(torch.uint8)
            scale = self.scale if self.factors is None else self.round_scale(self.scale * self.factors.exp())
            return self.store(codes.view(self.offsets.shape), scale)

    def _sides(self, original: Tensor | None) -> Tensor:
        """The place of each weight in its step; 0, the middle, if the original is not known, or if it lies outside of
        the step: error feedback chose such a code to make up for others, and at the edge the first updates would undo
        it."""
        if original is None:
            return torch.zeros(self.grouped, device=self.scale.device)
        codes, wanted = self.codes.to(torch.int32), original.float().view(self.grouped) / self.scale[..., None]
        place = wanted - self.values(codes)
        neighbours = (codes - 1).clamp_min_(0), (codes + 1).clamp_max_(self.levels - 1)
        below, above = (self.values(other).sub_(wanted).abs_() for other in neighbours)
        self.chosen = bool((torch.minimum(below, above) < NEARER * place.abs()).float().mean() > CHOSEN)
        place = place if self.steps is None else place.div_(self.steps(codes))
        return place.masked_fill_(~(place.abs() <= OUTSIDE), 0.0).clamp_(-EDGE, EDGE)  # NaN where a scale is 0


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
    """The weight [out, in] of a view with these offsets [out, in] and scales [out, groups]."""

    @staticmethod
    def forward(ctx, offsets: Tensor, scale: Tensor, view: TrainedGroups) -> Tensor:
        codes = view.nearest()
        ctx.save_for_backward(codes.to(torch.uint8), scale)
        ctx.view = view
        return view.values(codes).mul_(scale[..., None]).view(offsets.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        view, (stored, scale), (of_offsets, of_scale, _) = ctx.view, ctx.saved_tensors, ctx.needs_input_grad
        gradient, codes = gradient.view(view.grouped), stored.to(torch.int32)
        by_scale = view.by_scale(gradient, codes) if of_scale else None
        return view.by_offsets(gradient, codes, scale) if of_offsets else None, by_scale, None


def _as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in float32 as it is in another dtype; gradients pass straight through."""
    if dtype == torch.float32 or not x.requires_grad:
        return x.to(dtype).to(x.dtype)
    return x + (x.detach().to(dtype) - x).detach()
