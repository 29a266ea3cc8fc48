"""Every model of every run: what it is, what was measured of it, and how far it is from the baseline of its own run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from reports.compare.noise import Effect
from reports.compare.outcome import RunOutcome
from reports.page.caches import FULL, cache_rows
from reports.parts.table import recipe_text
from reports.parts.text import clean

INTERVAL = 2 * 1.96  # a 95 % interval is so many standard errors wide
TASK_METRICS = ("acc_norm", "acc", "exact_match")  # what stands for a task in records that do not say
NONE = "no compression"
_ASKED = ("n", "num_fewshot", "version")


class What(NamedTuple):
    """What a number is of: kind (task, perplexity, kl, exact, stored, bits, decode, prefill, cache), of what (task,
    corpus, visibility, context), and on how much. Numbers are compared only where all three are the same."""

    kind: str
    of: str = ""
    protocol: str = ""


class Number(NamedTuple):
    """A number with its standard error, or its spread (low, high); and the share of the baseline's that is left, with
    95 %."""

    value: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True)
class Variant:
    """A model of a run. number: its row, 0 for a baseline; effects: how much worse than the baseline, by what was
    asked."""

    run: RunOutcome
    name: str
    recipe: str
    model: str
    weights: str
    machine: str
    settings: str  # of the timing
    numbers: dict[What, Number]
    effects: dict[What, Effect]
    number: int = 0
    higher: dict[What, bool] = field(default_factory=dict)  # is more better? where a task says so

    @property
    def baseline(self) -> bool:
        return self.name == "baseline"

    @property
    def identity(self) -> tuple:
        """Baselines of the same identity are one."""
        at = (self.run.record or {}).get("provenance", {})
        return (self.weights, self.machine, at.get("device"), at.get("dtype"), at.get("deploy_dtype"))

    @property
    def timing(self) -> tuple:
        """Speeds are compared only among those of the same."""
        return (self.weights, self.machine, self.settings)

    @property
    def label(self) -> str:
        return "16-bit baseline" if self.baseline else f"#{self.number} {self.recipe}" if self.number else self.recipe


def variants(outcomes: Sequence[RunOutcome]) -> list[Variant]:
    """Every model that has scores; the baselines first, then from the best to the worst, numbered."""
    found = [
        v
        for run in outcomes
        if run.record and run.record.get("scores") and run.record.get("model")
        for v in of_run(run)
    ]
    families = ("task", "perplexity", "kl", "exact")
    primary = next(
        (kind for kind in families if any(w.kind == kind for v in found for w in v.effects if not v.baseline)), ""
    )

    def order(v: Variant) -> tuple:
        costs = [e.cost for w, e in v.effects.items() if w.kind == primary]
        return (not v.baseline, v.model, not costs, sum(costs) / len(costs) if costs else 0.0, v.run.key)

    found.sort(key=order)
    before = sum(v.baseline for v in found)
    return [v if v.baseline else replace(v, number=i - before + 1) for i, v in enumerate(found)]


def of_run(run: RunOutcome) -> list[Variant]:
    """The models of one run."""
    record = run.record
    recipes = {"compressed": record.get("recipe") or [], **(record.get("recipes") or {})}
    made = []
    for name in dict.fromkeys(("baseline", *record["scores"])):
        if name not in record["scores"]:
            continue
        numbers, effects, higher = measured(record, name)
        text = recipe_text(recipes[name]) if name in recipes else name
        made.append(
            Variant(
                run,
                name,
                clean(text or NONE, 160),
                clean(record["model"].get("name", ""), 80),
                str(record["model"].get("weights_sha256") or record["model"].get("name", "")),
                machine(record),
                _settings(record, name),
                numbers,
                effects,
                higher=higher,
            )
        )
    return made


def drift(found: Sequence[Variant], like: Variant, what: What) -> float:
    """How much the speed of this variant's baseline differs between the runs on its machine: largest over smallest."""
    speeds = [v.numbers[what].value for v in found if v.baseline and v.timing == like.timing and what in v.numbers]
    return max(speeds) / min(speeds) if speeds else 1.0


def machine(record: dict[str, Any]) -> str:
    """The machine on which a run's speeds were measured, as one would tell it from others."""
    at = record.get("provenance", {})
    has = at.get("hardware") or {}
    cpu = f"{has.get('cpu', 'unknown processor')} ({has.get('cpu_capability', '')})"
    threads = f"{at.get('threads', '?')} threads of {has.get('cores', '?')} cores"
    gpus = ", ".join(has.get("gpus") or []) if at.get("device") == "cuda" else ""
    return clean(", ".join(filter(None, (gpus, cpu, threads, has.get("system", "")))), 200)


