"""Every layer's choices with their bytes and losses, and models in which all layers have one choice, for timing."""

import copy
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kernels
from compress.allocation.budget import bytes_beside, megabytes
from compress.allocation.candidates import Candidates, takes
from compress.apply import split_all_experts
from compress.embedding import find_ends, store_end
from compress.linear import CompressedLinear, replace, sharing_copy, weight_of
from compress.method import Method
from compress.plan import Plan, plan
from compress.search.drops import (
    Losses,
    dropping,
    drops_in,
    measure_drops,
    parts_of_layers,
    text_of,
    thinner,
    with_drops,
)
from compress.search.program import Costs
from compress.walk.blocks import end_targets, find_blocks, targets
from compress.walk.capture import device_of
from compress.walk.context import Context
from compress.walk.ends.solve import solve_end
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import Collector
from compress.walk.walk import stored_as
from compress.weights.mixed import Mixed, windows
from eval.record.search import SearchLayer
from kernels import native
from kernels.support.files import write_whole
from kernels.support.modes import evaluating
from kernels.support.source import code_sha256
from kernels.support.user_cache import cache_folder

ORIGINAL = "original"
KERNELS = Path(kernels.__file__).parent
PHASES = "decode", "prefill"
LEAST = 0.01  # of the original's time: nothing is predicted to take less

# Models that decode: {name: tokens per second of decoding and of reading a prompt}, in the same turns.
Timer = Callable[[Mapping[str, PreTrainedModel]], Mapping[str, tuple[float, float]]]


@dataclass(frozen=True)
class Times:
    """What was timed: the original, and models in which all linears, or the embedding and the head, have one choice.

    Attributes:
        original: tokens per second of decoding and of reading a prompt, in 16 bits.
        decode, prefill: by choice, the time of the model with this choice, as a multiple of the original's.
        earlier: were they measured by an earlier search?
    """

    original: tuple[float, float]
    decode: dict[str, float]
    prefill: dict[str, float]
    earlier: bool = False


@dataclass(frozen=True)
class Library:
    """The choices of a model's layers.

    Attributes:
        method: `mixed` with the choices.
        layers: by the name of a layer's first linear, its choices with bytes and losses.
        beside: bytes of all that is not among them.
        weights: the number of weights of each layer.
        ends: which of the layers are the embedding and the head.
        head: the one of these whose product takes time in each step; None if it has no choices.
        parts: of each kind, by block, the layers of a part that may be left out.
    """

    method: Mixed
    layers: dict[str, Candidates]
    beside: int
    weights: dict[str, int]
    ends: tuple[str, ...]
    head: str | None
    parts: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """All choices."""
        return [*self.method.methods, *map(text_of, self.parts)]

    @property
    def tied(self) -> list[dict[str, str]]:
        """Layers that are left out together, {layer: choice}."""
        return [dict.fromkeys(names, text_of(kind)) for kind, of in self.parts.items() for names in of.values()]

    def kinds(self) -> list[list[str]]:
        """The layers in blocks, and the embedding and the head."""
        return [[n for n in self.layers if n not in self.ends], [n for n in self.layers if n in self.ends]]

    def costs(self, times: Times | None) -> dict[str, dict[str, Costs]]:
        """{layer: {choice: its costs}}; a layer's time is its share, by weights, of that of all layers in blocks that
        can have the choice, and in a part that is left out, of that part."""
        return {
            name: {
                text: Costs(choice.cost, choice.loss, *self._times(name, text, times))
                for text, choice in layer.choices.items()
            }
            for name, layer in self.layers.items()
        }

    def _times(self, name: str, text: str, times: Times | None) -> tuple[float, float]:
        if times is None:
            return 0.0, 0.0
        able = [n for n, layer in self.layers.items() if n not in self.ends and text in layer.choices]
        gone = [names for kind, of in self.parts.items() if text_of(kind) == text for names in of.values()]
        able = next((names for names in gone if name in names), able)
        inside = sum(self.weights[other] for other in able)
        share = float(name == self.head) if name in self.ends else self.weights[name] / inside
        return share * (times.decode[text] - 1), share * (times.prefill[text] - 1)

    def picked(self, name: str, text: str) -> SearchLayer:
        """A layer with this choice, for the record."""
        own = self.layers[name].choices  # of which the next ones are not those that other layers must have, too
        order = sorted({(one.cost, one.loss) for other, one in own.items() if other in {text, *self.method.methods}})
        cost, loss = own[text]
        fewer, more = [one for one in order if one[0] < cost], [one for one in order if one[0] > cost]
        return SearchLayer(name, text, cost, loss, fewer[-1] if fewer else (), more[0] if more else ())

    def recipe(self, chosen: Mapping[str, str], model: nn.Module) -> list[Method]:
        """Methods that drop what is left out, and `mixed` with the choices of the other layers."""
        kept = {name: layer for name, layer in self.layers.items() if chosen[name] in self.method.methods}
        texts = {member: chosen[name] for name, layer in kept.items() for member in layer.members}
        return [*drops_in(chosen, self.parts), self.method.choosing(model, texts)]


