"""apply: a recipe, a model and calibration batches -> a compressed model and a record of every weight."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress.dropped import undone_if_refused
from compress.inputs.model import check_device
from compress.kv.attach import attach, check_attach
from compress.kv.policy import CacheMethod
from compress.linear import parameter_count, sharing_copy
from compress.memory import measured, plan
from compress.method import Method, settle
from compress.recipe import Recipe, methods_of
from compress.records import AllocationRecord, DropRecord, FoldRecord, LayerRecord
from compress.result import Result, check_finished, naming_state, refuse_save_pretrained
from compress.walk.blocks import find_blocks, kept_weights
from compress.walk.capture import activations_on_disk, check_runs, device_of, on_device
from compress.walk.context import Context
from compress.walk.experts import is_fused_experts, split_experts
from compress.walk.finite import naming
from compress.walk.folds.folding import FoldingMethod
from compress.walk.identity import tokens_sha256, weights_sha256
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.offload import is_offloaded, offloaded_parts, original_linears
from compress.walk.once.calibrated import Shared, check_calibrate, shared_statistics
from compress.walk.parallel.ranks import current, joined
from compress.walk.parallel.spawn import check_devices, device_of_process, process_count, spawned
from compress.walk.resume import BlockStore
from compress.walk.shards import WorkFolder
from kernels.clock import clock
from kernels.registry import recording
from kernels.support import source
from kernels.support.busy import warn_if_busy


def apply(
    recipe: Recipe,
    model: PreTrainedModel,
    batches: Sequence[Tensor] = (),
    *,
    device: str | None = None,
    work_path: str | Path | None = None,
    calibrate: str = "sequential",
    processes: int | None = None,
    max_memory: int | str | None = None,
) -> Result:
    """Compress a model in place.

    Args:
        recipe: methods, applied in order: a list, one method, or a text such as "smoothquant, gptq(bits=8), int8".
        model: a transformers decoder; its blocks are replaced piece by piece, so keep a copy if you need the original.
        batches: calibration tokens, LongTensors [1, T]; any list will do, `calibration` makes one.
        device: where to compute, one block at a time; None: the model's own device.
        work_path: folder where finished blocks are kept. A run that was killed, started again with the same recipe,
            model and batches, takes them from there. Statistics of calibrate="once" are kept there, too.
        calibrate: "sequential": each block is solved on the outputs of the compressed blocks before it. "once": all
            linears are solved on the activations of the uncompressed model; the same statistics serve every recipe, but
            the result is less accurate.
        processes: number of processes that compress the model together; each runs a share of the batches and solves a
            share of the linears. The result is the same as with one process. None: all processes of torch's process
            group if there is one (torchrun), in which every process calls `apply` with the same arguments; else
            $WORKBENCH_PROCESSES if there are batches, or one. More than one without a process group: the processes are
            started on this machine, each with its own GPU if `device` is a GPU.
        max_memory: limit for the whole process, in bytes or as "6GB". The activations between blocks are kept on disk
            if the compression would not fit otherwise. None: no limit.

    Returns:
        Result: `.model` (the same object), `.layers`, and what the run record needs; the same in every process.

    Raises:
        ValueError: before any work, if the methods of the recipe cannot be combined or do not fit the model, if the
            batches are unusable, or if the compression needs more than `max_memory` or more room than the disk has; the
            message says what would fit. Later, if a drop breaks the model, after which all of it is put back.
        NotFinite: an activation, a statistic or an error is NaN or infinite. This error, and every other one after the
            work has begun, says whether the model is as it was, or partly compressed, so that it must be loaded again.
        ProcessLost: one of several processes has ended. An error in one of them is raised in all.
    """
    check_calibrate(calibrate)
    recipe = methods_of(recipe)
    arguments = {"recipe": recipe, "model": model, "batches": batches, "work_path": work_path, "calibrate": calibrate}
    arguments["max_memory"] = max_memory
    with (
        _together(apply, arguments, device, processes) as where,
        _shared(calibrate, [recipe], work_path) as shared,
    ):
        return _apply(recipe, model, batches, where, work_path, shared, max_memory)


@contextmanager
def _together(
    call: Callable, arguments: Mapping[str, Any], device: str | None, processes: int | None
) -> Iterator[torch.device]:
    """While the context lasts, all processes that make this call work together; gives the device of this process."""
    count = process_count(processes, worth_it=bool(len(arguments["batches"] or ())))
    check_device(device or "cpu")
    where = torch.device(device) if device else device_of(arguments["model"])
    with ExitStack() as stack:
        if count > 1 and not dist.is_initialized():
            where = where if device else torch.device(where.type)
            check_devices(where, count)
            recipes = arguments["recipes"].values() if "recipes" in arguments else [arguments["recipe"]]
            _check_can_be_sent(arguments["model"], [method for recipe in recipes for method in recipe], count)
            stack.enter_context(spawned(count, call, {**arguments, "device": str(where)}, where))
        where = device_of_process(where) if count > 1 else where
        stack.enter_context(joined(where, alone=count == 1))
        yield where


def _apply(
    recipe: Sequence[Method],
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    where: torch.device,
    work_path: str | Path | None,
    shared: Shared | None,
    max_memory: int | str | None = None,
    copied: bool = False,
) -> Result:
    """`apply` in every process; `shared`: the place for statistics that recipes share, None: each method collects
    its own; `copied`: the model is a copy of the user's, which the methods have checked already."""
    asked, recipe, batches = list(recipe), settle(list(recipe)), () if batches is None else batches
    if shared:
        recipe = [replace(m, sequential=False) if isinstance(m, LayerwiseMethod) else m for m in recipe]
    check_finished(model)
    _check_batches(batches, model, needed=[m.name for m in recipe if m.needs_calibration])
    _check_once(recipe, shared)
    if where.type == "cpu" and current().count == 1:  # several processes wait for each other
        warn_if_busy()
    start = clock(where)
    identity, tokens = model_identity(model), _tokens_identity(batches)
    for method in () if copied else recipe:
        method.check(model)
    on_cache = [method for method in recipe if isinstance(method, CacheMethod)]
    check_attach(model, on_cache)
    usage = plan(recipe, model, batches, max_memory)
    if any(isinstance(method, LayerwiseMethod | FoldingMethod) for method in recipe):
        _split_experts(model, batches)
    _check_same(
        {"recipe": str(recipe), "model": identity["weights_sha256"], "batches": tokens["sha256"] if tokens else None}
    )
    folder = _work_folder(model, work_path) if usage.activations == "disk" else None
    with nullcontext() if copied else naming_state(model):
        with measured(usage, model), activations_on_disk(folder), recording() as kernels:
            made = _run(recipe, model, batches, identity, tokens, where, work_path, shared)
        if on_cache:
            attach(model, on_cache)
    refuse_save_pretrained(model)
    return Result(
        model=model,
        recipe=recipe,
        asked=asked,
        layers=list(made.layers.values()),
        folds=made.folds,
        drops=made.drops,
        allocation=made.allocation,
        kept=kept_weights(model, [m.skip for m in recipe if isinstance(m, LayerwiseMethod)]),
        identity=identity,
        calibration=tokens,
        seconds=clock(where) - start,
        kernels={op: sorted(used) for op, used in kernels.items()},
        notes=[
            *(remark for method in recipe for remark in method.remarks(where)),
            *(_said_of_once(recipe) if shared and len(batches) else ()),
        ],
        usage=usage,
    )


