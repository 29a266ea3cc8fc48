"""apply: a recipe, a model and calibration batches -> a compressed model and a record of every weight."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress.dropped import undone_if_refused
from compress.kv.attach import attach
from compress.kv.policy import CacheMethod
from compress.linear import sharing_copy
from compress.memory import measured, predicted
from compress.method import Method
from compress.plan import Plan, check_unchanged, plan, walks
from compress.recipe import Recipe
from compress.result import Result, naming_state, refuse_save_pretrained
from compress.walk.blocks import find_blocks, kept_weights
from compress.walk.capture import activations_on_disk, device_of, on_device
from compress.walk.context import Context
from compress.walk.experts import is_fused_experts, split_experts
from compress.walk.finite import naming
from compress.walk.identity import code_sha256, weights_sha256
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.offload import is_offloaded, offloaded_parts, original_linears
from compress.walk.once.calibrated import SharedStatistics, shared_statistics
from compress.walk.parallel.ranks import current, joined
from compress.walk.parallel.spawn import device_of_process, spawned
from compress.walk.shards import WorkFolder
from compress.walk.statistics.saved import SavedStatistics
from eval.record.compression import AllocationRecord, DropRecord, FoldRecord, LayerRecord, RecoveryRecord
from kernels.clock import clock
from kernels.registry import ran, recording
from kernels.support.busy import warn_if_busy
from kernels.support.modes import counting_writes, evaluating

Told = LayerRecord | FoldRecord | DropRecord | AllocationRecord | RecoveryRecord


@dataclass(frozen=True)
class _Stage:
    """A model after the first methods of a recipe, from which other recipes that begin with them go on.

    Attributes:
        model: a copy, which nothing changes any more.
        made: the records of these methods.
        originals: the linears before the first method that stored something; None: none has.
        saved: the statistics that recipes share; None: not collected yet.
        seconds: the time that the methods took.
        kernels: the implementations that ran, by operation.
    """

    model: PreTrainedModel
    made: list[Told]
    originals: Mapping[str, nn.Module] | None
    saved: SavedStatistics | None
    seconds: float
    kernels: dict[str, set[str]]


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
    how: dict[str, Any] = {"device": device, "work_path": work_path, "calibrate": calibrate, "processes": processes}
    return _run_here(plan(recipe, model, batches, max_memory=max_memory, **how))


def run(plan: Plan) -> Result:
    """Compress the model of a plan in place; the errors are those of `apply` after the work has begun.

    Raises:
        ValueError: the model or the batches have changed since they were planned.
    """
    return _run_here(plan, planned_before=True)


def _run_here(plan: Plan, planned_before: bool = False) -> Result:
    with _together(_run_here, {"plan": plan}, plan) as device:
        if planned_before:
            check_unchanged(plan)
        with naming_state(plan.model):
            return _run(plan, device, _shared([plan]))


@contextmanager
def _together(call: Callable, arguments: Mapping[str, Any], plan: Plan) -> Iterator[torch.device]:
    """While the context lasts, all processes of a plan make this call together; gives the device of this process."""
    device = plan.device
    with ExitStack() as stack:
        if plan.processes > 1 and not dist.is_initialized():
            stack.enter_context(spawned(plan.processes, call, arguments))
        device = device_of_process(device) if plan.processes > 1 else device
        stack.enter_context(joined(device, alone=plan.processes == 1))
        stack.enter_context(counting_writes())
        yield device


def _run(
    plan: Plan,
    device: torch.device,
    shared: SharedStatistics | None,
    begun: tuple[int, _Stage] | None = None,
    wanted: dict[int, _Stage | None] | None = None,
) -> Result:
    """`run` in every process.

    Args:
        shared: the place for statistics that recipes share; None: each method collects its own.
        begun: the number of first methods that another recipe has applied already, and its model after them.
        wanted: the numbers of first methods after which other recipes will go on; each gets its `_Stage` here.
    """
    recipe, model = plan.recipe, plan.model if begun is None else sharing_copy(begun[1].model)
    if device.type == "cpu" and current().count == 1:  # several processes wait for each other
        warn_if_busy()
    start = clock(device)
    if walks(recipe) and begun is None:
        split_all_experts(model)
    folder = _work_folder(plan) if plan.usage.activations == "disk" else None
    with evaluating(model), measured(plan.usage, model), activations_on_disk(folder), recording() as kernels:
        made = _apply_methods(plan, model, device, shared, begun, wanted or {})
    if on_cache := [method for method in recipe if isinstance(method, CacheMethod)]:
        attach(model, on_cache)
    refuse_save_pretrained(model)
    return Result(
        model=model,
        recipe=recipe,
        asked=plan.asked,
        layers=_layers(made),
        folds=[one for one in made if isinstance(one, FoldRecord)],
        drops=[one for one in made if isinstance(one, DropRecord)],
        recoveries=[one for one in made if isinstance(one, RecoveryRecord)],
        allocation=next((one for one in made[::-1] if isinstance(one, AllocationRecord)), None),
        kept=_kept(model, recipe, made),
        identity=plan.identity,
        calibration=plan.calibration,
        seconds=plan.seconds + clock(device) - start + (begun[1].seconds if begun else 0.0),
        kernels={op: sorted(used) for op, used in kernels.items()},
        notes=[
            *(remark for method in recipe for remark in method.remarks(device)),
            *(_said_of_once(recipe) if shared and len(plan.batches) else ()),
        ],
        usage=plan.usage,
    )


def _apply_methods(
    plan: Plan,
    model: PreTrainedModel,
    device: torch.device,
    shared: SharedStatistics | None,
    begun: tuple[int, _Stage] | None,
    wanted: dict[int, _Stage | None],
) -> list[Told]:
    """Apply the methods of a plan to `model`, one after the other; returns all their records. See `_run`."""
    recipe, batches, tokens = plan.recipe, plan.batches, plan.calibration
    done, stage = begun or (0, _Stage(model, [], None, None, 0.0, {}))
    made, originals, saved, spent = [*stage.made], stage.originals, stage.saved, stage.seconds
    drops = [method.stage for method in recipe].count("drop")  # they come first
    with evaluating(plan.model):  # as it was before the recipe
        prepared = {
            i: method.prepare(plan.model, batches, Context(device, plan.store(i)))
            for i, method in enumerate(recipe[done:], done)
        }
    with ExitStack() as undo, recording() as kernels:
        for op, used in stage.kernels.items():
            for implementation in used:
                ran(op, implementation)
        if drops > done:
            undo.enter_context(undone_if_refused(model))
        for i, method in enumerate(recipe[done:], done):
            start = clock(device)
            if shared and saved is None and tokens and method.collects():
                weights = weights_sha256(model) if drops else plan.identity["weights_sha256"]
                with naming("calibrate='once'"):
                    saved = shared.statistics(model, batches, [weights, tokens["sha256"], code_sha256()], device=device)
            if i == drops:
                undo.close()  # the dropped parts are no longer needed
            # Errors of later methods are measured against the weights before the first method that stores something;
            # methods that move inputs change the weights from which later methods start.
            stores = method.stage not in ("drop", "transform") and not method.moves_inputs
            read = any(m.reads_originals for m in recipe[i + 1 :]) or any(count > i for count in wanted)
            untouched = original_linears(model) if originals is None and stores and read else None
            context = Context(device, plan.store(i), originals or {}, saved, prepared[i])
            with naming(method.name):
                made += method.apply(model, batches, context)
            stored = any(isinstance(one, LayerRecord) for one in made)
            originals = untouched if untouched is not None and stored else originals
            spent += clock(device) - start
            if i + 1 in wanted:
                so_far = {op: set(names) for op, names in kernels.items()}
                wanted[i + 1] = _Stage(sharing_copy(model), [*made], originals, saved, spent, so_far)
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

    The copies share the memory of all unchanged weights, with each other and with the model, which is not changed. What
    recipes that begin with the same methods have in common is done once, and counted in the `seconds` of each; not if
    the model's weights are on disk. With calibrate="once" all recipes share one pass over the model, which collects the
    statistics for all of them.

    Raises:
        ValueError: as in `apply`, for any of the recipes, before any is applied.
    """
    how: dict[str, Any] = {"device": device, "work_path": work_path, "calibrate": calibrate, "processes": processes}
    return _run_each({name: plan(recipe, model, batches, **how) for name, recipe in recipes.items()})


