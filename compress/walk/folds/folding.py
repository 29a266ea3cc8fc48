"""The pass of every method that moves scales from norms and linears into the linears that read them, and its check."""

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.linear import CompressedLinear, is_linear, weight_of
from compress.method import Method, knob
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, advance, block_calls, micro_batches, on_device, run_block
from compress.walk.chain import Chain
from compress.walk.context import Context
from compress.walk.experts import SplitExperts, split_experts
from compress.walk.folds.checks import (
    binned,
    column_absmax,
    difference,
    logits_of,
    moved_logits,
    show_largest,
    summary,
    tolerance,
)
from compress.walk.folds.links import Link, find_links, fold, links_by_block
from compress.walk.parallel.places import Place
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.statistics import Collector, LayerStatistics
from compress.walk.statistics.saved import SavedStatistics
from eval.record.compression import Channels, FoldRecord
from eval.record.reading import row
from kernels.clock import clock
from kernels.linear import fast_linear

CHECKED = 128  # tokens of the first batch on which each fold is checked


@dataclass(frozen=True)
class FoldChoice:
    """The scales that a method moves along one link.

    s: [channels of the producer], positive; ones where nothing is moved.
    alpha: strength of the migration; None where nothing is moved.
    error_*: ||WX - Q(W)Q(X)||² / ||WX||² over all consumers, as the method rounds, without and with s; None: not
        measured.
    """

    s: Tensor
    alpha: float | None
    error_before: float | None = None
    error_after: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Folded:
    """The fold that was done along one link.

    s: [channels of the producer], the factors by which its output was divided.
    columns: [in], the factors by which the inputs of the consumers were divided as a result.
    """

    link: Link
    record: FoldRecord
    s: Tensor
    columns: Tensor