@dataclass
class _Made:
    """The records of the methods of a recipe; `layers` by name, each after the last method."""

    layers: dict[str, LayerRecord] = field(default_factory=dict)
    folds: list[FoldRecord] = field(default_factory=list)
    drops: list[DropRecord] = field(default_factory=list)
    allocation: AllocationRecord | None = None

    def add(self, told: LayerRecord | FoldRecord | DropRecord | AllocationRecord) -> None:
        match told:
            case FoldRecord():
                self.folds.append(told)
            case DropRecord():
                self.drops.append(told)
            case AllocationRecord():
                self.allocation = told
            case _:
                self.layers[told.name] = _after(self.layers.get(told.name), told)


def _run(
    recipe: Sequence[Method],
    model: nn.Module,
    batches: Sequence[Tensor],
    identity: Mapping[str, Any],
    tokens: Mapping[str, Any] | None,
    where: torch.device,
    work_path: str | Path | None,
    shared: Shared | None,
) -> _Made:
    """Apply the methods of a settled recipe, one after the other."""
    made, originals, saved = _Made(), None, None
    drops = [method.stage for method in recipe].count("drop")  # they come first
    with ExitStack() as undo:
        undo.enter_context(undone_if_refused(model))
        for i, method in enumerate(recipe):
            if i == drops:
                undo.close()  # the dropped parts are no longer needed
            if shared and saved is None and tokens and method.collects():
                weights = weights_sha256(model) if made.drops else identity["weights_sha256"]
                with naming("calibrate='once'"):
                    saved = shared.statistics(model, batches, [weights, tokens["sha256"], code_sha256()], device=where)
            # Errors of later methods are measured against the weights before the first method that stores something;
            # methods that move inputs change the weights from which later methods start.
            stores = method.stage not in ("drop", "transform") and not method.moves_inputs
            held = originals is None and stores and any(m.reads_originals for m in recipe[i + 1 :])
            untouched = original_linears(model) if held else None
            store = None
            if work_path:
                steps = [(m.name, m.values()) for m in recipe[: i + 1]]
                about = [identity, tokens, code_sha256(), *(["once"] if shared else [])]
                store = BlockStore.of(Path(work_path), steps, about)
            with naming(method.name):
                for told in method.apply(model, batches, Context(where, store, originals or {}, saved)):
                    made.add(told)
            originals = originals if untouched is None or not made.layers else untouched
    return made


