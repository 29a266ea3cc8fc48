"""The loop that trains each block of a compressed model, with the outputs of the original model as targets."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.linear import CompressedLinear, replace, weight_of
from compress.tuning.training import Schedule, TrainedLinear, token_loss, train
from compress.walk.blocks import find_blocks, is_named
from compress.walk.capture import Call, block_calls, device_of, on_device, run_block
from compress.walk.chain import Chain
from compress.walk.groups import collect, input_groups
from compress.walk.original.swap import as_it_was
from compress.walk.parallel.ranks import current, joined
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics
from compress.walk.walk import dense_weights, record
from eval.record.compression import LayerRecord
from kernels.clock import clock
from kernels.linear import fast_linear


@dataclass(frozen=True)
class TunedBlock:
    """The result of training a block: its linears and other trained parameters by name, and the linears' records."""

    linears: dict[str, CompressedLinear]
    records: list[LayerRecord]
    norms: dict[str, Tensor]


@torch.no_grad()
def tune_blocks(
    model: nn.Module,
    batches: Sequence[Tensor],
    originals: Mapping[str, nn.Module],
    schedule: Schedule,
    *,
    name: str,
    skip: str,
    device: torch.device,
    store: BlockStore | None,
) -> list[LayerRecord]:
    """Train every block in turn, and replace its linears by the trained, stored ones.

    The first of several processes does the work, and sends its results to the others.

    Args:
        originals: the linears before they were compressed, by name.
        name: the name of the method, for the progress bar.
        skip: patterns of names of linears that are not trained.
    """
    _, blocks = find_blocks(model)
    ranks, records = current(), []
    work = _Tuning(model, originals, schedule, name, skip, device).blocks(batches, store) if ranks.rank == 0 else None
    for block in blocks:
        made = None
        if work is not None:
            with joined(device, alone=True):
                made = next(work)
        made = ranks.from_first(made)
        if work is None:
            with on_device(block, device):
                put(model, made, device)
        records += made.records
    return records


def put(model: nn.Module, made: TunedBlock, device: torch.device) -> None:
    """Put the trained linears and parameters of a block, which lies on this device, into the model."""
    for name, linear in made.linears.items():
        replace(model, name, linear.to(device))
    for name, value in made.norms.items():
        model.get_parameter(name).data = value.to(device)  # other models may share the memory of the former values


