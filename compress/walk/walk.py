"""The one loop over a model's blocks: capture, statistics, solve, swap, propagate. Every layerwise method runs in it.

One block at a time lies on the compute device. The inputs of the first block are caught as the model makes them, with
the masks and positions that it passes to each block; from there every block is run by itself, its outputs becoming the
inputs of the next, so that each sees what the compressed blocks before it give.
"""

import dataclasses
import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.formats import Format
from compress.linear import CompressedLinear, is_linear, replace, shape_of, weight_of
from compress.method import LayerRecord, LayerwiseMethod, Method
from compress.walk.capture import Call, Stop, block_calls, device_of, run_block, same_memory
from compress.walk.lockstep import run_in_step
from compress.walk.resume import BlockStore
from compress.walk.statistics import Collector, LayerStatistics
from kernels.linear import fast_linear


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's blocks: the outermost ModuleList that holds the most parameters."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise ValueError(
            f"`model` ({type(model).__name__}) has no list of blocks: only decoders of blocks can be walked"
        )
    return max(
        lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()) + sum(b.numel() for b in pair[1].buffers())
    )


def targets(model: nn.Module, method: LayerwiseMethod) -> dict[str, tuple[int, int]]:
    """Name and shape (out, in) of every linear that the method takes."""
    prefix, _ = find_blocks(model)
    linears = ((name, module) for name, module in model.named_modules() if is_linear(module))
    return {
        name: shape_of(module) for name, module in linears if not _reason_to_keep(model, prefix, name, module, method)
    }


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


def is_named(name: str, patterns: str) -> bool:
    """Does one of the comma-separated patterns (* and ?) match this name?"""
    return any(fnmatch.fnmatch(name, pattern.strip()) for pattern in patterns.split(",") if pattern.strip())


def _reason_to_keep(model: nn.Module, prefix: str, name: str, module: nn.Module, method: LayerwiseMethod) -> str:
    if not is_linear(module):
        return f"not a linear ({type(module).__name__})"
    if not name.startswith(prefix + "."):
        return "outside the blocks"
    if is_named(name, method.skip):
        return f"named by skip ({method.skip})"
    return "routes tokens to experts" if _routes(model, name, shape_of(module)[0]) else ""


def _routes(model: nn.Module, name: str, out: int) -> bool:
    """Is this linear a router, or the gate of a shared expert? Those sit beside experts and give one number for
    each."""
    config = model.config.get_text_config()
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if out not in {1, *(getattr(config, key, None) for key in keys)}:
        return False
    parent = name.rpartition(".")[0]
    return any(hasattr(model.get_submodule(p), "experts") for p in (parent, parent.rpartition(".")[0]))


@torch.no_grad()
def walk(
    model: nn.Module,
    method: LayerwiseMethod,
    batches: Sequence[Tensor],
    *,
    device: torch.device,
    store: BlockStore | None = None,
    originals: Mapping[str, nn.Module] | None = None,
) -> list[LayerRecord]:
    """Let `method` solve every linear inside the blocks, and put what it stores in their place.

    With no batches nothing is propagated, and errors are those of the weights; they are measured against `originals`
    where given.
    """
    prefix, blocks = find_blocks(model)
    chosen = targets(model, method)
    calls = block_calls(model, blocks, batches)
    records: list[LayerRecord] = []
    progress = tqdm(range(len(blocks)), desc=method.name, unit="block")
    for index in progress:
        block, home = blocks[index], device_of(blocks[index])
        done, passed_on = store.load(index) if store else None, False
        block.to(device)
        if done is None:
            own = {name: model.get_submodule(name) for name in chosen if name.startswith(f"{prefix}.{index}.")}
            try:
                linears, solved, passed_on = _solve_block(
                    model, prefix, index, own, originals or {}, calls, method, device, progress
                )
            except BaseException:
                block.to(home)
                raise
            done = linears, solved
            if store:
                store.save(index, *done)
        else:
            progress.set_postfix_str("finished before")
            done = (
                done[0],
                [dataclasses.replace(r, notes=(*r.notes, "solved by an earlier, interrupted run")) for r in done[1]],
            )
        for name, linear in done[0].items():
            replace(model, name, linear.to(device))
            if originals and name in originals:
                originals[name].to(home)
        records += done[1]
        if not passed_on and index + 1 < len(blocks):
            progress.set_postfix_str("propagate")
            with _dense_weights(block), fast_linear():
                for call in calls:
                    call.hidden = run_block(block, call, index, device).to(call.hidden.device)
        block.to(home)
    return records


