"""The one loop over a model's blocks: capture, statistics, solve, swap, propagate. Every layerwise method runs in it.

One block at a time lies on the compute device. The inputs of the first block are recorded while the model runs, with
the masks and positions that it passes to each block. From there every block is run by itself, and its outputs become
the inputs of the next, so that each block reads the outputs of the compressed blocks before it.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.formats import Format
from compress.formats.masked import kept_of, masked_like
from compress.linear import CompressedLinear, replace, weight_of
from compress.transforms import Transform, followed_by, orders
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import Call, advance, block_calls, on_device
from compress.walk.chain import Chain
from compress.walk.context import Context
from compress.walk.finite import check_error
from compress.walk.groups import collect, input_groups
from compress.walk.original.lockstep import Lockstep
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.statistics import PAIRED, LayerStatistics
from eval.record.compression import LayerRecord
from kernels.clock import clock
from kernels.linear import fast_linear, plain_torch

COLUMNS = 1024  # columns of a Gram matrix that are multiplied at once when errors are measured


class Solver(Protocol):
    """The attributes of a method that the walk uses; `compress.walk.layerwise.LayerwiseMethod` explains them."""

    name: str
    skip: str
    sequential: bool
    adds: bool
    statistics: tuple[str, ...]

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]: ...
    def rounding(self, statistics: LayerStatistics) -> Transform | None: ...
    def peer(self, W: Tensor, statistics: LayerStatistics) -> list[Format] | None: ...


@torch.no_grad()
def walk(
    model: nn.Module,
    method: Solver,
    batches: Sequence[Tensor],
    context: Context,
    *,
    reached: list[list[Call]] | None = None,
) -> list[LayerRecord]:
    """Let `method` solve every linear inside the blocks, and replace the linears by the stored ones.

    With no batches nothing is propagated, and errors are those of the weights; they are measured against the
    originals where given.

    Args:
        reached: receives the micro-batches with the outputs of the last block, as one element; None: these are not
            needed. It stays empty if an earlier run had solved the last block.
    """
    device, store = context.device, context.store
    prefix, blocks = find_blocks(model)
    chosen = chosen_linears(model, method)
    calls = block_calls(model, blocks, batches, divided=True)
    beside = [copy.copy(call) for call in calls] if set(method.statistics) & set(PAIRED) else []
    chain = Chain(store, calls) if store else None
    finished = chain.resume(len(blocks)) if chain else 0
    progress = progress_bar(range(len(blocks)), desc=method.name, unit="block")
    walking = Walking(model, prefix, blocks, method, calls, context, progress, bool(batches), beside)
    records: list[LayerRecord] = []

    def following(index: int) -> bool:
        """Whether the outputs of this block are needed."""
        return index + 1 < len(blocks) or reached is not None

    for index in progress:
        with on_device(blocks[index], device):
            if index < finished:
                walking.pass_beside(index)
                progress.set_postfix_str("finished before")
                linears, made = store.load(index)
                note = "solved by an earlier, interrupted run"
                made = [dataclasses.replace(r, notes=(*r.notes, note)) for r in made]
            else:
                own = [name for name in chosen if name.startswith(f"{prefix}.{index}.")]
                linears, made, passed_on = walking.solve(index, own, to_the_end=following(index))
            for name, linear in linears.items():
                replace(model, name, linear.to(device))
            records += made
            if index >= finished and not passed_on and following(index):
                walking.pass_on(index)
            if index >= finished and chain:
                with chain.keeping(index, last=index + 1 == len(blocks)):
                    store.save(index, linears, made)
    if reached is not None and finished < len(blocks):
        reached.append(calls)
    return records


@dataclasses.dataclass(frozen=True)
class Walking:
    """The walk of one method through the blocks of a model; the current block lies on the device of the context.

    calls: the micro-batches of this process, each with the inputs [batch, T, hidden] of the next block.
    calibrated: there are micro-batches, here or in another process.
    beside: the same micro-batches in the uncompressed model, if the method's statistics need them.
    """

    model: nn.Module
    prefix: str
    blocks: nn.ModuleList
    method: Solver
    calls: list[Call]
    context: Context
    progress: tqdm
    calibrated: bool
    beside: Sequence[Call] = ()

    def solve(
        self, index: int, names: Sequence[str], *, to_the_end: bool
    ) -> tuple[dict[str, CompressedLinear], list[LayerRecord], bool]:
        """The replacement of each of these linears of a block, their records, and whether the block's outputs have
        become the inputs of the next block.

        Args:
            to_the_end: the block's outputs are needed.
        """
        block, method, calls = self.blocks[index], self.method, self.calls
        linears = {name: self.model.get_submodule(name) for name in names}
        needs = with_errors(method.statistics) if self.calibrated else ()
        new: dict[str, CompressedLinear] = {}
        records: dict[str, LayerRecord] = {}
        notes: list[str] = []

        @plain_torch()
        def solve(several: Sequence[tuple[str, LayerStatistics]]) -> dict[str, CompressedLinear]:
            """Every process solves its share of these linears, and gets the results of the others."""
            made: dict[str, tuple[CompressedLinear, LayerRecord]] = {}
            mine = current().share(several, before=len(new))
            for name, statistics in mine:
                self.progress.set_postfix_str(name.removeprefix(f"{self.prefix}.{index}."))
                own = statistics.for_another()
                own.notes += notes
                own.measured = self.context.of(name)
                original = self.context.originals.get(name)
                original = None if original is None else weight_of(original).to(self.context.device)
                made[name] = solve_linear(name, linears[name], original, own, method, last=name == mine[-1][0])
            for one in current().gathered(made):
                new.update({name: linear for name, (linear, _) in one.items()})
                records.update({name: record for name, (_, record) in one.items()})
            self.progress.set_postfix_str("statistics")
            return {name: new[name] for name, _ in several}

        self.progress.set_postfix_str("statistics")
        with fast_linear():
            groups, once = input_groups(block, linears, calls, index, self.context.device)
            in_step = method.sequential and once and self.calibrated
            if in_step:
                how = {"to_the_end": to_the_end, "beside": self.beside}
                Lockstep(self.model, block, index, linears, groups, calls, needs, self.context.device, **how).run(solve)
            else:
                if self.beside:
                    notes.append("its inputs in the uncompressed model are not known here")
                self.pass_beside(index)
                if method.sequential and self.calibrated:
                    notes.append(
                        "solved at the same time as the other linears of its block, not in sequence: some run more "
                        "than once in a pass"
                    )
                collectors = collect(block, linears, groups, calls, index, needs, self.context.device, stop_early=once)
                several: list[tuple[str, LayerStatistics]] = []
                for group in groups:
                    statistics = collectors.pop(group[0]).result()
                    several += [(name, statistics) for name in group]
                    if current().count == 1:  # groups one by one hold less; for several processes all at once is faster
                        solve(several)
                        several.clear()
                solve(several)
        return new, [records[name] for name in names], in_step

    def pass_beside(self, index: int) -> None:
        """For the uncompressed model, make the outputs of a block, with the linears that it has now, the inputs of the
        next one."""
        with fast_linear():
            advance(self.blocks[index], self.beside, index, self.context.device)

    def pass_on(self, index: int) -> None:
        """Make a block's outputs, with its present linears, the inputs of the next one, if there are calls."""
        if not self.calls:
            return
        self.progress.set_postfix_str("propagate")
        with dense_weights(self.blocks[index]), fast_linear():
            advance(self.blocks[index], self.calls, index, self.context.device)


