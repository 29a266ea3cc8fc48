"""Speed over batch sizes and prompt lengths: every model compared with the baseline, cell by cell, in turns.

Every cell records how its model was executed. On a CPU nothing is compiled unless requested: a graph serves one batch
size and one length, and takes longer to compile than all timings with it. Models that `kernels.step` supports use its
passes, as with `compress.accelerate`; others run eagerly, and the framework's overhead per operation then counts, too.
If all are compiled, a cell in which one model cannot be compiled is measured eagerly for all.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from tqdm.auto import tqdm

from eval.machine.load import LoadMeter
from eval.record.speed import GridRow, SpeedGrid, TimingSettings
from eval.speed.device_lock import timing_threads, undisturbed
from eval.speed.speed import (
    TimedModel,
    clear,
    contestants,
    in_groups,
    in_turns,
    make,
    make_ready,
    quartiles,
    spreads,
)
from kernels.support.errors import check_positive
from kernels.support.positions import positions


def check_speed_grid(
    model: nn.Module,
    batches: Sequence[int],
    prompts: Sequence[int],
    new_tokens: int = 16,
    *,
    rounds: int = 3,
) -> None:
    """Raise ValueError if a grid cannot be measured like this; quick, so that it can be called before long work.

    Args: as in `measure_speed_grid`; any of the models.
    """
    for name, values in (("batches", batches), ("prompts", prompts)):
        if not values or any(type(value) is not int or value < 1 for value in values) or len(set(values)) < len(values):
            raise ValueError(f"`{name}` (={list(values)}) must be positive integers, at least one, each once")
    check_positive(new_tokens=new_tokens, rounds=rounds)
    longest = max(prompts)
    if longest + new_tokens > positions(model):
        raise ValueError(
            f"`prompts` (up to {longest}) + `new_tokens` (={new_tokens}) must be at most {positions(model)}, "
            "the positions that this model has"
        )


@torch.no_grad()
def measure_speed_grid(
    models: Mapping[str, nn.Module],
    *,
    batches: Sequence[int] = (1, 8),
    prompts: Sequence[int] = (128, 512),
    new_tokens: int = 16,
    rounds: int = 3,
    compiled: bool | None = None,
) -> SpeedGrid:
    """Time every model in every cell, in turns with the baseline.

    Args:
        models: {name: model}; the first must be "baseline", with which all others are compared. bfloat16 copies are
            timed.
        batches, prompts: batch sizes, and prompt lengths in tokens; all combinations. Rows of a batch are equally long.
        new_tokens: number of tokens decoded after each prompt, greedily.
        rounds: number of rounds for each cell.
        compiled: None: compile on a GPU, where launching a kernel can take longer than the kernel, and not on a CPU. A
            cell in which a model does not compile is measured eagerly for all, and names the model.

    Raises:
        ValueError: see `check_speed_grid`; no "baseline" at the beginning of `models`.
    """
    if next(iter(models), None) != "baseline":
        raise ValueError(f"`models` (={list(models)}) must begin with 'baseline', with which all others are compared")
    for model in models.values():
        check_speed_grid(model, batches, prompts, new_tokens, rounds=rounds)
    device = next(models["baseline"].parameters()).device
    variants = contestants(models, compiled=device.type == "cuda" if compiled is None else compiled)
    cells = [(batch, prompt) for prompt in prompts for batch in batches]
    progress = tqdm(total=len(variants) * len(cells) * (rounds + 1) + len(cells), desc="speed grid", unit="run")
    eager: dict[str, nn.Module] = {}

    def prepare(name: str, variant: TimedModel) -> None:
        progress.set_postfix_str(f"{name}: loading")
        eager[name] = make(variant)
        if not variant.compiled:
            variant.model = eager[name]

    rows: list[GridRow] = []
    groups, meter = 0, LoadMeter()
    with undisturbed(device):
        for held in in_groups(variants, prepare):
            for batch, prompt in cells:
                _ready(held, eager, batch, prompt, new_tokens, progress)
                in_turns(held, prompt, new_tokens, rounds, batch, progress, meter, repeats=1)
                again = {"baseline"} if groups else set()
                rows += [row for row in _rows(held, batch, prompt, new_tokens) if row.model not in again]
                for variant in held.values():
                    clear(variant)
                    variant.ttft_s, variant.token_s, variant.written_s = [], [], []
            groups += 1
            for name in held.keys() - {"baseline"}:
                del eager[name]
    progress.close()
    settings = TimingSettings(
        rounds=rounds,
        new_tokens=new_tokens,
        batches=tuple(batches),
        prompts=tuple(prompts),
        dtype=variants["baseline"].dtype,
        device=device.type,
        threads=timing_threads(),
        groups=groups,
    )
    return SpeedGrid(settings, tuple(rows), spreads(variants["baseline"].twice, rounds), meter.load)


def _ready(
    held: dict[str, TimedModel], eager: dict[str, nn.Module], batch: int, prompt: int, new_tokens: int, progress: tqdm
) -> None:
    """Prepare all models for a cell, all executed in the same way."""
    for name, variant in held.items():
        progress.set_postfix_str(f"{name}: batch {batch}, prompt {prompt}")
        make_ready(variant, eager[name], prompt, new_tokens, batch)
        progress.update()
    failed = [name for name, variant in held.items() if variant.compiled and variant.execution.startswith("eager")]
    if not failed:
        return
    why = held[failed[0]].execution
    for name, variant in held.items():
        clear(variant)
        variant.compiled = False
        make_ready(variant, eager[name], prompt, new_tokens, batch)
        variant.compiled, variant.execution = True, f"{why}: {', '.join(failed)}"


def _rows(held: dict[str, TimedModel], batch: int, prompt: int, new_tokens: int) -> list[GridRow]:
    first = held["baseline"]
    rows = []
    for name, v in held.items():
        prefill, decode = [batch * prompt / s for s in v.ttft_s], [batch / s for s in v.written_s]
        row = GridRow(
            model=name,
            batch=batch,
            prompt_tokens=prompt,
            new_tokens=new_tokens,
            prefill_tokens_per_s=statistics.median(prefill),
            prefill_quartiles=quartiles(prefill),
            decode_tokens_per_s=statistics.median(decode),
            decode_quartiles=quartiles(decode),
            time_to_first_token_s=statistics.median(v.ttft_s),
            execution=v.execution,
        )
        if v is not first:
            prefill_ratio = statistics.median(first.ttft_s) / statistics.median(v.ttft_s)
            decode_ratio = statistics.median(first.written_s) / statistics.median(v.written_s)
            row = replace(row, prefill_ratio=prefill_ratio, decode_ratio=decode_ratio)
        rows.append(row)
    return rows
