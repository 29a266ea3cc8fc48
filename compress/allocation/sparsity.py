"""The share of weights that is removed from each linear, given the share that is removed from all of them together."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.allocation.candidates import measure
from compress.allocation.predictions import PredictionLoss
from compress.allocation.program import BudgetProgram, Choice
from compress.linear import weight_of
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import device_of, on_device
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics

LEVELS = (0.2, 0.4, 0.6, 0.8)  # ratios at which distortions are measured; the last is the limit for a linear
STEP = 0.02  # distance between the ratios from which each linear's ratio is chosen


def global_ratios(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, int]],
    score: Callable[[Tensor, LayerStatistics], Tensor],
    ratio: float,
) -> dict[str, float]:
    """The ratio of each linear if the weights with the smallest scores of all linears are removed.

    The threshold is found by bisection, so that only one linear's scores are in memory at a time.

    Args:
        shapes: (out, in) of each linear by name.
        score: gives scores for a weight [out, in] and its (empty) statistics; comparable between linears.
        ratio: the ratio for all weights together.
    """
    prefix, blocks = find_blocks(model)
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}

    def scores() -> Iterator[tuple[str, Tensor]]:
        for index, block in enumerate(blocks):
            with on_device(block, device_of(block)):
                for name in (name for name in sizes if name.startswith(f"{prefix}.{index}.")):
                    statistics = LayerStatistics(0, {})
                    statistics.name = name
                    yield name, score(weight_of(model.get_submodule(name)), statistics)

    def below(threshold: float) -> dict[str, int]:
        return {name: int((values < threshold).sum()) for name, values in scores()}

    low, high = 0.0, max(values.max().item() for _, values in scores()) + 1.0
    for _ in tqdm(range(32), desc="threshold over all linears", unit="pass"):
        middle = (low + high) / 2
        counts = below(middle)
        low, high = (middle, high) if sum(counts.values()) <= ratio * sum(sizes.values()) else (low, middle)
    return {name: count / sizes[name] for name, count in below(low).items()}


def distortion_curves(
    model: nn.Module,
    methods: Mapping[float, LayerwiseMethod],
    batches: Sequence[Tensor],
    *,
    tokens: int,
    device: torch.device,
    store: BlockStore | None = None,
) -> dict[str, dict[float, float]]:
    """The change of the model's predictions if only one linear is pruned: {linear: {level: KL in nats per token}}.

    Args:
        methods: {level: the method that prunes this share}; they differ only in the level.
        tokens: the number of tokens of the batches on which predictions are compared.
        store: where the curves of finished blocks are kept.
    """
    method = next(iter(methods.values()))
    with torch.no_grad():
        loss = PredictionLoss(model, first_tokens(batches, tokens), device)
    found = measure(
        model,
        {f"{level:g}": pruner for level, pruner in methods.items()},
        batches,
        loss,
        names=list(targets(model, method.skip)),
        together=False,
        device=device,
        store=store,
        title=f"{method.name}: distortion curves",
    )
    return {
        name: {float(level): choice.loss for level, choice in candidates.choices.items()}
        for name, candidates in found.items()
    }


def allocate(curves: Mapping[str, Mapping[float, float]], weights: Mapping[str, int], ratio: float) -> dict[str, float]:
    """The ratio of each linear, so that at least `ratio` of all weights are removed and the sum of distortions is
    least.

    Between measured levels the root of the distortion is assumed to be linear; it is 0 if nothing is removed.

    Args:
        curves: {linear: {level: distortion}}.
        weights: {linear: its number of weights}.

    Source: arXiv:2308.10438, section 4.
    """
    steps = round(LEVELS[-1] / STEP)
    choices = np.arange(steps + 1) * STEP
    layers: dict[str, list[Choice]] = {}
    for name, curve in curves.items():
        levels = sorted(curve)
        roots = np.interp(choices, [0, *levels], [0, *(math.sqrt(max(curve[level], 0)) for level in levels)])
        layers[name] = [Choice(weights[name] * (steps - k), float(root) ** 2) for k, root in enumerate(roots)]
    budget = (steps - ratio / STEP) * sum(weights.values())
    numbers = BudgetProgram(layers).within(budget + 1e-6 * steps)
    return {name: float(choices[number]) for name, number in numbers.items()}


def first_tokens(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The first batches with at least `tokens` tokens together, cut to this number."""
    few: list[Tensor] = []
    for batch in batches:
        rest = tokens - sum(b.shape[1] for b in few)
        if rest > 0:
            few.append(batch[:, :rest])
    return few
