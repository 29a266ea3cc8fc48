"""Measurements of speed and cost, which `eval.speed` makes and pages read.

Any value may be missing in an early record; it is then None, "" or empty (`eval.record.reading.row`).
"""

from dataclasses import dataclass, field

from eval.record.html import html_table
from eval.record.metrics import fmt
from eval.record.noise import Ends, Load, counts, faster_by, speed_ends

Interval = tuple[float, ...]  # (low, high), or (value, low, high)
MEMORY = 0.6  # share of the bandwidth from which on a part is bound by memory
SHORT = 15e-6  # seconds of an instruction, below which threads wait for one another for much of it


@dataclass(frozen=True)
class TimingSettings:
    """The settings of a timing; each kind of timing has only some of these.

    groups: number of groups of models that were in memory together.
    """

    rounds: int | None = None
    new_tokens: int | None = None
    prompt_tokens: int | None = None
    batch: int | None = None
    batches: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    threads: int | None = None
    groups: int | None = None


@dataclass(frozen=True)
class StepPart:
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
class Speed:
    """The speed of one model: medians over the rounds, with the first and third quartile.

    decode, step and prefill in tokens per second (of all rows of a batch together), time_to_first_token in seconds.
    decode is what `model.generate` reaches, greedily, from one token to the next; step is the decoding step alone, in a
    loop of its own. dtype and execution of the step (compiled or eager, with the reason); kernels: {op: implementations
    that ran}; memory_limit: the decode speed if a step took no longer than reading the weights and the cache once, at
    the rate at which this machine reads memory. spread: for decode, step and prefill, the relative difference that
    chance makes, from the first variant, which is timed twice in every turn (`eval.record.noise.spread`); load: what
    else used the processor meanwhile. parts: those of a decoding step by name, if it runs in one call of C++.
    """

    decode_tokens_per_s: float | None
    decode_quartiles: Interval
    prefill_tokens_per_s: float | None
    prefill_quartiles: Interval
    time_to_first_token_s: float | None
    dtype: str
    execution: str
    kernels: dict[str, tuple[str, ...]]
    settings: TimingSettings
    memory_limit_tokens_per_s: float | None = None
    step_tokens_per_s: float | None = None
    step_quartiles: Interval = ()
    spread: dict[str, float] = field(default_factory=dict)
    load: Load | None = None
    parts: dict[str, StepPart] = field(default_factory=dict)

    def ends(self, phase: str) -> Ends | None:
        """The interval of the speed of decode, step or prefill (`eval.record.noise.speed_ends`)."""
        value, quartiles = getattr(self, f"{phase}_tokens_per_s"), getattr(self, f"{phase}_quartiles")
        return speed_ends(value, quartiles, self.spread.get(phase), self.load, self.settings.rounds)


@dataclass(frozen=True)
class GridRow:
    """The speed of one model in one cell of a grid: medians over the rounds, of `generate`, for all rows of the batch
    together. The ratios are to the baseline's same cell in the same rounds, None of the baseline itself."""

    model: str
    batch: int | None
    prompt_tokens: int | None
    new_tokens: int | None
    decode_tokens_per_s: float | None
    execution: str
    decode_quartiles: Interval = ()
    prefill_tokens_per_s: float | None = None
    prefill_quartiles: Interval = ()
    time_to_first_token_s: float | None = None
    prefill_ratio: float | None = None
    decode_ratio: float | None = None


@dataclass(frozen=True)
class SpeedGrid:
    """Speeds by batch and prompt; the record's `speed_grid`.

    spread: for decode and prefill, the relative difference that chance makes, from the baseline, which is timed twice
    in the first round of every cell. load: what else used the processor.
    """

    settings: TimingSettings
    rows: tuple[GridRow, ...]
    spread: dict[str, float] = field(default_factory=dict)
    load: Load | None = None

    @property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """{model: {prefill_tokens_per_s_b8_p512: ..., decode_tokens_per_s_b8_p512: ...}}."""
        found: dict[str, dict[str, float | None]] = {row.model: {} for row in self.rows}
        for row in self.rows:
            for metric in ("prefill_tokens_per_s", "decode_tokens_per_s"):
                found[row.model][f"{metric}_b{row.batch}_p{row.prompt_tokens}"] = getattr(row, metric)
        return found

    def found(self) -> "SpeedGrid":
        """The record's entry: this grid."""
        return self

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

    def _repr_html_(self) -> str:
        cells = list(dict.fromkeys((row.batch, row.prompt_tokens) for row in self.rows))
        lines = []
        for name in dict.fromkeys(row.model for row in self.rows):
            mine = {(row.batch, row.prompt_tokens): row for row in self.rows if row.model == name}
            lines.append((name, *(self._cell(mine[cell]) for cell in cells)))
        head = ("", *(f"batch {b}, prompt {p:,}" for b, p in cells))
        return html_table(head, lines, "tokens/s: decode, prefill; ≈ marks noise")

    def _cell(self, row: GridRow) -> str:
        noise = "" if self.counts(row, "decode") else "≈ "
        ratio = "" if row.decode_ratio is None else f" ({noise}{row.decode_ratio:.2f}×)"
        return f"{row.decode_tokens_per_s:,.1f}{ratio}, {row.prefill_tokens_per_s:,.0f}"


