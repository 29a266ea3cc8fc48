"""How much goes from which linear, given how much goes from all of them together."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.formats import Dense
from compress.linear import CompressedLinear, replace, weight_of
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import Call, Tail, advance, block_calls, device_of, on_device
from compress.walk.groups import collect, input_groups
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics
from kernels.linear import fast_linear

LEVELS = (0.2, 0.4, 0.6, 0.8)  # ratios at which distortions are measured; no linear loses more than the last
STEP = 0.02  # between the ratios among which each linear's is chosen
MOST_STATES = 1 << 16  # of the dynamic program


def global_ratios(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, int]],
    score: Callable[[Tensor, LayerStatistics], Tensor],
    ratio: float,
) -> dict[str, float]:
    """The ratio of each linear when the smallest scores of all linears together go.

    The threshold is found by bisection, so that no more than one linear's scores are held at a time.

    Args:
        shapes: (out, in) of each linear by name.
        score: of a weight [out, in] and its (empty) statistics; must be comparable between linears.
        ratio: of all weights together.
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


@torch.no_grad()
def distortion_curves(
    model: nn.Module,
    methods: Mapping[float, LayerwiseMethod],
    batches: Sequence[Tensor],
    *,
    tokens: int,
    device: torch.device,
    store: BlockStore | None = None,
) -> dict[str, dict[float, float]]:
    """What pruning one linear alone does to the model's predictions: {linear: {level: KL in nats per token}}.

    Every linear is pruned as the method would on what flows in the model as it is, and only it; the blocks after it are
    run again, for so many `tokens`. arXiv:2308.10438 measures the squared error of the outputs instead, which
    weighs likely and unlikely tokens alike; what it needs, that distortions of different linears add up, holds for
    small ones of both.

    Args:
        methods: {level: the method that prunes as much}; they differ in that alone.
        tokens: of the batches, on which predictions are compared.
        store: where the curves of finished blocks are kept.
    """
    prefix, blocks = find_blocks(model)
    method = next(iter(methods.values()))
    names = list(targets(model, method.skip))
    few = _first(batches, tokens)
    calls, probes = block_calls(model, blocks, batches, divided=True), block_calls(model, blocks, few)
    curves: dict[str, dict[float, float]] = {}
    home, tail = device_of(blocks[0]), Tail(model, blocks, few)
    progress = tqdm(total=len(names) * len(methods), desc=f"{method.name}: distortion curves", unit="pass")

    def predictions(first: int) -> list[Tensor]:
        """Logarithms of the probabilities that the model gives from block `first` on, per micro-batch of probes."""
        passing = [copy.copy(probe) for probe in probes]
        for index in range(first, len(blocks)):
            with on_device(blocks[index], device):
                advance(blocks[index], passing, index, device)
        return [tail.logits(i, call.hidden.to(home)).float().log_softmax(-1) for i, call in enumerate(passing)]

    try:
        with fast_linear():
            expected = predictions(0)
            for index, block in enumerate(blocks):
                own = {name: model.get_submodule(name) for name in names if name.startswith(f"{prefix}.{index}.")}
                found = store.get(index) if store else None
                if found is None:
                    with on_device(block, device):
                        for name, statistics in _statistics(block, own, calls, index, method.statistics, device):
                            progress.set_postfix_str(name.removeprefix(f"{prefix}."))
                            curves[name] = {}
                            for level, pruner in methods.items():
                                with _pruned(model, name, pruner, statistics):
                                    curves[name][level] = _kl(expected, predictions(index))
                                progress.update()
                else:
                    curves |= {
                        name: {float(level): kl for level, kl in curve.items()} for name, curve in found[1].items()
                    }
                    progress.update(len(own) * len(methods))
                if store and found is None:
                    store.put(index, {}, {name: curves[name] for name in own})
                with on_device(block, device):
                    advance(block, [*calls, *probes], index, device)
    finally:
        progress.close()
    return curves


