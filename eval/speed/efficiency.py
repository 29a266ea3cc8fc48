"""The six metrics of EfficientLLM (arXiv:2505.13840), as far as the machine can measure them; otherwise the reason.

    memory_use        bytes, mean while the model answers
    compute_use       share of the device's time in use
    latency           seconds of a whole answer
    throughput        decoded tokens per second
    energy            joules per decoded token
    compression_rate  stored bytes of the 16-bit baseline over those of the model

Models answer in turns, for a while each, executed eagerly and prepared in the same way
(`eval.speed.speed.contestants`), while a thread samples the machine. `eval.speed.speed` measures the speed of compiled
models, which is higher.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import psutil
import torch
from torch import nn
from tqdm.auto import tqdm

from eval.machine.energy import POWERCAP, EnergyCounter, NotMeasurable, energy_counter, gpu_use
from eval.machine.memory import return_freed_memory
from eval.machine.size import size
from eval.record.speed import Measure
from eval.speed.device_lock import undisturbed
from eval.speed.speed import TimedModel, clear, contestants, in_groups, make, make_ready, serve
from eval.speed.work import Work, work
from kernels.harness.roofline import Ceilings
from kernels.support.deploy import deployed
from kernels.support.errors import check_positive
from kernels.support.positions import positions

METRICS = ("memory_use", "compute_use", "latency", "throughput", "energy", "compression_rate")
EVERY_S = 0.02  # seconds between two samples of the machine


@dataclass
class Efficiency:
    """The measurements: {model: {each of `METRICS`: Measure}}."""

    models: dict[str, dict[str, Measure]] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {memory_use_bytes, compute_use_share, latency_s, ...}}, without metrics that cannot be measured."""
        names = dict(
            zip(
                METRICS,
                (
                    "memory_use_bytes",
                    "compute_use_share",
                    "latency_s",
                    "throughput_tokens_per_s",
                    "energy_j_per_token",
                    "compression_rate",
                ),
                strict=True,
            )
        )
        return {
            name: {names[metric]: one.value for metric, one in of.items() if one.value is not None}
            for name, of in self.models.items()
        }

    def found(self) -> dict[str, dict[str, Measure]]:
        """The record's entry `efficiency`."""
        return self.models

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *self.models))
        body = ""
        for metric in METRICS:
            cells = "".join(
                f"<td title='{escape(of[metric].note, quote=True)}'>{_shown(of[metric])}</td>"
                for of in self.models.values()
            )
            body += f"<tr><th style='text-align:left'>{metric.replace('_', ' ')}</th>{cells}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(one: Measure) -> str:
    return "not measurable here" if one.value is None else f"{one.value:,.4g} {escape(one.unit)}"


class Watch:
    """Samples the machine in a thread while the block runs.

    Attributes:
        memory: samples of the bytes above the earlier amount (resident set of this process, or torch's memory on a
            GPU).
        use: samples of `use()`, the used share of the device's time; empty without `use`.
        cpu_s, wall_s: processor time of this process (all threads), and elapsed time.
    """

    def __init__(self, device: torch.device, before: int, use: Callable[[], float] | None = None) -> None:
        self.memory: list[int] = []
        self.use: list[float] = []
        self.cpu_s = self.wall_s = 0.0
        self._device, self._before, self._use, self._stop = device, before, use, threading.Event()

    def __enter__(self) -> "Watch":
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._start = time.perf_counter(), time.process_time()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        self.memory.append(held_bytes(self._device) - self._before)
        if self._use is not None:
            self.use.append(self._use())


