"""The run record as typed rows, read once from a dict of any version: missing entries become None, "" or empty.

The keys have the names and units that `eval.record.schema` lists. A value of another type than its row's counts as
missing. Numbers that are not finite are kept. JSON has no such numbers, so they are written as the texts "NaN",
"Infinity" and "-Infinity" (`eval.record.reading.plain`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.record import noise
from eval.record.compression import (
    AllocationRecord,
    DepthRow,
    DropRecord,
    FoldRecord,
    LayerRecord,
    Magnitudes,
    RecoveryRecord,
)
from eval.record.measured import Bench, CacheMeasurements, Generation, Lossless, Sample, Tasks
from eval.record.reading import row
from eval.record.search import SearchRecord
from eval.record.serving import ServingRecord
from eval.record.speed import Cost, Measure, Speed, SpeedGrid

_LONG_TEXT = re.compile(r"'([^']{40})[^']{10,}'")  # a knob's text that is too long for a label
PHASES = {  # of a timing, by metric
    "decode_tokens_per_s": "decode", "step_tokens_per_s": "step", "prefill_tokens_per_s": "prefill",
    "time_to_first_token_s": "prefill",
}  # fmt: skip
Scores = dict[str, float]  # metric: value; the standard error of m is m_stderr


@dataclass(frozen=True)
class Header:
    key: str
    notebook: str
    started: str
    duration_s: float | None
    stale: bool | None  # only in the page of a finished run that was executed with other code of the workbench
    compression_s: float | None
    parameters: dict[str, object]


@dataclass(frozen=True)
class Step:
    """A method of a recipe with its knobs. text: the step as written in a recipe; "" in early records."""

    method: str
    knobs: dict[str, object]
    source: str
    text: str

    def __str__(self) -> str:
        named = ", ".join(f"{k}={v!r}" for k, v in self.knobs.items() if k in ("bits", "group_size", "alpha"))
        return self.text or (f"{self.method}({named})" if named else self.method)


@dataclass(frozen=True)
class ModelRef:
    name: str
    weights_sha256: str
    parameters: int | None


@dataclass(frozen=True)
class Calibration:
    corpus: str
    samples: int | None
    seqlen: int | None
    seed: int | None
    sha256: str
    overlap: int | None  # documents that were left out, because they are also in the text that is scored


@dataclass(frozen=True)
class StrengthPoint:
    value: str
    scores: Scores


@dataclass(frozen=True)
class StrengthLine:
    recipe: str
    points: tuple[StrengthPoint, ...]


@dataclass(frozen=True)
class Strengths:
    lines: tuple[StrengthLine, ...]


@dataclass(frozen=True)
class Kept:
    name: str
    shape: tuple[int, ...]
    bytes: float | None
    reason: str


@dataclass(frozen=True)
class Text:
    """The scored part of a text. tokens: in all windows; stride: None if windows do not overlap; bos: "each" if every
    window begins with the BOS token."""

    tokens: int | None
    window: int | None
    stride: int | None
    bos: str
    windows: int | None


@dataclass(frozen=True)
class Hardware:
    cpu: str
    cpu_capability: str
    cores: int | None
    memory_bytes: float | None
    gpus: tuple[str, ...]
    system: str


@dataclass(frozen=True)
class Provenance:
    commit: str
    dirty: bool
    versions: dict[str, str]
    hardware: Hardware
    threads: int | None
    device: str
    dtype: str
    deploy_dtype: str
    flags: dict[str, object]
    command: str

    @property
    def processor(self) -> str:
        return self.hardware.gpus[0] if self.device == "cuda" and self.hardware.gpus else self.hardware.cpu


@dataclass(frozen=True)
class RunRecord:
    """A whole record. `recipes` has the recipes of "compressed" and of every other model that has one."""

    schema_version: int | None
    run: Header
    recipe: tuple[Step, ...]
    recipes: dict[str, tuple[Step, ...]]
    model: ModelRef
    calibration: Calibration | None
    layers: tuple[LayerRecord, ...]
    inputs: dict[str, dict[str, Magnitudes]]
    folds: tuple[FoldRecord, ...]
    drops: tuple[DropRecord, ...]
    depth: tuple[DepthRow, ...]
    recoveries: dict[str, tuple[RecoveryRecord, ...]]
    allocation: AllocationRecord | None
    search: SearchRecord | None
    serving: ServingRecord | None
    strengths: Strengths
    cache: CacheMeasurements | None
    kept: tuple[Kept, ...]
    scores: dict[str, Scores]
    difference: dict[str, Scores]
    texts: dict[str, Text]
    speed: dict[str, Speed]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    kernels: dict[str, str]
    provenance: Provenance
    tasks: Tasks
    generation: Generation
    lossless: Lossless | None
    speed_grid: SpeedGrid
    efficiency: dict[str, dict[str, Measure]]
    cost: Cost
    bench: Bench | None

    @property
    def models(self) -> list[str]:
        """The models that have scores: the baseline, "compressed", and the others in the record's order."""
        return [name for name in dict.fromkeys(("baseline", "compressed", *self.scores)) if name in self.scores]

    @property
    def corpora(self) -> list[str]:
        """Every text on which a perplexity was measured."""
        names = (m for own in self.scores.values() for m in own if m.startswith("perplexity_"))
        return list(dict.fromkeys(m.removeprefix("perplexity_") for m in names if not m.endswith("_stderr")))

    @property
    def by_generate(self) -> bool:
        """Are decode speeds those of `generate`? In records from before 26 November 2026 they are those of the decoding
        step alone."""
        return not self.speed or any(row.step_tokens_per_s is not None for row in self.speed.values())

    def score(self, model: str, metric: str) -> float | None:
        return self.scores.get(model, {}).get(metric)

    def ratio(self, metric: str, model: str = "compressed") -> float | None:
        """A score divided by the baseline's; None if one of the two is unknown or 0."""
        before, after = self.score("baseline", metric), self.score(model, metric)
        return after / before if before and after else None

    def counts(self, metric: str, model: str = "compressed") -> bool:
        """Is a model's difference from the baseline in this metric more than noise (`eval.record.noise`)?"""
        values = [self.score(name, metric) for name in ("baseline", model)]
        lost = [value is not None and math.isnan(value) for value in values]
        if None not in values and any(lost):
            return not all(lost)  # a metric that one model lost counts against it
        if metric in PHASES:
            own, other = (self.speed.get(name) for name in (model, "baseline"))
            ends = [one.ends(PHASES[metric]) if one else None for one in (own, other)]
            return noise.counts(*noise.faster_by(*ends)) and self._confirmed(PHASES[metric], model)
        if interval := self._paired(metric, model):
            return noise.counts(*interval)
        before, after = self.score("baseline", metric), self.score(model, metric)
        error, other = (self.score(name, f"{metric}_stderr") for name in ("baseline", model))
        if before is None or after is None:
            return False
        if error is None or other is None:
            return abs(after - before) > noise.SAME_SIZE * abs(before)
        return noise.counts(*noise.difference(after - before, math.hypot(error, other)))

    def _confirmed(self, phase: str, model: str) -> bool:
        """Does the grid tell a model's speed from the baseline's, too? Asked of records without a model timed twice,
        whose quartiles cannot show what makes one model faster in all rounds, such as its place in memory."""
        if phase == "step" or any(one.spread for one in self.speed.values()):
            return True
        rows = [row for row in self.speed_grid.rows if row.model == model and row.batch == 1]
        return all(self.speed_grid.counts(row, phase) for row in rows)

    def _paired(self, metric: str, model: str) -> noise.Ends | None:
        """The interval of a difference on the same text or the same questions; None if the record has none."""
        of_text, loss = self.difference.get(model, {}), metric.replace("perplexity_", "nll_", 1)
        if metric.startswith("perplexity_") and loss in of_text and f"{loss}_stderr" in of_text:
            return noise.difference(of_text[loss], of_text[f"{loss}_stderr"])
        for task, one in self.tasks.compared.get(model, {}).items():
            low, high = one.difference_low, one.difference_high
            if metric == f"{one.metric}_{task}" and low is not None and high is not None:
                return low, high
        return None

    @property
    def disturbed(self) -> str:
        """What else used the processor while the main speeds were measured, in words; "" if nothing is known of it. The
        grid of batches and prompts has a load of its own."""
        loads = [one.load for one in self.speed.values()]
        loads += [self.cache.speed.load] if self.cache and self.cache.speed else []
        return next(filter(None, map(noise.disturbed, loads)), "")

    def recipe_of(self, model: str, *, whole: bool = False) -> str | None:
        """A model's recipe in its written form, in which long texts of knobs end in … unless it is asked for as a
        whole; None if it has none."""
        steps = self.recipes.get(model, self.recipe if model == "compressed" else None)
        if steps is None:
            return None
        text = ", ".join(map(str, steps))
        return text if whole else _LONG_TEXT.sub(r"'\1…'", text)


def typed(record: RunRecord | Mapping[str, Any] | None) -> RunRecord:
    """A record as typed rows; typed rows are returned unchanged."""
    return record if isinstance(record, RunRecord) else row(RunRecord, record)
