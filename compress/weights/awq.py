"""AWQ (Lin et al., 2023, arXiv:2306.00978): columns with large inputs are scaled up, so that rounding changes them
less, and ranges are clipped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.formats import Format
from compress.grid.grids import make_grid, scale_rule, scales_of
from compress.grid.integer import AT_ONCE
from compress.grid.nearest import rtn
from compress.method import Method, knob
from compress.walk.blocks import is_named
from compress.walk.context import Context
from compress.walk.folds.folding import FoldChoice, FoldingMethod
from compress.walk.folds.links import Link, compared_by_attention
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics
from compress.weights.on_grid import GridMethod
from eval.record.compression import FoldRecord, LayerRecord
from kernels.linear import linear

# Knobs that are settled by a weight quantiser that follows.
AIMS = ("bits", "group_size", "grid", "symmetric", "scale_dtype", "skip")
SMALLEST = 1e-4  # least mean magnitude of an input, as a fraction of the link's largest; smaller ones are raised to it


@dataclass(frozen=True, kw_only=True)
class AWQ(FoldingMethod, GridMethod):
    """Scales up the weights of large inputs before rounding, so that they lose less, and clips each group's range.

    When a weight quantiser follows in the recipe, AWQ only folds the scales, and chooses them for its grid.
    """

    name: ClassVar[str] = "awq"
    source: ClassVar[str] = "arXiv:2306.00978"
    needs_calibration: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ("gram", "absmean")

    symmetric: bool = knob(False, "no zero point: the grid lies around 0")
    strengths: int = knob(20, "strengths of the scaling that are tried, from 0 up to 1", range=(1, 1000))
    clip: bool = knob(
        True, "search each group's range for the least error of the layer's output; False: cover the group"
    )
    only_scale: bool | None = knob(
        None, "only fold the scales and leave rounding to a later weight quantiser; None: True if there is one"
    )

    @property
    def stage(self) -> str:
        return "transform" if self.only_scale else "quantize_weights"

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        meeting = [method for method in before if method.places & self.places]
        stored = next((method for method in meeting if method.stage not in ("drop", "transform")), None)
        if stored:
            raise ValueError(
                f"`recipe`: {self} must come before {stored}, because it scales weights before they are stored"
            )
        meeting = [method for method in after if method.places & self.places]
        follower = next((method for method in meeting if method.stage == "quantize_weights"), None)
        if follower is None:
            return self
        if self.where != "blocks":
            raise ValueError(
                f"`where` (={self.where!r}) of {self.name}: {follower} rounds after it, and scales are folded inside "
                "the blocks alone; where='blocks' works"
            )
        if self.only_scale is False:
            raise ValueError(
                f"`only_scale` (=False) of {self.name}: {follower} after it rounds the same weights; None works"
            )
        aims = {aim: getattr(follower, aim) for aim in AIMS if aim in follower.knobs()}
        for aim, value in aims.items():
            if getattr(self, aim) not in (value, self.knobs()[aim].default):
                raise ValueError(
                    f"`{aim}` (={getattr(self, aim)!r}) of {self.name} must be what {follower} rounds to after it: "
                    f"{value!r}, which is also used if it is left out"
                )
        return replace(self, only_scale=True, **aims)

    def check(self, model: nn.Module) -> None:
        LayerwiseMethod.check(self, model)
        if self.where != "embedding":
            FoldingMethod.check(self, model)

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]] | None:
        return None if self.only_scale else GridMethod.stores(self, shape)

    def leaves(self, link: Link) -> str:
        return (
            ""
            if any(map(self._takes, link.consumers))
            else f"`skip` (={self.skip!r}) names all that read {link.producer}"
        )

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[LayerRecord | FoldRecord]:
        chosen = context.store and BlockStore(context.store.folder / "folds")
        folds: list[FoldRecord] = []
        if self.where != "embedding":
            folds = FoldingMethod.apply(self, model, batches, replace(context, store=chosen))
        if self.only_scale:
            return folds
        unclipped = dict.fromkeys(compared_by_attention(model) if self.clip else (), True)
        return [*folds, *LayerwiseMethod.apply(self, model, batches, context.with_measured(unclipped=unclipped))]

    def choose(self, link: Link, weights: list[Tensor], statistics: LayerStatistics) -> FoldChoice:
        if not statistics.tokens:
            return FoldChoice(torch.ones(link.width), None, notes=("nothing moved: no calibration token came by",))
        W = torch.cat([W for name, W in zip(link.consumers, weights, strict=True) if self._takes(name)])
        H, channels = _gram(statistics), link.channels.to(W.device)
        x = link.largest(statistics.values["absmean"])
        choices = [(step / self.strengths, awq_scales(x, step / self.strengths)) for step in range(self.strengths)]
        group_size = W.shape[1] if self.group_size == -1 else self.group_size
        grid, kind = make_grid(self.grid, self.bits, self.symmetric), scales_of(self.grid, self.scale_dtype)
        errors = []
        for _, s in choices:
            scaled = W * s[channels]
            groups, rule = scaled.view(len(W), -1, group_size), scale_rule(grid, kind, scaled, group_size)
            chosen = grid.choose(groups, rule.rounded, how="absmax", importance=None, norm=2.0)
            Q = grid.rounded(groups, *(t[..., None] for t in chosen)).view(W.shape) / s[channels]
            errors.append(_energy(W - Q, H))
        energy = max(_energy(W, H), 1e-30)
        best = errors.index(min(errors))
        alpha, s = choices[best]
        notes = () if best else ("nothing moved: no alpha lessens the error",)
        return FoldChoice(s, alpha if best else None, errors[0] / energy, errors[best] / energy, notes)

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        if not self.clip:
            return self.peer(W, statistics)
        if statistics.measured.get("unclipped"):
            statistics.note("not clipped: its outputs are queries or keys")
            return self.peer(W, statistics)
        if not statistics.tokens:
            statistics.note("not clipped: no calibration token came by")
            return self.peer(W, statistics)
        return [awq_clip(W, _gram(statistics), **self.aim(W.shape[1]))]

    def peer(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return [rtn(W, **self.aim(W.shape[1]))]

    def _takes(self, name: str) -> bool:
        return not is_named(name, self.skip)


def awq_scales(x: Tensor, alpha: float) -> Tensor:
    """s = x^alpha, normalised so that the largest is the inverse of the smallest (arXiv:2306.00978, equation 5).

    Args:
        x: [channels], mean magnitudes of the inputs.

    Returns:
        [channels] float32, positive; ones for alpha = 0.
    """
    s = x.float().clamp_min(SMALLEST * x.max().clamp_min(1e-30)).pow(alpha)
    return s / (s.max() * s.min()).sqrt()


def awq_clip(
    W: Tensor,
    H: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = False,
    grid: str = "int",
    scale_dtype: str = "bfloat16",
) -> Format:
    """Round W to nearest on grids that clip each group so that the output's error (W - Ŵ) H (W - Ŵ)ᵀ is small.

    Args:
        W: [out, in].
        H: [in, in], the Gram matrix of the inputs.
        group_size: divides `in`.

    Source: arXiv:2306.00978, section 3.2 and its public code, which weighs each group's output by itself. Deviation:
    the effect of the earlier groups on the output counts, too.
    """
    out, columns = W.shape
    values = make_grid(grid, bits, symmetric)
    rule = scale_rule(values, scale_dtype, W, group_size)
    D = torch.empty_like(W)  # W - Ŵ
    codes = torch.empty_like(W)
    chosen = []
    for start in range(0, columns, group_size):
        group = slice(start, start + group_size)
        w, H_group = W[:, group], H[group, group]
        pull = 2 * linear(D[:, :start], H[group, :start]) if start else 0  # [out, group_size]
        scales, zeros = values.candidates(w, rule.of_group(start // group_size))  # [candidates, out] each
        at_once = max(1, AT_ONCE // w.numel())
        losses = []
        for scale, zero in zip(scales.split(at_once), zeros.split(at_once), strict=True):
            scale, zero = scale[..., None], zero[..., None]
            d = w - values.rounded(w, scale, zero)  # [at_once, out, group_size]
            losses.append(linear(d, H_group).add_(pull).mul_(d).sum(-1))
        best = torch.cat(losses).argmin(0, keepdim=True)
        scale, zero = scales.gather(0, best)[0], zeros.gather(0, best)[0]
        codes[:, group] = values.quantize(w, scale[:, None], zero[:, None]).to(w.dtype)
        D[:, group] = w - values.dequantize(codes[:, group], scale[:, None], zero[:, None])
        chosen.append((scale, zero))
    scale, zero = (torch.stack(each, 1) for each in zip(*chosen, strict=True))  # [out, groups]
    return values.stored(codes, scale, zero, group_size=group_size, rule=rule)


def _gram(statistics: LayerStatistics) -> Tensor:
    H = statistics.values["gram"]
    if not torch.isfinite(H).all():
        raise ValueError(
            "`batches` give activations that are not finite: the Gram matrix of the inputs holds NaN or infinity"
        )
    return H


def _energy(D: Tensor, H: Tensor) -> float:
    """tr(D H Dᵀ) for D [out, in] and H [in, in], symmetric."""
    return linear(D, H).mul_(D).sum().item()