def _solve_block(
    model: nn.Module,
    prefix: str,
    index: int,
    linears: dict[str, nn.Module],
    originals: Mapping[str, nn.Module],
    calls: list[Call],
    method: LayerwiseMethod,
    device: torch.device,
    progress: tqdm,
) -> tuple[dict[str, CompressedLinear], list[LayerRecord], bool]:
    """What stands for each linear of a block, their records, and whether the block's outputs were passed on with it."""
    blocks = model.get_submodule(prefix)
    # Every error is measured over the calibration tokens: over all by their Gram matrix, or over a sample of them.
    measure = () if "rows" in method.statistics else ("gram",)
    needs = tuple(dict.fromkeys((*method.statistics, *measure))) if calls else ()
    new: dict[str, CompressedLinear] = {}
    records: dict[str, LayerRecord] = {}
    notes: list[str] = []

    def solve(group: list[str], statistics: LayerStatistics) -> dict[str, CompressedLinear]:
        for name in group:
            progress.set_postfix_str(name.removeprefix(f"{prefix}.{index}."))
            own = statistics.for_another()
            own.notes += notes
            original = weight_of(originals[name]).to(device) if name in originals else None
            new[name], records[name] = _solve(name, linears[name], original, own, method)
        progress.set_postfix_str("statistics")
        return {name: new[name] for name in group}

    progress.set_postfix_str("statistics")
    with fast_linear():
        groups, once = input_groups(blocks[index], linears, calls, index, device)
        in_step = method.sequential and once and bool(calls)
        if in_step:
            following = index + 1 < len(blocks)
            run_in_step(model, blocks[index], index, linears, groups, calls, needs, device, solve, to_the_end=following)
        else:
            if method.sequential and calls:
                notes.append(
                    "solved beside the others of its block, not in sequence: some run more than once in a pass"
                )
            collectors = collect(blocks[index], linears, groups, calls, index, needs, device, stop_early=once)
            for group in groups:
                solve(group, collectors.pop(group[0]).result())
    return new, [records[name] for name in linears], in_step


def _solve(
    name: str, linear: nn.Module, original: Tensor | None, statistics: LayerStatistics, method: LayerwiseMethod
) -> tuple[CompressedLinear, LayerRecord]:
    start = time.perf_counter()
    W = weight_of(linear)
    statistics.name = name
    if isinstance(linear, CompressedLinear):
        statistics.stored = list(linear.parts)
    parts = method.solve(W, statistics)
    seconds = time.perf_counter() - start
    peer = method.peer(W, statistics)
    new = CompressedLinear(parts, linear.bias, dtype=_dtype_of(linear), transform=getattr(linear, "transform", None))
    if not statistics.tokens:
        statistics.note("no calibration tokens: the error is that of the weights")
    target = W if original is None else original
    reference = max(_energy(target, statistics), 1e-30)
    record = LayerRecord(
        name=name,
        shape=(new.out_features, new.in_features),
        format="+".join(part.name for part in parts),
        bits_per_weight=new.bits_per_weight,
        error=_error(target, new.parts, statistics) / reference,
        rtn_error=None if peer is None else _error(target, peer, statistics) / reference,
        seconds=seconds,
        tokens=statistics.tokens,
        notes=tuple(statistics.notes),
        sparsity=(new.dequantize() == 0).float().mean().item(),
    )
    return new, record


def _energy(D: Tensor, statistics: LayerStatistics) -> float:
    """||DX||² over the calibration tokens, or a sample of them, up to their number; ||D||² where no token came by."""
    if not statistics.tokens:
        return D.square().sum().item()
    if "rows" in statistics.values:
        return (statistics.values["rows"] @ D.t()).square().sum().item()
    return ((D @ statistics.values["gram"]) * D).sum().item()


