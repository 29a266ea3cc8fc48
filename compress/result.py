"""The result of a compression; shows itself in Jupyter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from compress.method import Method
from compress.walk.finite import NotFinite
from compress.walk.offload import offloaded_parts
from eval.record.compression import AllocationRecord, DropRecord, FoldRecord, LayerRecord, RecoveryRecord, Usage
from eval.record.html import html_table

LAYER_HEADS = ("linear", "", "shape", "bits", "error", "rtn", "notes")
FOLD_HEADS = ("from", "into", "alpha", "largest / median input before", "after", "notes")
BAR = 12  # characters of the largest error's bar
UNFINISHED = "_compression_unfinished"  # attribute of a model: what stopped the compression that has changed it


@dataclass
class Result:
    """A compressed model and the record of its compression.

    Attributes:
        model: the transformers model, compressed.
        recipe: the methods that were applied, with all knobs settled.
        asked: the methods as the user gave them, before knobs were settled.
        layers: one record per weight that a method took.
        folds: the scales that were moved from norms and linears into the linears that read them.
        drops: the parts of blocks that were dropped, and the other candidates.
        recoveries: what training after the compression has brought, for each method that trains.
        kept: every other weight: {name, shape, bytes, reason}.
        identity: of the model before compression: name, weights_sha256, parameters.
        calibration: corpus, samples, seqlen, seed, sha256; None if no batches were given.
        seconds: wall clock of the whole compression.
        kernels: {op: implementations that ran}.
        allocation: the division of a budget of bytes among layers; None if there was none.
        notes: remarks for readers, for example that a number format was emulated.
        usage: peak memory and disk, as predicted and as measured.
    """

    model: nn.Module
    recipe: list[Method]
    layers: list[LayerRecord]
    kept: list[dict[str, Any]]
    identity: dict[str, Any]
    calibration: dict[str, Any] | None
    seconds: float
    kernels: dict[str, list[str]]
    asked: list[Method] = field(default_factory=list)
    folds: list[FoldRecord] = field(default_factory=list)
    drops: list[DropRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    allocation: AllocationRecord | None = None
    notes: list[str] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per compressed weight, scales and zero points counted."""
        weights = sum(r.shape[0] * r.shape[1] for r in self.layers)
        return sum(r.bits_per_weight * r.shape[0] * r.shape[1] for r in self.layers) / max(weights, 1)

    def __str__(self) -> str:
        recipe = ", ".join(map(str, self.asked or self.recipe)) or "the original"
        stored = f"{len(self.layers)} linears at {self.bits_per_weight:.2f} bits per weight, " if self.layers else ""
        folded = f"{len(self.folds)} folds, " if self.folds else ""
        whole = [drop for drop in self.drops if drop.left is None]
        gone = [drop for drop in whole if drop.order]
        dropped = f"{len(gone)} of {len(whole)} dropped ({', '.join(drop.name for drop in gone)}), " if gone else ""
        for (kind, _), drop in {(drop.kind, drop.of): drop for drop in self.drops if drop.left is not None}.items():
            dropped += f"{drop.left} of {drop.of} {kind} in each block left, "
        return f"{recipe}: {dropped}{folded}{stored}{len(self.kept)} other weights kept, {self.seconds:.0f} s"

    def _repr_html_(self) -> str:
        noted = [r for r in self.layers if r.notes]
        reasons: dict[str, int] = {}
        for weight in self.kept:
            reasons[weight["reason"]] = reasons.get(weight["reason"], 0) + weight["bytes"]
        kept = ", ".join(f"{escape(reason)} ({size / 1e6:.1f} MB)" for reason, size in reasons.items())
        folds = f"{len(self.folds)} folds: what was moved from activations into weights"
        linears = "Every linear: error of its output on the calibration tokens"
        return (
            f"<p><b>{escape(str(self))}</b></p><p>Kept as they were: {kept or 'nothing'}.</p>"
            f"{''.join(f'<p>{escape(note)}</p>' for note in self.notes)}"
            f"{f'<p>{len(noted)} linears carry notes.</p>' if noted else ''}"
            f"{_details(folds, html_table(FOLD_HEADS, map(_fold_line, self.folds))) if self.folds else ''}"
            f"{_details(linears, html_table(LAYER_HEADS, self._layer_lines())) if self.layers else ''}"
        )

    def _layer_lines(self) -> Iterator[tuple[object, ...]]:
        """The table's line of each linear; the bar is its error beside the largest one."""
        top = max(r.error for r in self.layers) or 1
        for r in self.layers:
            rtn = "" if r.rtn_error is None else f"{r.rtn_error:.2e}"
            numbers = f"{r.shape[0]}×{r.shape[1]}", f"{r.bits_per_weight:.2f}", f"{r.error:.2e}", rtn
            yield r.name, "█" * round(BAR * r.error / top), *numbers, "; ".join(r.notes)


