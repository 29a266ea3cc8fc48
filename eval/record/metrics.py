"""Names, units and directions of the metrics of a record, how numbers are written, and the table of scores."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

METRICS = (
    # prefix of the metric, label, unit, better direction
    ("perplexity_", "Perplexity", "", -1),
    ("kl_", "KL to the baseline", "nats per token", -1),
    ("top1_agreement_", "Same most likely token", "%", 1),
    ("guess_acceptance", "The baseline's tokens that it guesses", "%", 1),
    ("lossless_speed_up", "Speed of the baseline's text with it as draft", "×", 1),
    ("free_running_kl", "KL along the baseline's own text", "nats per token", -1),
    ("free_running_same_tokens", "Own text: tokens before the first difference", "tokens", 1),
    ("free_running_repetition", "Own text: repeated runs of four tokens", "%", -1),
    ("free_running_tokens", "Own text: length", "tokens", 0),
    ("acc_", "Accuracy", "%", 1),
    ("acc_norm_", "Accuracy, by length", "%", 1),
    ("acc_mutual_info_", "Accuracy, by mutual information", "%", 1),
    ("acc_bytes_", "Accuracy, by bytes", "%", 1),
    ("exact_match_", "Exact match", "%", 1),
    ("f1_", "F1", "", 1),
    ("mcc_", "Matthews correlation", "", 1),
    ("bits_per_byte_", "Bits per byte", "", -1),
    ("byte_perplexity_", "Perplexity per byte", "", -1),
    ("word_perplexity_", "Perplexity per word", "", -1),
    ("brier_score_", "Brier score", "", -1),
    ("ece_", "Calibration error", "%", -1),
    ("decode_tokens_per_s", "Decode", "tokens/s", 1),
    ("step_tokens_per_s", "Decoding step alone", "tokens/s", 1),
    ("prefill_tokens_per_s", "Prefill", "tokens/s", 1),
    ("time_to_first_token_s", "Time to first token", "ms", -1),
    ("stored_bytes", "Stored", "MB", -1),
    ("resident_bytes", "In memory", "MB", -1),
    ("bits_per_weight", "Bits per weight, whole model", "", -1),
    ("peak_memory_bytes", "Peak memory", "MB", -1),
    ("cache_bytes", "KV cache", "MB", -1),
)
NOT_FINITE = "not finite"
SCALE = {"%": 100, "ms": 1000, "MB": 1e-6}


def prefix_of(metric: str) -> str:
    """The longest prefix of METRICS that the metric's name has; those without an underscore at the end are whole names.
    "" for none."""
    fits = (p for p, *_ in METRICS if (metric.startswith(p) and metric != p if p.endswith("_") else metric == p))
    return max(fits, key=len, default="")


def better(metric: str) -> int:
    """1: more of it is better; -1: less; 0: that is not known."""
    return {prefix: sign for prefix, _, _, sign in METRICS}.get(prefix_of(metric), 0)


def with_prefix(metrics: Iterable[str], prefix: str) -> list[str]:
    """The metrics with this prefix, each once, without standard errors."""
    return [m for m in dict.fromkeys(metrics) if not m.endswith("_stderr") and prefix_of(m) == prefix]


def described(metric: str) -> tuple[str, str, float]:
    """Label, unit and scale of a metric of lm-eval without its task: acc_norm -> ("Accuracy, by length", "%", 100)."""
    found = {prefix: (label, unit) for prefix, label, unit, _ in METRICS}.get(
        f"{metric}_", (metric.replace("_", " "), "")
    )
    return *found, SCALE.get(found[1], 1)


def fmt(value: float | None, spec: str = ".2f", scale: float = 1, unit: str = "") -> str:
    """A number by a format specification, with its unit; a dash for none, and words for one that is not finite."""
    if value is None:
        return "–"
    return f"{value * scale:{spec}}{unit}" if math.isfinite(value) else NOT_FINITE


def number(value: float | None) -> str:
    """A number with three or four significant digits."""
    if value is None or not math.isfinite(value) or value == 0:
        return fmt(value, "g")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))) - (abs(value) >= 100))}f}"


def percent(share: float | None) -> str:
    """A change as +12.3 %, with more digits where it is small."""
    digits = 2 if share is not None and abs(share) < 0.01 else 1
    return fmt(share, f"+.{digits}f", 100, " %").replace("-", "−")


def change(after: float | None, before: float | None) -> float | None:
    """The relative change from one number to another; None if it has no meaning."""
    return after / before - 1 if after is not None and before else None


def growth(cost: float) -> float:
    """exp(cost) − 1: the change of a perplexity from that of the loss, bounded where it would overflow."""
    return math.expm1(min(cost, 14.0))


def with_error(value: float | None, stderr: float | None, scale: float = 1) -> tuple[str, str]:
    """A number and its standard error as texts for a table, with one decimal for per cent: ("43.2", "± 1.5"); "" for no
    error."""
    shown = fmt(value, ".1f", scale) if scale == 100 else number(None if value is None else value * scale)
    if stderr is None or value is None or not math.isfinite(stderr):
        return shown, ""
    error = stderr * scale
    return shown, f"± {error:.1f}" if scale == 100 else f"± {error:.2g}" if error < 10 else f"± {error:.0f}"


def kind_of(ratio: float, counts: bool) -> str:
    """The class of a speed-up: good or bad; noise if it does not count (`eval.record.noise`)."""
    return "noise" if not counts else "good" if ratio > 1 else "bad"


class Change(NamedTuple):
    """The change from the baseline to another model. kind: good, bad, noise (too small to be told), or ""."""

    text: str = ""
    kind: str = ""


class MetricRow(NamedTuple):
    """A metric. detail: its corpus or task; cells: a number and its standard error for every model; changes: the change
    from the baseline for every model."""

    label: str
    detail: str
    unit: str
    cells: list[tuple[str, str]]
    changes: list[Change]


class MetricTable(NamedTuple):
    models: list[str]
    rows: list[MetricRow]


def metric_table(
    models: Sequence[str], scores: Mapping[str, Mapping[str, float]], counts: Callable[[str, str], bool]
) -> MetricTable:
    """The scores: a row per metric, a column per model.

    Args:
        scores: as in a record (`eval.record.rows.RunRecord`).
        counts: (metric, model) -> is the model's difference from the baseline more than noise? The record's own method.
    """
    rows = []
    for prefix, label, unit, better in METRICS:
        for metric in with_prefix((m for model in models for m in scores[model]), prefix):
            scale = SCALE.get(unit, 1)
            found = [(scores[model].get(metric), scores[model].get(f"{metric}_stderr")) for model in models]
            shown = [with_error(_times(value, scale), _times(error, scale)) for value, error in found]
            changes = [_change(metric, model, better, scores, counts) for model in models]
            detail = metric[len(prefix) :] if prefix.endswith("_") else ""
            rows.append(MetricRow(label, detail, unit, shown, changes))
    return MetricTable(list(models), rows)


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _change(
    metric: str,
    model: str,
    better: int,
    scores: Mapping[str, Mapping[str, float]],
    counts: Callable[[str, str], bool],
) -> Change:
    before, after = scores.get("baseline", {}).get(metric), scores[model].get(metric)
    if model == "baseline" or not before or after is None or not math.isfinite(after / before):
        return Change()
    ratio = after / before
    text = f"{ratio:.2f}×" if ratio >= 2 or ratio <= 0.5 else f"{(ratio - 1) * 100:+.1f} %".replace("-", "−")
    if not counts(metric, model):
        return Change(f"≈ {text}", "noise")
    return Change(text, ("good" if (ratio > 1) == (better > 0) else "bad") if better else "")
