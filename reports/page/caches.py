"""The caches of a run as rows: bytes, answers by visibility, speed by context."""

from typing import Any

import numpy as np

FULL, MAIN = "full", "compressed"


def cache_rows(cache: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per variant of a record's `cache`.

    name, main, bytes (at the largest length), share of the full cache's, seconds to compress, and by visibility exact,
    stderr, nll, kl, kl_stderr, against (difference from the full cache, and its interval), worse, better.
    """
    found = []
    for name in dict.fromkeys(row["variant"] for row in cache["answers"]):
        sizes, full = cache["cache_bytes"][name], cache["cache_bytes"][FULL]
        row: dict[str, Any] = {
            "name": name,
            "main": name == MAIN,
            "bytes": sizes[max(sizes, key=int)],
            "share": sum(sizes.values()) / sum(full.values()),
            "seconds": cache["seconds"].get(name),
            "by": {},
        }
        for visibility in dict.fromkeys(one["visibility"] for one in cache["answers"]):
            own = [one for one in cache["answers"] if one["variant"] == name and one["visibility"] == visibility]
            exact, nll, kl = (_mean([v for one in own for v in one[key]]) for key in ("exact", "nll", "kl"))
            against = cache["against"].get(name, {}).get(visibility)
            row["by"][visibility] = {
                "exact": exact[0],
                "stderr": exact[1],
                "nll": nll[0],
                "kl": kl[0],
                "kl_stderr": kl[1],
                "against": against,
                "worse": bool(against and against[2] < 0),
                "better": bool(against and against[1] > 0),
            }
        found.append(row)
    return found


def speed_rows(speed: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per variant: name, main, execution, and by context a cell of tokens (per second), ms (of attention), ratio
    (of it)."""
    rows = []
    for name, attention in speed["attention_s"].items():
        whole, ratios = speed["tokens_per_s"].get(name, {}), speed["attention_speedup"][name]
        cells = [
            {"tokens": whole[c][0] if c in whole else None, "ms": attention[c][0] * 1e3, "ratio": ratios[c]}
            for c in sorted(attention, key=int)
        ]
        rows.append({"name": name, "main": name == MAIN, "cells": cells, "execution": speed["execution"].get(name, "")})
    return rows


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    x = np.asarray(values, dtype=float)
    return float(x.mean()), float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else 0.0
