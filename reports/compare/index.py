"""runs/index.html: all runs at a glance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.compare.outcome import RunOutcome
from reports.page.caches import FULL, MAIN
from reports.page.evaluation import mean_recovery
from reports.parts.files import LIMIT_BYTES, Report, environment, write_page
from reports.parts.table import corpora, percent, recipe_text
from reports.parts.text import clean, link, plural

STATUSES = ("finished", "failed", "running", "waiting")
_ORDER = {"running": 0, "failed": 1, "finished": 2, "waiting": 3}  # what may want somebody first
MAX_ROWS = 1000


def render_index(outcomes: Sequence[RunOutcome], path: str | Path, *, comparisons: Mapping[str, str] = {}) -> Report:
    """Write the page of all runs, whole or not at all; at most 1 MB.

    Args:
        outcomes: all runs; shown are those that run or failed, then the finished ones, the newest first, then those
            that wait.
        comparisons: {title: where its page is, relative to this page}, such as those of sweeps.
    """
    return write_page(index_page(outcomes, comparisons=comparisons), path)


def index_page(outcomes: Sequence[RunOutcome], *, comparisons: Mapping[str, str] = {}) -> str:
    """The page as HTML."""
    counts = {status: sum(one.status == status for one in outcomes) for status in STATUSES}
    rows = sorted((_row(one) for one in outcomes), key=lambda row: row["started"], reverse=True)
    rows.sort(key=lambda row: _ORDER.get(row["status"].partition(" ")[0], 1))
    template = environment().get_template("index.html")
    shown = rows[:MAX_ROWS]
    while True:
        html = template.render(
            counts={status: count for status, count in counts.items() if count or status == "finished"},
            total=len(outcomes),
            rows=shown,
            left=len(rows) - len(shown),
            failures=plural(counts["failed"], "run"),
            comparisons=[
                (clean(title, 120), link(href.lstrip("/"))) for title, href in list(comparisons.items())[:MAX_ROWS]
            ],
        )
        if len(html.encode()) <= LIMIT_BYTES or not shown:
            return html
        shown = shown[: len(shown) * 3 // 4]  # names may be long


def _row(one: RunOutcome) -> dict[str, Any]:
    """One run as the table shows it: texts, and the numbers that it is sorted by ("" for none)."""
    record, done = one.record or {}, one.status == "finished"
    run, model = record.get("run") or {}, record.get("model") or {}
    duration = run.get("duration_s", (one.failure or {}).get("seconds"))
    recipe = recipe_text(record["recipe"]) if record.get("recipe") else ""
    folder = one.href.lstrip("/")
    kept, accuracy = _accuracy(record)
    return {
        "key": clean(one.key, 120),
        "notebook": clean(one.notebook, 60),
        "status": clean(one.shown_status, 40),
        "recipe": clean(recipe, 200),
        "model": clean(model.get("name") or _asked(one, "model_name"), 80),
        "started": str(run.get("started") or "")[:19],
        "duration": duration,
        "took": "" if duration is None else _took(duration),
        "kept": kept,
        "accuracy": accuracy,
        "smaller": _smaller(record),
        "faster": _faster(record),
        "failure": clean((one.failure or {}).get("kind") or "", 40),
        "why": _why(one.failure) if one.failure else "",
        "folder": link(folder) if not done else "",
        "report": link(folder, "report.html") if done else "",
        "notebook_file": link(folder, "notebook.ipynb") if done else "",
        "record": link(folder, "record.json") if done else "",
    }


def _asked(one: RunOutcome, name: str) -> str:
    return str((one.parameters or {}).get(name) or "")


def _why(failure: dict[str, Any]) -> str:
    """Where and why a run failed, in one line."""
    error = str(failure.get("error") or "").strip().splitlines()
    where = failure.get("cell_title") or ("" if failure.get("cell") is None else f"cell {failure['cell']}")
    return ": ".join(clean(text, 160) for text in (where, error[-1] if error else "") if text)


def _took(seconds: float) -> str:
    """A duration to read: 48 s, 12 min, 1 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _accuracy(record: dict[str, Any]) -> tuple[float | None, list[tuple[str, str]]]:
    """What is kept of the baseline's accuracy as a share, to sort by, and each headline number with what it is of."""
    said, shares = [], []
    mean = mean_recovery(record) if record.get("scores") else None
    if mean:
        shares.append(mean[0])
        said.append((f"{mean[0] * 100:.1f} %", f"of {plural(mean[1], 'task')}"))
    if record.get("cache"):
        answers = record["cache"]["answers"]
        exact = {name: [v for row in answers if row["variant"] == name for v in row["exact"]] for name in (FULL, MAIN)}
        if all(exact.values()):
            full, ours = (sum(of) / len(of) for of in exact.values())
            shares += [ours / full] if full else []
            said.append((f"{ours * 100:.0f} %", f"exact; full cache {full * 100:.0f} %"))
    elif record.get("scores"):
        base, small = record["scores"]["baseline"], record["scores"]["compressed"]
        for corpus in corpora([record]):
            before, after = base.get(f"perplexity_{corpus}"), small.get(f"perplexity_{corpus}")
            if before and after:
                shares.append(before / after)
                said.append((percent(after / before - 1), f"perplexity, {clean(corpus, 40)}"))
    return (shares[0] if shares else None), said[:2]


def _smaller(record: dict[str, Any]) -> float | None:
    """How many times smaller: the KV cache in a run on caches, else the stored model."""
    if record.get("cache"):
        sizes = record["cache"].get("cache_bytes") or {}
        full, ours = (sum((sizes.get(name) or {}).values()) for name in (FULL, MAIN))
        return full / ours if full and ours else None
    before, after = (
        (record.get("scores") or {}).get(name, {}).get("stored_bytes") for name in ("baseline", "compressed")
    )
    return before / after if before and after else None


def _faster(record: dict[str, Any]) -> float | None:
    """Decoded tokens per second against the baseline's: behind the longest context in a run on caches."""
    speed = (record.get("cache") or {}).get("speed") or {}
    if speed.get("tokens_per_s", {}).get(MAIN):
        longest = max(speed["tokens_per_s"][MAIN], key=int)
        return speed["tokens_per_s"][MAIN][longest][0] / speed["tokens_per_s"][FULL][longest][0]
    before, after = (
        (record.get("scores") or {}).get(name, {}).get("decode_tokens_per_s") for name in ("baseline", "compressed")
    )
    return after / before if before and after else None