@dataclass(frozen=True, kw_only=True)
class FoldingMethod(Method):
    """A method that chooses scales for the links of a model; a fold changes no output, so that every block sees true
    inputs."""

    layers: str = knob(
        "",
        "comma-separated name patterns (* and ?) of linears that must be smoothed, together with the linears that read "
        "the same input; empty: all linears that can be smoothed",
    )

    statistics: ClassVar[
        tuple[str, ...]
    ] = ()  # statistics of the consumers' input, names in compress.walk.statistics.STATISTICS; "absmax" is always added

    def choose(self, link: Link, weights: list[Tensor], statistics: LayerStatistics) -> FoldChoice:
        """Scales for one link.

        Args:
            weights: W [out, in] in float32 of each consumer, after the folds before this one.
            statistics: of the consumers' input.
        """
        raise NotImplementedError

    def leaves(self, link: Link) -> str:
        """The reason why the knobs exclude this link; empty if they do not."""
        return ""

    def collects(self) -> tuple[str, ...]:
        return (*super().collects(), *self._needs())

    def check(self, model: nn.Module) -> None:
        """Raise as `links_of` does; if any link is enough, the search stops at the first block that has one."""
        self._check_not_compressed(model)
        blocks = () if self.layers.strip(" ,") else links_by_block(model)
        if not any(not self.leaves(link) for links, _ in blocks for link in links):
            self.links_of(model)

    def _check_not_compressed(self, model: nn.Module) -> None:
        linears = [module for module in find_blocks(model)[1].modules() if is_linear(module)]
        if linears and all(isinstance(module, CompressedLinear) for module in linears):
            raise ValueError(
                f"`model` holds every linear of its blocks compressed already, so that {self.name} can fold nothing "
                "into them: start from the model before that compression"
            )

    def links_of(self, model: nn.Module) -> list[list[Link]]:
        """The links to be scaled, block by block.

        Raises:
            ValueError: nothing can be scaled, or not the layers that `layers` asks for.
        """
        self._check_not_compressed(model)
        found, reasons = find_links(model)
        for link in (link for block in found for link in block):
            reasons |= dict.fromkeys(link.consumers, self.leaves(link))
        patterns = [pattern.strip() for pattern in self.layers.split(",") if pattern.strip()]
        for pattern in patterns:
            asked = fnmatch.filter(reasons, pattern)
            if not asked:
                raise ValueError(
                    f"`layers` (={self.layers!r}) of {self.name}: no linear of the blocks is named {pattern}; "
                    f"one of them is {next(iter(reasons), 'none')}"
                )
            for name in asked:
                if reasons[name]:
                    raise ValueError(f"`layers` (={self.layers!r}) of {self.name} asks for {name}, but {reasons[name]}")
        asked = {
            name for pattern in patterns or ["*"] for name in fnmatch.filter(reasons, pattern) if not reasons[name]
        }
        if not asked:
            why = next(iter(reasons.items()), ("the model", "it has no linears"))
            raise ValueError(f"`model` has no linear that {self.name} could smooth; for example {why[0]}: {why[1]}")
        return [[link for link in block if asked & set(link.consumers)] for block in found]

    @torch.no_grad()
    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[FoldRecord]:
        """Choose and fold block by block; one pass over each gives the statistics and the inputs of the next.

        Raises:
            RuntimeError: a fold changed the output of a block, or of the model; its old weights have been restored.
        """
        device, store, saved = context.device, context.store, context.saved
        split_experts(model)
        links = self.links_of(model)
        _, blocks = find_blocks(model)
        calls = block_calls(model, blocks, batches, divided=True) if saved is None else []
        calls += block_calls(model, blocks, [batches[0][:, :CHECKED]])  # one more, short, on which folds are checked
        calls[-1].place = Place(number=len(micro_batches(batches)))
        chain = Chain(store, calls) if store else None
        finished = chain.resume(len(blocks)) if chain else 0
        before = logits_of(model)
        folded: list[Folded] = []
        progress = progress_bar(range(len(blocks)), desc=self.name, unit="block")
        for index in progress:
            block = blocks[index]
            with on_device(block, device):
                if index < finished:
                    progress.set_postfix_str("finished before")
                    chosen = _take_over(model, links[index], *store.get(index))
                else:
                    with fast_linear():
                        chosen = self._smooth(model, block, links[index], calls, index, device, saved, progress)
                    if chain:
                        with chain.keeping(index, last=index + 1 == len(blocks)):
                            kept = {str(i): one.s.cpu() for i, one in enumerate(chosen)}
                            store.put(index, kept, [asdict(one.record) for one in chosen])
            folded += chosen
            for one in chosen if saved is not None else ():
                saved.scale(one.link.consumers, one.columns)
        why = "something outside the blocks reads what was scaled; the folds were undone"
        if problem := moved_logits(model, before, blocks[0], self.name, why):
            for one in reversed(folded):
                fold(model, one.link, 1 / one.s)
            raise RuntimeError(problem)
        return show_largest([one.record for one in folded])

    def _smooth(
        self,
        model: nn.Module,
        block: nn.Module,
        links: list[Link],
        calls: list[Call],
        index: int,
        device: torch.device,
        saved: SavedStatistics | None,
        progress: tqdm,
    ) -> list[Folded]:
        """Collect, choose, fold and check one block."""
        progress.set_postfix_str("statistics")
        checked = Call(calls[-1].hidden, calls[-1].arguments)
        collectors = [] if saved is not None else self._collect(model, block, links, calls[:-1], index, device)
        advance(block, calls[-1:], index, device)
        y = calls[-1].hidden.to(device)
        routed = any(isinstance(module, SplitExperts) for module in block.modules())
        touched = [model.get_submodule(name) for link in links for name in (link.producer, *link.consumers)]
        originals = [(module, name, p) for module in touched for name, p in module.named_parameters()]
        chosen = []
        for link in links:
            progress.set_postfix_str(link.producer)
            start = clock(device)
            if saved is None:
                statistics = collectors.pop(0).result()
            else:
                statistics = saved.of(link.consumers[0], index, self._needs(), device)
            consumers = [model.get_submodule(name) for name in link.consumers]
            weights = [weight_of(consumer) for consumer in consumers]
            w = column_absmax(weights)  # taken now: the fold changes these weights
            choice = current().from_first(self.choose(link, weights, statistics))
            assert choice.s.isfinite().all() and (choice.s > 0).all(), (
                f"{link.producer}: scales must be finite and positive"
            )
            x = statistics.values["absmax"]
            columns = torch.ones_like(x)
            if choice.alpha is not None:
                columns = fold(model, link, choice.s)
            moved = difference(run_block(block, checked, index, device), y, routed=routed)
            if not moved <= tolerance(block):
                for module, name, original in originals:
                    setattr(module, name, original)
                raise RuntimeError(
                    f"{self.name}: with {link.producer} scaled and {', '.join(link.consumers)} undoing it, what block "
                    f"{index} "
                    f"gives differs by {moved:.1e} (at most {tolerance(block):.0e}); the block has its weights "
                    "back"
                )
            x_after = x / choice.s.to(x.device)[link.channels.to(x.device)]
            w_after = column_absmax([weight_of(consumer) for consumer in consumers])
            magnitudes = {"x_before": x, "x_after": x_after, "w_before": w, "w_after": w_after}
            record = FoldRecord(
                name=link.producer,
                kind=link.kind,
                consumers=link.consumers,
                alpha=choice.alpha,
                **{key: summary(values) for key, values in magnitudes.items()},
                error_before=choice.error_before,
                error_after=choice.error_after,
                difference=moved,
                seconds=clock(device) - start,
                notes=(*statistics.notes, *choice.notes),
                channels=Channels(**{key: binned(values) for key, values in magnitudes.items()}),
            )
            chosen.append(Folded(link, record, choice.s, columns))
        return chosen

    def _needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.statistics, "absmax")))

    def _collect(
        self, model: nn.Module, block: nn.Module, links: list[Link], calls: list[Call], index: int, device: torch.device
    ) -> list[Collector]:
        """Make the block's outputs the inputs of the next one; returns the statistics of each link's consumers."""
        collectors = [Collector(link.consumers[0], self._needs(), len(link.channels), device) for link in links]
        handles = [
            model.get_submodule(link.consumers[0]).register_forward_pre_hook(
                lambda _, args, c=c: c.update(args[0], call.place)
            )
            for link, c in zip(links, collectors, strict=True)
        ]
        try:
            for call in calls:
                advance(block, [call], index, device)
        finally:
            for handle in handles:
                handle.remove()
        return collectors


def _take_over(
    model: nn.Module, links: list[Link], scales: dict[str, Tensor], records: list[dict[str, Any]]
) -> list[Folded]:
    """Fold the scales that an earlier run chose for a block."""
    chosen = []
    for i, (link, r) in enumerate(zip(links, records, strict=True)):
        columns = torch.ones(len(link.channels))
        if r["alpha"] is not None:
            columns = fold(model, link, scales[str(i)])
        record = row(FoldRecord, r)
        record = replace(record, notes=(*record.notes, "chosen by an earlier, interrupted run"))
        chosen.append(Folded(link, record, scales[str(i)], columns))
    return chosen