@dataclass(frozen=True)
class _Tuning:
    """The work on all blocks, in one process."""

    model: nn.Module
    originals: Mapping[str, nn.Module]
    schedule: Schedule
    name: str
    skip: str
    device: torch.device

    def blocks(self, batches: Sequence[Tensor], store: BlockStore | None) -> Iterator[TunedBlock]:
        """Each trained block in turn, after it was put into the model; finished ones come from the store."""
        prefix, blocks = find_blocks(self.model)
        outside = [name for name in self.originals if not name.startswith(f"{prefix}.")]
        calls = block_calls(self.model, blocks, batches, stacked=False)
        with as_it_was(self.model, self.originals, outside, device_of(self.model)):  # where the model itself runs
            wanted = block_calls(self.model, blocks, batches, stacked=False)
        chain = Chain(store, calls) if store else None
        finished = chain.resume(len(blocks)) if chain else 0
        progress = tqdm(range(len(blocks)), desc=self.name, unit="block")
        for index in progress:
            block, inside = blocks[index], [n for n in self.originals if n.startswith(f"{prefix}.{index}.")]
            with on_device(block, self.device):
                with as_it_was(self.model, self.originals, inside, self.device), fast_linear():
                    for call in wanted:
                        call.hidden = run_block(block, call, index, self.device)
                made = _load(store, index) if index < finished else self.tuned(index, inside, calls, wanted)
                put(self.model, made, self.device)
                if index >= finished and chain:
                    with chain.keeping(index, last=index + 1 == len(blocks)):
                        _save(store, index, made)
            progress.set_postfix_str(made.records[0].notes[-1] if made.records else "")
            yield made

    def tuned(self, index: int, names: Sequence[str], calls: list[Call], wanted: Sequence[Call]) -> TunedBlock:
        """The result of training a block; its outputs become the inputs of the next one.

        Args:
            names: the names of the linears whose original is known.
            calls: each with the output of the compressed blocks before this one.
            wanted: each with the output of the original block.
        """
        start = clock(self.device)
        prefix, blocks = find_blocks(self.model)
        block = blocks[index]
        stored = {n: m for n in names if isinstance(m := self.model.get_submodule(n), CompressedLinear)}
        norms = {n: p for n, p in block.named_parameters(prefix=f"{prefix}.{index}") if p.dim() == 1}
        untrained = {n: p.data for n, p in norms.items()}
        for parameter in norms.values():
            parameter.data = parameter.data.clone()  # other models may share its memory
        with dense_weights(block), fast_linear():
            outputs = (run_block(block, call, index, self.device) for call in calls)
            first = self._loss(outputs, wanted)
        linears = self._trained(index, stored, list(norms.values()), calls, wanted)
        put(self.model, TunedBlock(linears, [], {}), self.device)
        passed, statistics = self._passed(index, linears, calls)
        last = self._loss((call.hidden for call in passed), wanted)
        note = f"tuned: its block's loss went from {first:.4g} to {last:.4g}"
        if linears and not last < first:
            note = f"not tuned: its block's loss would have gone from {first:.4g} to {last:.4g}"
            linears = {n: stored[n] for n in linears}
            put(self.model, TunedBlock(linears, [], untrained), self.device)
            passed, statistics = self._passed(index, linears, calls)
        calls[:] = passed
        seconds = (clock(self.device) - start) / max(len(linears), 1)
        records = []
        for name, linear in linears.items():
            statistics[name].note(note)
            original = weight_of(self.originals[name]).to(self.device)
            records.append(record(name, original, linear, statistics[name], seconds=seconds))
        kept = {n: p.clone() for n, p in norms.items()} if linears and self.schedule.norm_rate else {}
        return TunedBlock(linears, records, kept)

    def _trained(
        self,
        index: int,
        stored: Mapping[str, CompressedLinear],
        norms: Sequence[nn.Parameter],
        calls: Sequence[Call],
        wanted: Sequence[Call],
    ) -> dict[str, CompressedLinear]:
        """The results of training for the linears of a block that can be trained."""
        block = find_blocks(self.model)[1][index]
        trained = {
            name: TrainedLinear(linear, weight_of(self.originals[name]).to(self.device), self.schedule)
            for name, linear in stored.items()
            if not is_named(name, self.skip)
        }
        trained = {name: linear for name, linear in trained.items() if linear.views}
        with ExitStack() as stack:
            for name, linear in stored.items():
                if name in trained:
                    replace(self.model, name, trained[name])
                    stack.callback(replace, self.model, name, linear)
                else:
                    stack.enter_context(linear.dense())
            if trained:
                train(block, index, trained.values(), norms, calls, wanted, self.schedule, self.device)
        return {name: linear.stored() for name, linear in trained.items()}

    def _passed(
        self, index: int, linears: Mapping[str, CompressedLinear], calls: Sequence[Call]
    ) -> tuple[list[Call], dict[str, LayerStatistics]]:
        """The micro-batches with the block's outputs, and by name the Gram matrix of the inputs of each linear."""
        block, passed = find_blocks(self.model)[1][index], [copy.copy(call) for call in calls]
        with dense_weights(block), fast_linear():
            groups, _ = input_groups(block, dict(linears), passed, index, self.device)
            read = collect(
                block, dict(linears), groups, passed, index, ("gram",), self.device, stop_early=False, pass_on=True
            )
        shared = {group[0]: read[group[0]].result() for group in groups}
        return passed, {name: shared[group[0]].for_another() for group in groups for name in group}

    def _loss(self, outputs: Iterable[Tensor], wanted: Sequence[Call]) -> float:
        losses = [
            token_loss(y, call.hidden.to(y.device), self.schedule.sink_weight).item()
            for y, call in zip(outputs, wanted, strict=True)
        ]
        return sum(losses) / len(losses)


def _save(store: BlockStore, index: int, made: TunedBlock) -> None:
    store.beside("norms", without=()).put(index, made.norms, {})
    store.save(index, made.linears, made.records)


def _load(store: BlockStore, index: int) -> TunedBlock:
    linears, records = store.load(index)
    note = "tuned by an earlier, interrupted run"
    norms, _ = store.beside("norms", without=()).get(index)
    return TunedBlock(linears, [replace_fields(r, notes=(*r.notes, note)) for r in records], norms)
