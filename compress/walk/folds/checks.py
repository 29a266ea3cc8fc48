"""The effect of a fold: how far outputs change, and the ranges of inputs and weights before and after."""

import re
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.walk.capture import device_of
from compress.walk.folds.links import made_up_batch
from eval.record.compression import FoldRecord, Magnitudes

SHOWN = 4  # folds whose magnitudes are recorded channel by channel: those with the largest outliers
BINS = 512


def logits_of(model: nn.Module) -> Tensor:
    return model(made_up_batch(model).to(device_of(model)), use_cache=False).logits


def difference(now: Tensor, before: Tensor, *, routed: bool = False) -> float:
    """||y - y'|| / ||y||; with `routed`, over the three quarters of the tokens that differ least.

    Rounding in 16 bits sends a few tokens to another expert; a wrong fold changes them all.
    """
    y, left = before.float().flatten(0, -2), (now.float() - before.float()).flatten(0, -2)  # [tokens, ...]
    if routed:
        kept = left.norm(dim=-1).argsort()[: -(-3 * len(left) // 4)]
        y, left = y[kept], left[kept]
    return (left.norm() / y.norm().clamp_min(1e-30)).item()


def moved_logits(model: nn.Module, before: Tensor, block: nn.Module, method: str, why: str) -> str:
    """The error's message if folds that changed the output of no block have changed the model's logits; "" if not.

    Args:
        before: the logits before the folds. block: one of the model's blocks. why: the cause, and what to do.
    """
    moved, most = difference(logits_of(model), before), 25 * tolerance(block)
    if moved <= most:
        return ""
    return (
        f"{method}: the outputs of all blocks are unchanged, but the model's logits differ by {moved:.1e} (at most "
        f"{most:.0e}): {why}"
    )


def tolerance(block: nn.Module) -> float:
    """The allowed change of the block's output: rounding in its dtype."""
    return 1e-4 if all(p.dtype in (torch.float32, torch.float64) for p in block.parameters()) else 2e-2


def column_absmax(weights: list[Tensor]) -> Tensor:
    """[in]: the largest magnitude of each column over all consumers."""
    return torch.stack([W.abs().amax(0) for W in weights]).amax(0)


def summary(values: Tensor, kurtosis: float | None = None) -> Magnitudes:
    return Magnitudes(values.max().item(), values.quantile(0.99).item(), values.median().item(), kurtosis)


def binned(values: Tensor) -> tuple[float, ...]:
    """At most 512 numbers: neighbouring channels share one, the largest among them."""
    size = -(-len(values) // BINS)
    bins = F.pad(values, (0, -len(values) % size)).view(-1, size).amax(1)
    return tuple(float(f"{value:.4g}") for value in bins.tolist())


def show_largest(records: list[FoldRecord]) -> list[FoldRecord]:
    """The records, with magnitudes channel by channel only for the inputs with the largest outliers: one of each kind
    first."""
    order = sorted(range(len(records)), key=lambda i: -records[i].x_before.outlier)
    first = {re.sub(r"\d+", "*", records[i].name): i for i in reversed(order)}.values()
    shown = sorted(order, key=lambda i: i not in first)[:SHOWN]
    return [r if i in shown else replace(r, channels=None) for i, r in enumerate(records)]
