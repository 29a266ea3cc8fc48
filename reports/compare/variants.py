"""Every model of every run: its recipe, its measurements, and its difference from the baseline of its own run."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eval.record.noise import Z
from eval.record.rows import RunRecord, Step
from reports.compare.noise import Effect
from reports.compare.outcome import RunOutcome
from reports.parts.caches import FULL, cache_rows
from reports.parts.plots import finite
from reports.parts.text import clean

INTERVAL = 2 * Z  # width of a 95 % interval in standard errors
ACCURACY = ("kl", "task", "perplexity", "exact")  # kinds of quantities; models are ranked by the first that any has
TASK_METRICS = ("acc_norm", "acc", "exact_match")  # the metric of a task in records that do not name it, best first
NONE = "no compression"
MAX_KNOBS = 3  # that tell models of one recipe apart
_CALLED = {"perplexity": "perplexity on", "kl": "KL on", "exact": "exact answers,"}


class Quantity(NamedTuple):
    """The meaning of a number: kind (task, perplexity, kl, exact, stored, bits, decode, prefill, cache), of (task,
    corpus, visibility, context), and protocol (amount of data). Numbers are compared only if all three are the same."""

    kind: str
    of: str = ""
    protocol: str = ""

    @property
    def words(self) -> str:
        """A measure of accuracy as text."""
        if self.kind == "task":
            task, _, metric = self.of.rpartition(" ")
            return clean(f"{task} ({metric})", 80)
        return clean(f"{_CALLED[self.kind]} {self.of}", 80)


class Number(NamedTuple):
    """A number with its standard error or its interval (low, high), and its ratio to the baseline's, with the ends of a
    95 % interval."""

    value: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True)
class Variant:
    """A model of a run. number: its row, 0 for a baseline; effects: its losses relative to the baseline; lost: measures
    of accuracy that it should have, and whose value is missing or not finite, which counts against it."""

    run: RunOutcome
    name: str
    recipe: str
    model: str
    weights: str
    machine: str
    settings: str  # of the timing
    numbers: dict[Quantity, Number]
    effects: dict[Quantity, Effect]
    number: int = 0
    higher: dict[Quantity, bool] = field(default_factory=dict)  # is more better? for tasks that tell it
    lost: frozenset[Quantity] = frozenset()

    @property
    def baseline(self) -> bool:
        return self.name == "baseline"

    @property
    def identity(self) -> tuple:
        """Baselines with the same identity count as one."""
        at = self.run.measured.provenance
        return (self.weights, self.machine, at.device, at.dtype, at.deploy_dtype)

    @property
    def timing(self) -> tuple:
        """Speeds are compared only among variants for which this is equal."""
        return (self.weights, self.machine, self.settings)

    @property
    def label(self) -> str:
        return "16-bit baseline" if self.baseline else f"#{self.number} {self.recipe}" if self.number else self.recipe


def variants(outcomes: Sequence[RunOutcome]) -> list[Variant]:
    """Every model that has scores; the baselines first, then from the best to the worst, numbered.

    Models of the same weights are ranked by the mean over the measures that they share; those without these follow, and
    those that lost a measure of accuracy are last.
    """
    found = [v for run in outcomes if run.measured.scores and run.measured.model.name for v in of_run(run)]
    found = _told_apart(found)
    kinds = {q.kind for v in found for q in v.effects if not v.baseline}
    primary = next((kind for kind in ACCURACY if kind in kinds), "")
    ranking = {
        weights: shared([v for v in found if v.weights == weights], primary) for weights in {v.weights for v in found}
    }

    def order(v: Variant) -> tuple:
        cost = mean_cost(v, ranking[v.weights])
        return (not v.baseline, v.model, bool(v.lost), cost is None, cost or 0.0, v.run.key)

    found.sort(key=order)
    before = sum(v.baseline for v in found)
    return [v if v.baseline else replace(v, number=i - before + 1) for i, v in enumerate(found)]


def _told_apart(found: list[Variant]) -> list[Variant]:
    """The same models, with the knobs that differ, else the run, behind recipes that several of them share."""
    groups: dict[tuple[str, str], list[Variant]] = {}
    for v in found:
        if not v.baseline:
            groups.setdefault((v.weights, v.recipe), []).append(v)
    names = {id(v): name for twins in groups.values() for v, name in zip(twins, _names(twins), strict=True)}
    return [replace(v, recipe=names.get(id(v), v.recipe)) for v in found]


def _names(twins: Sequence[Variant]) -> list[str]:
    """Names for models of one recipe: with the knobs of the model itself, then those of its run's recipe, then the
    run's other parameters, as far as these differ and are needed; with the run if none is left."""
    records = [v.run.measured for v in twins]
    sources = (
        [_knobs(r.recipes.get(v.name, ())) for v, r in zip(twins, records, strict=True)],
        [_knobs(r.recipe) for r in records],
        [r.run.parameters for r in records],
    )
    names, told = [v.recipe for v in twins], [{} for _ in twins]
    for settings in sources:
        if len(set(names)) < len(names):
            keys = dict.fromkeys(key for one in settings for key in one)
            differing = [key for key in keys if len({str(one.get(key)) for one in settings}) > 1][:MAX_KNOBS]
            for known, one in zip(told, settings, strict=True):
                known |= {key: one[key] for key in differing if key in one}
            texts = [clean(", ".join(f"{key}={value!r}" for key, value in known.items()), 100) for known in told]
            names = [f"{v.recipe} [{text}]" if text else v.recipe for v, text in zip(twins, texts, strict=True)]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{name} in {clean(v.run.key, 60)}" if name in twice else name for name, v in zip(names, twins, strict=True)
    ]


