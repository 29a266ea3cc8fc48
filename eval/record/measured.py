"""Rows of optional measurements: tasks, generations, speed grids, costs, caches, kernels."""

from dataclasses import dataclass

from eval.record.noise import Ends, Load, counts, faster_by, speed_ends

Interval = tuple[float, ...]  # (low, high), or (value, low, high)


@dataclass(frozen=True)
class Settings:
    """Settings of timings, tasks or generations; each has only some of these."""

    prompt_tokens: int | None
    new_tokens: int | None
    rounds: int | None
    batch: int | None
    limit: int | None
    num_fewshot: int | None
    batch_size: int | None
    seed: int | None
    lm_eval: str
    device: object
    dtype: object
    deterministic: bool
    chat: bool
    prompts: object
    seeds: object


@dataclass(frozen=True)
class Sample:
    """A prompt and each model's text. first_difference: the first token that differs from the baseline's, or None."""

    prompt: str
    texts: dict[str, str]
    first_difference: dict[str, int | None]
    temperature: float | None
    seed: int | None


@dataclass(frozen=True)
class TaskRow:
    task: str
    metric: str
    n: int | None
    num_fewshot: int | None
    version: str
    higher_is_better: bool | None


@dataclass(frozen=True)
class Paired:
    """A model compared with the baseline on the same questions of one task; intervals are at 95 %."""

    metric: str
    n: int | None
    baseline: float | None
    value: float | None
    recovery: float | None
    recovery_low: float | None
    recovery_high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    right_to_wrong: int | None
    wrong_to_right: int | None
    same: int | None
    mcnemar_p: float | None


@dataclass(frozen=True)
class Flip:
    task: str
    doc_id: str
    direction: str
    question: str
    gold: str
    baseline_answer: str
    answer: str


@dataclass(frozen=True)
class Tasks:
    settings: Settings
    rows: tuple[TaskRow, ...]
    compared: dict[str, dict[str, Paired]]
    flips: dict[str, tuple[Flip, ...]]
    files: dict[str, dict[str, str]]
    groups: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def parts(self) -> set[str]:
        """Tasks that are parts of a group that is scored as a whole."""
        scored = {row.task for row in self.rows}
        return {part for group, of in self.groups.items() if group in scored for part in of if part != group}


@dataclass(frozen=True)
class GenerationRow:
    model: str
    temperature: float | None
    n: int | None
    first_difference: float | None
    first_difference_stderr: float | None
    same_share: float | None
    same_share_stderr: float | None
    length: float | None
    length_stderr: float | None
    repetition: float | None
    repetition_stderr: float | None
    ended_share: float | None
    ended_share_stderr: float | None


@dataclass(frozen=True)
class Generation:
    settings: Settings
    rows: tuple[GenerationRow, ...]
    samples: tuple[Sample, ...]
    file: str


@dataclass(frozen=True)
class GridRow:
    model: str
    batch: int | None
    prompt_tokens: int | None
    prefill_tokens_per_s: float | None
    prefill_quartiles: Interval
    prefill_ratio: float | None
    decode_tokens_per_s: float | None
    decode_quartiles: Interval
    decode_ratio: float | None
    time_to_first_token_s: float | None
    execution: str


@dataclass(frozen=True)
class SpeedGrid:
    settings: Settings
    rows: tuple[GridRow, ...]
    spread: dict[str, float]
    load: Load | None

    def counts(self, row: GridRow, phase: str) -> bool:
        """Does a model's speed in decode or prefill differ from that of the baseline in the same cell by more than
        noise?"""
        cell = [one for one in self.rows if (one.batch, one.prompt_tokens) == (row.batch, row.prompt_tokens)]
        base = next((one for one in cell if one.model == "baseline"), None)
        ends = [self._ends(one, phase) if one else None for one in (row, base)]
        return counts(*faster_by(*ends))

    def _ends(self, row: GridRow, phase: str) -> Ends | None:
        value, quartiles = getattr(row, f"{phase}_tokens_per_s"), getattr(row, f"{phase}_quartiles")
        return speed_ends(value, quartiles, self.spread.get(phase), self.load, self.settings.rounds)


@dataclass(frozen=True)
class Measure:
    value: float | None
    unit: str
    note: str


@dataclass(frozen=True)
class Ceilings:
    read_bytes_per_s: float | None
    flops_per_s: float | None
    how: str


@dataclass(frozen=True)
class CostRow:
    model: str
    batch: int | None
    context: int | None
    weight_bytes: float | None
    cache_bytes: float | None
    flops: float | None
    bound: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def ratio(self) -> float | None:
        return self.measured_s / self.predicted_s if self.measured_s and self.predicted_s else None


