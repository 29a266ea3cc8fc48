"""SmoothQuant (Xiao et al., 2022, arXiv:2211.10438): move the activations' outliers into the weights before both are
rounded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compress.method import Method, knob
from compress.walk.folds.folding import FoldChoice, FoldingMethod
from compress.walk.folds.links import Link
from compress.walk.statistics import LayerStatistics
from kernels.linear import linear
from kernels.w8a8_matmul import quantize_weight, w8a8_matmul

GRID = tuple(i / 10 for i in range(11))
LARGEST = 1e5  # the largest scale, and the inverse of the smallest


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(FoldingMethod):
    """Moves the outliers of activations into the weights, by scales folded into the norms and linears before them."""

    name: ClassVar[str] = "smoothquant"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "arXiv:2211.10438, equation 4"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("absmax", "absmax_rest", "rows")

    alpha: float | str = knob(
        0.5,
        "how much of the inputs' ranges moves into the weights, 0 to 1; search: for each link, the value with the "
        "least output error in 8 bits",
        describes=True,
    )
    links: str = knob(
        "all",
        "what is scaled: norms, as in the paper (norm), or also v for o and up for down, where exact (all)",
        choices=("all", "norm"),
    )
    target: str = knob(
        "auto",
        "rounding of activations that search and the recorded errors assume: in 8 bits with a step per token (token), "
        "with one static step (tensor), or as in the recipe's activation quantiser (auto; token without one)",
        choices=("auto", "token", "tensor"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha != "search" and not (not isinstance(self.alpha, str) and 0 <= self.alpha <= 1):
            raise ValueError(f"`alpha` (={self.alpha!r}) of {self.name} must lie between 0 and 1, or be 'search'")

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        if self.target != "auto":
            return self
        aims = (getattr(method, "activations", None) for method in after if method.stage == "quantize_activations")
        return replace(self, target=next((aim for aim in aims if aim in ("token", "tensor")), "token"))

    def leaves(self, link: Link) -> str:
        if self.links == "norm" and link.kind != "norm":
            return f"`links` (='norm') leaves out what reads a linear ({link.producer}); 'all' would take it"
        return ""

    def choose(self, link: Link, weights: list[Tensor], statistics: LayerStatistics) -> FoldChoice:
        """Scales of equation 4; errors are measured on a sample of tokens, with scales and a static step from all
        other tokens.

        After smoothing, every channel reaches the limit of the step's range, and new tokens exceed it. A static search
        on the tokens that set the step would therefore choose alphas that are too large.
        """
        W, channels = torch.cat(weights), link.channels.to(weights[0].device)  # [out of all consumers, in]
        absmax, rest, rows = (statistics.values[key] for key in ("absmax", "absmax_rest", "rows"))
        rest = rest if rest.any() else absmax  # few tokens: all are in the sample
        w, y = link.largest(W.abs().amax(0)), linear(rows, W)  # [channels of the producer], [tokens, out]

        def error(s: Tensor) -> float:
            step = (rest / s[channels]).amax() / 127 if self.target == "tensor" else None
            return output_error(W, rows, s[channels], step, y)

        unmoved = torch.ones_like(w)
        before = error(unmoved)
        alphas = GRID if self.alpha == "search" else (float(self.alpha),)
        errors = {alpha: error(smoothing_scales(link.largest(rest), w, alpha)) for alpha in alphas}
        alpha = min(errors, key=errors.__getitem__)
        if self.alpha == "search" and errors[alpha] >= before:
            return FoldChoice(unmoved, None, before, before, ("nothing moved: no alpha lessens the error in 8 bits",))
        return FoldChoice(smoothing_scales(link.largest(absmax), w, alpha), alpha, before, errors[alpha])


def smoothing_scales(x: Tensor, w: Tensor, alpha: float) -> Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (arXiv:2211.10438, equation 4).

    Args:
        x, w: [channels], the largest magnitudes of the inputs and of the weights' columns.
        alpha: 0 (the weights' columns become alike) to 1 (the inputs' channels become alike).

    Returns:
        [channels], float32; 1 where x or w is 0, as nothing there needs to move, and never beyond 1e-5 to 1e5.
    """
    s = x.float().pow(alpha) / w.float().pow(1 - alpha)
    return torch.where((x == 0) | (w == 0), 1.0, s.clamp(1 / LARGEST, LARGEST))


def output_error(W: Tensor, rows: Tensor, columns: Tensor, step: Tensor | None, y: Tensor) -> float:
    """||WX - Q(W s)Q(X / s)||² / ||WX||², weights in int8 per output channel, inputs per token or, given a step, per
    tensor.

    Args:
        W: [out, in]. rows: [n, in], inputs. columns: [in], the scales s. step: of the inputs' int8 codes, or None.
        y: [n, out], the product without rounding.
    """
    rounded = w8a8_matmul(rows / columns, quantize_weight(W * columns, torch.int8), x_scale=step)
    return ((y - rounded).square().sum() / y.square().sum().clamp_min(1e-30)).item()