def _error(W: Tensor, parts: Sequence[Format], statistics: LayerStatistics) -> float:
    """||WX - Y||² with Y what the stored parts give for X, counted as in `_energy`; with their rounding of X if it is
    at hand."""
    if statistics.tokens and "rows" in statistics.values and any(part.activation_bits for part in parts):
        rows = statistics.values["rows"]
        return (rows @ W.t() - sum(part.matmul(rows) for part in parts)).square().sum().item()
    return _energy(W - sum(part.dequantize() for part in parts), statistics)


def input_groups(
    block: nn.Module, linears: dict[str, nn.Module], calls: list[Call], index: int, device: torch.device
) -> tuple[list[list[str]], bool]:
    """Linears by the input that they read, in the order of the computation, found by running one micro-batch.

    Two linears share an input if they are given the same memory in the same pass. Also says whether no linear was
    called more than once. Experts that no token reached form groups of their own, in the places where they would have
    been reached.
    """
    if not calls:
        return [[name] for name in linears], True
    inputs: list[tuple[str, Tensor]] = []  # held, so that no memory is used twice while we compare
    with _hooked(linears, lambda name, x: inputs.append((name, x))):
        run_block(block, calls[0], index, device)
    called = [name for name, _ in inputs]
    repeated = {name for name in called if called.count(name) > 1}  # each by itself: its inputs are several
    found: list[tuple[Tensor, list[str]]] = []
    for name, x in inputs:
        if any(name in members for _, members in found):
            continue
        for leader, members in found:
            if name not in repeated and members[0] not in repeated and same_memory(leader, x):
                members.append(name)
                break
        else:
            found.append((x, [name]))
    groups = [members for _, members in found]
    for name in linears:
        if name not in called:
            groups.insert(_place(name, list(linears), groups), [name])
    return groups, not repeated


def _place(name: str, order: list[str], groups: list[list[str]]) -> int:
    """Where a linear that was not reached goes among the groups: beside its like (expert 3's beside expert 2's)."""
    placed = {member: i for i, group in enumerate(groups) for member in group}
    at, parent = order.index(name), name.rpartition(".")[0]
    like = [other for other in order if other in placed and other.rpartition(".")[0] == parent]
    for other in reversed([o for o in like if order.index(o) < at]):
        return placed[other] + 1
    if like:
        return placed[like[0]]
    return max((placed[o] + 1 for o in order[:at] if o in placed), default=0)


def collect(
    block: nn.Module,
    linears: dict[str, nn.Module],
    groups: list[list[str]],
    calls: list[Call],
    index: int,
    needs: Sequence[str],
    device: torch.device,
    *,
    stop_early: bool,
) -> dict[str, Collector]:
    """Run every micro-batch and feed the statistics of each group once, from its first linear, whose name is the
    key."""
    leader_of = {name: group[0] for group in groups for name in group}
    collectors = {group[0]: Collector(needs, shape_of(linears[group[0]])[1], device) for group in groups}
    seen: dict[str, Tensor] = {}

    def on_input(name: str, x: Tensor) -> None:
        leader = leader_of[name]
        if name != leader:
            assert same_memory(seen[leader], x), f"{name} and {leader} shared an input in one pass, not in another"
            return
        seen[name] = x
        collectors[name].update(x)
        if stop_early and len(seen) == len(collectors):
            raise Stop

    with _hooked({name: linears[name] for name in leader_of}, on_input):
        for call in calls:
            seen.clear()
            with suppress(Stop):
                run_block(block, call, index, device)
    return collectors


@contextmanager
def _hooked(linears: dict[str, nn.Module], on_input: Callable[[str, Tensor], None]) -> Iterator[None]:
    handles = [
        m.register_forward_pre_hook(lambda _, args, name=name: on_input(name, args[0])) for name, m in linears.items()
    ]
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


def _dtype_of(linear: nn.Module) -> torch.dtype:
    return linear.dtype if isinstance(linear, CompressedLinear) else linear.weight.dtype