def measured(record: dict[str, Any], name: str) -> tuple[dict[What, Number], dict[What, Effect], dict[What, bool]]:
    """Numbers of a model of a record, how much worse than the baseline they are, and for tasks whether more is
    better."""
    own, base = record["scores"][name], record["scores"].get("baseline", {})
    numbers, effects, higher = {}, {}, {}
    for task, metric, protocol, more in tasks_of(record):
        number = _task(record, name, task, f"{metric}_{task}", more)
        if number:
            what = What("task", f"{task} {metric}", protocol)
            numbers[what], higher[what] = number, more
            if name == "baseline":
                effects[what] = Effect(0.0, 0.0)
            elif number.ratio is not None:
                width = None if number.ratio_low is None else (number.ratio_high - number.ratio_low) / INTERVAL
                effects[what] = Effect(1 - number.ratio, width)
    for metric in [m for m in own if m.startswith(("perplexity_", "kl_")) and not m.endswith("_stderr")]:
        kind, corpus = metric.split("_", 1)
        value, stderr = _finite(own[metric]), _finite(own.get(f"{metric}_stderr"))
        if value is None or (
            kind == "kl" and f"perplexity_{corpus}" not in own
        ):  # divergences of answers have columns of their own
            continue
        what = What(kind, corpus, _text_protocol(record, corpus))
        numbers[what] = Number(value, stderr)
        if kind == "kl":
            effects[what] = Effect(value, stderr)
        elif (effect := _nll(record, name, corpus)) is not None:
            effects[what] = effect
            numbers[what] = Number(value, stderr, ratio=math.exp(-effect.cost))
    for kind, metric in (("stored", "stored_bytes"), ("bits", "bits_per_weight")):
        if _finite(own.get(metric)):
            ratio = own[metric] / base[metric] if _finite(base.get(metric)) and kind == "stored" else None
            numbers[What(kind)] = Number(own[metric], ratio=ratio)
    for kind in ("decode", "prefill"):
        if _finite(own.get(f"{kind}_tokens_per_s")):
            timed = (record.get("speed") or {}).get(name) or {}
            low, high = timed.get(f"{kind}_quartiles") or (None, None) if _rounds(timed) > 1 else (None, None)
            value, before = own[f"{kind}_tokens_per_s"], _finite(base.get(f"{kind}_tokens_per_s"))
            numbers[What(kind)] = Number(value, low=low, high=high, ratio=value / before if before else None)
    if record.get("cache"):
        _add_cache(record["cache"], name, numbers, effects)
    if _finite(own.get("cache_bytes")):
        numbers[What("cache")] = Number(own["cache_bytes"])
    return numbers, effects, higher