def chosen_linears(model: nn.Module, method: Solver) -> list[str]:
    """Names of the linears that a method takes."""
    names = targets(model, method.skip)
    return [name for name in names if not method.adds or isinstance(model.get_submodule(name), CompressedLinear)]


def with_errors(statistics: Sequence[str]) -> tuple[str, ...]:
    """These statistics, and one from which errors over the calibration tokens are measured: a sample of the inputs, or
    the Gram matrix of all."""
    measure = () if "rows" in statistics else ("gram",)
    return tuple(dict.fromkeys((*statistics, *measure)))


def solve_linear(
    name: str,
    linear: nn.Module,
    original: Tensor | None,
    statistics: LayerStatistics,
    method: Solver,
    *,
    last: bool = False,
) -> tuple[CompressedLinear, LayerRecord]:
    """The stored replacement of a linear, and its record.

    Args:
        original: the weight against which the error is measured; None: the linear's own weight.
        last: no other linear is solved from the shared values of these statistics.
    """
    W = weight_of(linear)
    start = clock(W.device)
    target = W if original is None else original
    new = stored_as(name, linear, W, statistics, method, target)
    rounding = method.rounding(statistics)
    new.transform = followed_by(new.transform, rounding)
    seconds = clock(W.device) - start
    exact = [] if method.adds else exact_parts(linear)
    peer = method.peer(without(W, exact), statistics)
    if peer is not None and statistics.keep is not None:
        peer = masked_like(statistics.stored, peer, statistics.keep)
    if peer is not None:
        peer = [*peer, *exact]
    if last:
        statistics.shared.clear()  # a factor is as large as H; its memory is needed to measure the errors
    if not statistics.tokens:
        statistics.note("no calibration tokens: the error is that of the weights")
    return new, record(name, target, new, statistics, peer=peer, rounding=rounding, seconds=seconds)