def _fold_line(f: FoldRecord) -> tuple[object, ...]:
    alpha = "–" if f.alpha is None else f"{f.alpha:.2f}"
    ratios = f"{f.x_before.outlier:.1f}", f"{f.x_after.outlier:.1f}"
    return f.name, ", ".join(f.consumers), alpha, *ratios, "; ".join(f.notes)


def _details(summary: str, table: str) -> str:
    return f"<details><summary>{summary}</summary>{table}</details>"


def refuse_save_pretrained(model: nn.Module) -> None:
    """Make `save_pretrained` of a model that holds modules of this workbench an error: transformers would write its
    tensors beside a configuration of the original model, from which others make a model with random weights."""
    own = __name__.partition(".")[0]
    if any(type(module).__module__.partition(".")[0] == own for module in model.modules()):
        model.save_pretrained = _no_save_pretrained


@contextmanager
def naming_state(model: nn.Module) -> Iterator[None]:
    """If the context ends in an error, the error says whether the model in memory is as it was before. A model that was
    changed is refused by `check_finished` from then on.

    The original weights are not kept to bring them back: that would take the memory of a second model.
    """
    before = makeup(model)
    try:
        yield
    except BaseException as error:
        if makeup(model) == before:
            state = "the model in memory is as it was"
        else:
            state = "the model in memory is partly compressed: load it again before another try"
            setattr(model, UNFINISHED, type(error).__name__)
            refuse_save_pretrained(model)
        if isinstance(error, NotFinite):
            raise NotFinite(f"{error}; {state}") from None
        error.add_note(f"After this error {state}.")
        raise


def check_finished(model: nn.Module) -> None:
    """Raise ValueError if an earlier compression of this model stopped when it had changed a part of it."""
    if reason := getattr(model, UNFINISHED, None):
        raise ValueError(
            f"`model` is partly compressed: an earlier `apply` stopped ({reason}) after it had changed some of its "
            "weights; load the model again"
        )


def makeup(model: nn.Module) -> dict[str, object]:
    """What changes if a module, a weight or a hook of the model is replaced, added or written to, and not if it moves
    to another device. Writes of which torch keeps no count, such as those through `.data`, do not show."""
    parts = offloaded_parts(model)
    away = {module for part in parts for module in model.get_submodule(part).modules()}
    makeup: dict[str, object] = {name: dict(part.where) for name, part in parts.items()}
    for name, module in model.named_modules():
        weights = {} if module in away else module._parameters
        own = {key: _version(weight) for key, weight in weights.items() if weight is not None}
        hooks = (*module._forward_pre_hooks, *module._forward_hooks)  # their numbers
        makeup[f"{name} "] = type(module), id(module), hooks, own
    return makeup


def _version(weight: Tensor) -> tuple[int, torch.dtype, int]:
    return id(weight), weight.dtype, 0 if weight.is_inference() else weight._version


def _no_save_pretrained(*args: Any, **more: Any) -> None:
    raise ValueError(
        "`save_pretrained` cannot write compressed weights: the folder would load as a model with random weights; "
        "`save_compressed(result, folder, tokenizer)` or, for a saved model, `export_checkpoint` works, with a "
        "`save_format` that other libraries read"
    )