def check_library(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    method: Mixed,
    *,
    most: float | None = None,
    device: str | None = None,
    kinds: Sequence[str] = (),
) -> Plan:
    """The plan of a measurement of all choices, by which everything is refused that can be before the work.

    Args:
        method: of `search_method`.
        most: bytes that the whole model may have; None: any number.
        kinds: of parts of blocks that may be left out, as `drops.kinds_of` gives them.

    Raises:
        ValueError: the model or the choices cannot be handled, or even the smallest choices take more bytes.
    """
    if kinds:
        plan([*dropping(kinds), method], model, batches, device=device)
    planned = plan([method], model, batches, device=device, work_path=cache_folder("search"))
    (method,) = planned.recipe
    if most is not None and not kinds and (smallest := method.smallest_size(model)) > most:
        raise ValueError(
            f"`max_bytes` (={most:.0f}) cannot be kept: with the smallest of `choices` the whole model takes "
            f"{megabytes(smallest)}; fewer bits among `choices`, or choices for the embedding, work"
        )
    return planned


@torch.no_grad()
def measure_library(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    method: Mixed,
    *,
    device: str | None = None,
    kinds: Sequence[str] = (),
) -> Library:
    """Measure the loss of every choice of every layer, and without each part that may be left out, on the model as it
    is; arguments and errors as in `check_library`. What was measured is kept in the user's cache folder, so that the
    next search with the same model, text and choices need not measure it again."""
    planned = check_library(model, batches, method, device=device, kinds=kinds)
    (method,) = planned.recipe
    dropped: Losses = {}
    if kinds:
        kept = planned.store(0).beside("drops", without=("choices", "skip", "where"))
        with evaluating(model):
            probes = windows(batches, method.tokens)
            dropped = measure_drops(model, batches, probes, kinds, planned.device, kept)
        for kind, losses in dropped.items():
            if odd := [index for index, loss in losses.items() if not isfinite(loss)]:
                raise ValueError(f"`drops`: without the {kind} of block {odd[0]}, predictions are no numbers")
    work = sharing_copy(model)
    split_all_experts(work)
    with evaluating(work):
        layers = method.candidates(work, batches, Context(planned.device, planned.store(0)))
    if idle := [name for name, layer in layers.items() if not any(choice.loss for choice in layer.choices.values())]:
        warnings.warn(
            f"{len(idle)} layers, of which {idle[0]} is the first, lose nothing by any choice, as experts do that no "
            f"measured token reaches: the search gives them the fewest bits; more than {method.tokens} tokens may "
            "reach them",
            stacklevel=2,
        )
    if lost := next((name for name, layer in layers.items() if not layer.choices), ""):
        raise ValueError(f"`choices`: none can store {lost} together with the linears that read the same input")
    shapes = targets(work, method.skip, method.where)
    ends = {} if method.where == "blocks" else end_targets(work, method.skip)
    parts = parts_of_layers(work, layers, dropped)
    layers = with_drops(layers, dropped, parts)
    for name, layer in layers.items():
        if odd := next((text for text, one in layer.choices.items() if not isfinite(one.loss)), ""):
            raise ValueError(
                f"`choices`: with {odd} for {name}, predictions are no numbers ({layer.choices[odd].loss})"
            )
    return Library(
        method=method,
        layers=layers,
        beside=bytes_beside(work, shapes),
        weights={name: sum(prod(shapes[member]) for member in layer.members) for name, layer in layers.items()},
        ends=tuple(ends),
        head=head if (head := find_ends(work).head) in ends else None,
        parts=parts,
    )


def same_choices(method: Mixed, model: nn.Module) -> bool:
    """Whether all linears inside the blocks can have the same choices."""
    inside = [one for one in method.methods.values() if "blocks" in one.places]
    shapes = targets(model, method.skip)
    return all(takes(one, name, shape) for name, shape in shapes.items() for one in inside)


