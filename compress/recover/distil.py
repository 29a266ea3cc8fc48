"""Distillation: a compressed model is trained for minutes, until its predictions are close to the original model's."""

import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.formats import LowRankWeight
from compress.linear import compressed_linears
from compress.method import Method, knob
from compress.recover.divergence import LOSSES
from compress.recover.learned import TRAIN, Changes, learning
from compress.recover.loop import Loop, Schedule
from compress.recover.teacher import TOKENS, Teacher
from compress.walk.blocks import check_skip
from compress.walk.capture import device_of
from compress.walk.context import Context
from compress.walk.identity import tokens_sha256
from compress.walk.offload import is_offloaded
from compress.walk.parallel.ranks import current
from compress.walk.resume import BlockStore
from eval.record.compression import RecoveryRecord

RATES = {"scales": 1e-3, "weights": 1e-3, "adapters": 2e-3, "norms": 2e-3}  # by `train`, if `rate` is 0
HELD_OUT = 16  # one window in so many is held out, at most MOST_HELD_OUT
MOST_HELD_OUT = 12  # where inputs are rounded to 4 bits, noise hides the differences of states on fewer windows
# Passes of the original model that a window costs in training, by `train`: one forward, one for the gradients of
# inputs, one for those of weights, and one for the optimiser's work where it moves every weight.
PASSES = {"scales": 3, "weights": 4, "adapters": 3, "norms": 2}