def allocate(curves: Mapping[str, Mapping[float, float]], weights: Mapping[str, int], ratio: float) -> dict[str, float]:
    """The ratio of each linear, so that at least `ratio` of all weights go and the sum of distortions is least.

    Dynamic programming over the linears, with the number of weights that went so far as its state (arXiv:2308.10438,
    section 4). Between measured levels the root of the distortion is taken to be linear; it is 0 where nothing goes.

    Args:
        curves: {linear: {level: distortion}}.
        weights: {linear: how many it has}.
    """
    names = list(curves)
    choices = np.arange(0, LEVELS[-1] + STEP / 2, STEP)
    wanted = math.ceil(ratio * sum(weights.values()) - 1e-6)
    # What all choices have in common is counted as one; where they have little, as much as keeps the states few.
    unit = max(STEP * math.gcd(*weights.values()), wanted / MOST_STATES)
    states = math.ceil(wanted / unit - 1e-6)
    best = np.full(states + 1, np.inf)  # least distortion when so many units went, the last standing for all beyond
    best[0] = 0.0
    chosen = np.zeros((len(names), states + 1), dtype=np.int16)
    before_last = np.zeros(
        (len(names), len(choices)), dtype=np.int64
    )  # the state from which a choice reached the last one
    for i, name in enumerate(names):
        levels = sorted(curves[name])
        roots = np.interp(choices, [0, *levels], [0, *(math.sqrt(max(curves[name][level], 0)) for level in levels)])
        after = np.full(states + 1, np.inf)
        for k, (choice, root) in enumerate(zip(choices, roots, strict=True)):
            gone = min(int(choice * weights[name] / unit + 1e-6), states)
            total = np.full(states + 1, np.inf)
            total[gone:] = best[: states + 1 - gone] + root**2
            before_last[i, k] = states - gone + best[states - gone :].argmin()
            total[states] = best[before_last[i, k]] + root**2
            better = total < after
            after[better], chosen[i, better] = total[better], k
        best = after
    ratios, state = {}, states
    for i in reversed(range(len(names))):
        k = chosen[i, state]
        ratios[names[i]] = float(choices[k])
        state = before_last[i, k] if state == states else state - int(choices[k] * weights[names[i]] / unit + 1e-6)
    assert state == 0
    return {name: ratios[name] for name in names}


def _first(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The first batches with at least so many tokens together, cut to as many."""
    few: list[Tensor] = []
    for batch in batches:
        rest = tokens - sum(b.shape[1] for b in few)
        if rest > 0:
            few.append(batch[:, :rest])
    return few


def _statistics(
    block: nn.Module,
    linears: dict[str, nn.Module],
    calls: list[Call],
    index: int,
    needs: Sequence[str],
    device: torch.device,
) -> Iterator[tuple[str, LayerStatistics]]:
    """Each linear of a block with what the method wants to know of its inputs."""
    groups, once = input_groups(block, linears, calls, index, device)
    collectors = collect(block, linears, groups, calls, index, needs, device, stop_early=once)
    for group in groups:
        shared = collectors.pop(group[0]).result()
        for name in group:
            statistics = shared.for_another()
            statistics.name = name
            yield name, statistics


@contextmanager
def _pruned(model: nn.Module, name: str, pruner: LayerwiseMethod, statistics: LayerStatistics) -> Iterator[None]:
    """While the block runs, this linear alone is pruned."""
    linear = model.get_submodule(name)
    dense = Dense(sum(part.dequantize() for part in pruner.solve(weight_of(linear), statistics)))
    bias, dtype = linear.bias, linear.dtype if isinstance(linear, CompressedLinear) else linear.weight.dtype
    replace(model, name, CompressedLinear([dense], bias, dtype=dtype))
    try:
        yield
    finally:
        replace(model, name, linear)


def _kl(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """KL(expected || found) of logarithms of probabilities [batch, T, vocabulary], mean over all tokens."""
    total = sum(float((p.exp() * (p - q)).sum(-1).double().sum()) for p, q in zip(expected, found, strict=True))
    return max(total / sum(p[..., 0].numel() for p in expected), 0.0)
