"""runs/index.html: all runs in one table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eval.record.metrics import NOT_FINITE, change, percent
from eval.record.rows import RunRecord
from reports.compare.outcome import Failure, RunOutcome
from reports.parts.caches import FULL, MAIN
from reports.parts.files import LIMIT_BYTES, Report, environment, write_page
from reports.parts.plots import finite
from reports.parts.table import mean_recovery
from reports.parts.text import clean, link, plural, public

STATUSES = ("finished", "failed", "damaged", "running", "waiting")
_ORDER = {"running": 0, "failed": 1, "damaged": 1, "finished": 2, "waiting": 3}  # what may need attention comes first
MAX_ROWS = 1000


def render_index(rows: Sequence["IndexRow"], path: str | Path, *, comparisons: Mapping[str, str] = {}) -> Report:
    """Write the page of all runs, whole or not at all; at most 1 MB.

    Args:
        rows: all runs; shown in the order: running or failed, then finished, the newest first, then waiting.
        comparisons: {title: link to its page, relative to this page}, such as those of sweeps.
    """
    return write_page(page_of_rows(rows, comparisons=comparisons), path)


def index_page(outcomes: Sequence[RunOutcome], *, comparisons: Mapping[str, str] = {}) -> str:
    """The page of these runs as HTML."""
    return page_of_rows([index_row(one) for one in outcomes], comparisons=comparisons)


def page_of_rows(rows: Sequence["IndexRow"], *, comparisons: Mapping[str, str] = {}) -> str:
    """The page as HTML."""
    found = Counter(row.status.partition(" ")[0] for row in rows)
    counts = {status: found[status] for status in STATUSES}
    rows = sorted(rows, key=lambda row: row.started, reverse=True)
    rows.sort(key=lambda row: _ORDER.get(row.status.partition(" ")[0], 1))
    template = environment().get_template("index.html")
    shown = rows[:MAX_ROWS]
    while True:
        html = template.render(
            counts={status: count for status, count in counts.items() if count or status == "finished"},
            total=len(rows),
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


class IndexRow(NamedTuple):
    """One run as a row of the table; kept, smaller and faster are the sort keys of its columns. The last three are for
    `workbench list`."""

    key: str
    notebook: str
    status: str
    stale: bool
    recipe: str
    model: str
    started: str
    duration: float | None
    took: str
    kept: float | None
    accuracy: list[tuple[str, str]]
    smaller: float | None
    faster: float | None
    faster_counts: bool
    failure: str
    why: str
    folder: str
    report: str
    notebook_file: str
    record: str
    kl: float | None  # of the compressed model from its baseline, nats per token, on the first text
    stored_bytes: float | None
    decode: float | None  # tokens per second


def index_row(one: RunOutcome) -> IndexRow:
    """The row of a run."""
    record, failure, done = one.measured, one.failed, one.status == "finished"
    duration = record.run.duration_s if failure is None or record.run.duration_s is not None else failure.seconds
    folder = one.href.lstrip("/")
    model = record.model.name or str((one.parameters or {}).get("model_name") or "")
    return IndexRow(
        clean(one.key, 120),
        clean(one.notebook, 60),
        clean(one.shown_status, 40),
        one.stale,
        clean(record.recipe_of("compressed") or "", 200),
        clean(model, 80),
        clean(record.run.started[:19], 19),  # without the offset, which is that of UTC
        duration,
        "" if duration is None else _took(duration),
        *_accuracy(record),
        _smaller(record),
        *_faster(record),
        clean(failure.kind, 40) if failure else "",
        _why(failure) if failure else "",
        "" if done else link(folder),
        *(link(folder, file) if done else "" for file in ("report.html", "notebook.ipynb", "record.json")),
        *_measured(record),
    )


def _measured(record: RunRecord) -> tuple[float | None, float | None, float | None]:
    """Divergence, bytes and decode speed of the compressed model."""
    kl = next((record.score("compressed", f"kl_{corpus}") for corpus in record.corpora), None)
    return kl, *(record.score("compressed", metric) for metric in ("stored_bytes", "decode_tokens_per_s"))


def _why(failure: Failure) -> str:
    """The place and reason of a run's failure, in one line."""
    error = failure.error.strip().splitlines()
    where = failure.cell_title or ("" if failure.cell is None else f"cell {failure.cell}")
    return ": ".join(public(text, 160) for text in (where, error[-1] if error else "") if text)


def _took(seconds: float) -> str:
    """A duration as text: 48 s, 12 min, 1 h 05 min."""
    if not finite(seconds) or seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _accuracy(record: RunRecord) -> tuple[float | None, list[tuple[str, str]]]:
    """The share of the baseline's accuracy that is kept, and each headline number with its meaning."""
    said, shares = [], []
    if mean := mean_recovery(record):
        shares.append(mean[0])
        said.append((f"{mean[0] * 100:.1f} %", f"of {plural(mean[1], 'task')}"))
    if record.cache:
        answers = record.cache.answers
        exact = {name: [v for one in answers if one.variant == name for v in one.exact] for name in (FULL, MAIN)}
        if all(exact.values()):
            full, ours = (sum(of) / len(of) for of in exact.values())
            shares += [ours / full] if full else []
            said.append((f"{ours * 100:.0f} %", f"exact; full cache {full * 100:.0f} %"))
    else:
        for corpus in record.corpora:
            before, after = (record.score(name, f"perplexity_{corpus}") for name in ("baseline", "compressed"))
            if finite(before) and "compressed" in record.scores and not finite(after):
                return 0.0, [(NOT_FINITE, f"perplexity, {clean(corpus, 40)}")]
            if before and after:
                shares.append(before / after)
                said.append((percent(change(after, before)), f"perplexity, {clean(corpus, 40)}"))
    return (shares[0] if shares and finite(shares[0]) else None), said[:2]


def _smaller(record: RunRecord) -> float | None:
    """The factor of size reduction: of the KV cache in a run on caches, else of the stored model."""
    if record.cache:
        full, ours = (sum(record.cache.cache_bytes.get(name, {}).values()) for name in (FULL, MAIN))
        return full / ours if full and ours else None
    ratio = record.ratio("stored_bytes")
    return 1 / ratio if ratio and finite(ratio) else None


def _faster(record: RunRecord) -> tuple[float | None, bool]:
    """Decoded tokens per second relative to the baseline's, and whether that is more than noise; in a run on caches,
    after the longest context."""
    if record.cache and record.cache.speed:
        context, ratio = record.cache.speed.decode_ratio(MAIN, FULL) or (0, None)
        return ratio, record.cache.speed.counts(MAIN, FULL, context)
    return record.ratio("decode_tokens_per_s"), record.counts("decode_tokens_per_s")