@dataclass(frozen=True)
class Measure:
    """One of the metrics of EfficientLLM. value: None if it cannot be measured here; the note then gives the reason."""

    value: float | None
    unit: str
    note: str = ""


@dataclass(frozen=True)
class CostCeilings:
    """The rates of the device that costs are predicted from. flops_per_s: None if it was not measured; then only bytes
    count. how: the origin of the rates."""

    read_bytes_per_s: float | None
    flops_per_s: float | None
    how: str


@dataclass(frozen=True)
class CostRow:
    """The least time of one decoding step, in which every row of the batch gets a token, and the measured time.

    predicted_s: seconds, the longer of bytes / bandwidth and flops / peak. bound: "memory" or "compute", whichever is
        the longer one. measured_s: of one such step, None: not measured.
    """

    model: str
    batch: int | None
    context: int | None
    weight_bytes: float | None
    cache_bytes: float | None
    flops: float | None
    predicted_s: float | None
    bound: str
    measured_s: float | None = None
    execution: str = ""

    @property
    def ratio(self) -> float | None:
        return self.measured_s / self.predicted_s if self.measured_s and self.predicted_s else None


@dataclass(frozen=True)
class Cost:
    """Predicted and measured times of decoding steps; the record's `cost`."""

    ceilings: CostCeilings
    rows: tuple[CostRow, ...]

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {predicted_decode_tokens_per_s, share_of_predicted_speed}} for each model's first row with a
        measurement."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.batch and row.predicted_s and row.measured_s and row.model not in found:
                found[row.model] = {
                    "predicted_decode_tokens_per_s": row.batch / row.predicted_s,
                    "share_of_predicted_speed": row.predicted_s / row.measured_s,
                }
        return found

    def found(self) -> "Cost":
        """The record's entry: these costs."""
        return self

    def _repr_html_(self) -> str:
        head = ("", "batch", "context", "weights, MB", "cache, MB", "Mflop", "predicted, ms", "bound", "measured, ms")
        lines = (
            (
                row.model,
                row.batch,
                fmt(row.context, ",d"),
                fmt(row.weight_bytes, ",.1f", 1e-6),
                fmt(row.cache_bytes, ",.2f", 1e-6),
                fmt(row.flops, ",.0f", 1e-6),
                fmt(row.predicted_s, ".2f", 1e3),
                row.bound,
                fmt(row.measured_s, ".2f", 1e3),
            )
            for row in self.rows
        )
        return html_table(head, lines)


@dataclass(frozen=True)
class CacheSpeed:
    """Decoding behind long contexts with compressed caches, each time as (median, first quartile, third quartile).

    Attributes:
        tokens_per_s: {variant: {context: ...}} of the whole model, batch 1.
        attention_s: {variant: {context: ...}}: seconds of the attention of all layers for one token; also for "full,
            torch SDPA".
        attention_speedup: {variant: {context: the time of the faster attention with a full 16-bit cache, divided by the
            time of this attention}}.
        execution: {variant: native step, compiled or eager, with the reason}.
        kernels: {op: implementations that ran}.
        spread: for decode and attention, the relative difference that chance makes, from the full cache, which is timed
            twice in the first rounds of every context. load: what else used the processor.
    """

    tokens_per_s: dict[str, dict[int, Interval]]
    attention_s: dict[str, dict[int, Interval]]
    attention_speedup: dict[str, dict[int, float]]
    execution: dict[str, str]
    settings: TimingSettings
    spread: dict[str, float] = field(default_factory=dict)
    load: Load | None = None
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)

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

    def _repr_html_(self) -> str:
        contexts = list(next(iter(self.attention_s.values())))
        lines = []
        for name, attention in self.attention_s.items():
            whole = self.tokens_per_s.get(name, {})
            cells = (
                f"{f'{whole[c][0]:.1f} tokens/s, ' if c in whole else ''}attention {attention[c][0] * 1e3:.2f} ms"
                for c in contexts
            )
            lines.append((name, *cells))
        return html_table(("", *(f"{c:,} tokens" for c in contexts)), lines)
