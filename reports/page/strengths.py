"""Recipes that were scored at several strengths, as tables."""

from typing import Any


def strength_tables(strengths: dict[str, Any]) -> list[dict[str, Any]]:
    """A table per corpus and set of strengths: {corpus, values, rows: [{recipe, cells: [perplexity or None per
    value]}]}."""
    tables: dict[tuple, dict[str, Any]] = {}
    for line in strengths.get("lines", []):
        values = [point["value"] for point in line["points"]]
        corpora = dict.fromkeys(
            metric.removeprefix("perplexity_")
            for point in line["points"]
            for metric in point["scores"]
            if metric.startswith("perplexity_") and not metric.endswith("_stderr")
        )
        for corpus in corpora:
            table = tables.setdefault((corpus, *values), {"corpus": corpus, "values": values, "rows": []})
            cells = [point["scores"].get(f"perplexity_{corpus}") for point in line["points"]]
            table["rows"].append({"recipe": line["recipe"], "cells": cells})
    return list(tables.values())
