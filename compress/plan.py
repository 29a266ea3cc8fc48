"""plan: a recipe, a model and calibration batches -> a compression of which everything is known before it begins.

Whatever can be refused is refused here: a plan changes nothing of the model.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.inputs.model import check_device
from compress.kv.attach import check_attach
from compress.kv.policy import CacheMethod
from compress.linear import sharing_copy
from compress.memory import predicted
from compress.method import RECOVER, Method, settle
from compress.recipe import Recipe, methods_of
from compress.result import check_finished, makeup
from compress.walk.blocks import find_blocks
from compress.walk.capture import check_runs, device_of
from compress.walk.finite import NotFinite
from compress.walk.folds.folding import FoldingMethod
from compress.walk.identity import code_sha256, model_identity, tokens_identity, tokens_sha256, weights_sha256
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.offload import is_offloaded
from compress.walk.once.calibrated import check_calibrate
from compress.walk.parallel.ranks import current, joined
from compress.walk.parallel.spawn import check_devices, device_of_process, process_count
from compress.walk.resume import BlockStore
from eval.record.compression import Usage
from kernels.support.modes import counting_writes, evaluating
from kernels.support.positions import positions


@dataclass(frozen=True)
class Plan:
    """A compression that was checked and can begin; `compress.apply.run` runs it.

    Attributes:
        recipe: the methods, each with the knobs that the others settle.
        asked: the methods as the user gave them.
        model, batches, work_path, calibrate: as `plan` was given them.
        device: where to compute; "cuda" without a number if each of several processes has a GPU of its own.
        processes: the number of processes that compress the model together.
        usage: memory and disk space, predicted.
        identity: of the model: name, weights_sha256, parameters.
        calibration: corpus, samples, seqlen, seed, sha256; None without batches.
        seconds: the time that planning took.
        made_of: the modules, weights and hooks of the model when it was planned, see `compress.result.makeup`.
    """

    recipe: list[Method]
    asked: list[Method]
    model: PreTrainedModel
    batches: Sequence[Tensor]
    work_path: str | Path | None
    calibrate: str
    device: torch.device
    processes: int
    usage: Usage
    identity: dict[str, Any]
    calibration: dict[str, Any] | None
    seconds: float
    made_of: dict[str, object]

    def store(self, index: int) -> BlockStore | None:
        """Where the blocks that method `index` has finished are kept; None without a work folder."""
        if not self.work_path:
            return None
        steps = [(method.name, method.values()) for method in self.recipe[: index + 1]]
        about = [self.identity, self.calibration, code_sha256(), *(["once"] if self.calibrate == "once" else [])]
        return BlockStore.of(Path(self.work_path), steps, about)


def check_unchanged(plan: Plan) -> None:
    """Raise ValueError if the model or the batches of a plan have changed since: a result names those of the plan."""
    model = makeup(plan.model) == plan.made_of and weights_sha256(plan.model) == plan.identity["weights_sha256"]
    batches = tokens_sha256(plan.batches) == (plan.calibration or {"sha256": tokens_sha256([])})["sha256"]
    if not (model and batches):
        changed = "batches have" if model else "model has"
        raise ValueError(f"`plan`: its {changed} changed since it was planned, so that it must be planned again")


def plan(
    recipe: Recipe,
    model: PreTrainedModel,
    batches: Sequence[Tensor] | None = (),
    *,
    device: str | None = None,
    work_path: str | Path | None = None,
    calibrate: str = "sequential",
    processes: int | None = None,
    max_memory: int | str | None = None,
) -> Plan:
    """Check a compression, and predict its memory; nothing of the model changes. The arguments are those of `apply`.

    Raises:
        ValueError: the methods of the recipe cannot be combined or do not fit the model, the batches are unusable, or
            the compression needs more than `max_memory` or more room than the disk has; the message says what would
            fit.
        NotFinite: a weight of the model is NaN or infinite.
    """
    start = time.perf_counter()
    check_calibrate(calibrate)
    asked, batches = methods_of(recipe), () if batches is None else batches
    where, count = _chosen(device, processes, model, asked, batches)
    # What one process refuses, all of them refuse.
    with joined(device_of_process(where), alone=count == 1), evaluating(model), counting_writes():
        check_finished(model)
        try:
            settled = check_recipe(asked, model)
        except NotFinite:  # of a pass over made-up tokens, which does not tell the cause
            model_identity(model)
            raise
        if calibrate == "once":
            settled = _calibrated_once(settled)
        _check_batches(batches, model, needed=[method.name for method in settled if method.needs_calibration])
        for method in settled:
            method.check_run(model, batches, where, count)
        identity, tokens = model_identity(model), tokens_identity(batches)
        if walks(settled) and len(batches) and not is_offloaded(model):
            check_runs(model, find_blocks(model)[1], batches[0])
        usage = predicted(settled, model, batches, max_memory)
        _check_same(settled, identity, tokens)
    return Plan(
        recipe=settled,
        asked=asked,
        model=model,
        batches=batches,
        work_path=work_path,
        calibrate=calibrate,
        device=where,
        processes=count,
        usage=usage,
        identity=identity,
        calibration=tokens,
        seconds=time.perf_counter() - start,
        made_of=makeup(model),
    )


def check_recipe(
    recipe: Recipe, model: nn.Module, *, outline: bool = False, awaited: frozenset[str] = frozenset()
) -> list[Method]:
    """The methods of a recipe, each as it acts between the others, if they fit a model.

    Args:
        outline: the model has shapes and no weights, so that checks which need weights are left out; `plan` makes them.
        awaited: files that do not exist yet; methods with a knob that names one of them are not checked.

    Raises:
        ValueError: the methods cannot be combined, or one of them does not fit the model.
    """
    settled = settle(methods_of(recipe))
    for place, method in enumerate(settled):
        if awaited & {value for value in vars(method).values() if isinstance(value, str)}:
            continue
        with suppress(*(RuntimeError, NotImplementedError) if outline else ()):
            method.check(_left_by(settled[:place], model) if method.by_position else model)
    check_attach(model, [method for method in settled if isinstance(method, CacheMethod)])
    return settled


def _left_by(methods: Sequence[Method], model: nn.Module) -> nn.Module:
    """The model without the modules that these methods remove; it shares its weights with the model."""
    if all(method.stage != "drop" for method in methods):
        return model
    smaller = sharing_copy(model)
    for method in methods:
        method.outline(smaller)
    return smaller


def _check_same(recipe: Sequence[Method], identity: Mapping[str, Any], calibration: Mapping[str, Any] | None) -> None:
    """Raise ValueError if the processes of one compression were called with different arguments."""
    tokens = calibration and calibration["sha256"]
    about = {"recipe": str(recipe), "model": identity["weights_sha256"], "batches": tokens}
    for rank, other in enumerate(current().gathered(about)):
        for name, value in other.items():
            if value != about[name]:
                raise ValueError(
                    f"`{name}` of process {rank} differs from that of process {current().rank}: all processes of a "
                    "process group compress one model together; `processes=1` compresses one in each"
                )


def walks(recipe: Sequence[Method]) -> bool:
    """Whether a method goes through the model block by block."""
    return any(isinstance(method, LayerwiseMethod | FoldingMethod) for method in recipe)


def _calibrated_once(recipe: Sequence[Method]) -> list[Method]:
    """The methods as they are solved from statistics of the uncompressed model.

    Raises:
        ValueError: one of them would make these statistics wrong.
    """
    if moving := [method.name for method in recipe if method.moves_inputs]:
        raise ValueError(
            f"`calibrate` (='once') uses statistics of the unchanged model, and {', '.join(moving)} changes the inputs "
            "of linears; calibrate='sequential' calibrates it"
        )
    for i, method in enumerate(recipe):
        if method.stage == RECOVER and (later := next((m.name for m in recipe[i + 1 :] if m.collects()), "")):
            raise ValueError(
                f"`calibrate` (='once') uses statistics of the unchanged model for {later}, and {method.name} changes "
                "the weights before it; calibrate='sequential' calibrates it"
            )
    return [replace(method, sequential=False) if isinstance(method, LayerwiseMethod) else method for method in recipe]


def _chosen(
    device: str | None, processes: int | None, model: nn.Module, recipe: Sequence[Method], batches: Sequence[Tensor]
) -> tuple[torch.device, int]:
    """The device and the number of processes.

    Raises:
        ValueError: they are not there; or the processes are to be started here, and cannot be given what they need.
    """
    count = process_count(processes, worth_it=bool(len(batches)))
    check_device(device or "cpu")
    where = torch.device(device) if device else device_of(model)
    if count > 1 and not dist.is_initialized():
        where = where if device else torch.device(where.type)
        check_devices(where, count)
        _check_can_be_sent(model, recipe, count)
    return where, count


def _check_can_be_sent(model: nn.Module, recipe: Sequence[Method], count: int) -> None:
    """Raise ValueError if the model cannot be sent to another process, or the class of a method is not found there."""
    if is_offloaded(model):
        raise ValueError(
            f"`processes` (={count}): the weights of this model lie on disk, where each process has to open them by "
            "itself: start all processes with torchrun"
        )
    for method in recipe:
        if type(method).__module__ == "__main__":
            raise ValueError(
                f"`processes` (={count}): {type(method).__name__} is defined in a notebook or a script, where the "
                "other processes do not find it: move it to a file of its own, or pass processes=1"
            )


def _check_batches(batches: Sequence[Tensor], model: PreTrainedModel, needed: list[str]) -> None:
    if needed and not len(batches):
        raise ValueError(
            f"`batches` is empty, and {', '.join(needed)} needs calibration; `calibration(tokenizer)` makes some"
        )
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    most = positions(model)
    for i, batch in enumerate(batches):
        if not isinstance(batch, Tensor) or batch.dtype != torch.long or batch.dim() != 2 or batch.shape[0] != 1:
            what = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(f"`batches[{i}]` must be a LongTensor [1, T], not {what}")
        if batch.shape[1] > most:
            raise ValueError(
                f"`batches[{i}]` has {batch.shape[1]} tokens; this model has {most} positions, so that `seqlen` "
                f"must be at most {most}"
            )
        if batch.shape[1] == 0 or not 0 <= batch.min().item() <= batch.max().item() < vocabulary:
            raise ValueError(f"`batches[{i}]` must hold token ids between 0 and {vocabulary - 1}, and at least one")