def _run_each(plans: Mapping[str, Plan]) -> dict[str, Result]:
    """Run several plans for one model, each on a copy of it; they differ in their recipes alone."""
    results: dict[str, Result] = {}
    if not plans:
        return results
    first = next(iter(plans.values()))
    begins = _beginnings(plans)
    stages: dict[str, dict[int, _Stage | None]] = {name: {} for name in plans}
    for other, count in begins.values():
        stages[other][count] = None
    with _together(_run_each, {"plans": plans}, first) as device:
        shared, progress = _shared([*plans.values()]), tqdm(plans.items(), desc="recipes", unit="recipe")
        for name, one in progress:
            progress.set_postfix_str(name)
            model = sharing_copy(one.model)
            usage = predicted(one.recipe, model, one.batches)  # beside the results that are in memory by now
            other, count = begins.pop(name, (name, 0))
            stage = stages[other].get(count)
            begun = None if stage is None else (count, stage)
            results[name] = _run(replace(one, model=model, usage=usage), device, shared, begun, stages[name])
            for of, kept in stages.items():
                kept.update({after: None for after in kept if (of, after) not in begins.values()})  # no longer needed
    return results


def _beginnings(plans: Mapping[str, Plan]) -> dict[str, tuple[str, int]]:
    """By name of a plan whose recipe begins with the methods of an earlier one: that one's name, and how many methods
    they share.

    Parts of a model on disk cannot be shared, all drops are undone together, and experts are split before the first
    method of a recipe that goes through the model, and of no other.
    """
    found: dict[str, tuple[str, int]] = {}
    for place, (name, one) in enumerate(plans.items()):
        most = max([method.stage for method in one.recipe].count("drop") - 1, 0)
        for other in [*plans][:place]:
            recipe = plans[other].recipe
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.recipe, recipe, strict=False)))
            if count > most and walks(recipe) == walks(one.recipe) and not is_offloaded(one.model):
                found[name], most = (other, count), count
    return found