@dataclass(frozen=True, kw_only=True)
class Distil(Method):
    """Trains a compressed model towards the predictions of the original one; the bytes that are stored stay the same.

    The loss is measured at the logits, over windows of the calibration corpus: those of the calibration itself, and
    further ones.
    """

    name: ClassVar[str] = "distil"
    stage: ClassVar[str] = "recover"
    source: ClassVar[str] = "arXiv:1503.02531; for stored weights arXiv:2305.17888 and arXiv:2407.11062"
    needs_calibration: ClassVar[bool] = True

    train: str = knob(
        "scales",
        "what learns; scales: scales of stored weights, norms and biases, while all codes stay; weights: codes, "
        "unpruned weights and scales; adapters: low-rank parts in 16 bits that an earlier method has added, norms and "
        "biases; norms: norms and biases",
        choices=TRAIN,
        describes=True,
    )
    loss: str = knob(
        "forward", "divergence from the original model (forward), to it (reverse), or both", choices=LOSSES
    )
    steps: int = knob(1000, "most updates of what learns", range=(1, 1 << 24))
    minutes: float = knob(
        10.0,
        "time in minutes, with the original model's predictions, which take a fifth to a third of it, for as many "
        "windows as training goes through about once; it fixes the number of updates after the first twelve; 0: no "
        "limit",
        range=(0, 1e6),
        describes=True,
    )
    windows: int = knob(
        1024,
        "most windows of text; the calibration corpus may have fewer, and the updates may need fewer",
        range=(2, 1 << 24),
    )
    batch: int = knob(2, "windows per update, which several processes divide among themselves", range=(1, 1 << 16))
    rate: float = knob(
        0.0,
        "size of the largest updates, as a share of what learns; 0: 0.001 for scales and weights, 0.002 for adapters "
        "and norms; a quarter of it where held-out text does not improve any more, from the best state on",
        range=(0, 1),
    )
    skip: str = knob("", "comma-separated name patterns (* and ?) of linears that do not learn")
    keep_zeros: bool | None = knob(
        None, "weights that are stored as 0 stay 0; None: True if an earlier method of the recipe pruned"
    )
    gradient_checkpointing: bool = knob(
        False,
        "a block keeps its input alone for the gradients, and computes the rest again: less memory, more time, the "
        "same result",
    )

    @property
    def reads_originals(self) -> bool:
        return self.train == "weights"

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        if not before:
            raise ValueError(
                f"`recipe`: {self} recovers what an earlier method has changed, and there is none before it; a pruning "
                "method or a quantiser before it works"
            )
        if self.train == "adapters" and not any(map(_adds_factors, before)):
            raise ValueError(
                f"`train` (='adapters') of {self.name}: no earlier method of the recipe adds a low-rank part in 16 "
                "bits: low_rank before it does"
            )
        pruned = any(method.zeros for method in before)
        return self if self.keep_zeros is not None else replace(self, keep_zeros=pruned)

    def check(self, model: nn.Module) -> None:
        if is_offloaded(model):
            raise ValueError(
                f"`weights` (='disk'): {self.name} keeps gradients for the whole model in memory: load it with "
                "weights='memory'"
            )
        check_skip(model, self.skip, self.name)
        if self.train == "norms" and not any(p.dim() == 1 and (p.is_meta or p.any()) for p in model.parameters()):
            raise ValueError(f"`train` (='norms') of {self.name}: this model has no norms or biases that could learn")

    def check_run(self, model: nn.Module, batches: Sequence[Tensor], device: torch.device, processes: int) -> None:
        there = sum(map(len, self._text(batches)))
        if there < 2:
            raise ValueError(f"`batches` has {there} windows for {self}; it needs at least 2, one of which is held out")
        if device.type != device_of(model).type:
            raise ValueError(
                f"`device` (={str(device)!r}): {self.name} trains the whole model where it lies, on "
                f"{device_of(model)}: load it on the other device"
            )

    def own_passes(self) -> str:
        return "the predictions of the original model, and training"

    def trains(self, longest: int) -> tuple[str, int]:
        scope = "model by blocks" if self.gradient_checkpointing else "model"
        return scope, max(longest, min(self.batch, TOKENS // max(longest, 1)) * longest)

    def held_copies(self, stored: bool, itemsize: int, products: int) -> float:
        """The weights as products read them, and their gradients, in the dtype of products; in float32 the weights as
        they are stored, their gradients, the optimiser's state, and the best state. With fewer numbers that learn, only
        some of these have the size of the weights."""
        read = {"scales": 2, "weights": 2, "adapters": 2, "norms": 1}[self.train] * products / 4
        if stored:
            return read + {"scales": 3.0, "weights": 7.0, "adapters": 1.0, "norms": 0.0}[self.train]
        return (read + 4.0 if self.train == "weights" else 0.0) + (itemsize < 4)  # plain float32 weights are shared

    def prepare(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> "Prepared":
        """The predictions of the original model.

        With `minutes`, they are written for as many windows as training will go through about once: a window costs one
        pass here, and `PASSES` in training, so that no window is begun after 1 / (1 + PASSES) of the minutes. A window
        that training does not reach has cost one pass for nothing; from windows that it reaches again it learns little
        that holds for other text.
        """
        held_out, trained = self._text(batches)
        text = [*held_out, *trained]
        made = Prepared.at(context.store, text, len(held_out))
        passes = 1 + PASSES[self.train] + self.gradient_checkpointing
        least, seconds = made.held_out + self.batch, 60 * self.minutes / passes
        made.teacher.write(model, text, least=least, seconds=seconds)
        return made

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[RecoveryRecord]:
        changes, record = current().from_first(self._trained(model, context))
        changes.put(model)
        return [record]

    def _trained(self, model: nn.Module, context: Context) -> tuple[Changes, RecoveryRecord]:
        prepared = context.prepared
        count, seconds = prepared.teacher.written(len(prepared.text))
        schedule = Schedule(
            steps=self.steps,
            minutes=self.minutes,
            batch=self.batch,
            rate=self.rate or RATES[self.train],
            loss=self.loss,
            held_out=prepared.held_out,
            spent=seconds,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        before = {**compressed_linears(model), **{n: p.detach() for n, p in model.named_parameters()}}
        how = {"keep_zeros": bool(self.keep_zeros), "originals": context.originals}
        with learning(model, self.train, self.skip, **how) as (learned, changes):
            if not learned.count:
                raise ValueError(f"`train` (={self.train!r}) of {self.name}: nothing in this model can learn by it")
            store = _beside(context.store, "training", prepared.text) if current().rank == 0 else None
            how = {"name": self.name, "store": store}
            training = Loop(model, learned, prepared.text[:count], prepared.teacher, schedule, **how).run()
            trained = changes()
        record = RecoveryRecord(
            method=str(self),
            windows=count,
            held_out=prepared.held_out,
            learned=learned.count,
            teacher_seconds=seconds,
            curve=tuple(training.curve),
            kept=training.best,
            ended=training.ended,
            moved=_moved(before, trained),
            fixed=len(compressed_linears(model)) - len(trained.linears),
        )
        return trained, record

    def _text(self, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The windows that are held out, and those that are trained on, no more than all updates together read. Those
        that are held out are not of the calibration if its corpus has others."""
        more = getattr(batches, "further", lambda count: [])  # of `compress.calibration`
        every = [*batches, *more(max(self.windows - len(batches), MOST_HELD_OUT))]
        count = min(len(every), self.windows)
        held_out = min(MOST_HELD_OUT, max(1, count // HELD_OUT))
        return every[len(every) - held_out :], every[: min(count - held_out, self.steps * self.batch)]


def _adds_factors(method: Method) -> bool:
    """Whether a method may store low-rank parts that can learn."""
    stored = [spec for one in method.variants() for spec in one.stores((256, 256)) or []]
    return any(spec["format"] == LowRankWeight.name and spec["bits"] == 16 for spec in stored)


def _moved(before: Mapping[str, Any], changes: Changes) -> dict[str, float]:
    """||change|| / ||weight|| of everything that has learnt."""
    moved = {}
    for name, linear in changes.linears.items():
        W = before[name].dequantize()
        moved[name] = ((linear.dequantize() - W).norm() / W.norm().clamp_min(1e-30)).item()
    for name, value in changes.parameters.items():
        W = before[name].float()
        moved[name] = ((value.float() - W).norm() / W.norm()).item()
    return moved


@dataclass(frozen=True)
class Prepared:
    """The text of a training, its windows that are held out first, and the original model's predictions for it."""

    text: list[Tensor]
    held_out: int
    teacher: Teacher

    @classmethod
    def at(cls, store: BlockStore | None, text: list[Tensor], held_out: int) -> "Prepared":
        """With predictions in this store's folder, or in a temporary one that lives as long as the result; the first of
        several processes has them."""
        if current().rank:
            return cls(text, held_out, Teacher(None))
        if store is not None:
            return cls(text, held_out, Teacher(_beside(store, "teacher", text)))
        folder = tempfile.TemporaryDirectory(prefix="workbench-teacher-")
        made = cls(text, held_out, Teacher(BlockStore(Path(folder.name))))
        weakref.finalize(made, folder.cleanup)
        return made


def _beside(store: BlockStore | None, what: str, text: Sequence[Tensor]) -> BlockStore | None:
    """A folder inside that of a store, for data that depend on the whole text as well; None without a store."""
    return None if store is None else BlockStore(store.folder / f"{what}-{tokens_sha256(text)[:16]}")