def _knobs(recipe: Sequence[Step]) -> dict[str, object]:
    return {key: value for step in recipe for key, value in step.knobs.items()}


def shared(own: Sequence[Variant], kind: str) -> tuple[Quantity, ...]:
    """The measures of this kind by which models can be compared: those that all of them have that were scored at all
    and have lost nothing; if there is none, the one that most of them have."""
    scored = [v for v in own if not v.baseline and any(q.kind == kind for q in v.effects)]
    sets = [{q for q in v.effects if q.kind == kind} for v in [v for v in scored if not v.lost] or scored]
    if not sets:
        return ()
    counted = Counter(q for each in sets for q in each)
    return tuple(sorted(set.intersection(*sets))) or (min(counted, key=lambda q: (-counted[q], q)),)


def mean_cost(v: Variant, quantities: Sequence[Quantity]) -> float | None:
    """The mean loss over these measures; None if there are none, or if the model lacks one."""
    if not quantities or any(q not in v.effects for q in quantities):
        return None
    return sum(v.effects[q].cost for q in quantities) / len(quantities)


def of_run(run: RunOutcome) -> list[Variant]:
    """The models of one run."""
    record = run.measured
    made, of_baseline = [], {}
    for name in (name for name in dict.fromkeys(("baseline", *record.scores)) if name in record.scores):
        numbers, effects, higher = measured(record, name)
        of_baseline = numbers if name == "baseline" else of_baseline
        recipe = record.recipe_of(name)
        made.append(
            Variant(
                run,
                name,
                clean(name if recipe is None else recipe or NONE, 160),
                clean(record.model.name, 80),
                record.model.weights_sha256 or record.model.name,
                machine(record),
                _settings(record, name),
                numbers,
                effects,
                higher=higher,
                lost=lost(record, name, numbers, of_baseline),
            )
        )
    return made


def drift(found: Sequence[Variant], like: Variant, what: Quantity) -> float:
    """The variation of this variant's baseline's speed between the runs on its machine: largest over smallest."""
    speeds = [v.numbers[what].value for v in found if v.baseline and v.timing == like.timing and what in v.numbers]
    return max(speeds) / min(speeds) if speeds and min(speeds) > 0 else 1.0


def machine(record: RunRecord) -> str:
    """The machine on which a run's speeds were measured, as text that distinguishes it from others."""
    at, has = record.provenance, record.provenance.hardware
    cpu = f"{has.cpu or 'unknown processor'} ({has.cpu_capability})"
    threads = f"{'?' if at.threads is None else at.threads} threads of {'?' if has.cores is None else has.cores} cores"
    gpus = ", ".join(has.gpus) if at.device == "cuda" else ""
    return clean(", ".join(filter(None, (gpus, cpu, threads, has.system))), 200)


Numbers = dict[Quantity, Number]
Effects = dict[Quantity, Effect]


