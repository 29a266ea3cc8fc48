"""Rows of optional measurements: tasks, generations, caches, kernels."""

from dataclasses import dataclass, field

from eval.record.speed import CacheSpeed, Interval


@dataclass(frozen=True)
class Sample:
    """A prompt and each model's text. first_difference: the first token that differs from the baseline's, or None.
    temperature, seed: None in samples that are all greedy."""

    prompt: str
    texts: dict[str, str]
    first_difference: dict[str, int | None]
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class TaskSettings:
    """How the questions of tasks were asked. task_path: the folder of their files."""

    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    chat: bool | None = None
    task_path: str = ""
    lm_eval: str = ""
    dtype: str = ""
    device: str = ""
    deterministic: bool | None = None


@dataclass(frozen=True)
class TaskRow:
    """A task and its primary metric. n: number of questions; seconds: by model."""

    task: str
    metric: str
    n: int | None
    num_fewshot: int | None
    version: str
    higher_is_better: bool | None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Paired:
    """A model compared with the baseline on the same questions of one task; intervals are at 95 %.

    recovery: value / baseline, or its inverse if less is better: 1 is as good. difference: value - baseline.
    right_to_wrong, wrong_to_right, same, mcnemar_p: None unless all values are 0 or 1. A value that is not finite is
    None.
    """

    metric: str
    n: int | None
    baseline: float | None
    value: float | None
    recovery: float | None = None
    recovery_low: float | None = None
    recovery_high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None
    same: int | None = None
    mcnemar_p: float | None = None


@dataclass(frozen=True)
class Flip:
    """A question that one of two models answered right. direction: "right to wrong" or "wrong to right"."""

    task: str
    doc_id: str
    direction: str
    question: str
    gold: str
    baseline_answer: str
    answer: str
    doc_hash: str = ""


@dataclass(frozen=True)
class Tasks:
    """Answers to tasks; the record's `tasks`.

    compared: {model: {task: beside the baseline}}; flips: some of each model's changed answers; files: {model: {task:
    file of its samples}}; cached: {model: tasks whose answers were already stored}; groups: {requested group: tasks}.
    """

    settings: TaskSettings
    rows: tuple[TaskRow, ...]
    compared: dict[str, dict[str, Paired]]
    flips: dict[str, tuple[Flip, ...]]
    files: dict[str, dict[str, str]]
    groups: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]
    cached: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def parts(self) -> set[str]:
        """Tasks that are parts of a group that is scored as a whole."""
        scored = {row.task for row in self.rows}
        return {part for group, of in self.groups.items() if group in scored for part in of if part != group}


@dataclass(frozen=True)
class GenerationRow:
    """Means over the texts of one model at one temperature (0: greedy), with standard errors over the prompts.

    None: the baseline compared with itself, or a standard error of a single prompt.

    first_difference: number of tokens before the first that differs from the baseline's; a text without a difference
        counts with its length, so that the largest value is `new_tokens`.
    length: at most `new_tokens`, likewise. repetition: None if all texts are shorter than four tokens.
    """

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
class GenerationSettings:
    """How texts were written. prompts, seeds: their numbers (early records list them); dtype, device: by model; aside:
    {model: settings of its own that were not used}."""

    new_tokens: int | None
    prompts: object
    seeds: object
    prompts_sha256: str = ""
    temperatures: tuple[float, ...] = ()
    chat: bool | None = None
    end_tokens: tuple[int, ...] = ()
    dtype: object = None
    device: object = None
    aside: object = None


@dataclass(frozen=True)
class Generation:
    """Texts written by the models; the record's `generation`. file: of all texts, relative to the run's folder."""

    settings: GenerationSettings
    rows: tuple[GenerationRow, ...]
    samples: tuple[Sample, ...]
    file: str


@dataclass(frozen=True)
class GuessedTokens:
    """A model as a draft of the baseline. acceptance: share of the baseline's greedy tokens that are the draft's
    likeliest ones; its standard error is over the texts. lengths: by number of guesses per step, the mean number of
    accepted ones."""

    acceptance: float | None
    acceptance_stderr: float | None
    tokens: int | None
    lengths: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GuessingSpeed:
    """The baseline writing a kind of text in one way: "plain", "look-up", with a draft of this name, or with both.

    tokens_per_s: with the time of the prompts, median over the rounds. ratio: to plain decoding in the same round,
    median. spread: relative difference that chance makes, from plain decoding timed twice. same: were all texts those
    of plain decoding? guessed: number of guessed tokens in all rounds; None: plain decoding, or not counted. rollback:
    loss up to which guesses stayed. loss, plain_loss: of the baseline on these texts and on those of plain decoding, in
    nats per token; None where only guesses stay that the baseline chooses itself.
    """

    kind: str
    way: str
    tokens_per_s: float | None
    ratio: float | None
    spread: float | None
    same: bool | None
    guessed: int | None = None
    rollback: float = 0.0
    loss: float | None = None
    plain_loss: float | None = None

    @property
    def way_and_guesses(self) -> str:
        """The way, and whether nothing was guessed, so that its speed is that of plain decoding."""
        way = f"{self.way}, rollback {self.rollback:g}" if self.rollback else self.way
        return f"{way} (did not guess)" if self.guessed == 0 else way


@dataclass(frozen=True)
class Lossless:
    """Guesses that the baseline verifies; the record's `lossless`. why_not: why nothing, or a draft, was not timed."""

    new_tokens: int | None
    rounds: int | None
    drafts: dict[str, GuessedTokens]
    speeds: tuple[GuessingSpeed, ...]
    why_not: str = ""


@dataclass(frozen=True)
class CacheAnswers:
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

    task: str
    length: int | None

    share: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CacheMeasurements:
    """The measurements of compressed KV caches, by variant; the record's `cache`.

    against: by visibility, the difference of exact answers from the full cache's, with its interval. kept: by length,
    [layers][heads]. curves: {policy with {} for its budget: [(budget, variant)]}. See `eval.contexts.answers`.
    """

    answers: tuple[CacheAnswers, ...]
    against: dict[str, dict[str, Interval]]
    cache_bytes: dict[str, dict[int, float]]
    elsewhere_bytes: dict[str, dict[int, float]]
    seconds: dict[str, float]
    kept: dict[str, dict[int, tuple[tuple[float, ...], ...]]]
    survival: dict[str, tuple[Survival, ...]]
    errors: dict[str, tuple[float, ...]]
    depths: tuple[NeedleDepths, ...]
    curves: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()
    left_alone: dict[str, int] = field(default_factory=dict)
    speed: CacheSpeed | None = None


@dataclass(frozen=True)
class BenchRun:
    ops: tuple[str, ...]
    meaningful: bool
    checks_only: bool
    budget_s: float | None


@dataclass(frozen=True)
class BenchGpu:
    name: str
    sms: int | None
    l2_bytes: float | None
    driver: str


@dataclass(frozen=True)
class BenchEnvironment:
    gpu: BenchGpu | None


@dataclass(frozen=True)
class BenchCeilings:
    bandwidth: float | None
    rates: dict[str, float]


@dataclass(frozen=True)
class CheckRow:
    op: str
    name: str
    impl: str
    error: float | None
    tolerance: float | None
    green: bool
    message: str


@dataclass(frozen=True)
class ContestRow:
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
    goal_bandwidth: float | None
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
    checks: tuple[CheckRow, ...]
    rows: tuple[ContestRow, ...]
    summary: BenchSummary
