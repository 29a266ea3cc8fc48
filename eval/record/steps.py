"""Where the time of a decoding step goes: of a compressed model, beside the model in 16 bits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eval.record.noise import disturbed
from eval.record.speed import Speed, StepPart

ATTENTION, BESIDE = "attention", "embedding, norms, the rest"


@dataclass(frozen=True)
class StepTimes:
    """A decoding step of a model. parts: by name. seconds: of a whole step, with what Python does between steps."""

    parts: dict[str, StepPart]
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

    @classmethod
    def of(cls, speeds: Mapping[str, Speed], baseline: str = "baseline") -> "Explanation | None":
        """The models of which the parts of a step were timed, the one in 16 bits first; None: not this one, or it
        alone. baseline: the name of the model in 16 bits."""
        names = [baseline, *(name for name in speeds if name != baseline)] if baseline in speeds else []
        steps = {
            name: StepTimes(one.parts, (one.settings.batch or 1) / speed)
            for name in names
            if (one := speeds[name]).parts
            and (speed := one.step_tokens_per_s)
            and _positive(speed, *(part.seconds for part in one.parts.values()))
        }
        if len(steps) < 2 or baseline not in steps:
            return None
        parts = [part for step in steps.values() for part in step.parts.values()]
        bandwidth = max((part.bytes / part.least for part in parts if part.least), default=0.0)
        return cls(steps, bandwidth, next(filter(None, (disturbed(one.load) for one in speeds.values())), ""))

    def sentences(self, name: str) -> list[str]:
        """What makes this model as fast as it is."""
        before, after = next(iter(self.steps.values())), self.steps[name]
        times = before.bytes / after.bytes if after.bytes else math.nan
        expected = f"By the bytes that a token reads it would decode {times:.2f} times as fast as in 16 bits; it"
        subject = expected if math.isfinite(times) and times > 0 else "It"
        said = [
            f"{subject} decodes {before.seconds / after.seconds:.2f} times as fast: "
            f"{_ms(after.seconds)} a token instead of {_ms(before.seconds)}."
        ]
        both = {part: own for part, own in after.parts.items() if part in before.parts}
        same = [part for part, own in both.items() if own.bytes >= before.parts[part].bytes and part != ATTENTION]
        if same:
            taken = sum(after.parts[part].seconds for part in same)
            said.append(f"Kept in 16 bits: {_listed(same)}, {_ms(taken)} ({_share(taken / after.seconds)}).")
        above = {part: own.seconds - own.least for part, own in after.parts.items() if math.isfinite(own.bytes)}
        worst = max(above, key=above.__getitem__, default="")
        if worst and above[worst] > 0.05 * after.seconds:
            own = after.parts[worst]
            said.append(
                f"Most of what is above the time to read the bytes is in {worst}: {_ms(own.seconds)} for "
                f"{own.bytes / 1e6:.1f} MB, {_share(own.least / own.seconds)} of the bandwidth; its limit is "
                f"{'the ' * (own.bound == 'waiting of threads')}{own.bound}."
            )
        slower = [part for part, own in both.items() if own.seconds > 1.05 * before.parts[part].seconds]
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


@dataclass(frozen=True)
class PromptPart:
    """A part of a pass over a prompt, of all blocks together.

    operations: two for each multiply-add. seconds: of one pass. kernels: what multiplies it.
    """

    operations: float
    seconds: float
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromptTimes:
    """A pass over a prompt. parts: by name; what is left of `seconds` are sums, norms, gates and Python."""

    parts: dict[str, PromptPart]
    seconds: float

    @property
    def rest(self) -> float:
        """Seconds that belong to no part."""
        return max(self.seconds - sum(part.seconds for part in self.parts.values()), 0.0)

    @property
    def operations(self) -> float:
        """Operations of all parts."""
        return sum(part.operations for part in self.parts.values())


@dataclass(frozen=True)
class PromptExplanation:
    """Passes over a prompt of several models, in turns, the one in 16 bits first.

    tokens: of the prompt. rate: operations per second of this device's fastest large product in 16 bits, 0 if unknown.
    disturbed: what else used the processor meanwhile, or "".
    """

    prompts: dict[str, PromptTimes]
    tokens: int
    rate: float
    disturbed: str

    def sentences(self, name: str) -> list[str]:
        """What makes this model's passes as fast as they are."""
        before, after = next(iter(self.prompts.values())), self.prompts[name]
        said = [
            f"It reads a prompt {before.seconds / after.seconds:.2f} times as fast as in 16 bits: {_ms(after.seconds)} "
            f"for {self.tokens:,} tokens instead of {_ms(before.seconds)}. A prompt needs the same operations in every "
            "format of the weights, so that formats differ by their kernels and hardly by their bytes."
        ]
        if self.rate:
            least = after.operations / self.rate
            said.append(
                f"Its {after.operations / 1e9:,.0f} billion operations would take {_ms(least)} at the rate of this "
                f"device's fastest large product in 16 bits, {_share(least / after.seconds)} of the time."
            )
        both = [part for part in after.parts if part in before.parts]
        slower = [part for part in both if after.parts[part].seconds > 1.05 * before.parts[part].seconds]
        if slower:
            more = sum(after.parts[part].seconds - before.parts[part].seconds for part in slower)
            said.append(f"Slower than in 16 bits: {_listed(slower)}, by {_ms(more)} together.")
        if after.rest > 0.05 * after.seconds:
            said.append(
                f"{_ms(after.rest)} ({_share(after.rest / after.seconds)}) lie outside the products and attention: "
                "sums, norms, gates and Python."
            )
        if self.disturbed:
            said.append(f"These times are noisy: {self.disturbed}.")
        return said