def record(
    name: str,
    target: Tensor,
    new: CompressedLinear,
    statistics: LayerStatistics,
    *,
    peer: Sequence[Format] | None = None,
    rounding: Transform | None = None,
    seconds: float,
) -> LayerRecord:
    """The record of a weight `target` [out, in] and its replacement.

    Args:
        new: the replacement.
        peer: the parts that rounding to nearest would store.
        rounding: the method's transform of the inputs; `statistics` are of the inputs before it.
    """
    reference = max(energy_of(target, statistics), 1e-30)
    error = error_of(target, new.parts, statistics, rounding) / reference
    check_error(name, error)
    return LayerRecord(
        name=name,
        shape=(new.out_features, new.in_features),
        format="+".join(part.name for part in new.parts),
        bits_per_weight=new.bits_per_weight,
        error=error,
        rtn_error=None if peer is None else error_of(target, peer, statistics) / reference,
        seconds=seconds,
        tokens=statistics.tokens,
        notes=tuple(statistics.notes),
        sparsity=(new.dequantize() == 0).float().mean().item(),
    )


def stored_as(
    name: str,
    linear: nn.Module,
    W: Tensor,
    statistics: LayerStatistics,
    method: Solver,
    target: Tensor | None = None,
) -> CompressedLinear:
    """The replacement of a linear with the weight W [out, in]; puts the parts stored earlier into `statistics`.

    Args:
        target: [out, in], the weight that a method with `adds` approximates: the original weight.
    """
    statistics.name, statistics.dtype = name, dtype_of(linear)
    exact = exact_parts(linear)
    if isinstance(linear, CompressedLinear):
        statistics.stored = [part for part in linear.parts if not part.exact]
        statistics.keep = kept_of(statistics.stored)
        statistics.ordered = orders(linear.transform)
    if method.adds:
        parts = [*statistics.stored, *exact, *method.solve(target - W, statistics)]
    else:
        parts = method.solve(without(W, exact), statistics)
        if statistics.keep is not None:  # pruned weights stay 0, whatever the method returned
            parts = masked_like(statistics.stored, parts, statistics.keep)
        parts = [*parts, *exact]
    parts = [part.to(statistics.dtype) for part in parts]  # in the model's dtype; codes and scales keep theirs
    return CompressedLinear(parts, linear.bias, dtype=statistics.dtype, transform=getattr(linear, "transform", None))


def energy_of(D: Tensor, statistics: LayerStatistics) -> float:
    """||DX||² over the calibration tokens or a sample, up to a factor of their count; ||D||² without tokens."""
    if not statistics.tokens:
        return D.square().sum().item()
    if "rows" in statistics.values:
        return (statistics.values["rows"] @ D.t()).square().sum().item()
    return quadratic(D, statistics.values["gram"])


def quadratic(D: Tensor, H: Tensor) -> float:
    """tr(D H Dᵀ) for a symmetric H, of which only the blocks on and above the diagonal are read: half the products."""
    total = D.new_zeros((), dtype=torch.float64)
    for start in range(0, len(H), COLUMNS):
        block = D[:, start : start + COLUMNS]
        above = D[:, :start] @ H[:start, start : start + COLUMNS]
        total += (above.mul_(2).addmm_(block, H[start : start + COLUMNS, start : start + COLUMNS]) * block).sum()
    return total.item()


def error_of(
    W: Tensor, parts: Sequence[Format], statistics: LayerStatistics, rounding: Transform | None = None
) -> float:
    """||WX - Y||² with Y the output of the stored parts for X, scaled as in `energy_of`; with their rounding of X if a
    sample of X is known."""
    rounds = rounding is not None or any(part.activation_bits for part in parts)
    if statistics.tokens and "rows" in statistics.values and rounds:
        rows = statistics.values["rows"]
        x = rows if rounding is None else rounding(rows)
        return (rows @ W.t() - sum(part.matmul(rows if part.exact else x) for part in parts)).square().sum().item()
    return energy_of(W - sum(part.dequantize() for part in parts), statistics)


def exact_parts(linear: nn.Module) -> list[Format]:
    """The exact parts of a linear, which do not change while the rest of its weight is compressed."""
    return [part for part in linear.parts if part.exact] if isinstance(linear, CompressedLinear) else []


def without(W: Tensor, parts: Sequence[Format]) -> Tensor:
    """W [out, in] minus these parts."""
    return W - sum(part.dequantize() for part in parts) if parts else W


@contextmanager
def dense_weights(block: nn.Module) -> Iterator[None]:
    """Dequantise the block's compressed linears once for many passes."""
    with ExitStack() as stack:
        for module in block.modules():
            if isinstance(module, CompressedLinear):
                stack.enter_context(module.dense())
        yield


def dtype_of(linear: nn.Module) -> torch.dtype:
    return linear.dtype if isinstance(linear, CompressedLinear) else linear.weight.dtype
