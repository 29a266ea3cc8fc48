"""Number grids: the values that a weight may take, and the choice of its scale and zero point.

`scale_dtype` of these functions names a floating dtype, or is a function that rounds scales to what can be stored.

A weight w of a group is stored as an integer code q in [0, 2^bits): w = scale * (q - zero). Symmetric grids fix
zero = 2^(bits-1), so that the values run from -2^(bits-1) to 2^(bits-1)-1 steps; the scale may be negative, so that the
longer side is on the side of the largest weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.formats.scales import ScaleRule

Stored = str | Callable[[Tensor], Tensor]  # the rounding of scales: a floating dtype's name, or a function
SEARCH_STEPS = 16  # clipping ratios tried by `search`, down to half the range
AT_ONCE = 1 << 18  # weights times candidates that are compared at once: the size of the caches


def quantize(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes (in w's dtype) nearest to w; scale and zero broadcast against w."""
    return (w / scale).round_().add_(zero).clamp_(0, (1 << bits) - 1)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weights of the codes."""
    return (codes - zero) * scale


def absmax(w: Tensor, bits: int, symmetric: bool, scale_dtype: Stored = "bfloat16") -> tuple[Tensor, Tensor]:
    """Scale and zero point that just cover each group.

    Args:
        w: [..., group_size].

    Returns:
        scale, zero: [...] float32, the scale rounded to `scale_dtype`.
    """
    return _cover(w.amin(-1), w.amax(-1), bits, symmetric, scale_dtype)


SCALES = ("absmax", "clip", "search")  # ways to choose scales, see `choose`


def choose(
    w: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: Stored = "bfloat16",
    *,
    how: str = "search",
    importance: Tensor | None = None,
    norm: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group: "absmax" covers it, "clip" searches clipping ratios (`search` with scales
    above 0 only), "search" signs too."""
    if how == "absmax":
        return absmax(w, bits, symmetric, scale_dtype)
    return search(w, bits, symmetric, scale_dtype, importance=importance, norm=norm, signs=how == "search")


def search(
    w: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: Stored = "bfloat16",
    *,
    importance: Tensor | None = None,
    norm: float = 2.0,
    signs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Scale and zero point that minimise sum(importance * |w - ŵ|^norm) over clipping ratios and, symmetric, over
    signs.

    Args:
        w: [..., group_size].
        importance: weights of the columns, broadcastable to w; None for equal ones.
        norm: exponent p; 2 is the squared error, larger exponents keep the group's extremes more exact.
        signs: False leaves out negative scales, which put the longer side of a symmetric grid above 0.

    Returns:
        scale, zero: [...] float32; never worse than `absmax` by this measure.
    """
    scales, zeros = candidates(w, bits, symmetric, scale_dtype)  # [candidates, ...] each
    at_once = max(1, AT_ONCE // w.numel())
    chunks = zip(scales.split(at_once), zeros.split(at_once), strict=True)
    centre = 1 << (bits - 1) if symmetric else None
    loss = torch.cat([_loss(w, scale, zero, bits, importance, norm, centre) for scale, zero in chunks])
    if not signs:
        loss[scales < 0] = torch.inf
    best = loss.argmin(0, keepdim=True)
    return scales.gather(0, best)[0], zeros.gather(0, best)[0]


def candidates(w: Tensor, bits: int, symmetric: bool, scale_dtype: Stored = "bfloat16") -> tuple[Tensor, Tensor]:
    """The candidates of `search`: the grid of `absmax` first, then clipped grids and, symmetric, both signs.

    Args:
        w: [..., group_size].

    Returns:
        scales, zeros: [candidates, ...] float32.
    """
    low, high = w.amin(-1), w.amax(-1)
    cover = _cover(low, high, bits, symmetric, scale_dtype)
    ratios = [1 - 0.5 * step / SEARCH_STEPS for step in range(SEARCH_STEPS)]
    if symmetric:
        # The long side of the grid, -2^(bits-1), on the extreme weight, and on its opposite.
        steps = torch.tensor([sign * ratio for ratio in ratios for sign in (-1, 1)], device=w.device) / (
            1 << (bits - 1)
        )
        extreme = torch.where(high > -low, high, low)
        scales = _round_scale(steps.view(-1, *[1] * extreme.dim()) * extreme, scale_dtype)
        return torch.cat([cover[0][None], scales]), cover[1].expand(len(steps) + 1, *extreme.shape)
    tries = [cover, *(_cover(low * ratio, high * ratio, bits, symmetric, scale_dtype) for ratio in ratios)]
    scales, zeros = zip(*tries, strict=True)
    return torch.stack(scales), torch.stack(zeros)


def check_group_size(group_size: int, name: str, shape: tuple[int, int]) -> None:
    """Raise ValueError unless `group_size` divides the rows of this weight; the message names close sizes that do."""
    columns = shape[1]
    if group_size == -1 or (group_size > 0 and columns % group_size == 0):
        return
    divisors = [d for d in range(8, columns + 1) if columns % d == 0]
    near = sorted(sorted(divisors, key=lambda d: abs(d - group_size))[:3])
    raise ValueError(
        f"`group_size` (={group_size}) must divide in_features (={columns}) of {name}; "
        f"divisors near it: {', '.join(map(str, near)) or columns}; -1 takes whole rows"
    )


def _cover(low: Tensor, high: Tensor, bits: int, symmetric: bool, scale_dtype: Stored) -> tuple[Tensor, Tensor]:
    levels = (1 << bits) - 1
    if symmetric:
        scale = _round_scale(2 * torch.maximum(high, -low) / levels, scale_dtype)
        return scale, torch.full_like(scale, 1 << (bits - 1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _round_scale((high - low) / levels, scale_dtype)
    return scale, (-low / scale).round().clamp(0, levels)


def _round_scale(scale: Tensor, dtype: Stored) -> Tensor:
    """The rounded scale for storage; 1 for a group of zeros, and for a scale too small for the format."""
    return dtype(scale) if callable(dtype) else ScaleRule(dtype).rounded(scale)


def _loss(
    w: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: int,
    importance: Tensor | None,
    norm: float,
    centre: int | None = None,
) -> Tensor:
    """sum(importance * |w - ŵ|^norm) per group; rounds as `quantize` does, with fewer passes over the weights.

    centre: the common zero point of all groups; bounds that are numbers are several times as fast as tensors.
    """
    scale, zero = scale[..., None], zero[..., None] if centre is None else centre
    error = (w / scale).round_().clamp_(-zero, (1 << bits) - 1 - zero).mul_(scale).sub_(w)
    error = error.square_() if norm == 2 else error.abs_().pow_(norm)
    return (error if importance is None else error.mul_(importance)).sum(-1)