def measure_times(
    method: Mixed,
    model: PreTrainedModel,
    timer: Timer,
    *,
    batches: Sequence[Tensor] = (),
    kinds: Sequence[str] = (),
    device: str | None = None,
) -> Times:
    """Time the original and a model for every choice of `mixed`, in the same turns; or the original alone, if a search
    for the same shapes and choices, on the same machine and with the same kernels, has measured their ratios before.
    For every kind of part that may be left out, a model without a quarter of them is timed; the time that is kept is
    that of a model without one of them.

    Raises:
        ValueError: the timer gave no speed for a model.
    """
    texts = [*method.methods, *map(text_of, kinds)]
    kept = cache_folder("search") / f"times-{_circumstances(texts, method.skip, model, timer)}.json"
    found = None
    with suppress(OSError, ValueError):
        found = json.loads(kept.read_text(encoding="utf-8"))
    if isinstance(found, dict) and all(found.get(phase, {}).keys() == set(texts) for phase in PHASES):
        return Times(timer({ORIGINAL: model})[ORIGINAL], *(found[phase] for phase in PHASES), earlier=True)
    thin = {text_of(kind): thinner(model, kind, batches, device) for kind in kinds}
    made = {text: _uniform(model, one, method) for text, one in method.methods.items()}
    rates = timer({ORIGINAL: model, **made, **{text: one for text, (one, _) in thin.items()}})
    if odd := next((name for name, both in rates.items() if not all(0 < rate < float("inf") for rate in both)), ""):
        raise ValueError(f"`timer` gave {rates[odd]} for {odd}, which are no tokens per second")
    decode, prefill = rates[ORIGINAL]
    lacks = {text: count for text, (_, count) in thin.items()}
    times = Times(
        (decode, prefill),
        {text: 1 + (decode / rates[text][0] - 1) / lacks.get(text, 1) for text in texts},
        {text: 1 + (prefill / rates[text][1] - 1) / lacks.get(text, 1) for text in texts},
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(json.dumps({phase: getattr(times, phase) for phase in PHASES}), kept)
    return times


def _circumstances(texts: Sequence[str], skip: str, model: PreTrainedModel, timer: Timer) -> str:
    """A hash of what times depend on: the model's shapes, the choices, the machine, its threads, kernels and timing."""
    device = device_of(model)
    card = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else native.why_not() or native.isa(torch.bfloat16)
    )
    machine = platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), str(device), card
    shapes = list(targets(model, where="all").items())  # of a model whose config does not tell what was dropped
    asked = model.config.to_json_string(), shapes, texts, skip, getattr(timer, "keywords", {})
    code = code_sha256(KERNELS, KERNELS.parent / "eval" / "speed", Path(__file__).parent)
    return hashlib.sha256(json.dumps([*asked, machine, torch.__version__, code], default=str).encode()).hexdigest()[:16]


def _uniform(model: PreTrainedModel, method: LayerwiseMethod, mixed: Mixed) -> PreTrainedModel:
    """The model with this choice for all layers that can have it: only its shapes and formats are right, not its
    weights, each of which is solved once and copied to the other blocks."""
    copied, made = sharing_copy(model), dict[tuple, CompressedLinear]()
    split_all_experts(copied)
    ends = end_targets(copied, mixed.skip)
    prefix, _ = find_blocks(copied)
    for name, shape in targets(copied, mixed.skip, mixed.where).items():
        if ("embedding" if name in ends else "blocks") not in method.places or not takes(method, name, shape):
            continue
        kind = name.removeprefix(prefix).lstrip(".").partition(".")[2], shape
        if name in ends or kind not in made:
            made[kind] = _unsolved(name, copied.get_submodule(name), method, end=name in ends)
            new = made[kind]
        else:
            new = copy.deepcopy(made[kind])
        if name in ends:
            store_end(copied, name, new)
        else:
            replace(copied, name, new)
    return copied


def _unsolved(name: str, linear: nn.Module, method: LayerwiseMethod, *, end: bool) -> CompressedLinear:
    """A linear, the embedding or the head (an `end`) as a method stores it, without calibration."""
    device = device_of(linear)
    if end:
        columns = linear.weight.shape[1]
        return solve_end(
            linear, name, None, Collector(name, method.statistics, columns, device).result(), method, device
        )[0]
    W = weight_of(linear)
    return stored_as(name, linear, W, Collector(name, method.statistics, W.shape[1], device).result(), method)
