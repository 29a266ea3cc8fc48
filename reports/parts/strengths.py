"""Recipes that were scored at several strengths, as tables."""

from typing import NamedTuple

from eval.record.rows import Strengths


class StrengthTable(NamedTuple):
    """Perplexities on one corpus: a row (recipe, one cell per value) for each recipe scored at these values."""

    corpus: str
    values: list[str]
    rows: list[tuple[str, list[float | None]]]


def strength_tables(strengths: Strengths) -> list[StrengthTable]:
    """A table per corpus and set of strengths."""
    tables: dict[tuple[str, ...], StrengthTable] = {}
    for line in strengths.lines:
        values = [point.value for point in line.points]
        metrics = dict.fromkeys(m for point in line.points for m in point.scores if m.startswith("perplexity_"))
        for metric in (m for m in metrics if not m.endswith("_stderr")):
            corpus = metric.removeprefix("perplexity_")
            table = tables.setdefault((corpus, *values), StrengthTable(corpus, values, []))
            table.rows.append((line.recipe, [point.scores.get(metric) for point in line.points]))
    return list(tables.values())
