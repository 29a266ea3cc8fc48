"""What the metrics of a record are called, in which unit they are shown, and which way is better."""

import math
from collections.abc import Iterable

METRICS = (
    # prefix of the metric, label, unit, which way is better
    ("perplexity_", "Perplexity", "", -1),
    ("kl_", "KL to the baseline", "nats per token", -1),
    ("top1_agreement_", "Same most likely token", "%", 1),
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
    ("decode_tokens_per_s", "Decode", "tokens/s", 1),
    ("prefill_tokens_per_s", "Prefill", "tokens/s", 1),
    ("time_to_first_token_s", "Time to first token", "ms", -1),
    ("stored_bytes", "Stored", "MB", -1),
    ("resident_bytes", "In memory", "MB", -1),
    ("bits_per_weight", "Bits per weight, whole model", "", -1),
    ("peak_memory_bytes", "Peak memory", "MB", -1),
    ("cache_bytes", "KV cache", "MB", -1),
)
SCALE = {"%": 100, "ms": 1000, "MB": 1e-6}


def prefix_of(metric: str) -> str:
    """The longest prefix of METRICS that the metric's name has; those without an underscore at the end are whole names.
    "" for none."""
    fits = (p for p, *_ in METRICS if (metric.startswith(p) and metric != p if p.endswith("_") else metric == p))
    return max(fits, key=len, default="")


def with_prefix(metrics: Iterable[str], prefix: str) -> list[str]:
    """Those of the metrics, each once, whose prefix this is; no standard errors."""
    return [m for m in dict.fromkeys(metrics) if not m.endswith("_stderr") and prefix_of(m) == prefix]


def described(metric: str) -> tuple[str, str, float]:
    """Label, unit and scale of a metric of lm-eval without its task: acc_norm -> ("Accuracy, by length", "%", 100)."""
    found = {prefix: (label, unit) for prefix, label, unit, _ in METRICS}.get(
        f"{metric}_", (metric.replace("_", " "), "")
    )
    return *found, SCALE.get(found[1], 1)


def number(value: float | None) -> str:
    """A number with three or four significant digits."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))) - (abs(value) >= 100))}f}"


def with_error(value: float | None, stderr: float | None, scale: float = 1) -> tuple[str, str]:
    """A number and its standard error as a table shows them, with one decimal for per cent: ("43.2", "± 1.5"); "" for
    no error."""
    if value is None:
        return "–", ""
    percent = scale == 100
    shown = f"{value * scale:.1f}" if percent else number(value * scale)
    if stderr is None:
        return shown, ""
    error = stderr * scale
    return shown, f"± {error:.1f}" if percent else f"± {error:.2g}" if error < 10 else f"± {error:.0f}"