def held_bytes(device: torch.device) -> int:
    """Bytes allocated by torch on a GPU; else the resident set of this process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


@dataclass
class _Samples:
    """The samples of one model. tensors: bytes of the deployed copy, stored: bytes of its checkpoint, ready: bytes
    added by its cache."""

    tensors: int
    stored: int
    work: Work
    ready: int = 0
    memory: list[int] = field(default_factory=list)
    use: list[float] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    joules: float = 0.0


def check_efficiency(
    model: nn.Module, *, prompt_tokens: int = 128, new_tokens: int = 32, rounds: int = 3, seconds: float = 2.0
) -> None:
    """Raise ValueError if efficiency cannot be measured like this; quick. Args: as in `measure_efficiency`."""
    check_positive(prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds)
    if prompt_tokens + new_tokens > positions(model):
        raise ValueError(
            f"`prompt_tokens` (={prompt_tokens}) + `new_tokens` (={new_tokens}) must be at most {positions(model)}, "
            "the positions that this model has"
        )
    if not seconds > 0:
        raise ValueError(f"`seconds` (={seconds!r}) must be above 0")


@torch.no_grad()
def measure_efficiency(
    models: Mapping[str, nn.Module],
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 32,
    rounds: int = 3,
    seconds: float = 2.0,
    ceilings: Ceilings | None = None,
    powercap: Path = POWERCAP,
) -> Efficiency:
    """Let every model answer prompts one after the other, in turns, and measure the resources used.

    Memory is the bytes of the model's tensors plus the growth of the process while answering (the first answer makes
    the cache). Energy is that of the whole device, idle power and other programs included.

    Args:
        models: {name: model}, "baseline" first. bfloat16 copies answer.
        prompt_tokens, new_tokens: lengths for each answer, batch 1.
        rounds: number of rounds; in each, every model answers for `seconds` (at least one answer).
        ceilings: the device's rates (`kernels.harness.roofline.measure`), for the share of its operations in a note.
        powercap: the folder in which Linux shows the energy counters of processors.

    Raises:
        ValueError: see `check_efficiency`; no "baseline" at the beginning of `models`.
    """
    if next(iter(models), None) != "baseline":
        raise ValueError(f"`models` (={list(models)}) must begin with 'baseline', with which all others are compared")
    for model in models.values():
        check_efficiency(model, prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds, seconds=seconds)
    device = next(models["baseline"].parameters()).device
    try:
        energy, why_not = energy_counter(device, powercap), ""
    except NotMeasurable as reason:
        energy, why_not = None, str(reason)
    try:
        use, why_no_use = gpu_use(device) if device.type == "cuda" else None, ""
    except NotMeasurable as reason:
        use, why_no_use = None, str(reason)
    variants = contestants(models, compiled=False)
    seen: dict[str, _Samples] = {}
    progress = tqdm(total=len(models) * (rounds + 1), desc="efficiency", unit="run")

    def prepare(name: str, variant: TimedModel) -> None:
        progress.set_postfix_str(f"{name}: loading")
        half = deployed(variant.source)
        taken = size(half)
        seen[name] = _Samples(taken.resident_bytes, taken.stored_bytes, work(half))
        del half
        variant.model = make(variant)
        make_ready(
            variant, variant.model, prompt_tokens, new_tokens
        )  # once beforehand: memory of loaded libraries is not attributed to a model
        clear(variant)
        before = held_bytes(device)
        make_ready(variant, variant.model, prompt_tokens, new_tokens)
        seen[name].ready = max(0, held_bytes(device) - before)
        progress.update()

    with undisturbed(device):
        for held in in_groups(variants, prepare):
            for _ in range(rounds):
                for name, variant in held.items():
                    progress.set_postfix_str(name)
                    _answer(variant, seen[name], prompt_tokens, new_tokens, seconds, energy, use)
                    progress.update()
    progress.close()
    found = Efficiency()
    for name, one in seen.items():
        measures = _speed(one, prompt_tokens, new_tokens) | {"memory_use": _memory(one, device)}
        measures["compute_use"] = _compute(one, device, prompt_tokens + new_tokens // 2, ceilings, why_no_use)
        measures["energy"] = _energy(one, new_tokens, energy, why_not)
        measures["compression_rate"] = Measure(
            seen["baseline"].stored / one.stored,
            "×",
            "stored bytes alone, of bfloat16 copies; what is left of the answers is told by other scores",
        )
        found.models[name] = {metric: measures[metric] for metric in METRICS}
    return found


def _answer(
    variant: TimedModel,
    seen: _Samples,
    prompt_tokens: int,
    new_tokens: int,
    seconds: float,
    energy: EnergyCounter | None,
    use: Callable[[], float] | None,
) -> None:
    """Let a model answer for a while."""
    device = next(variant.source.parameters()).device
    return_freed_memory()
    before = energy.joules() if energy else 0.0
    with Watch(device, held_bytes(device) - seen.ready, use) as watch:
        end = time.perf_counter() + seconds
        while True:
            first, later = serve(variant, prompt_tokens, new_tokens)
            seen.answers_s.append(first + sum(later))
            seen.token_s += later
            if time.perf_counter() >= end:
                break
    seen.joules += energy.joules() - before if energy else 0.0
    seen.memory += watch.memory
    seen.use += watch.use
    seen.cpu_s += watch.cpu_s
    seen.wall_s += watch.wall_s


def _speed(seen: _Samples, prompt_tokens: int, new_tokens: int) -> dict[str, Measure]:
    about = f"prompt of {prompt_tokens} tokens, {new_tokens} more, batch 1, eager"
    return {
        "latency": Measure(statistics.median(seen.answers_s), "s", f"median of {len(seen.answers_s)} answers: {about}"),
        "throughput": Measure(
            1 / statistics.median(seen.token_s), "tokens/s", f"decoding, without the prompt: {about}"
        ),
    }


def _compute(seen: _Samples, device: torch.device, context: int, ceilings: Ceilings | None, why_not: str) -> Measure:
    rate = ceilings.rates.get(seen.work.dtype) if ceilings else None
    reached = seen.work.flops(context, 1) / statistics.median(seen.token_s) / rate if rate else 0.0
    more = f"; decoding does {reached:.2%} of the operations per second that dense products reach here" if rate else ""
    if device.type == "cuda":
        if not seen.use:
            return Measure(None, "share", f"not measurable here: {why_not}{more}")
        note = f"share of the time in which a kernel ran (NVML), mean; at the peak {max(seen.use):.0%}{more}"
        return Measure(statistics.mean(seen.use), "share", note)
    threads = torch.get_num_threads()
    note = f"processor time over the time of {threads} threads; waiting threads that spin are counted{more}"
    return Measure(seen.cpu_s / (seen.wall_s * threads), "share", note)


def _memory(seen: _Samples, device: torch.device) -> Measure:
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
    mean, peak = seen.tensors + statistics.mean(seen.memory), seen.tensors + max(seen.memory)
    where = "of the GPU" if cuda else "of this machine"
    return Measure(mean, "bytes", f"mean; at the peak {peak / 1e6:,.0f} MB; {peak / total:.2%} {where}'s memory")


def _energy(seen: _Samples, new_tokens: int, energy: EnergyCounter | None, why_not: str) -> Measure:
    if energy is None:
        return Measure(None, "J/token", f"not measurable here: {why_not}")
    return Measure(
        seen.joules / (len(seen.answers_s) * new_tokens), "J/token", f"{energy.covers}, prompt and idle power included"
    )
