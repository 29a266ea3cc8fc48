"""What the page of a kernel benchmark shows: the record of `kernels.harness.validate`, in words, rows and figures."""

from collections import defaultdict
from typing import Any

from reports.parts import kernel_plots


def context(record: dict[str, Any]) -> dict[str, Any]:
    """Everything that templates/kernels.html asks for."""
    bench = record["bench"]
    timed = [row for row in bench["rows"] if row["status"] == "timed"]
    checks = defaultdict(list)
    for check in bench["checks"]:
        checks[check["op"]].append(check)
    told = [row["goal_met"] for row in timed if row.get("goal_met") is not None]
    gpu = bench["environment"].get("gpu")
    machine = gpu["name"] if gpu else record["provenance"]["hardware"]["cpu"]
    means = bench["run"]["meaningful"]
    return {
        "bench": bench,
        "title": f"Kernels on {machine}",
        "machine": machine,
        "verdict": verdict(bench, timed),
        "goals": {"met": sum(told), "count": len(told)},
        "rows": [_row(row) for row in bench["rows"]],
        "checks": dict(checks),
        "roofline": kernel_plots.roofline(timed, bench["ceilings"]) if means and timed and bench["ceilings"] else "",
        "speedups": kernel_plots.speedups(timed) if means and timed else "",
    }


def verdict(bench: dict[str, Any], timed: list[dict[str, Any]]) -> list[str]:
    """Plain sentences: what was checked, what was timed, where ours is faster and where it is not."""
    red = bench["summary"]["red"]
    count = bench["summary"]["checks"]
    said = ["No check was made, so nothing was timed." if not count else f"All {count} checks passed."]
    if red:
        said = [f"{red} of {count} checks failed; what failed was not timed."]
    if late := sorted({rest["op"] for rest in bench["unfinished"] if rest["phase"] == "checks"}):
        said.append(f"The budget ended before all checks of {', '.join(late)} were made.")
    if not bench["run"]["meaningful"]:
        return [*said, "This was a trial at toy sizes or in Triton's interpreter: its times mean nothing."]
    ratios = [row["speedup"] for row in timed if row.get("speedup")]
    if ratios:
        faster = sum(r > 1 for r in ratios)
        said.append(
            f"Of {len(ratios)} contests with their baseline, ours is the faster in {faster}; "
            f"from {min(ratios):.2f}× to {max(ratios):.2f}×."
        )
    if above := sum((row.get("roofline") or 0) > 1.05 for row in timed):
        said.append(
            f"{above} of them {'are' if above > 1 else 'is'} above the roofline: "
            "the operands fit a cache, or the machine was busy when its ceilings were measured."
        )
    told = {line["op"] for line in (*bench["rows"], *bench["unfinished"])}
    if count and not bench["run"]["checks_only"] and (silent := [op for op in bench["run"]["ops"] if op not in told]):
        said.append(
            f"Nothing to time of {', '.join(silent)}: no path of its own for these shapes and this dtype on this "
            "machine."
        )
    left = len(bench["rows"]) - len(timed)
    if left:
        said.append(f"{left} contest{'s were' if left > 1 else ' was'} not timed; the table says why.")
    return said


def _row(row: dict[str, Any]) -> dict[str, Any]:
    shown = {
        "name": f"{row['op']} {row.get('detail') or ''}".strip(),
        "shape": " × ".join(map(str, row.get("shape") or ())) or "–",
        "tokens": row.get("tokens") or "–",
        "timed": row["status"] == "timed",
        "status": row["status"],
    }
    if not shown["timed"]:
        return shown
    seconds, ratio = row["seconds"], row.get("speedup")
    low, high = row["quartiles"][row["ours"]]
    others = row.get("strongest")
    goals = [f"{row['goal']:.2f}×"] if row.get("goal") else []
    goals += [f"{row['goal_us']:.3g} µs"] if row.get("goal_us") else []
    met = row.get("goal_met")
    return shown | {
        "ours": _us(seconds[row["ours"]]),
        "spread": f"{_us(low)}–{_us(high)}" if row["rounds"] > 1 else "",
        "baseline": _us(seconds.get(row["baseline"])),
        "speedup": f"{ratio:.2f}×" if ratio else "–",
        "kind": "" if not ratio or 0.97 <= ratio <= 1.03 else "good" if ratio > 1 else "bad",
        "roofline": f"{row['roofline'] * 100:.0f} %" if row.get("roofline") else "–",
        "goal": " and ".join(goals) + {True: ", met", False: ", missed", None: ""}[met] if goals else "–",
        "goal_kind": {True: "good", False: "bad", None: ""}[met],
        "strongest": f"{others} {_us(seconds[others])}" if others else "–",
    }


def _us(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    us = seconds * 1e6
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"
