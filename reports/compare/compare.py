"""Many runs -> one page: which recipe is best at which size and speed, and how sure that is."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports.compare import excerpts
from reports.compare.environment import differences, machines
from reports.compare.heatmap import heat_map
from reports.compare.leaderboard import MAX_ROWS, Leaderboard, leaderboard, of_variants
from reports.compare.noise import RULE
from reports.compare.outcome import RunOutcome
from reports.compare.pareto import Cast, Plane, casts, planes
from reports.compare.two import Verdict, compare_two
from reports.compare.variants import Variant, What, variants
from reports.parts import table
from reports.parts.files import LIMIT_BYTES, Report, environment, write_page
from reports.parts.text import clean, link, listed, plural

__all__ = ["Leaderboard", "RunOutcome", "Verdict", "compare_page", "compare_two", "leaderboard", "render_comparison"]
MAX_FAILURES, MAX_RUNS, MAX_LINES = 30, 200, 12
_LOSSES = (  # kind, what it is called, and how a cost is shown
    ("task", "of the baseline’s accuracy", lambda cost: f"{100 * (1 - cost):.1f} %"),
    ("perplexity", "perplexity", lambda cost: table.percent(math.exp(min(cost, 14.0)) - 1)),
    ("exact", "points of exact answers", lambda cost: f"{-100 * cost:+.0f}"),
)
_SCALES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.02)


def render_comparison(outcomes: Sequence[RunOutcome], path: str | Path, *, title: str = "Comparison") -> Report:
    """Write the page of these runs, whole or not at all."""
    return write_page(compare_page(outcomes, title=title), path)


def compare_page(
    outcomes: Sequence[RunOutcome],
    *,
    title: str = "Comparison",
    path_of_samples: excerpts.PathOfSamples = excerpts.samples_link,
) -> str:
    """The page as HTML, of at most a megabyte: where there is more, every part shows less of it and says so.

    Args:
        path_of_samples: (run, file in its folder) -> link, relative to the page; "" where it must not be linked.
    """
    template = environment().get_template("compare.html")
    found = variants(outcomes)
    cast = casts(found)
    for scale in _SCALES:
        html = template.render(
            context(outcomes, found, cast, title=clean(title, 200), path_of=path_of_samples, scale=scale)
        )
        if len(html.encode()) <= LIMIT_BYTES:
            break
    return html


def context(
    outcomes: Sequence[RunOutcome],
    found: Sequence[Variant],
    cast: Sequence[Cast],
    *,
    title: str,
    path_of: excerpts.PathOfSamples,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Everything that templates/compare.html asks for."""
    drawn = planes(cast, scale)
    failed = [run for run in outcomes if run.status == "failed" or run.failure]
    runs = max(5, round(MAX_RUNS * scale))
    return {
        "title": title,
        "sub": _sub(outcomes),
        "verdict": _verdict(outcomes, found, drawn),
        "cards": _cards(outcomes, found),
        "board": of_variants(found, max(5, round(MAX_ROWS * scale))),
        "rule": RULE,
        "planes": drawn,
        "best": [one for one in drawn if one.model == drawn[0].model][:2],
        "heat": heat_map(found, scale),
        "flips": excerpts.flips(found, path_of, scale),
        "texts": excerpts.generations(found, path_of, scale),
        "failures": [_failure(run) for run in failed[: max(5, round(MAX_FAILURES * scale))]],
        "failed": len(failed),
        "machines": machines(outcomes),
        "differs": differences(outcomes, max(3, round(6 * min(1.0, scale * 2)))),
        "compared_runs": sum(run.record is not None for run in outcomes),
        "runs": [_run(run, max(300, round(2000 * scale))) for run in outcomes[:runs]],
        "more_runs": max(0, len(outcomes) - runs),
    }


def _sub(outcomes: Sequence[RunOutcome]) -> str:
    records = [run.record for run in outcomes if run.record]
    models = list(dict.fromkeys(clean(r["model"]["name"], 60) for r in records if r.get("model")))
    days = sorted({r["run"]["started"][:10] for r in records if r.get("run", {}).get("started")})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""
    return " · ".join(filter(None, (plural(len(outcomes), "run"), listed(models), when)))


def _verdict(outcomes: Sequence[RunOutcome], found: Sequence[Variant], drawn: Sequence[Plane]) -> str:
    status = Counter(run.status for run in outcomes)
    said = f"{status['finished']} of {plural(len(outcomes), 'run')} finished"
    others = [f"{count} {name}" for name, count in status.items() if name != "finished"]
    said += f" ({', '.join(others)})." if others else "."
    return " ".join([said, *(one.brief for one in drawn[:1])])


def _cards(outcomes: Sequence[RunOutcome], found: Sequence[Variant]) -> list[tuple[str, str]]:
    """How many runs are done; of the models of most runs: the smallest, the fastest, and the one that loses least."""
    done = sum(run.status == "finished" for run in outcomes)
    cards = [(f"{done} of {len(outcomes)}", "runs finished")]
    own = [v for v in found if not v.baseline]
    if not own:
        return cards
    weights = Counter(v.weights for v in own).most_common(1)[0][0]
    own = [v for v in own if v.weights == weights]
    sized = [v for v in own if What("stored") in v.numbers and v.numbers[What("stored")].ratio]
    timed = [v for v in own if What("decode") in v.numbers and v.numbers[What("decode")].ratio]
    for kind, what, shown in _LOSSES:
        costs = [
            (sum(c) / len(c), v.number, v)
            for v in own
            if (c := [e.cost for w, e in v.effects.items() if w.kind == kind])
        ]
        if costs:
            cost, _, best = min(costs)
            cards.append((shown(cost), f"{what}, the least loss: {clean(best.label, 70)}"))
            break
    if sized:
        small = min(sized, key=lambda v: v.numbers[What("stored")].value)
        cards.append(
            (f"{1 / small.numbers[What('stored')].ratio:.2f}×", f"smaller, the most: {clean(small.label, 70)}")
        )
    if timed:
        fast = max(timed, key=lambda v: v.numbers[What("decode")].ratio)
        cards.append(
            (
                f"{fast.numbers[What('decode')].ratio:.2f}×",
                f"decode speed against its own baseline, the most: {clean(fast.label, 70)}",
            )
        )
    return cards


def _failure(run: RunOutcome) -> dict[str, Any]:
    told = run.failure or {}
    cell = "" if told.get("cell") is None else f"cell {told['cell']}"
    where = ", ".join(filter(None, (cell, clean(told.get("cell_title") or "", 120))))
    return {
        "key": clean(run.key, 120),
        "href": link(run.href, "notebook.ipynb"),
        "kind": clean(told.get("kind") or "unknown", 60),
        "where": where,
        "error": clean(told.get("error") or "", 400),
        "lines": "\n".join(clean(line, 240) for line in (told.get("lines") or [])[-MAX_LINES:]),
        "peak": told.get("peak_memory_bytes"),
        "seconds": told.get("seconds"),
        "attempts": told.get("attempts"),
    }


def _run(run: RunOutcome, limit: int) -> dict[str, Any]:
    record = run.record or {}
    command = run.command or (record.get("provenance") or {}).get("command") or ""
    return {
        "key": clean(run.key, 120),
        "notebook": clean(run.notebook, 60),
        "status": clean(run.shown_status, 30),
        "href": link(run.href, "report.html") if run.record else "",
        "seconds": (record.get("run") or {}).get("duration_s"),
        "command": clean(command, limit),
    }
