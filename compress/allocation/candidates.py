"""The bytes and the loss of each way to store a layer: one pass over the blocks tries every choice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.allocation.program import Choice
from compress.formats import bits_of
from compress.linear import CompressedLinear, shape_of, weight_of
from compress.walk.blocks import find_blocks, is_named
from compress.walk.capture import Call, advance, block_calls, on_device
from compress.walk.groups import collect, input_groups
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics
from compress.walk.statistics.saved import SavedStatistics
from compress.walk.walk import stored_as
from kernels.linear import fast_linear


class Solved(NamedTuple):
    """A linear in the stored form of one choice, beside its weight [out, in] and the statistics of its inputs.

    rows: those of the whole weight that W and the stored form have.
    """

    new: CompressedLinear
    W: Tensor
    statistics: LayerStatistics
    rows: slice = slice(None)


class Loss(Protocol):
    """The loss if some linears of a block are stored in another form, and all others are not changed.

    Attributes:
        statistics: the names in STATISTICS that the loss reads.
        sample: about this many rows of a weight are enough for all choices of a layer but the first; 0: all are needed.
    """

    statistics: tuple[str, ...]
    sample: int

    def of(self, index: int, solved: Mapping[str, Solved]) -> float:
        """The loss for these linears of block `index`, which lies on the compute device."""

    def of_end(self, name: str, solved: Solved) -> float:
        """The loss for the embedding or the head, or for both if they are one weight."""

    def leave(self, index: int) -> None:
        """Go on to the next block; this one still lies on the compute device."""


@dataclass(frozen=True)
class Candidates:
    """A layer, which is one linear or several that are stored in the same form, and its choices by their names."""

    members: tuple[str, ...]
    choices: dict[str, Choice]


def takes(method: LayerwiseMethod, name: str, shape: tuple[int, int]) -> bool:
    """Whether a method can store this linear, and its knobs do not exclude it."""
    try:
        method.check_layer(name, shape)
    except ValueError:
        return False
    return not is_named(name, method.skip)


@torch.no_grad()
def measure(
    model: nn.Module,
    methods: Mapping[str, LayerwiseMethod],
    batches: Sequence[Tensor],
    loss: Loss,
    *,
    names: Sequence[str],
    together: bool,
    device: torch.device,
    store: BlockStore | None = None,
    saved: SavedStatistics | None = None,
    title: str = "choices",
) -> dict[str, Candidates]:
    """Every layer's choices with their bytes and losses, solved on the activations of the uncompressed model.

    Args:
        methods: the choices by their names.
        names: the linears to measure.
        together: linears that read the same input (q, k and v; gate and up) are one layer, with one choice for all.
        store: where the results of finished blocks are kept.
        saved: statistics of the uncompressed model; None: they are collected from the batches.

    Returns:
        {name of the layer's first linear: its candidates}, in the model's order.
    """
    prefix, blocks = find_blocks(model)
    needs = tuple(dict.fromkeys((*(n for method in methods.values() for n in method.statistics), *loss.statistics)))
    calls = [] if saved else block_calls(model, blocks, batches, divided=True)
    found: dict[str, Candidates] = {}
    progress = tqdm(total=len(names) * len(methods), desc=title, unit="choice")
    left = len(names)
    with fast_linear():
        for index, block in enumerate(blocks):
            if not left:  # what the other blocks give is not needed
                break
            own = {name: model.get_submodule(name) for name in names if name.startswith(f"{prefix}.{index}.")}
            left -= len(own)
            kept = store.get(index) if store else None
            with on_device(block, device):
                made = {name: from_json(one) for name, one in kept[1].items()} if kept else {}
                if kept:
                    progress.update(len(own) * len(methods))
                else:
                    for group in _statistics(block, own, calls, index, needs, device, saved):
                        for layer in [group] if together else [{name: one} for name, one in group.items()]:
                            progress.set_postfix_str(next(iter(layer)).removeprefix(f"{prefix}."))
                            made[next(iter(layer))] = _candidates(index, layer, own, methods, loss, progress)
                    if store:
                        store.put(index, {}, {name: as_json(one) for name, one in made.items()})
                loss.leave(index)
                advance(block, calls, index, device)
            found |= made
    progress.close()
    return found


def _candidates(
    index: int,
    layer: Mapping[str, LayerStatistics],
    linears: Mapping[str, nn.Module],
    methods: Mapping[str, LayerwiseMethod],
    loss: Loss,
    progress: tqdm,
) -> Candidates:
    """The choices of one layer of a block."""
    weights = {name: weight_of(linears[name]) for name in layer}
    choices: dict[str, Choice] = {}
    for choice, method in methods.items():
        if all(takes(method, name, tuple(W.shape)) for name, W in weights.items()):
            solved, size = {}, 0
            for name, statistics in layer.items():
                own, W = statistics.for_another(), weights[name]
                rows = sampled(method, linears[name], loss.sample if choices else 0)
                linear = with_rows(linears[name], W, rows)
                solved[name] = Solved(stored_as(name, linear, W[rows], own, method), W[rows], own, rows)
                size += stored_bytes(solved[name], method, tuple(W.shape))
            choices[choice] = Choice(size, loss.of(index, solved))
        progress.update(len(layer))
    return Candidates(tuple(layer), choices)


def sampled(method: LayerwiseMethod, linear: nn.Module, count: int) -> slice:
    """About `count` rows of a weight, evenly spread, if the method treats rows alike; otherwise all, as for 0."""
    step = shape_of(linear)[0] // count if count and method.alike_rows and type(linear) is nn.Linear else 1
    return slice(None, None, max(step, 1))


def with_rows(linear: nn.Module, W: Tensor, rows: slice) -> nn.Module:
    """A linear with only these rows of its weight W [out, in] and no bias; the linear itself if these are all."""
    if rows.step in (None, 1):
        return linear
    part = nn.Linear(W.shape[1], len(W[rows]), bias=False, device="meta")
    part.weight = nn.Parameter(W[rows].to(linear.weight.dtype), requires_grad=False)
    return part


def stored_bytes(solved: Solved, method: LayerwiseMethod, shape: tuple[int, int]) -> int:
    """Bytes of a stored weight of this shape, with floats that are cast with the model in 16 bits; by the method's
    specification if only some rows were stored."""
    whole = solved.rows.step in (None, 1)
    return round((solved.new.bits_per_weight if whole else bits_of(method.stores(shape))) * prod(shape) / 8)


def _statistics(
    block: nn.Module,
    linears: dict[str, nn.Module],
    calls: list[Call],
    index: int,
    needs: Sequence[str],
    device: torch.device,
    saved: SavedStatistics | None,
) -> Iterator[dict[str, LayerStatistics]]:
    """The statistics that the methods need of a block's linears; each item holds the linears of one input."""
    if saved:
        for group in saved.groups(index):
            own = [name for name in group if name in linears]
            if own:
                shared = saved.of(own[0], index, needs, device)
                yield {name: shared.for_another() for name in own}
        return
    groups, once = input_groups(block, linears, calls, index, device)
    collectors = collect(block, linears, groups, calls, index, needs, device, stop_early=once)
    for group in groups:
        shared = collectors.pop(group[0]).result()
        yield {name: shared.for_another() for name in group}


def as_json(candidates: Candidates) -> dict:
    """Candidates as a block store keeps them."""
    choices = {name: [choice.cost, choice.loss] for name, choice in candidates.choices.items()}
    return {"members": candidates.members, "choices": choices}


def from_json(kept: dict) -> Candidates:
    """The candidates that `as_json` described."""
    return Candidates(tuple(kept["members"]), {name: Choice(*choice) for name, choice in kept["choices"].items()})
