"""Width pruning: remove the units of every MLP, or the groups of heads of every attention layer, that add least to the
residual stream; what is left is a plain model of a smaller config."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from compress.dropped import parts_of
from compress.linear import is_linear, shape_of, weight_of
from compress.method import knob
from compress.smaller import Chosen, UnitDrop
from compress.walk.blocks import find_blocks
from compress.walk.capture import advance, block_calls, device_of, on_device
from compress.walk.experts import SplitExperts, is_fused_experts
from compress.walk.parallel.ranks import progress_bar
from kernels.linear import fast_linear

PARTS = {"mlp": "mlp", "heads": "attention"}  # by target, the part of a block that gets narrower
KINDS = {"mlp": "units", "heads": "heads"}  # in records
METRICS = ("activation", "taylor")
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ffn_intermediate_size")


@dataclass(frozen=True)
class Units:
    """The places of a part's units in its linears.

    name: of the part of the block. rows: by name of a linear in the block, its outputs [units, n] that belong to each
    unit. consumer: the name of the linear that reads the units, and makes the output of the part. columns: its inputs
    [units, n] of each unit.
    """

    name: str
    rows: Mapping[str, Tensor]
    consumer: str
    columns: Tensor

    @property
    def count(self) -> int:
        return len(self.columns)


@dataclass(frozen=True, kw_only=True)
class Width(UnitDrop):
    """Removes units of MLPs or groups of heads, as many in each block, so that the model has a smaller config."""

    name: ClassVar[str] = "width"
    source: ClassVar[str] = "arXiv:2407.14679 (activation); arXiv:1906.10771 (taylor)"
    mistaken: ClassVar[str] = "lie in another order than they were taken for"

    target: str = knob(
        "mlp",
        "what gets narrower: the inner layer of MLPs (mlp), or attention, by a key-value head with its query heads "
        "(heads)",
        choices=tuple(PARTS),
        describes=True,
    )
    ratio: float = knob(0.25, "share of the units that is removed", range=(0, 1), describes=True)
    metric: str = knob(
        "activation",
        "importance of a unit: the size of what it adds to the residual stream (activation), or the change of the loss "
        "without it, from gradients (taylor)",
        choices=METRICS,
    )
    multiple: int = knob(
        32, "the units of MLPs that stay are a multiple of this number, which groups of weights divide", range=(1, 4096)
    )

    def check(self, model: nn.Module) -> None:
        if self.metric == "taylor" and model.dtype == torch.float16:
            raise ValueError(
                f"`metric` (='taylor') of {self.name}: most gradients are 0 in float16; load the model in float32 or "
                "bfloat16, or take metric='activation'"
            )
        super().check(model)

    def check_run(self, model: nn.Module, batches: Sequence[Tensor], device: torch.device, processes: int) -> None:
        if self.metric == "taylor" and device.type != device_of(model).type:
            raise ValueError(
                f"`device` (={str(device)!r}): metric='taylor' of {self.name} takes gradients of the whole model where "
                f"it lies, on {device_of(model)}: load it on the other device, or take metric='activation'"
            )

    @property
    def kind(self) -> str:
        return KINDS[self.target]

    @property
    def refused(self) -> str:
        return f"`target` (={self.target!r}) of {self.name}"

    def trains(self, longest: int) -> tuple[str, int] | None:
        return ("model", longest) if self.metric == "taylor" else None

    def own_passes(self) -> str:
        return f"how much each unit of the {PARTS[self.target]} matters"

    def importance(
        self, model: nn.Module, units: Mapping[int, Units], batches: Sequence[Tensor], device: torch.device
    ) -> dict[int, Tensor]:
        measure = _by_gradients if self.metric == "taylor" else _by_activations
        return measure(model, units, batches, device)

    def masked(self, model: nn.Module, units: Mapping[int, Units], chosen: Chosen) -> AbstractContextManager:
        return _zeroed(model, units, chosen)

    def left(self, model: nn.Module, count: int) -> int:
        step = self.multiple if self.target == "mlp" else 1
        left = round(count * (1 - self.ratio) / step) * step
        if not 0 < left < count:
            what = "units" if self.target == "mlp" else "groups of heads"
            shown = f"in multiples of {step}" if step > 1 else "at least 1"
            raise ValueError(
                f"`ratio` (={self.ratio:g}) of {self.name} would leave {left} of {count} {what}: some must go, and "
                f"some must stay, {shown}" + (" (`multiple`)" if step > 1 else "")
            )
        return left

    def units(self, model: nn.Module) -> dict[int, Units]:
        """By number of the block, the units of its part; blocks whose part was dropped have none.

        Raises:
            ValueError: they are not known, or differ in number.
        """
        _, blocks = find_blocks(model)
        units: dict[int, Units] = {}
        for index, block in enumerate(blocks):
            if names := parts_of(block)[PARTS[self.target]]:
                find = _of_mlp if self.target == "mlp" else _of_heads
                try:
                    units[index] = find(model, block, names)
                except _Unknown as reason:
                    raise ValueError(f"{self.refused}: block {index} of {type(model).__name__} {reason}") from None
        if not units:
            raise ValueError(f"{self.refused}: no block of {type(model).__name__} has such a part")
        if len(counts := {its.count for its in units.values()}) > 1:
            raise ValueError(
                f"{self.refused}: the blocks of {type(model).__name__} have {', '.join(map(str, sorted(counts)))} "
                "units, and must have equally many"
            )
        return units

    def _settings(self, model: nn.Module, units: Mapping[int, Units], keep: int) -> dict[str, int]:
        """The settings of the config that change."""
        config, count = model.config.get_text_config(), units[min(units)].count
        if self.target == "heads":
            groups = config.num_attention_heads // count
            both = {"num_attention_heads": keep * groups, "num_key_value_heads": keep, "head_dim": _head_dim(model)}
            return {key: value for key, value in both.items() if key != "num_key_value_heads" or hasattr(config, key)}
        names = [key for key in WIDTHS if getattr(config, key, None) == count]
        return dict.fromkeys(names or ["n_inner"], keep)  # GPT-2 derives it from the width of the stream

    def cut(self, model: nn.Module, smaller: nn.Module, units: Mapping[int, Units], chosen: Chosen) -> dict[str, int]:
        blocks = find_blocks(smaller)[1]
        for index, its in units.items():
            for name, rows in its.rows.items():
                _slice(blocks[index].get_submodule(name), rows[chosen[index]].flatten().sort().values, None)
            columns = its.columns[chosen[index]].flatten().sort().values
            _slice(blocks[index].get_submodule(its.consumer), None, columns)
        return self._settings(model, units, len(next(iter(chosen.values()))))


class _Unknown(Exception):
    """Why the units of a part are not known."""


def _of_mlp(model: nn.Module, block: nn.Module, names: Sequence[str]) -> Units:
    """Unit i of an MLP: rows i of its first linears (gate and up, which may be one weight), column i of the last."""
    linears, stream = _linears(block, names), model.config.get_text_config().hidden_size
    last = [name for name, module in linears.items() if shape_of(module)[0] == stream]
    if len(linears) < 2 or not last:
        raise _Unknown("has no linear that makes the output of its MLP from another one's")
    consumer, inner = last[-1], shape_of(linears[last[-1]])[1]
    rows = {}
    for name, module in linears.items():
        out = shape_of(module)[0]
        if name != consumer and out not in (inner, 2 * inner):
            raise _Unknown(f"has a {name} of {out} outputs in its MLP, beside a width of {inner}")
        if name != consumer:
            rows[name] = torch.arange(out).view(-1, inner).T
    return Units(", ".join(names), rows, consumer, torch.arange(inner)[:, None])


def _of_heads(model: nn.Module, block: nn.Module, names: Sequence[str]) -> Units:
    """Group g of attention: head g of keys and values, its heads of queries, and the columns that read these."""
    config, size = model.config.get_text_config(), _head_dim(model)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise _Unknown(f"has {heads} heads of queries and {groups} of keys")
    linears = _linears(block, names)
    last = [n for n, m in linears.items() if shape_of(m) == (config.hidden_size, heads * size)]
    if not last:
        raise _Unknown(f"has no linear that reads {heads} heads of {size} values")
    consumer, queries = last[-1], torch.arange(heads * size).view(groups, -1)
    keys = torch.arange(groups * size).view(groups, -1)
    fused = torch.cat([queries, heads * size + keys, (heads + groups) * size + keys], 1)
    known = {fused.numel(): fused, queries.numel(): queries, keys.numel(): keys}
    rows = {name: known.get(shape_of(module)[0]) for name, module in linears.items() if name != consumer}
    for name, its in rows.items():
        if its is None:
            raise _Unknown(f"has a {name} in its attention that is not queries, keys or values of {size} each")
    return Units(", ".join(names), rows, consumer, queries)


def _linears(block: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The linears of these children of a block, by name in it."""
    found = {}
    for name, module in block.named_modules():
        if not any(name == part or name.startswith(f"{part}.") for part in names):
            continue
        if is_fused_experts(module) or isinstance(module, SplitExperts):
            raise _Unknown("has a mixture of experts in place of an MLP")
        if is_linear(module):
            found[name] = module
    return found