@dataclass(frozen=True)
class Cost:
    ceilings: Ceilings
    rows: tuple[CostRow, ...]


@dataclass(frozen=True)
class Answers:
    """Answers of one variant of the cache to one task: a number for each sample; kl_by_token: means."""

    variant: str
    task: str
    length: int
    visibility: str
    exact: tuple[float, ...]
    nll: tuple[float, ...]
    kl: tuple[float, ...]
    kl_by_token: tuple[float, ...]


@dataclass(frozen=True)
class NeedleDepths:
    task: str
    length: int
    depths: tuple[float | None, ...]


@dataclass(frozen=True)
class Survival:
    """Share of the needle that is kept, [layer][head]."""

    share: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CacheSpeed:
    """By variant and context: (median, lower quartile, upper quartile)."""

    tokens_per_s: dict[str, dict[int, Interval]]
    attention_s: dict[str, dict[int, Interval]]
    attention_speedup: dict[str, dict[int, float]]
    execution: dict[str, str]
    settings: Settings
    spread: dict[str, float]
    load: Load | None

    def decode_ratio(self, name: str, baseline: str) -> tuple[int, float | None] | None:
        """The longest context of a variant, and its decode speed there over that of the baseline."""
        own = self.tokens_per_s.get(name)
        if not own:
            return None
        longest = max(own)
        full = self.tokens_per_s.get(baseline, {}).get(longest)
        return longest, own[longest][0] / full[0] if own[longest] and full and full[0] else None

    def counts(self, name: str, baseline: str, context: int) -> bool:
        """Do the decode speeds of two variants behind a context differ by more than noise?"""
        return counts(*faster_by(self.ends(name, context), self.ends(baseline, context)))

    def ends(self, name: str, context: int) -> Ends | None:
        """The interval of a variant's decode speed behind a context (`eval.record.noise.speed_ends`)."""
        timed = self.tokens_per_s.get(name, {}).get(context, ())
        if not timed:
            return None
        return speed_ends(timed[0], timed[1:], self.spread.get("decode"), self.load, self.settings.rounds)


@dataclass(frozen=True)
class Cache:
    """The measurements of compressed KV caches, by variant."""

    answers: tuple[Answers, ...]
    against: dict[str, dict[str, Interval]]
    cache_bytes: dict[str, dict[int, float]]
    elsewhere_bytes: dict[str, dict[int, float]]
    seconds: dict[str, float]
    kept: dict[str, dict[int, tuple[tuple[float, ...], ...]]]
    survival: dict[str, tuple[Survival, ...]]
    errors: dict[str, tuple[float, ...]]
    depths: tuple[NeedleDepths, ...]
    curves: dict[str, tuple[tuple[str, ...], ...]]
    references: tuple[str, ...]
    timed: tuple[str, ...]
    left_alone: dict[str, int]
    speed: CacheSpeed | None


@dataclass(frozen=True)
class BenchRun:
    ops: tuple[str, ...]
    meaningful: bool
    checks_only: bool
    budget_s: float | None


@dataclass(frozen=True)
class Gpu:
    name: str
    sms: int | None
    l2_bytes: float | None
    driver: str


@dataclass(frozen=True)
class BenchEnvironment:
    gpu: Gpu | None


@dataclass(frozen=True)
class BenchCeilings:
    bandwidth: float | None
    rates: dict[str, float]


@dataclass(frozen=True)
class Check:
    op: str
    name: str
    impl: str
    error: float | None
    tolerance: float | None
    green: bool
    message: str


@dataclass(frozen=True)
class Contest:
    op: str
    detail: str
    shape: tuple[int, ...]
    tokens: int | None
    status: str
    ours: str
    baseline: str
    seconds: dict[str, float]
    quartiles: dict[str, Interval]
    rounds: int | None
    speedup: float | None
    strongest: str
    goal: float | None
    goal_us: float | None
    goal_met: bool | None
    least_bytes: float | None
    flops: float | None
    rate: str
    roofline: float | None


@dataclass(frozen=True)
class Unfinished:
    op: str
    phase: str


@dataclass(frozen=True)
class BenchSummary:
    checks: int | None
    red: int | None


@dataclass(frozen=True)
class Bench:
    run: BenchRun
    unfinished: tuple[Unfinished, ...]
    environment: BenchEnvironment
    ceilings: BenchCeilings | None
    checks: tuple[Check, ...]
    rows: tuple[Contest, ...]
    summary: BenchSummary