def apply_each(
    recipes: Mapping[str, Recipe],
    model: PreTrainedModel,
    batches: Sequence[Tensor] = (),
    *,
    device: str | None = None,
    work_path: str | Path | None = None,
    calibrate: str = "sequential",
    processes: int | None = None,
) -> dict[str, Result]:
    """Apply several recipes, each to a copy of the model, for a comparison on the same calibration; see `apply`.

    The copies share the memory of all unchanged weights, with each other and with the model, which is not changed. With
    calibrate="once" they also share one pass over the model, which collects the statistics for all of them.

    Raises:
        ValueError: as in `apply`, for any of the recipes, before any is applied.
    """
    check_calibrate(calibrate)
    check_finished(model)
    recipes = {name: methods_of(recipe) for name, recipe in recipes.items()}
    for recipe in recipes.values():
        for method in settle(recipe):
            method.check(model)
    progress = tqdm(recipes.items(), desc="recipes", unit="recipe")
    results = {}
    arguments = {"recipes": recipes, "model": model, "batches": batches, "work_path": work_path, "calibrate": calibrate}
    with (
        _together(apply_each, arguments, device, processes) as where,
        _shared(calibrate, list(recipes.values()), work_path) as shared,
    ):
        for name, recipe in progress:
            progress.set_postfix_str(name)
            results[name] = _apply(recipe, sharing_copy(model), batches, where, work_path, shared, copied=True)
    return results