def _head_dim(model: nn.Module) -> int:
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _slice(module: nn.Module, rows: Tensor | None, columns: Tensor | None) -> None:
    """Keep these outputs or these inputs of a linear; its tensors are new ones."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        kept = parameter.detach()
        if name == "bias":
            kept = kept if rows is None else kept[rows.to(kept.device)]
        else:
            kept = kept.T if isinstance(module, Conv1D) else kept
            kept = kept[rows.to(kept.device)] if columns is None else kept[:, columns.to(kept.device)]
            kept = kept.T if isinstance(module, Conv1D) else kept
        setattr(module, name, nn.Parameter(kept.contiguous(), parameter.requires_grad))


@contextmanager
def _zeroed(model: nn.Module, units: Mapping[int, Units], chosen: Mapping[int, Tensor]) -> Iterator[None]:
    """While the context lasts, the columns of units that are not chosen are 0."""
    _, blocks = find_blocks(model)
    with ExitStack() as undo:
        for index, its in units.items():
            module = blocks[index].get_submodule(its.consumer)
            undo.callback(setattr, module, "weight", module.weight)
            zeroed = module.weight.detach().clone()
            gone = torch.ones(its.count, dtype=torch.bool).index_fill_(0, chosen[index], False)
            (zeroed if isinstance(module, Conv1D) else zeroed.T)[its.columns[gone].flatten()] = 0
            module.weight = nn.Parameter(zeroed, requires_grad=False)
        yield


@torch.no_grad()
def _by_activations(
    model: nn.Module, units: Mapping[int, Units], batches: Sequence[Tensor], device: torch.device
) -> dict[int, Tensor]:
    """For each unit, Σ over its columns of a² * ||W[:, column]||²: the squared size of what it adds to the residual
    stream over all tokens, if its columns are taken to be independent."""
    _, blocks = find_blocks(model)
    calls, scores = block_calls(model, blocks, batches), {}
    with fast_linear():
        for index, block in enumerate(progress_bar(blocks, desc="importance of units", unit="block")):
            with on_device(block, device):
                if index not in units:
                    advance(block, calls, index, device)
                    continue
                consumer, total = block.get_submodule(units[index].consumer), 0.0

                def add(_, args):
                    nonlocal total
                    total = total + args[0].flatten(0, -2).float().square().sum(0)

                handle = consumer.register_forward_pre_hook(add)
                try:
                    advance(block, calls, index, device)
                finally:
                    handle.remove()
                size = weight_of(consumer).square().sum(0)
                scores[index] = (total * size).cpu()[units[index].columns].sum(1)
    return scores


def _by_gradients(
    model: nn.Module, units: Mapping[int, Units], batches: Sequence[Tensor], device: torch.device
) -> dict[int, Tensor]:
    """For each unit, Σ over windows of (Σ a ∂loss/∂a)²: the squared change of the loss without it, to first order."""
    _, blocks = find_blocks(model)
    scores = {index: torch.zeros(its.count) for index, its in units.items()}
    window: dict[int, Tensor] = {}

    def hook(index: int):
        def add(_, args):
            a = args[0]
            a.register_hook(lambda g: window.update({index: (a.detach() * g).flatten(0, -2).float().sum(0).cpu()}))

        return add

    with ExitStack() as undo:
        for index, its in units.items():
            handle = blocks[index].get_submodule(its.consumer).register_forward_pre_hook(hook(index))
            undo.callback(handle.remove)
        leaf = model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
        undo.callback(leaf.remove)
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        for parameter, flag in flags:
            parameter.requires_grad_(False)
            undo.callback(parameter.requires_grad_, flag)
        for batch in progress_bar(batches, desc="importance of units", unit="window"):
            ids = batch.to(device_of(model))
            with torch.enable_grad():
                logits = model(ids, use_cache=False).logits[0, :-1].float()
                cross_entropy(logits, ids[0, 1:]).backward()
            for index, its in units.items():
                scores[index] += window[index][its.columns].sum(1).square()
    return scores