def measured(record: RunRecord, name: str) -> tuple[Numbers, Effects, dict[Quantity, bool]]:
    """Numbers of a model of a record, their losses relative to the baseline, and for tasks whether more is better.
    Numbers that are not finite cannot be compared, and are left out."""
    numbers, effects, higher = {}, {}, {}
    for task, metric, protocol, more in tasks_of(record):
        number = _task(record, name, task, f"{metric}_{task}", more)
        if number:
            what = Quantity("task", f"{task} {metric}", protocol)
            numbers[what], higher[what] = number, more
            if name == "baseline":
                effects[what] = Effect(0.0, 0.0)
            elif number.ratio is not None:
                width = None if number.ratio_low is None else (number.ratio_high - number.ratio_low) / INTERVAL
                effects[what] = Effect(1 - number.ratio, width)
    _add_texts(record, name, numbers, effects)
    for kind, metric in (("stored", "stored_bytes"), ("bits", "bits_per_weight")):
        if value := _score(record, name, metric):
            numbers[Quantity(kind)] = Number(value, ratio=_ratio(record, name, metric) if kind == "stored" else None)
    for kind in ("decode", "prefill"):
        if value := _score(record, name, f"{kind}_tokens_per_s"):
            timed = record.speed.get(name)
            low, high = (timed.ends(kind) if timed else None) or (None, None)
            numbers[Quantity(kind)] = Number(value, None, low, high, _ratio(record, name, f"{kind}_tokens_per_s"))
    if record.cache:
        _add_cache(record, name, numbers, effects)
    if size := _score(record, name, "cache_bytes"):
        numbers[Quantity("cache")] = Number(size)
    return numbers, effects, higher


def lost(record: RunRecord, name: str, numbers: Numbers, of_baseline: Numbers) -> frozenset[Quantity]:
    """Measures of accuracy that this model should have and that `numbers` lacks: those whose value in the record is not
    finite, and those of the baseline, unless this model was measured by none of their kind."""
    own, expected = record.scores[name], {}
    for task, metric, protocol, _ in tasks_of(record):
        expected[Quantity("task", f"{task} {metric}", protocol)] = own.get(f"{metric}_{task}")
    for metric in own:
        if metric.startswith(("perplexity_", "kl_")) and not metric.endswith("_stderr"):
            kind, corpus = metric.split("_", 1)
            expected[Quantity(kind, corpus, _text_protocol(record, corpus))] = own[metric]
    found = {q for q, value in expected.items() if value is not None and _known(value) is None}
    if name != "baseline":
        measured_kinds = {q.kind for q in numbers} | ({"task", "perplexity"} if name == "compressed" else set())
        found |= {q for q in of_baseline if q.kind in ACCURACY and q.kind in measured_kinds and q not in numbers}
    return frozenset(found)


def _score(record: RunRecord, name: str, metric: str) -> float | None:
    return _known(record.score(name, metric))


def _known(value: float | None) -> float | None:
    return value if finite(value) else None


def _ratio(record: RunRecord, name: str, metric: str) -> float | None:
    return _known(record.ratio(metric, name))


def _add_texts(record: RunRecord, name: str, numbers: Numbers, effects: Effects) -> None:
    """Perplexities and divergences; divergences of answers about caches have columns of their own."""
    own = record.scores[name]
    for metric in (m for m in own if m.startswith(("perplexity_", "kl_")) and not m.endswith("_stderr")):
        kind, corpus = metric.split("_", 1)
        value, stderr = _known(own[metric]), _known(own.get(f"{metric}_stderr"))
        if value is None or (kind == "kl" and f"perplexity_{corpus}" not in own):
            continue
        what = Quantity(kind, corpus, _text_protocol(record, corpus))
        numbers[what] = Number(value, stderr)
        if kind == "kl":
            effects[what] = Effect(value, stderr)
        elif (effect := _nll(record, name, corpus)) is not None:
            effects[what] = effect
            numbers[what] = Number(value, stderr, ratio=math.exp(-min(max(effect.cost, -700.0), 700.0)))


def tasks_of(record: RunRecord) -> list[tuple[str, str, str, bool]]:
    """Task, its metric, the number of questions, and whether more is better. Of a group of tasks only the group: its
    score is over all the questions of its tasks."""
    if record.tasks.rows:
        how = ", chat" if record.tasks.settings.chat else ""
        asked = ("n", "num_fewshot", "version")
        return [
            (
                row.task,
                row.metric,
                ", ".join(f"{k} {getattr(row, k)}" for k in asked if getattr(row, k) not in (None, "")) + how,
                row.higher_is_better is not False,
            )
            for row in record.tasks.rows
            if row.task not in record.tasks.parts
        ]
    found: dict[str, str] = {}
    names = {metric for own in record.scores.values() for metric in own if not metric.endswith("_stderr")}
    for kind in TASK_METRICS:
        for metric in sorted(name for name in names if name.startswith(f"{kind}_")):
            if not (kind == "acc" and metric.startswith("acc_norm_")):
                found.setdefault(metric[len(kind) + 1 :], kind)
    return [(task, metric, "", True) for task, metric in found.items()]