@dataclass(frozen=True)
class PredictedPart:
    """A part of a decoding step or of a pass over a prompt on a device that is not at hand, of all blocks together.

    bytes: of weights or of the cache that are read. operations: two for each multiply-add. launches: at least so many
    kernels. seconds: the longest of the times for the bytes, the operations and the launches. bound: which one it is.
    """

    bytes: float
    operations: float
    launches: int
    seconds: float
    bound: str


@dataclass(frozen=True)
class PredictedStep:
    """A step of decoding, or a pass over a prompt. parts: by name."""

    parts: dict[str, PredictedPart]

    @property
    def seconds(self) -> float:
        """The least time, without Python's."""
        return sum(part.seconds for part in self.parts.values())


@dataclass(frozen=True)
class Prediction:
    """Steps of several models on a device, from shapes alone, the model in 16 bits first.

    device: its name. launches: kernels that the model's own code starts for one step. launch: seconds of Python for
    each. tokens: of the prompt that a pass reads, 1 for a decoding step.
    """

    steps: dict[str, PredictedStep]
    device: str
    launches: int
    launch: float
    tokens: int = 1

    def sentences(self, name: str) -> list[str]:
        """What makes this model as fast as it is."""
        before, after = next(iter(self.steps.values())), self.steps[name]
        what = "a token" if self.tokens == 1 else f"a prompt of {self.tokens:,} tokens"
        times = before.seconds / after.seconds
        said = [
            f"On {self.device} {what} takes {_ms(after.seconds)} at least, and {_ms(before.seconds)} in 16 bits: "
            + ("the same time." if abs(times - 1) < 0.005 else f"{times:.2f} times as fast if nothing else takes time.")
        ]
        both = {
            part: own for part, own in after.parts.items() if part in before.parts and part not in (ATTENTION, BESIDE)
        }
        same = [part for part, own in both.items() if own.bytes and own.bytes >= before.parts[part].bytes]
        taken = sum(after.parts[part].seconds for part in same)
        if same and taken > 0.05 * after.seconds:
            said.append(f"Kept in 16 bits: {_listed(same)}, {_ms(taken)} ({_share(taken / after.seconds)}).")
        for bound, why in _BOUNDS.items():
            parts = [part for part, own in after.parts.items() if own.bound == bound]
            taken = sum(after.parts[part].seconds for part in parts)
            if taken > 0.05 * after.seconds:
                said.append(f"Limited by {why}: {_listed(parts)}, {_ms(taken)} ({_share(taken / after.seconds)}).")
        python = self.launches * self.launch
        count = f"The model's own code starts {self.launches:,} kernels, for which Python needs {_ms(python)}"
        if python > after.seconds and self.tokens > 1:
            said.append(f"{count}, more than the device: a longer prompt, or several at once, would use it better.")
        elif python > after.seconds:
            slower = "Without a graph both models" if python > before.seconds else "Without a graph this model"
            said.append(
                f"{count}, more than the device. {slower} would wait for Python; `accelerate(model)` replays decoding "
                "steps as one CUDA graph, which waits for nothing."
            )
        else:
            said.append(f"{count}, which the device's own work hides.")
        return said


_BOUNDS = {"arithmetic": "arithmetic in 16 bits, which fewer bytes do not shorten", "launches": "the number of kernels"}


def _positive(*numbers: float | None) -> bool:
    """Are all of them positive and finite? A record that was edited may hold any number."""
    return all(number is not None and 0 < number < math.inf for number in numbers)


def _share(part: float) -> str:
    return f"{100 * part:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])} and {names[-1]}"
