"""Rows of optional measurements: tasks, generations, caches, kernels."""

from dataclasses import dataclass

from eval.record.speed import CacheSpeed, Interval


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