def _task(record: RunRecord, name: str, task: str, metric: str, more: bool) -> Number | None:
    value, stderr = _score(record, name, metric), _score(record, name, f"{metric}_stderr")
    if value is None:
        return None
    paired = record.tasks.compared.get(name, {}).get(task)
    if paired and finite(paired.recovery):
        low, high = paired.recovery_low, paired.recovery_high
        ends = (low, high) if finite(low, high) else (None, None)
        return Number(value, stderr, None, None, paired.recovery, *ends)
    before, other = _score(record, "baseline", metric), _score(record, "baseline", f"{metric}_stderr")
    if not before or name == "baseline" or not more:
        return Number(value, stderr)
    ratio = value / before
    if stderr is None or other is None:
        return Number(value, stderr, ratio=ratio)
    error = math.hypot(stderr / before, ratio * other / before) * INTERVAL / 2  # as if the questions were different
    return Number(value, stderr, ratio=ratio, ratio_low=ratio - error, ratio_high=ratio + error)


def _nll(record: RunRecord, name: str, corpus: str) -> Effect | None:
    """The loss above the baseline's in nats per token: paired if the record has it, else from the two perplexities."""
    if name == "baseline":
        return Effect(0.0, 0.0)
    paired, metric = record.difference.get(name, {}), f"perplexity_{corpus}"
    if finite(paired.get(f"nll_{corpus}")):
        return Effect(paired[f"nll_{corpus}"], _known(paired.get(f"nll_{corpus}_stderr")))
    own, base = (_score(record, n, metric) for n in (name, "baseline"))
    if not own or not base or own < 0 or base < 0:
        return None
    errors = [_score(record, n, f"{metric}_stderr") for n in (name, "baseline")]
    stderr = None if None in errors else math.hypot(errors[0] / own, errors[1] / base)
    return Effect(math.log(own / base), stderr)


def _add_cache(record: RunRecord, name: str, numbers: Numbers, effects: Effects) -> None:
    """Exact answers by visibility, bytes of the cache at the longest context with questions, speed after the longest
    context."""
    cache, variant = record.cache, FULL if name == "baseline" else name
    row = {row.name: row for row in cache_rows(cache)}.get(variant)
    if row is None:
        return
    lengths, asked = (sorted({getattr(one, key) for one in cache.answers}) for key in ("length", "task"))
    for visibility, cell in row.by.items():
        if not finite(cell.exact, cell.stderr):
            continue
        own = [one for one in cache.answers if one.variant == variant and one.visibility == visibility]
        count = sum(len(one.exact) for one in own)
        protocol = f"{', '.join(asked)} at {', '.join(map(str, lengths))} tokens, n {count}"
        what = Quantity("exact", visibility, protocol)
        numbers[what] = Number(cell.exact, None, *cell.interval)
        if variant == FULL:
            effects[what] = Effect(0.0, 0.0)
        elif len(cell.against) == 3 and finite(*cell.against):
            mean, low, high = cell.against
            effects[what] = Effect(-mean, (high - low) / INTERVAL)
    if finite(row.bytes):
        numbers[Quantity("cache", f"{max(lengths):,} tokens")] = Number(row.bytes, ratio=_known(row.share))
    longest = cache.speed.decode_ratio(variant, FULL) if cache.speed else None
    if longest and finite(*(timed := cache.speed.tokens_per_s[variant][longest[0]])) and len(timed) == 3:
        low, high = cache.speed.ends(variant, longest[0]) or (None, None)
        what = Quantity("decode", f"behind {longest[0]:,} tokens")
        numbers[what] = Number(timed[0], None, low, high, _known(longest[1]))


def _settings(record: RunRecord, name: str) -> str:
    timed = record.speed.get(name)
    settings = timed.settings if timed else record.cache.speed.settings if record.cache and record.cache.speed else None
    known = {key: getattr(settings, key, None) for key in ("prompt_tokens", "new_tokens", "batch")}
    return ", ".join(f"{key} {value}" for key, value in known.items() if value is not None)


def _text_protocol(record: RunRecord, corpus: str) -> str:
    text = record.texts.get(corpus)
    if not text or text.windows is None or text.window is None:
        return ""
    stride, bos = f", stride {text.stride}" * bool(text.stride), ", BOS before each" * (text.bos == "each")
    return f"{text.windows} × {text.window:,} tokens{stride}{bos}"