def _split_experts(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Split the experts of every block into linears, which changes no output.

    Raises:
        ValueError: the model cannot be walked; nothing in it was changed.
    """
    _, blocks = find_blocks(model)
    if len(batches) and not is_offloaded(model) and any(map(is_fused_experts, blocks.modules())):
        check_runs(model, blocks, batches[0])
    for block in blocks:
        if any(map(is_fused_experts, block.modules())):
            with on_device(block, device_of(block)):
                split_experts(block)


def _work_folder(model: nn.Module, work_path: str | Path | None) -> WorkFolder:
    """A work folder for activations that do not fit into memory."""
    parts = list(offloaded_parts(model).values())
    return parts[0].folder if parts else WorkFolder(work_path or "")


def _shared(
    calibrate: str, recipes: Sequence[Sequence[Method]], work_path: str | Path | None
) -> AbstractContextManager[Shared | None]:
    """The place of the statistics that these recipes share; None unless they are calibrated once."""
    if calibrate != "once":
        return nullcontext()
    methods = [method for recipe in recipes for method in settle(list(recipe))]
    needs = [need for method in methods for need in method.collects()]
    return shared_statistics(needs, work_path, head=any("embedding" in method.places for method in methods))


def model_identity(model: nn.Module) -> dict[str, Any]:
    """The record's description of the model that was compressed."""
    return {
        "name": getattr(model, "name_or_path", "") or type(model).__name__,
        "weights_sha256": weights_sha256(model, finite=True),
        "parameters": parameter_count(model),
        **getattr(model, "made_by", {}),
    }


def _tokens_identity(batches: Sequence[Tensor]) -> dict[str, Any] | None:
    """The record's description of the calibration tokens: that of `calibration`, if it made these tokens."""
    if not len(batches):
        return None
    tokens = {
        "corpus": None,
        "samples": len(batches),
        "seqlen": max(b.shape[1] for b in batches),
        "seed": None,
        "sha256": tokens_sha256(list(batches)),
    }
    known = getattr(batches, "identity", tokens)
    return known if known["sha256"] == tokens["sha256"] else tokens


def _check_once(recipe: Sequence[Method], shared: Shared | None) -> None:
    """Raise ValueError if a method of the recipe would make shared statistics wrong."""
    if shared and (moving := [m.name for m in recipe if m.moves_inputs]):
        raise ValueError(
            f"`calibrate` (='once') uses statistics of the unchanged model, and {', '.join(moving)} changes the inputs "
            "of linears: calibrate='sequential' would do"
        )


def _said_of_once(recipe: Sequence[Method]) -> list[str]:
    """Remarks for readers on a recipe that was calibrated once."""
    alone = [f"{method.name}: {what}" for method in recipe if (what := method.own_passes())]
    return [
        "calibrate='once': every linear was solved on what the model gives as it is; no block saw what the compressed "
        "blocks before it give",
        *(f"not taken from the saved statistics, but from passes of its own: {what}" for what in alone),
    ]


def _check_can_be_sent(model: nn.Module, methods: Sequence[Method], count: int) -> None:
    """Raise ValueError if the model cannot be sent to another process, or the class of a method is not found there."""
    if is_offloaded(model):
        raise ValueError(
            f"`processes` (={count}): the weights of this model lie on disk, where each process has to open them by "
            "itself: start all processes with torchrun"
        )
    for method in methods:
        if type(method).__module__ == "__main__":
            raise ValueError(
                f"`processes` (={count}): {type(method).__name__} is defined in a notebook or a script, where the "
                "other processes do not find it; a class in a file of its own, or processes=1, would do"
            )


def _check_same(about: Mapping[str, str | None]) -> None:
    """Raise ValueError if the processes of one compression were called with different arguments."""
    for rank, other in enumerate(current().gathered(about)):
        for name, value in other.items():
            if value != about[name]:
                raise ValueError(
                    f"`{name}` of process {rank} differs from that of process {current().rank}: all processes of a "
                    "process group compress one model together; `processes=1` compresses one in each"
                )


def _after(before: LayerRecord | None, now: LayerRecord) -> LayerRecord:
    """The record of a weight after one more method of the recipe."""
    if before is None:
        return now
    return replace(
        now,
        rtn_error=before.rtn_error if now.rtn_error is None else now.rtn_error,
        seconds=before.seconds + now.seconds,
        notes=(*before.notes, *now.notes),
        distortion=now.distortion or before.distortion,
        choice=now.choice or before.choice,
        choices=now.choices or before.choices,
    )


def _check_batches(batches: Sequence[Tensor], model: PreTrainedModel, needed: list[str]) -> None:
    if needed and not len(batches):
        raise ValueError(
            f"`batches` is empty, and {', '.join(needed)} needs calibration; `calibration(tokenizer)` makes some"
        )
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    for i, batch in enumerate(batches):
        if not isinstance(batch, Tensor) or batch.dtype != torch.long or batch.dim() != 2 or batch.shape[0] != 1:
            what = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(f"`batches[{i}]` must be a LongTensor [1, T], not {what}")
        if batch.shape[1] > positions:
            raise ValueError(
                f"`batches[{i}]` has {batch.shape[1]} tokens; this model has {positions} positions: a `seqlen` up to "
                "that would do"
            )
        if batch.shape[1] == 0 or not 0 <= batch.min().item() <= batch.max().item() < vocabulary:
            raise ValueError(f"`batches[{i}]` must hold token ids between 0 and {vocabulary - 1}, and at least one")


def code_sha256() -> str:
    """Hash of the code behind a finished block: this package, the kernels, torch's and transformers' versions."""
    root = Path(__file__).parents[1]
    code = source.code_sha256(root / "compress", root / "kernels")
    return hashlib.sha256(f"{torch.__version__} {transformers.__version__} {code}".encode()).hexdigest()
