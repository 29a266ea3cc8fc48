"""Many runs -> one page: the best recipe for each size and speed, and the certainty of the ranking."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.record.metrics import fmt, growth, percent
from eval.record.reading import row
from reports.compare import excerpts
from reports.compare.decision import ALLOWED_LOSS, decisions
from reports.compare.environment import differences, machines
from reports.compare.heatmap import heat_map
from reports.compare.leaderboard import MAX_ROWS, Leaderboard, leaderboard, of_variants
from reports.compare.noise import RULE
from reports.compare.outcome import Failure, RunOutcome
from reports.compare.pareto import Plane, PlaneModels, plane_models, planes
from reports.compare.two import Verdict, compare_two
from reports.compare.variants import Quantity, Variant, mean_cost, shared, variants
from reports.parts.downloads import as_csv, with_downloads
from reports.parts.files import LIMIT_BYTES, Report, environment, with_contents, with_links, write_page
from reports.parts.text import clean, listed, plural

__all__ = ["Leaderboard", "RunOutcome", "Verdict", "compare_page", "compare_two", "leaderboard", "render_comparison"]
MAX_FAILURES, MAX_RUNS, MAX_LOST = 30, 200, 5
_LOSSES = (  # kind, its name on the page, and how a cost is shown
    ("kl", "nats of KL per token", lambda cost: f"{cost:.4f}"),
    ("task", "of the baseline’s accuracy", lambda cost: f"{100 * (1 - cost):.1f} %"),
    ("perplexity", "perplexity", lambda cost: percent(growth(cost))),
    ("exact", "points of exact answers", lambda cost: f"{-100 * cost:+.0f}"),
)
_SCALES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.02)


def render_comparison(
    outcomes: Sequence[RunOutcome],
    path: str | Path,
    *,
    title: str = "Comparison",
    allowed_loss: float = ALLOWED_LOSS,
    links: Mapping[str, str] = {},
) -> Report:
    """Write the page of these runs, whole or not at all; see `compare_page`.

    Args:
        links: to the pages around it, {label: address relative to the page}.
    """
    return write_page(with_links(compare_page(outcomes, title=title, allowed_loss=allowed_loss), links), path)


def compare_page(
    outcomes: Sequence[RunOutcome],
    *,
    title: str = "Comparison",
    allowed_loss: float = ALLOWED_LOSS,
) -> str:
    """The page as HTML, of at most a megabyte: if there is more, every part shows fewer rows and says so.

    Args:
        allowed_loss: the loss of accuracy, as a share, that the smallest recipe may have; the page begins with it.
    """
    template = environment().get_template("compare.html")
    found = variants(outcomes)
    models = plane_models(found)
    first = {"title": clean(title, 200), "decisions": decisions(models, allowed_loss)}
    board = of_variants(found, sys.maxsize)
    data = as_csv(board.head, board.lines), board.data
    for scale in _SCALES:
        html = template.render(first | context(outcomes, found, models, scale=scale))
        html = with_contents(with_downloads(html, "comparison", *data, "the leaderboard"))
        if len(html.encode()) <= LIMIT_BYTES:
            break
    return html


def context(
    outcomes: Sequence[RunOutcome],
    found: Sequence[Variant],
    models: Sequence[PlaneModels],
    *,
    scale: float = 1.0,
) -> dict[str, Any]:
    """What templates/compare.html needs beside the title and the decisions."""
    drawn = planes(models, scale)
    failed = [run for run in outcomes if run.status == "failed" or run.failure]
    runs = max(5, round(MAX_RUNS * scale))
    return {
        "sub": _sub(outcomes),
        "verdict": _verdict(outcomes, found, drawn),
        "cards": _cards(outcomes, found),
        "board": of_variants(found, max(5, round(MAX_ROWS * scale))),
        "rule": RULE,
        "planes": drawn,
        "best": [one for one in drawn if one.model == drawn[0].model][:2],
        "heat": heat_map(found, scale),
        "flips": excerpts.flips(found, scale),
        "texts": excerpts.generations(found, scale),
        "failures": [(run, run.failed or row(Failure, {})) for run in failed[: max(5, round(MAX_FAILURES * scale))]],
        "failed": len(failed),
        "machines": machines(outcomes),
        "differs": differences(outcomes, max(3, round(6 * min(1.0, scale * 2)))),
        "compared_runs": sum(run.record is not None for run in outcomes),
        "runs": outcomes[:runs],
        "longest_command": max(300, round(2000 * scale)),
        "more_runs": max(0, len(outcomes) - runs),
    }


def _sub(outcomes: Sequence[RunOutcome]) -> str:
    models = list(dict.fromkeys(clean(run.measured.model.name, 60) for run in outcomes if run.measured.model.name))
    days = sorted({run.measured.run.started[:10] for run in outcomes if run.measured.run.started})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""
    return " · ".join(filter(None, (plural(len(outcomes), "run"), listed(models), clean(when, 40))))


def _verdict(outcomes: Sequence[RunOutcome], found: Sequence[Variant], drawn: Sequence[Plane]) -> str:
    status = Counter(run.status for run in outcomes)
    said = f"{status['finished']} of {plural(len(outcomes), 'run')} finished"
    others = [f"{count} {name}" for name, count in status.items() if name != "finished"]
    said += f" ({', '.join(others)})." if others else "."
    stale = sum(run.stale for run in outcomes)
    if stale:
        were = "run was" if stale == 1 else "runs were"
        said += f" {stale} finished {were} made with code of the workbench that has changed since."
    return " ".join([said, *(one.brief for one in drawn[:1]), *_lost(found)])


def _lost(found: Sequence[Variant]) -> list[str]:
    """A sentence on the measures of accuracy that are not finite, or missing, and the models that lost them."""
    losers = [v for v in found if v.lost]
    if not losers:
        return []
    each = []
    for v in losers[:MAX_LOST]:
        key = clean(v.run.key, 60)
        where = "" if v.label.endswith(f" in {key}") else f" in {key}"
        each.append(f"{listed([q.words for q in sorted(v.lost)], 3)} of {v.label}{where}")
    more = f" and {plural(len(losers) - MAX_LOST, 'more model')}" * (len(losers) > MAX_LOST)
    return [f"Not finite, or missing where the baseline has it: {'; '.join(each)}{more}. Such models are ranked last."]


def _cards(outcomes: Sequence[RunOutcome], found: Sequence[Variant]) -> list[tuple[str, str]]:
    """The number of finished runs; for the models of most runs: the smallest, the fastest, and the most accurate of
    those that were measured alike and lost no measure of accuracy."""
    done = sum(run.status == "finished" for run in outcomes)
    cards = [(f"{done} of {len(outcomes)}", "runs finished")]
    own = [v for v in found if not v.baseline and not v.lost]
    if not own:
        return cards
    weights = Counter(v.weights for v in own).most_common(1)[0][0]
    own = [v for v in own if v.weights == weights]
    for kind, words, shown in _LOSSES:
        scored = [v for v in own if any(q.kind == kind for q in v.effects)]
        alike = shared(own, kind)
        costs = [(cost, v.number, v) for v in scored if (cost := mean_cost(v, alike)) is not None]
        if len(costs) > 1 or len(scored) == 1:  # else no two were measured alike
            cost, _, best = min(costs)
            among = f" of {len(costs)} that were measured alike" * (len(costs) < len(scored))
            cards.append((shown(cost), f"{words}, the least loss{among}: {clean(best.label, 70)}"))
        if scored:
            break
    for kind, words in (("stored", "smaller, the most"), ("decode", "decode speed against its own baseline, the most")):
        ratios = [(number.ratio, v) for v in own if (number := v.numbers.get(Quantity(kind))) and number.ratio]
        if ratios:
            ratio, best = (min if kind == "stored" else max)(ratios, key=lambda pair: pair[0])
            told = kind == "stored" or best.run.measured.counts("decode_tokens_per_s", best.name)
            words = f"{words}{'' if told else ', within the noise'}: {clean(best.label, 70)}"
            cards.append((fmt(1 / ratio if kind == "stored" else ratio, unit="×"), words))
    return cards
