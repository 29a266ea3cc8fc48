"""Why a compressed model is as fast as it is: the time of each part of its decoding step, beside the 16-bit model's."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from eval.machine.load import LoadMeter
from eval.machine.size import positions
from eval.record.noise import disturbed
from eval.speed.device_lock import undisturbed
from eval.speed.speed import FastDecoder, TimedModel, contestants, make, make_ready, serve
from kernels.harness.roofline import read_bandwidth
from kernels.step.assemble import OPS
from kernels.step.native import DecodeStep
from kernels.step.program import Attention, Products, Weight

PARTS = {"qkv": "q, k, v", "o": "o", "mlp": "gate, up", "down": "down", "logits": "head"}  # by what a product writes
ATTENTION = "attention"
MEMORY = 0.6  # share of the bandwidth from which on a part is bound by memory
SHORT = 15e-6  # seconds of an instruction, below which threads wait for one another for much of it


@dataclass(frozen=True)
class Part:
    """A part of a decoding step, of all blocks together.

    bytes: of weights or of the cache that one step reads. seconds: of one step. calls: the number of instructions.
    kernels: what multiplies it. least: seconds to read the bytes at the bandwidth of this machine.
    """

    bytes: float
    seconds: float
    calls: int
    kernels: tuple[str, ...]
    least: float

    @property
    def bound(self) -> str:
        """What limits it."""
        if self.least >= MEMORY * self.seconds:
            return "memory"
        return "waiting of threads" if self.seconds < SHORT * self.calls else "arithmetic"


@dataclass(frozen=True)
class StepTimes:
    """A decoding step of a model. parts: by name. seconds: of a whole step, with what Python does between steps."""

    parts: dict[str, Part]
    seconds: float

    @property
    def rest(self) -> float:
        """Seconds of a step that belong to no part."""
        return max(self.seconds - sum(part.seconds for part in self.parts.values()), 0.0)

    @property
    def bytes(self) -> float:
        """Bytes that a step reads."""
        return sum(part.bytes for part in self.parts.values())


@dataclass(frozen=True)
class Explanation:
    """Steps of several models, in turns, the one in 16 bits first. bandwidth: bytes per second. disturbed: what else
    used the processor meanwhile, or ""."""

    steps: dict[str, StepTimes]
    bandwidth: float
    disturbed: str

    def sentences(self, name: str) -> list[str]:
        """What makes this model as fast as it is."""
        before, after = next(iter(self.steps.values())), self.steps[name]
        said = [
            f"By the bytes that a token reads it would decode {before.bytes / after.bytes:.2f} times as fast as in 16 "
            f"bits; it decodes {before.seconds / after.seconds:.2f} times as fast: {_ms(after.seconds)} a token "
            f"instead of {_ms(before.seconds)}."
        ]
        same = [
            part for part, own in after.parts.items() if own.bytes >= before.parts[part].bytes and part != ATTENTION
        ]
        if same:
            taken = sum(after.parts[part].seconds for part in same)
            said.append(f"Kept in 16 bits: {_listed(same)}, {_ms(taken)} ({_share(taken / after.seconds)}).")
        above = {part: own.seconds - own.least for part, own in after.parts.items()}
        worst = max(above, key=above.__getitem__)
        if above[worst] > 0.05 * after.seconds:
            own = after.parts[worst]
            said.append(
                f"Most of what is above the time to read the bytes is in {worst}: {_ms(own.seconds)} for "
                f"{own.bytes / 1e6:.1f} MB, {_share(own.least / own.seconds)} of the bandwidth; its limit is "
                f"{'the ' * (own.bound == 'waiting of threads')}{own.bound}."
            )
        slower = [part for part, own in after.parts.items() if own.seconds > 1.05 * before.parts[part].seconds]
        if slower:
            said.append(f"Slower than in 16 bits: {_listed(slower)}.")
        if after.rest > 0.05 * after.seconds:
            said.append(
                f"{_ms(after.rest)} ({_share(after.rest / after.seconds)}) lie outside the parts: the embedding, the "
                "start of threads, and Python."
            )
        if self.disturbed:
            said.append(f"These times are noisy: {self.disturbed}.")
        return said


@torch.no_grad()
def explain(
    models: Mapping[str, nn.Module], *, prompt_tokens: int = 512, new_tokens: int = 16, rounds: int = 5, batch: int = 1
) -> Explanation:
    """Time the parts of the decoding step of several models, in turns.

    Args:
        models: the first one is that in 16 bits. All are timed in bfloat16.
        prompt_tokens: cached tokens before the first step. batch: sequences.

    Raises:
        ValueError: a model has no native step on this machine; the message says why.
    """
    longest = min(map(positions, models.values()))
    if not 2 <= prompt_tokens <= longest - new_tokens:
        raise ValueError(
            f"`context` (={prompt_tokens}) must be at least 2, and at most {longest - new_tokens} for this model"
        )
    variants = contestants(models, compiled=False)
    device = next(next(iter(models.values())).parameters()).device
    size = prompt_tokens, new_tokens, batch
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    whole: dict[str, list[float]] = {name: [] for name in variants}
    meter = LoadMeter()
    with undisturbed(device):
        steps = {name: _ready(name, variant, size) for name, variant in variants.items()}
        with meter:
            for _ in range(rounds):
                for name, variant in variants.items():
                    steps[name].time()
                    _, seconds = serve(variant, *size)
                    times[name].append([total / new_tokens for total in steps[name].seconds])
                    whole[name].append(sum(seconds) / len(seconds))
        bandwidth = read_bandwidth(device)
    found = {
        name: StepTimes(
            _parts(steps[name], times[name], prompt_tokens + new_tokens // 2, bandwidth), median(whole[name])
        )
        for name in variants
    }
    return Explanation(found, bandwidth, disturbed(meter.load))


def _ready(name: str, variant: TimedModel, size: tuple[int, int, int]) -> DecodeStep:
    make_ready(variant, make(variant), *size)
    step = variant.step
    if not isinstance(step, FastDecoder) or not step.in_one_call:
        why = getattr(step, "why_compiled", "") or variant.execution
        raise ValueError(f"{name}: its parts cannot be timed, because it has no native step on this machine ({why})")
    return step.step.step


def _parts(step: DecodeStep, times: list[list[float]], context: int, bandwidth: float) -> dict[str, Part]:
    sums: dict[str, list] = {}
    for i, one in enumerate(step.program.instructions):
        seconds = median([own[i] for own in times])
        if isinstance(one, Products):
            name, size = PARTS[one.writes], sum(map(_bytes, one.weights))
            kernels = {OPS.get(type(w.stored), "linear") for w in one.weights}
        else:
            assert isinstance(one, Attention), "a step in one call"
            name, kernels = ATTENTION, {"kv_decode"}
            seen = min(context, one.window or context)
            size = 2 * len(one.keys) * one.kv_heads * one.channels * seen * one.keys.element_size()
        total = sums.setdefault(name, [0.0, 0.0, 0, set()])
        total[0] += size
        total[1] += seconds
        total[2] += 1
        total[3] |= kernels
    order = [*dict.fromkeys((PARTS["qkv"], ATTENTION, *PARTS.values()))]
    return {
        name: Part(size, seconds, calls, tuple(sorted(kernels)), size / bandwidth)
        for name, (size, seconds, calls, kernels) in sorted(sums.items(), key=lambda one: order.index(one[0]))
    }


def _bytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in weight.tensors() if tensor is not None)


def _share(part: float) -> str:
    return f"{100 * part:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])} and {names[-1]}"
