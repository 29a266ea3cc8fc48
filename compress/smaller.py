"""The config of a model that has lost some of its parts, whether a model of that config would be the same, and the base
of methods that drop units of every block."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from compress.linear import CompressedLinear, compressed_linears, is_linear, parameter_count, shape_of, sharing_copy
from compress.method import Method
from compress.walk.blocks import find_blocks
from compress.walk.context import Context
from compress.walk.experts import SplitExperts, is_fused_experts
from compress.walk.finite import NotFinite
from compress.walk.folds import checks
from compress.walk.offload import empty_weights, is_offloaded
from eval.record.compression import DropRecord
from kernels.support.errors import first_line

NUMBERS = ("layer_idx", "layer_id")  # attributes in which the modules of a block keep its number
PLAIN = (int, float, bool, str, type(None))
Chosen = Mapping[int, Tensor]  # by number of a block, the numbers of its units that stay


@dataclass(frozen=True, kw_only=True)
class UnitDrop(Method):
    """Removes the least important units of every block that has such units, so that the model has a smaller config.

    Subclasses say which units there are, how important each is, how units that are not chosen lose their effect, and
    how they are cut out of a copy of the model.
    """

    stage: ClassVar[str] = "drop"
    needs_calibration: ClassVar[bool] = True
    routed: ClassVar[bool] = False  # rounding may send a few tokens another way
    kind: ClassVar[str]  # of the units, in records
    refused: ClassVar[str]  # the beginning of errors that refuse a model
    mistaken: ClassVar[str]  # what is wrong with units if the smaller model does not compute as the masked one
    # (model): by number of the block, its units, with their `count` and the `name` of their part of the block.
    units: ClassVar[Callable[..., Mapping[int, Any]]]
    # (model, count): the number of units of `count` that stay; ValueError if none would go, or too few would stay.
    left: ClassVar[Callable[..., int]]
    # (model, units, batches, device): by number of the block, the importance [count] of its units.
    importance: ClassVar[Callable[..., dict[int, Tensor]]]
    # (model, units, chosen): while the context lasts, units that are not chosen have no effect.
    masked: ClassVar[Callable[..., AbstractContextManager]]
    # (model, smaller, units, chosen): cuts them out of a copy of the model; the settings of the config that change.
    cut: ClassVar[Callable[..., dict[str, Any]]]

    def check(self, model: nn.Module) -> None:
        if is_offloaded(model):
            raise ValueError(f"`weights` (='disk'): {self.name} needs the model in memory: weights='memory'")
        if stored := next(iter(compressed_linears(model)), ""):
            raise ValueError(
                f"`model` holds {stored} compressed already, and {self.name} removes parts of plain weights"
            )
        self.outline(of_settings(model, {}))

    def outline(self, model: nn.Module) -> None:
        units = self.units(model)
        self._keep(model, units, {i: torch.arange(self.left(model, its.count)) for i, its in units.items()})

    @torch.no_grad()
    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[DropRecord]:
        units, (prefix, blocks) = self.units(model), find_blocks(model)
        scores = self.importance(model, units, batches, context.device)
        if not all(own.isfinite().all() for own in scores.values()):
            raise NotFinite(f"the importance of some {self.kind} is NaN or infinite")
        chosen = {i: own.topk(self.left(model, len(own))).indices.sort().values for i, own in scores.items()}
        before = [parameter_count(block) for block in blocks]
        with self.masked(model, units, chosen):
            wanted = checks.logits_of(model)
        self._keep(model, units, chosen)
        error = checks.difference(checks.logits_of(model), wanted, routed=self.routed and model.dtype != torch.float32)
        if not error <= 10 * checks.tolerance(model):
            raise ValueError(
                f"{self.refused}: the {self.kind} of {type(model).__name__} {self.mistaken} (its logits differ by "
                f"{error:.1e} of their length from those of the model in which the others have no effect); the model "
                "is as it was"
            )
        return [
            DropRecord(
                name=f"{prefix}.{i}.{units[i].name}",
                kind=self.kind,
                block=i,
                importance=1 - (scores[i][kept].sum() / scores[i].sum().clamp_min(1e-30)).item(),
                order=1,
                parameters=before[i] - parameter_count(find_blocks(model)[1][i]),
                left=len(kept),
                of=len(scores[i]),
            )
            for i, kept in chosen.items()
        ]

    def _keep(self, model: nn.Module, units: Mapping[int, Any], chosen: Chosen) -> None:
        """Give the model modules with these units alone, and its config their numbers. All modules are new ones."""
        smaller = sharing_copy(model)
        if problem := become(model, smaller, self.cut(model, smaller, units, chosen)):
            raise ValueError(
                f"{self.refused}: no config of {type(model).__name__} describes the smaller model: {problem}"
            )


def without_blocks(model: nn.Module, gone: Set[int]) -> dict[str, Any]:
    """The settings of the config of a model's decoder after blocks are removed, those that change.

    A model is built from them, without memory for its weights, and compared with the remaining one: settings may give
    the kinds of blocks by lists, by intervals, or counted from the last block. The model is not changed.

    Raises:
        ValueError: a model of the changed config would be another one.
    """
    config, reason = model.config.get_text_config(), ""
    for lists in _lists_by_block(config):
        settings: dict[str, Any] = {
            key: [value for index, value in enumerate(vars(config)[key]) if index not in gone] for key in lists
        }
        settings["num_hidden_layers"] = len(find_blocks(model)[1]) - len(gone)
        problem = _problem(model, settings, gone)
        if not problem:
            return settings
        reason = reason or problem
    shown = ", ".join(map(str, sorted(gone)))
    raise ValueError(
        f"`model` ({type(model).__name__}): its config cannot describe it without the blocks {shown}: {reason}; other "
        "blocks (`layers`), or attention or mlp as `target`, may do"
    )


def _lists_by_block(config: PreTrainedConfig) -> Iterator[list[str]]:
    """Choices of the config's lists that have one entry per block, such as `layer_types`, the likely one first.

    They are the lists whose length in the config's class follows the number of blocks, also for deeper models. Where
    this does not suffice, one other list of names has its length for the same reason.
    """
    depth, key = config.num_hidden_layers, config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == depth}
    try:
        deeper = {more: vars(type(config)(**{key: more})) for more in (depth + 1, depth + 2)}
    except Exception:  # a class that needs more than a depth makes no such lists itself
        deeper = {}

    def follows(name: str) -> bool:
        others = ((one.get(name), more) for more, one in deeper.items())
        return bool(deeper) and all(isinstance(other, list) and len(other) == more for other, more in others)

    known = [name for name in lists if follows(name)]
    yield known
    for name, value in lists.items():
        if name not in known and all(isinstance(one, str) for one in value):
            yield [*known, name]


def of_settings(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """A model of a changed config, on the meta device; the given model is not changed.

    Args:
        settings: those of the config of its decoder that change.

    Raises:
        ValueError: there is no model of these settings.
    """
    whole = copy.deepcopy(model.config)
    try:
        for key, value in settings.items():
            setattr(whole.get_text_config(), key, value)
        with tempfile.TemporaryDirectory() as folder:
            whole.save_pretrained(folder)
            saved = type(whole).from_pretrained(folder)
        with empty_weights():
            return type(model)(saved)
    except Exception as error:  # configs and models of other authors check themselves in many ways
        raise ValueError(f"no {type(model).__name__} can be built from its config: {first_line(error)}") from error


def _problem(model: nn.Module, settings: dict[str, Any], gone: Set[int]) -> str:
    """The first difference between a model and one that is built from a changed config; "" if there is none."""
    try:
        built = of_settings(model, settings)
    except ValueError as error:
        return str(error)
    prefix, blocks = find_blocks(model)
    theirs = find_blocks(built)[1]
    left = [index for index in range(len(blocks)) if index not in gone]
    if len(theirs) != len(left):
        return f"it would have {len(theirs)} blocks"
    for block, index in zip(theirs, left, strict=True):
        if problem := difference(blocks[index], block, f"{prefix}.{index}"):
            return problem
    return difference(model, built, "", leave=prefix)


def adopt(ours: nn.Module, theirs: nn.Module) -> None:
    """Give the modules of a model the numbers, names and flags of those of another one that have the same names."""
    others = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        if type(other := others.get(name)) is type(module):
            vars(module).update({k: v for k, v in plain(other).items() if k in vars(module)})


def become(model: nn.Module, smaller: nn.Module, settings: dict[str, Any]) -> str:
    """Give a model the modules of a copy of it that has become smaller, and its config the settings that describe it.

    Returns:
        "", or the reason why no config describes it, after which the model is as it was.
    """
    try:
        skeleton = of_settings(model, settings)
    except ValueError as error:
        return str(error)
    adopt(smaller, skeleton)
    if problem := difference(smaller, skeleton):
        return problem
    own = {id(smaller.config): model.config, id(smaller.config.get_text_config()): model.config.get_text_config()}
    for name, child in smaller.named_children():
        setattr(model, name, child)
    for module in model.modules():
        for key, value in vars(module).items():
            vars(module)[key] = own.get(id(value), value)
    adopt(model, skeleton)
    for key, value in settings.items():
        setattr(model.config.get_text_config(), key, value)
    return ""


def difference(ours: nn.Module, theirs: nn.Module, name: str = "", *, leave: str = "") -> str:
    """The first difference of two modules in their kinds, shapes and plain attributes; "" if there is none.

    Args:
        leave: the name of a module that is not compared.
    """
    if name and name == leave or _stands_for(ours, theirs):
        return ""
    if type(ours) is not type(theirs):
        return f"{name or 'it'} would be a {type(theirs).__name__}, not a {type(ours).__name__}"
    shapes = [_shapes(module, with_buffers=not leave) for module in (ours, theirs)]
    for key in sorted(shapes[0].keys() | shapes[1].keys()):
        if shapes[0].get(key) != shapes[1].get(key):
            return f"{name}.{key} would have the shape {shapes[1].get(key)}, not {shapes[0].get(key)}"
    own, other = (plain(module) if not leave else {} for module in (ours, theirs))
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            return f"{name}.{key} would be {other.get(key)}, not {own.get(key)}"
    if missing := sorted(set(ours._modules) ^ set(theirs._modules)):
        return f"{name}.{missing[0]} would be in one of them alone"
    for child, module in theirs._modules.items():
        if module is None or ours._modules[child] is None:
            continue
        inner = f"{name}.{child}".removeprefix(".")
        if problem := difference(ours._modules[child], module, inner, leave=leave):
            return problem
    return ""


def _shapes(module: nn.Module, *, with_buffers: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's own weights, and of its stored buffers."""
    stored = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
    tensors = module._parameters | (stored if with_buffers else {})
    return {key: tuple(tensor.shape) for key, tensor in tensors.items() if tensor is not None}


def plain(module: nn.Module) -> dict[str, Any]:
    """The numbers, names and flags that a module keeps for itself, without its number and that of all blocks."""
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, PLAIN)
        and not key.startswith("_")
        and key not in (*NUMBERS, "num_hidden_layers", "training")
    }


def _stands_for(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether a module is a changed form of the other one: a compressed weight, split experts, or a dropped part."""
    if isinstance(ours, CompressedLinear) and is_linear(theirs):
        return shape_of(ours) == shape_of(theirs)
    changed = type(ours).__module__.partition(".")[0] == "compress"
    return changed and (not isinstance(ours, SplitExperts) or is_fused_experts(theirs))
