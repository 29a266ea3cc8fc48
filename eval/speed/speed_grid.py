"""Speed over batch sizes and prompt lengths, and under load: every model against the baseline, cell by cell, in turns.

Every cell is executed in the same way for all models, and says how. On a CPU nothing is compiled unless that is asked
for: a graph serves one model, one batch size and one length, and takes longer to compile than all that is timed with
    it. What the framework
adds to every operation then counts for all models, so that ratios lie nearer to 1 than those of compiled steps
(`eval.speed.speed`).
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from eval.speed.device_lock import timing_threads, undisturbed
from eval.speed.speed import (
    Variant,
    clear,
    contestants,
    frozen,
    in_groups,
    in_turns,
    lean,
    make,
    make_ready,
    positions,
    quartiles,
    serve,
)

MOST_LOAD = 10.0  # times the baseline's capacity: beyond it nothing but the queue would be measured


@dataclass
class SpeedGrid:
    """What was measured.

    Attributes:
        settings: batches, prompts, new_tokens, rounds, load, load_seconds, seed, dtype, device, threads, groups.
        rows: {model, batch, prompt_tokens, new_tokens, prefill_tokens_per_s, prefill_quartiles, decode_tokens_per_s
            (all rows of the batch together), decode_quartiles, time_to_first_token_s, execution, prefill_ratio,
            decode_ratio}: medians over the rounds; the ratios are to the baseline's same cell in the same rounds, None
            of the baseline itself.
        load: {model, offered (requests per second), offered_share (of the baseline's capacity), requests, unserved,
            time_to_first_token_p50_s, time_to_first_token_p95_s, tokens_per_s (of one request once it is served,
            median), throughput_tokens_per_s, prompt_tokens, new_tokens, execution}: see `measure_speed_grid`.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    load: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {prefill_tokens_per_s_b8_p512: ..., decode_tokens_per_s_b8_p512: ...,
        time_to_first_token_p95_s_load90: ...}}."""
        found: dict[str, dict[str, float]] = {row["model"]: {} for row in self.rows}
        for row in self.rows:
            for metric in ("prefill_tokens_per_s", "decode_tokens_per_s"):
                found[row["model"]][f"{metric}_b{row['batch']}_p{row['prompt_tokens']}"] = row[metric]
        for row in self.load:
            for metric in ("time_to_first_token_p50_s", "time_to_first_token_p95_s"):
                found[row["model"]][f"{metric}_load{round(100 * row['offered_share'])}"] = row[metric]
        return found

    def found(self) -> dict[str, Any]:
        """Everything as JSON, as the record keeps it under `speed_grid`."""
        return {"settings": self.settings, "rows": self.rows, "load": self.load}

    def _repr_html_(self) -> str:
        cells = list(dict.fromkeys((row["batch"], row["prompt_tokens"]) for row in self.rows))
        head = "".join(f"<th>batch {b}, prompt {p:,}</th>" for b, p in cells)
        body = ""
        for name in dict.fromkeys(row["model"] for row in self.rows):
            mine = {(row["batch"], row["prompt_tokens"]): row for row in self.rows if row["model"] == name}
            body += f"<tr><th style='text-align:left'>{escape(name)}</th>{''.join(_cell(mine[cell]) for cell in cells)}</tr>"
        waits = "".join(
            f"<p>{escape(row['model'])} at {row['offered_share']:.0%} of the baseline's capacity, {row['requests']} "
            "requests: "
            f"first token after {row['time_to_first_token_p50_s']:.2f} s (p95 {row['time_to_first_token_p95_s']:.2f} "
            "s)</p>"
            for row in self.load
        )
        caption = "<caption>tokens/s: decode, prefill</caption>"
        return f"<table>{caption}<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{waits}"


def _cell(row: dict[str, Any]) -> str:
    ratio = "" if row["decode_ratio"] is None else f" ({row['decode_ratio']:.2f}×)"
    return f"<td>{row['decode_tokens_per_s']:,.1f}{ratio}, {row['prefill_tokens_per_s']:,.0f}</td>"


def check_speed_grid(
    model: nn.Module,
    batches: Sequence[int],
    prompts: Sequence[int],
    new_tokens: int = 16,
    load: Sequence[float] = (),
    *,
    rounds: int = 3,
    load_seconds: float = 15.0,
) -> None:
    """Raise ValueError if a grid cannot be measured like this; quick, so that it can be asked before long work.

    Args: as of `measure_speed_grid`; any of the models.
    """
    for name, values in (("batches", batches), ("prompts", prompts)):
        if not values or any(type(value) is not int or value < 1 for value in values) or len(set(values)) < len(values):
            raise ValueError(f"`{name}` (={list(values)}) must be positive integers, at least one, each once")
    for name, value in (("new_tokens", new_tokens), ("rounds", rounds)):
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` (={value!r}) must be a positive integer")
    longest = max(prompts)
    if longest + new_tokens > positions(model):
        raise ValueError(
            f"`prompts` (up to {longest}) + `new_tokens` (={new_tokens}) must be at most {positions(model)}, "
            "the positions that this model has"
        )
    for share in load:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= MOST_LOAD:
            raise ValueError(
                f"`load` (={list(load)}) must be shares of the baseline's capacity above 0 and up to {MOST_LOAD:g}; "
                "0.5 and 0.9 are usual"
            )
    if load and 1 not in batches:
        raise ValueError(
            f"`batches` (={list(batches)}) must hold 1 where `load` is asked for: its requests come one at a time"
        )
    if not load_seconds > 0:
        raise ValueError(f"`load_seconds` (={load_seconds!r}) must be above 0")


@torch.no_grad()
def measure_speed_grid(
    models: Mapping[str, nn.Module],
    *,
    batches: Sequence[int] = (1, 8),
    prompts: Sequence[int] = (128, 512),
    new_tokens: int = 16,
    rounds: int = 3,
    load: Sequence[float] = (),
    load_seconds: float = 15.0,
    seed: int = 0,
    compiled: bool | None = None,
) -> SpeedGrid:
    """Time every model in every cell, in turns with the baseline, and then under load.

    Load is a queue with one server and no batching: requests of the first of `prompts` and `new_tokens` arrive at
    random (gaps of an exponential distribution, from `seed`: the same schedule for every model) at shares of the rate
    that the baseline serves without a pause, and are served one after the other in real time. It tells how waiting
    grows with slowness. It is no serving
    engine: those batch requests that overlap, and reach several times this throughput.

    Args:
        models: {name: model}, "baseline", the one that all are held against, first. bfloat16 copies are timed.
        batches, prompts: sizes, and lengths in tokens; each with each. Rows of a batch are equally long.
        new_tokens: decoded after each prompt, greedily.
        rounds: of each cell.
        load: shares of the baseline's capacity, 0.5 and 0.9 say.
        load_seconds: for a model and a share. Requests arrive during the first half of it; what a slower model has not
            begun by its end is `unserved`, and counts in the percentiles with the time that it has waited till then.
            The p95 of fewer than 20 requests is the longest.
        compiled: None: on a GPU, where launching a kernel can take longer than the kernel, and not on a CPU. A cell in
            which a model does not compile is measured eagerly for all, and says which.

    Raises:
        ValueError: see `check_speed_grid`; no "baseline" at the beginning of `models`.
    """
    if next(iter(models), None) != "baseline":
        raise ValueError(f"`models` (={list(models)}) must begin with 'baseline', which all are held against")
    for model in models.values():
        check_speed_grid(model, batches, prompts, new_tokens, load, rounds=rounds, load_seconds=load_seconds)
    device = next(models["baseline"].parameters()).device
    variants = contestants(models, compiled=device.type == "cuda" if compiled is None else compiled)
    cells = [(batch, prompt) for prompt in prompts for batch in batches]
    progress = tqdm(total=len(variants) * (len(cells) * (rounds + 1) + len(load)), desc="speed grid", unit="run")
    eager: dict[str, nn.Module] = {}

    def prepare(name: str, variant: Variant) -> None:
        progress.set_postfix_str(f"{name}: loading")
        eager[name] = make(variant)
        if not variant.compiled:
            variant.model = eager[name]

    grid = SpeedGrid()
    groups, capacity = 0, 0.0
    with undisturbed(device), frozen(variants):
        for held in in_groups(variants, prepare):
            for batch, prompt in cells:
                _ready(held, eager, batch, prompt, new_tokens, progress)
                in_turns(held, prompt, new_tokens, rounds, batch, progress)
                grid.rows += [
                    row for row in _rows(held, batch, prompt, new_tokens) if not groups or row["model"] != "baseline"
                ]
                if (batch, prompt) == (1, prompts[0]) and load:
                    asked = held if not groups else {name: one for name, one in held.items() if name != "baseline"}
                    capacity = capacity or _capacity(held["baseline"], new_tokens)
                    for share in load:
                        grid.load += _under_load(
                            asked, share, capacity, prompt, new_tokens, load_seconds, seed, progress
                        )
                for variant in held.values():
                    clear(variant)
                    variant.ttft_s, variant.token_s = [], []
            groups += 1
            for name in held.keys() - {"baseline"}:
                del eager[name]
    progress.close()
    grid.settings = {
        "batches": list(batches),
        "prompts": list(prompts),
        "new_tokens": new_tokens,
        "rounds": rounds,
        "load": list(load),
        "load_seconds": load_seconds,
        "seed": seed,
        "dtype": variants["baseline"].dtype,
        "device": device.type,
        "threads": timing_threads(),
        "groups": groups,
    }
    return grid


def _ready(
    held: dict[str, Variant], eager: dict[str, nn.Module], batch: int, prompt: int, new_tokens: int, progress: tqdm
) -> None:
    """Make all of them ready for a cell, executed in the same way."""
    for name, variant in held.items():
        progress.set_postfix_str(f"{name}: batch {batch}, prompt {prompt}")
        make_ready(variant, eager[name], prompt, new_tokens, batch)
        progress.update()
    failed = [
        name for name, variant in held.items() if variant.compiled and not variant.execution.startswith("compiled")
    ]
    if not failed:
        return
    why = held[failed[0]].execution
    for name, variant in held.items():
        clear(variant)
        variant.compiled = False
        make_ready(variant, eager[name], prompt, new_tokens, batch)
        variant.compiled, variant.execution = True, f"{why}: {', '.join(failed)}"


def _rows(held: dict[str, Variant], batch: int, prompt: int, new_tokens: int) -> list[dict[str, Any]]:
    first = held["baseline"]
    rows = []
    for name, v in held.items():
        prefill, decode = [batch * prompt / s for s in v.ttft_s], [batch / s for s in v.token_s]
        rows.append(
            {
                "model": name,
                "batch": batch,
                "prompt_tokens": prompt,
                "new_tokens": new_tokens,
                "prefill_tokens_per_s": statistics.median(prefill),
                "prefill_quartiles": list(quartiles(prefill)),
                "decode_tokens_per_s": statistics.median(decode),
                "decode_quartiles": list(quartiles(decode)),
                "time_to_first_token_s": statistics.median(v.ttft_s),
                "execution": v.execution,
                "prefill_ratio": None if v is first else statistics.median(first.ttft_s) / statistics.median(v.ttft_s),
                "decode_ratio": None if v is first else statistics.median(first.token_s) / statistics.median(v.token_s),
            }
        )
    return rows


def _capacity(baseline: Variant, new_tokens: int) -> float:
    """Requests per second that it serves one after the other."""
    return 1 / (statistics.median(baseline.ttft_s) + new_tokens * statistics.median(baseline.token_s))


def _under_load(
    held: dict[str, Variant],
    share: float,
    capacity: float,
    prompt: int,
    new_tokens: int,
    seconds: float,
    seed: int,
    progress: tqdm,
) -> list[dict[str, Any]]:
    arrivals = schedule(share * capacity, seconds / 2, seed)
    rows = []
    for name, variant in held.items():
        progress.set_postfix_str(f"{name}: {share:.0%} load")
        with lean({name: variant}, prompt, new_tokens):
            waited, paces, unserved, took = queue(arrivals, lambda v=variant: serve(v, prompt, new_tokens), seconds)
        progress.update()
        ordered = sorted(waited)
        rows.append(
            {
                "model": name,
                "offered": share * capacity,
                "offered_share": share,
                "requests": len(arrivals),
                "unserved": unserved,
                "time_to_first_token_p50_s": percentile(ordered, 50),
                "time_to_first_token_p95_s": percentile(ordered, 95),
                "tokens_per_s": statistics.median(paces),
                "throughput_tokens_per_s": len(paces) * (new_tokens + 1) / took,
                "prompt_tokens": prompt,
                "new_tokens": new_tokens,
                "execution": variant.execution,
            }
        )
    return rows


def schedule(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests arrive, in seconds from the first: a Poisson process of `rate` per second, for so long."""
    gaps, arrivals = random.Random(seed), [0.0]
    while (at := arrivals[-1] + gaps.expovariate(rate)) < seconds:
        arrivals.append(at)
    return arrivals


def queue(
    arrivals: Sequence[float],
    answer: Callable[[], tuple[float, list[float]]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[float], list[float], int, float]:
    """Serve requests one after the other, in the order in which they arrive.

    Args:
        arrivals: seconds from the first, rising, all of them before `seconds`.
        answer: serves a request now; seconds to its first token, and for each later one.
        seconds: after which no request is begun.

    Returns:
        seconds from each arrival to its first token (of those that were not begun: that they have waited till the end),
        tokens per second of each that was served (from its beginning), how many were not begun, seconds until the last
        answer's end.
    """
    waited, paces = [], []
    start = clock()
    for i, arrival in enumerate(arrivals):
        if (early := arrival - (clock() - start)) > 0:
            sleep(early)
        begun = clock() - start
        if begun > seconds:
            return waited + [begun - late for late in arrivals[i:]], paces, len(arrivals) - i, begun
        first, later = answer()
        waited.append(begun + first - arrival)
        paces.append((1 + len(later)) / (first + sum(later)))
    return waited, paces, 0, clock() - start


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many percent do not exceed; of few values, the largest soon."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
