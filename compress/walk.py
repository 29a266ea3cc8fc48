"""The one loop over a model's blocks: capture, statistics, solve, swap, propagate. Every layerwise method runs in it.

One block at a time lies on the compute device. The inputs of the first block are caught as the model makes them, with
the masks and positions that it passes to each block; from there every block is run by itself, its outputs becoming the
inputs of the next, so that each sees what the compressed blocks before it give.
"""

import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.formats import Format
from compress.linear import CompressedLinear, is_linear, replace, shape_of, weight_of
from compress.method import LayerRecord, LayerwiseMethod, Method
from compress.resume import BlockStore
from compress.statistics import STATISTICS, LayerStatistics, Statistic
from kernels.linear import fast_linear

MICRO_BATCH_TOKENS = 2048  # tokens that go through a block at once


class _Stop(Exception):
    """Ends a forward pass when what was wanted from it has been seen."""


@dataclass
class Call:
    """One micro-batch on its way through the blocks."""

    hidden: Tensor  # [batch, T, hidden], the input of the block to come
    arguments: list[tuple[tuple, dict]] = field(default_factory=list)  # per block, what else the model passes


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's blocks: the outermost ModuleList that holds the most parameters."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise ValueError(f"`model` ({type(model).__name__}) has no list of blocks: only decoders of blocks can be walked")
    return max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()) + sum(b.numel() for b in pair[1].buffers()))


def targets(model: nn.Module, method: LayerwiseMethod) -> dict[str, tuple[int, int]]:
    """Name and shape (out, in) of every linear that the method takes."""
    prefix, _ = find_blocks(model)
    linears = ((name, module) for name, module in model.named_modules() if is_linear(module))
    return {name: shape_of(module) for name, module in linears if not _reason_to_keep(model, prefix, name, module, method)}


def kept_weights(model: nn.Module, recipe: Sequence[Method]) -> list[dict[str, Any]]:
    """Every parameter that no method took: {name, shape, bytes, reason}."""
    prefix, _ = find_blocks(model)
    layerwise = [method for method in recipe if isinstance(method, LayerwiseMethod)]
    kept = []
    for name, parameter in model.named_parameters():
        owner_name = name.rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        reasons = (_reason_to_keep(model, prefix, owner_name, owner, method) for method in layerwise)
        reason = next(filter(None, reasons), "no method of the recipe takes it")
        kept.append({"name": name, "shape": list(parameter.shape), "bytes": parameter.nbytes, "reason": reason})
    return kept


