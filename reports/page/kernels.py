"""The page of a kernel benchmark: the record of `kernels.harness.validate` in words, rows and figures."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.record.measured import Bench, ContestRow
from eval.record.metrics import fmt, kind_of
from eval.record.noise import counts, faster_by, speed_ends
from eval.record.rows import RunRecord, typed
from reports.parts import kernel_plots
from reports.parts.figures import Figures


def context(run: RunRecord) -> dict[str, Any]:
    """Everything that templates/kernels.html needs."""
    bench = run.bench
    timed = [row for row in bench.rows if row.status == "timed"]
    checks = defaultdict(list)
    for check in bench.checks:
        checks[check.op].append(check)
    goals = [row.goal_met for row in timed if row.goal_met is not None]
    machine = bench.environment.gpu.name if bench.environment.gpu else run.provenance.hardware.cpu
    draws = bench.run.meaningful and timed
    return {
        "bench": bench,
        "title": f"Kernels on {machine}",
        "machine": machine,
        "verdict": verdict(bench, timed),
        "cards": _cards(bench, sum(goals), len(goals)),
        "rows": [_row(row) for row in bench.rows],
        "checks": dict(checks),
        "roofline": kernel_plots.roofline(timed, bench.ceilings) if draws and bench.ceilings else "",
        "speedups": kernel_plots.speedups(timed) if draws else "",
    }


def _cards(bench: Bench, met: int, goals: int) -> list[tuple[str, str]]:
    """The main numbers of a benchmark, each with its meaning."""
    count = bench.summary.checks or 0
    passed = f"{count - (bench.summary.red or 0)} of {count}"
    what = "checks passed: close to float64, no output element left unwritten, and two calls equal bit for bit"
    cards = [(passed, what)]
    if bench.ceilings:
        bandwidth = fmt(bench.ceilings.bandwidth, ".3g", 1e-9, " GB/s")
        cards.append((bandwidth, "the memory ceiling: bytes read and written by a copy"))
        for name, rate in bench.ceilings.rates.items():
            unit = " TOP/s" if name.startswith("int") else " TFLOP/s"
            cards.append((fmt(rate, ".3g", 1e-12, unit), f"the ceiling of matrix products in {name}"))
    return [*cards, (f"{met} of {goals}", "goals met")] if goals else cards


def figures(found: Mapping[str, Any]) -> Figures:
    """The figures of a benchmark (`KernelBench.found`), for a notebook."""
    shown = context(typed({"bench": found}))
    titles = {"speedups": "Speed-up against tokens", "roofline": "Against the roofline"}
    return Figures(" ".join(shown["verdict"]), {title: shown[key] for key, title in titles.items()})


def verdict(bench: Bench, timed: Sequence[ContestRow]) -> list[str]:
    """Plain sentences: the checks, the timings, the cases in which ours is faster, and those in which it is not."""
    red, count = bench.summary.red or 0, bench.summary.checks or 0
    said = ["No check was made, so nothing was timed." if not count else f"All {count} checks passed."]
    if red:
        said = [f"{red} of {count} checks failed; a row whose output was wrong at its own shape was not timed."]
    if late := sorted({rest.op for rest in bench.unfinished if rest.phase == "checks"}):
        said.append(f"The budget ended before all checks of {', '.join(late)} were made.")
    if not bench.run.meaningful:
        return [*said, "This was a trial at toy sizes or in Triton's interpreter: its times mean nothing."]
    ratios = [row.speedup for row in timed if row.speedup]
    if ratios:
        said.append(
            f"Of {len(ratios)} contests with their baseline, ours is the faster in "
            f"{sum(_kind(row) == 'good' for row in timed)}, beyond the quartiles of the rounds; "
            f"from {fmt(min(ratios))}× to {fmt(max(ratios))}×."
        )
    if above := sum((row.roofline or 0) > 1.05 for row in timed):
        said.append(
            f"{above} of them {'are' if above > 1 else 'is'} above the roofline: "
            "the operands fit a cache, or the machine was busy when its ceilings were measured."
        )
    named = {line.op for line in (*bench.rows, *bench.unfinished)}
    if count and not bench.run.checks_only and (silent := [op for op in bench.run.ops if op not in named]):
        said.append(
            f"Nothing to time of {', '.join(silent)}: no path of its own for these shapes and this dtype on this "
            "machine."
        )
    left = len(bench.rows) - len(timed)
    if left:
        said.append(f"{left} contest{'s were' if left > 1 else ' was'} not timed; the table says why.")
    return said


class ShownContest(NamedTuple):
    """A contest as text. kind and goal_kind: whether a speed-up, and a goal, is good or bad."""

    name: str
    shape: str
    tokens: object
    status: str
    ours: str = ""
    spread: str = ""
    baseline: str = ""
    speedup: str = ""
    kind: str = ""
    roofline: str = ""
    goal: str = ""
    goal_kind: str = ""
    strongest: str = ""


def _row(row: ContestRow) -> ShownContest:
    head = (f"{row.op} {row.detail}".strip(), " × ".join(map(str, row.shape)) or "–", row.tokens or "–", row.status)
    if row.status != "timed":
        return ShownContest(*head)
    goals = [f"{fmt(row.goal)}×"] if row.goal else []
    goals += [f"{fmt(row.goal_us, '.3g')} µs"] if row.goal_us else []
    goals += [f"{fmt(row.goal_bandwidth, '.0f', 100, ' %')} of the bandwidth"] if row.goal_bandwidth else []
    met = {True: (", met", "good"), False: (", missed", "bad"), None: ("", "")}[row.goal_met]
    return ShownContest(
        *head,
        ours=_us(row.seconds.get(row.ours)),
        spread="–".join(map(_us, row.quartiles.get(row.ours, ()))) if (row.rounds or 0) > 1 else "",
        baseline=_us(row.seconds.get(row.baseline)),
        speedup=f"{fmt(row.speedup)}×" if row.speedup else "–",
        kind=_kind(row),
        roofline=fmt(row.roofline or None, ".0f", 100, " %"),
        goal=" and ".join(goals) + met[0] if goals else "–",
        goal_kind=met[1],
        strongest=f"{row.strongest} {_us(row.seconds.get(row.strongest))}" if row.strongest else "–",
    )


def _kind(row: ContestRow) -> str:
    """good or bad where ours and the baseline differ beyond the quartiles of their rounds, else noise; "" for one."""
    if not row.speedup:
        return ""
    ends = (
        speed_ends(row.seconds.get(name), row.quartiles.get(name, ()), rounds=row.rounds)
        for name in (row.baseline, row.ours)
    )
    return kind_of(row.speedup, counts(*faster_by(*ends)))


def _us(seconds: float | None) -> str:
    return fmt(seconds, ",.0f" if seconds and seconds >= 1e-4 else ".3g", 1e6)