def tasks_of(record: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Task, metric that stands for it, on how much it was asked, and whether more is better. Of a group, the group
    alone: its score is over all the questions of its tasks."""
    told = record.get("tasks") or {}
    if told.get("rows"):
        scored, groups, settings = (
            {r["task"] for r in told["rows"]},
            told.get("groups") or {},
            told.get("settings") or {},
        )
        inside = {task for group, tasks in groups.items() if group in scored for task in tasks if task != group}
        how = ", chat" if settings.get("chat") else ""
        return [
            (
                r["task"],
                r["metric"],
                ", ".join(f"{k} {r[k]}" for k in _ASKED if r.get(k) is not None) + how,
                r.get("higher_is_better") is not False,
            )
            for r in told["rows"]
            if r["task"] not in inside
        ]
    found: dict[str, str] = {}
    for metric in (m for own in record["scores"].values() for m in own if not m.endswith("_stderr")):
        kind = next((k for k in TASK_METRICS if metric.startswith(f"{k}_")), None)
        if kind and TASK_METRICS.index(kind) <= TASK_METRICS.index(
            found.get(metric[len(kind) + 1 :], TASK_METRICS[-1])
        ):
            found[metric[len(kind) + 1 :]] = kind
    return [(task, metric, "", True) for task, metric in found.items()]


def _task(record: dict[str, Any], name: str, task: str, metric: str, more: bool) -> Number | None:
    own, base = record["scores"][name], record["scores"].get("baseline", {})
    value, stderr = _finite(own.get(metric)), _finite(own.get(f"{metric}_stderr"))
    if value is None:
        return None
    paired = (((record.get("tasks") or {}).get("compared") or {}).get(name) or {}).get(task) or {}
    if paired.get("recovery") is not None:
        return Number(
            value,
            stderr,
            ratio=paired["recovery"],
            ratio_low=_finite(paired.get("recovery_low")),
            ratio_high=_finite(paired.get("recovery_high")),
        )
    before = _finite(base.get(metric))
    if not before or name == "baseline" or not more:
        return Number(value, stderr)
    ratio, other = value / before, _finite(base.get(f"{metric}_stderr"))
    if stderr is None or other is None:
        return Number(value, stderr, ratio=ratio)
    error = (
        math.hypot(stderr / before, ratio * other / before) * INTERVAL / 2
    )  # as if they had answered other questions
    return Number(value, stderr, ratio=ratio, ratio_low=ratio - error, ratio_high=ratio + error)


def _nll(record: dict[str, Any], name: str, corpus: str) -> Effect | None:
    """The loss above the baseline's in nats per token: paired where the record says so, else from the two
    perplexities."""
    if name == "baseline":
        return Effect(0.0, 0.0)
    paired = (record.get("difference") or {}).get(name) or {}
    if _finite(paired.get(f"nll_{corpus}")) is not None:
        return Effect(paired[f"nll_{corpus}"], _finite(paired.get(f"nll_{corpus}_stderr")))
    (own, base), metric = (record["scores"].get(n, {}) for n in (name, "baseline")), f"perplexity_{corpus}"
    if not _finite(own.get(metric)) or not _finite(base.get(metric)):
        return None
    errors = [_finite(one.get(f"{metric}_stderr")) for one in (own, base)]
    stderr = None if None in errors else math.hypot(errors[0] / own[metric], errors[1] / base[metric])
    return Effect(math.log(own[metric] / base[metric]), stderr)


def _add_cache(cache: dict[str, Any], name: str, numbers: dict[What, Number], effects: dict[What, Effect]) -> None:
    """Exact answers by visibility, bytes of the cache at the longest context that was asked about, speed behind the
    longest."""
    variant = FULL if name == "baseline" else name
    rows = {row["name"]: row for row in cache_rows(cache)}
    if variant not in rows:
        return
    lengths = sorted({one["length"] for one in cache["answers"]})
    asked = sorted({one["task"] for one in cache["answers"]})
    for visibility, cell in rows[variant]["by"].items():
        count = sum(
            len(o["exact"]) for o in cache["answers"] if o["variant"] == variant and o["visibility"] == visibility
        )
        what = What("exact", visibility, f"{', '.join(asked)} at {', '.join(map(str, lengths))} tokens, n {count}")
        numbers[what] = Number(cell["exact"], cell["stderr"])
        if variant == FULL:
            effects[what] = Effect(0.0, 0.0)
        elif cell["against"]:
            mean, low, high = cell["against"]
            effects[what] = Effect(-mean, (high - low) / INTERVAL)
    numbers[What("cache", f"{max(lengths):,} tokens")] = Number(rows[variant]["bytes"], ratio=rows[variant]["share"])
    timed = (cache.get("speed") or {}).get("tokens_per_s", {})
    if timed.get(variant):
        context = max(timed[variant], key=int)
        value, low, high = timed[variant][context]
        low, high = (low, high) if _rounds(cache["speed"]) > 1 else (None, None)
        full = timed.get(FULL, {}).get(context)
        ratio = value / full[0] if full else None
        numbers[What("decode", f"behind {int(context):,} tokens")] = Number(value, low=low, high=high, ratio=ratio)


def _settings(record: dict[str, Any], name: str) -> str:
    told = (
        ((record.get("speed") or {}).get(name) or {}).get("settings")
        or (record.get("cache") or {}).get("speed", {})
        or {}
    )
    return ", ".join(f"{k} {told[k]}" for k in ("prompt_tokens", "new_tokens", "batch") if told.get(k) is not None)


def _rounds(timed: dict[str, Any]) -> int:
    """In how many rounds something was timed: the quartiles of one round are no spread."""
    return (timed.get("settings") or {}).get("rounds", 2) if timed else 0


def _text_protocol(record: dict[str, Any], corpus: str) -> str:
    text = (record.get("texts") or {}).get(corpus)
    if not text:
        return ""
    stride = f", stride {text['stride']}" if text.get("stride") else ""
    bos = ", BOS before each" if text.get("bos") == "each" else ""
    return f"{text['windows']} × {text['window']:,} tokens{stride}{bos}"


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