def split_all_experts(model: nn.Module) -> None:
    """Split the experts of every block into linears, which changes no output."""
    for block in find_blocks(model)[1]:
        if any(map(is_fused_experts, block.modules())):
            with on_device(block, device_of(block)):
                split_experts(block)


def _work_folder(plan: Plan) -> WorkFolder:
    """A work folder for activations that do not fit into memory."""
    parts = list(offloaded_parts(plan.model).values())
    return parts[0].folder if parts else WorkFolder(plan.work_path or "")


def _shared(plans: Sequence[Plan]) -> SharedStatistics | None:
    """The place of the statistics that these plans share; None unless they are calibrated once."""
    if plans[0].calibrate != "once":
        return None
    methods = [method for plan in plans for method in plan.recipe]
    needs = [need for method in methods for need in method.collects()]
    return shared_statistics(needs, plans[0].work_path, head=any("embedding" in method.places for method in methods))


def _said_of_once(recipe: Sequence[Method]) -> list[str]:
    """Remarks for readers on a recipe that was calibrated once."""
    alone = [f"{method.name}: {what}" for method in recipe if (what := method.own_passes())]
    return [
        "calibrate='once': every linear was solved on what the model gives as it is; no block saw what the compressed "
        "blocks before it give",
        *(f"not taken from the saved statistics, but from passes of its own: {what}" for what in alone),
    ]


def _kept(model: nn.Module, recipe: Sequence[Method], made: Sequence[Told]) -> list[dict[str, Any]]:
    """Every parameter that is not stored compressed, with the reason, or the method that has trained it."""
    trained = {
        name: one.method for one in made if isinstance(one, RecoveryRecord) for name, by in one.moved.items() if by
    }
    kept = kept_weights(model, [m.skip for m in recipe if isinstance(m, LayerwiseMethod)])
    return [{**row, "reason": f"trained by {trained[n]}"} if (n := row["name"]) in trained else row for row in kept]


def _layers(made: Sequence[Told]) -> list[LayerRecord]:
    """One record of each weight that was stored, after the last method of the recipe."""
    layers: dict[str, LayerRecord] = {}
    for record in made:
        if isinstance(record, LayerRecord):
            before = layers.get(record.name)
            layers[record.name] = record if before is None else _after(before, record)
        elif isinstance(record, RecoveryRecord):
            for name, moved in record.moved.items():
                if name in layers:
                    note = f"{record.method} moved it by {moved:.2%}; its error is that before"
                    layers[name] = replace(layers[name], notes=(*layers[name].notes, note))
    return list(layers.values())


def _after(before: LayerRecord, now: LayerRecord) -> LayerRecord:
    """The record of a weight after one more method of the recipe."""
    return replace(
        now,
        rtn_error=before.rtn_error if now.rtn_error is None else now.rtn_error,
        seconds=(before.seconds or 0.0) + (now.seconds or 0.0),
        notes=(*before.notes, *now.notes),
        distortion=now.distortion or before.distortion,
        choice=now.choice or before.choice,
        choices=now.choices or before.choices,
    )