def _reason_to_keep(model: nn.Module, prefix: str, name: str, module: nn.Module, method: LayerwiseMethod) -> str:
    if not is_linear(module):
        return f"not a linear ({type(module).__name__})"
    if not name.startswith(prefix + "."):
        return "outside the blocks"
    if any(fnmatch.fnmatch(name, pattern.strip()) for pattern in method.skip.split(",") if pattern.strip()):
        return f"named by skip ({method.skip})"
    experts = (getattr(model.config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return "routes tokens to experts" if shape_of(module)[0] in experts else ""


@torch.no_grad()
def walk(
    model: nn.Module, method: LayerwiseMethod, batches: Sequence[Tensor], *, device: torch.device, store: BlockStore | None = None
) -> list[LayerRecord]:
    """Let `method` solve every linear inside the blocks, and put what it stores in their place.

    With no batches nothing is propagated, and errors are those of the weights.
    """
    prefix, blocks = find_blocks(model)
    chosen = targets(model, method)
    calls = block_calls(model, blocks, batches)
    records: list[LayerRecord] = []
    progress = tqdm(range(len(blocks)), desc=method.name, unit="block")
    for index in progress:
        block, home = blocks[index], _device_of(blocks[index])
        block.to(device)
        done = store.load(index) if store else None
        if done is None:
            own = [name for name in chosen if name.startswith(f"{prefix}.{index}.")]
            done = _solve_block(model, index, own, calls, method, device, progress)
            if store:
                store.save(index, *done)
        else:
            progress.set_postfix_str("finished before")
        for name, linear in done[0].items():
            replace(model, name, linear.to(device))
        records += done[1]
        if index + 1 < len(blocks):
            progress.set_postfix_str("propagate")
            with _dense_weights(block):
                for call in calls:
                    call.hidden = _run(block, call, index, device).to(call.hidden.device)
        block.to(home)
    return records


def _solve_block(
    model: nn.Module, index: int, names: list[str], calls: list[Call], method: LayerwiseMethod, device: torch.device,
    progress: tqdm,
) -> tuple[dict[str, CompressedLinear], list[LayerRecord]]:  # fmt: skip
    block = find_blocks(model)[1][index]
    linears = {name: model.get_submodule(name) for name in names}
    groups, once = input_groups(block, linears, calls, index, device)
    stages = [[group] for group in groups] if method.sequential else [groups]
    needs = tuple(dict.fromkeys((*method.statistics, "gram")))  # gram: every error is measured on the same footing
    swapped: dict[str, CompressedLinear] = {}
    records = {}
    for stage in stages:
        progress.set_postfix_str("statistics")
        statistics = _collect(block, linears, stage, calls, index, needs, device, stop_early=once)
        for name, own in statistics.items():
            progress.set_postfix_str(name.split(".", 2)[-1])
            swapped[name], records[name] = _solve(name, linears[name], own, method)
            if method.sequential:
                replace(model, name, swapped[name])
    return swapped, [records[name] for name in names]


def _solve(
    name: str, linear: nn.Module, statistics: LayerStatistics, method: LayerwiseMethod
) -> tuple[CompressedLinear, LayerRecord]:
    start = time.perf_counter()
    W = weight_of(linear)
    parts = method.solve(W, statistics)
    seconds = time.perf_counter() - start
    peer = method.peer(W, statistics)
    new = CompressedLinear(parts, linear.bias, dtype=_dtype_of(linear), transform=getattr(linear, "transform", None))
    if not statistics.tokens:
        statistics.note("no calibration tokens: the error is that of the weights")
    record = LayerRecord(
        name=name,
        shape=(new.out_features, new.in_features),
        format="+".join(part.name for part in parts),
        bits_per_weight=new.bits_per_weight,
        error=_relative_error(W, parts, statistics),
        rtn_error=None if peer is None else _relative_error(W, peer, statistics),
        seconds=seconds,
        tokens=statistics.tokens,
        notes=tuple(statistics.notes),
    )
    return new, record


def _relative_error(W: Tensor, parts: Sequence[Format], statistics: LayerStatistics) -> float:
    """||(W - Ŵ)X||² / ||WX||², or of the weights alone where no token came by."""
    D = W - sum(part.dequantize() for part in parts)
    if not statistics.tokens:
        return (D.square().sum() / W.square().sum().clamp_min(1e-30)).item()
    H = statistics.values["gram"]
    return ((D @ H * D).sum() / (W @ H * W).sum().clamp_min(1e-30)).item()


def input_groups(
    block: nn.Module, linears: dict[str, nn.Module], calls: list[Call], index: int, device: torch.device
) -> tuple[list[list[str]], bool]:
    """Linears by the input that they read, in the order of the computation, found by running one micro-batch.

    Two linears share an input if they are given the same memory in the same pass. Also says whether each linear was
    called just once; experts that no token reached form groups of their own.
    """
    if not calls:
        return [[name] for name in linears], False
    inputs: list[tuple[str, Tensor]] = []  # held, so that no memory is used twice while we compare
    with _hooked(linears, lambda name, x: inputs.append((name, x))), fast_linear():
        _run(block, calls[0], index, device)
    groups: list[tuple[Tensor, list[str]]] = []
    called = [name for name, _ in inputs]
    for name, x in inputs:
        if any(name in members for _, members in groups):
            continue
        for leader, members in groups:
            if _same_memory(leader, x):
                members.append(name)
                break
        else:
            groups.append((x, [name]))
    never = [[name] for name in linears if name not in called]
    return [members for _, members in groups] + never, len(called) == len(set(called)) and not never


def _collect(
    block: nn.Module, linears: dict[str, nn.Module], groups: list[list[str]], calls: list[Call], index: int,
    needs: Sequence[str], device: torch.device, *, stop_early: bool,
) -> dict[str, LayerStatistics]:  # fmt: skip
    """Run every micro-batch and feed the statistics of each group once, from its first linear."""
    leader_of = {name: group[0] for group in groups for name in group}
    collected: dict[str, list[Statistic]] = {
        group[0]: [STATISTICS[need](shape_of(linears[group[0]])[1], device) for need in needs] for group in groups
    }
    tokens = dict.fromkeys(collected, 0)
    seen: dict[str, Tensor] = {}

    def on_input(name: str, x: Tensor) -> None:
        leader = leader_of[name]
        if name != leader:
            assert _same_memory(seen[leader], x), f"{name} and {leader} shared an input in one pass, not in another"
            return
        seen[name] = x
        rows = x.reshape(-1, x.shape[-1])
        tokens[name] += rows.shape[0]
        for statistic in collected[name]:
            statistic.update(rows)
        if stop_early and len(seen) == len(collected):
            raise _Stop

    with _hooked({name: linears[name] for name in leader_of}, on_input), _dense_weights(block):
        for call in calls:
            seen.clear()
            with suppress(_Stop):
                _run(block, call, index, device)
    result = {}
    for group in groups:
        values = {need: s.result() for need, s in zip(needs, collected[group[0]], strict=True)}
        first = LayerStatistics(tokens[group[0]], values)
        result.update({name: first if name == group[0] else first.for_another() for name in group})
    return result


def block_calls(model: nn.Module, blocks: nn.ModuleList, batches: Sequence[Tensor]) -> list[Call]:
    """Micro-batches with the arguments that the model gives to each block, as it makes them.

    Raises:
        ValueError: the batches give outputs that are not finite, or the blocks do not form a chain.
    """
    if not batches:
        return []
    as_tuple = _probe(model, blocks, batches[0])
    calls: list[Call] = []
    originals = list(blocks)
    latest: dict[tuple, Tensor] = {}
    try:
        for i, block in enumerate(originals):
            blocks[i] = _Recorder(block, calls, latest, as_tuple, first=i == 0, last=i == len(originals) - 1)
        for batch in micro_batches(batches):
            with suppress(_Stop):
                model(batch.to(_device_of(model)), use_cache=False)
    finally:
        for i, block in enumerate(originals):
            blocks[i] = block
    return calls


def micro_batches(batches: Sequence[Tensor]) -> list[Tensor]:
    """Stack neighbouring batches of equal length, up to MICRO_BATCH_TOKENS tokens."""
    stacked: list[list[Tensor]] = []
    for batch in batches:
        last = stacked[-1] if stacked else None
        if last and last[0].shape[1] == batch.shape[1] and (len(last) + 1) * batch.shape[1] <= MICRO_BATCH_TOKENS:
            last.append(batch)
        else:
            stacked.append([batch])
    return [torch.cat(group) for group in stacked]


class _Recorder(nn.Module):
    """Stands in a block's place, keeps what the model passes, and hands its input on."""

    def __init__(self, block: nn.Module, calls: list[Call], latest: dict, as_tuple: bool, *, first: bool, last: bool) -> None:
        super().__init__()
        object.__setattr__(self, "block", block)  # not a submodule: nothing may move or count it here
        self.calls, self.latest, self.as_tuple, self.first, self.last = calls, latest, as_tuple, first, last

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)

    def forward(self, *args, **kwargs):
        hidden, args, kwargs = _take_hidden(args, kwargs)
        if self.first:
            self.calls.append(Call(hidden))
        call = self.calls[-1]
        call.arguments.append((self._keep("args", args), self._keep("kwargs", kwargs)))
        if self.last:
            raise _Stop
        return (hidden,) if self.as_tuple else hidden

    def _keep(self, key, value):
        """The value, its tensors replaced by equal ones of the micro-batch before: masks and positions repeat."""
        if isinstance(value, Tensor):
            before = self.latest.get(key)
            if before is None or before.shape != value.shape or not torch.equal(before, value):
                self.latest[key] = value
            return self.latest[key]
        if isinstance(value, dict):
            return {k: self._keep((key, k), v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._keep((key, i), v) for i, v in enumerate(value))
        return value


def _probe(model: nn.Module, blocks: nn.ModuleList, batch: Tensor) -> bool:
    """One ordinary pass: are the outputs finite, is each block's output the next one's input; returns tuples?"""
    ends: list[tuple[Tensor, object]] = []

    def hook(module, args, kwargs, output):
        ends.append((_take_hidden(args, kwargs)[0], output))

    handles = [block.register_forward_hook(hook, with_kwargs=True) for block in blocks]
    try:
        logits = model(batch.to(_device_of(model)), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if not torch.isfinite(logits).all():
        raise ValueError("`batches`: the model's outputs on the first batch hold NaN or infinity; check the batch, the "
                         "model's weights, and its `dtype` (float16 overflows where bfloat16 does not)")  # fmt: skip
    for (_, output), (following, _) in zip(ends, ends[1:], strict=False):
        if not torch.equal(_first(output), following):
            raise ValueError("`model`: its blocks do not form a chain (a block's input is not the output of the one before)")
    return isinstance(ends[0][1], tuple)


def _run(block: nn.Module, call: Call, index: int, device: torch.device) -> Tensor:
    args, kwargs = _to(call.arguments[index], device)
    with fast_linear():
        return _first(block(call.hidden.to(device), *args, **kwargs))


def _to(value, device: torch.device):
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(v, device) for v in value)
    return value


def _take_hidden(args: tuple, kwargs: dict) -> tuple[Tensor, tuple, dict]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def _first(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a._version == b._version)


@contextmanager
def _hooked(linears: dict[str, nn.Module], on_input: Callable[[str, Tensor], None]) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(lambda _, args, name=name: on_input(name, args[0])) for name, m in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _dense_weights(block: nn.Module) -> Iterator[None]:
    """Dequantise the block's compressed linears once for many passes."""
    with ExitStack() as stack:
        for module in block.modules():
            if isinstance(module, CompressedLinear):
                stack.enter_context(module.dense())
        yield


def _device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def _dtype_of(linear: nn.Module) -> torch.dtype:
    return linear.dtype if isinstance(linear, CompressedLinear) else linear.weight.dtype
