"""The results of `kernels.harness.validate` as a text table: one line per contest, and a summary."""

from typing import Any

HEAD = (
    "op", "detail", "shape", "M", "ours us", "baseline us", "16-bit us", "speed-up", "goal", "roofline",
    "strongest other",
)  # fmt: skip
MARKS = {
    "*": "timed by events around a loop: Python and launches count",
    "~": "quartiles more than 10% apart",
    "^": "the clock of the multiprocessors changed by more than 3%",
    "!": "UNSOUND: its output is wrong at this shape, so its time counts for nothing",
    "?": "other checks of this op are red; what is timed here is right at this shape",
}
LEFT = {0, 1, 2, 10}  # columns of words; the others are figures


def table(record: dict[str, Any]) -> str:
    """Red checks, then a fixed-width table of the rows, then the goals that were missed."""
    text = []
    if not record["run"]["meaningful"]:
        text.append("(toy sizes, or Triton's interpreter: times mean nothing)")
    red = [c for c in record["checks"] if not c["green"]]
    text += [f"RED  {c['op']}: {c['name']} ({c['impl']}): {c['message']}" for c in red]
    text += [f"RED  {name(row)}: {who}: {why}" for row in record["rows"] for who, why in row["unsound"].items()]
    checks = len(record["checks"])
    text.append(f"{checks - len(red)} of {checks} checks are green" if checks else "no checks were run")
    if took := record["run"].get("phases_s"):
        text.append("seconds: " + ", ".join(f"{phase} {seconds:,.0f}" for phase, seconds in took.items()))
    for rest in record["unfinished"]:
        text.append(f"not done within the budget: {rest['phase']} of {rest['op']} from number {rest['next']} on")
    if record["rows"]:
        text += ["", rows_table(record["rows"])]
    if missed := record["summary"]["goals_missed"]:
        text += ["", "goals missed:", *(f"  {name}" for name in missed)]
    return "\n".join(text)


def rows_table(rows: list[dict[str, Any]]) -> str:
    """The table of the rows, with an explanation of the marks below."""
    cells = [HEAD, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in cells if len(line) > i) for i in range(len(HEAD))]
    widths = [min(width, 30) for width in widths[:-1]] + [0]
    text = "\n".join(_line(line, widths) for line in cells)
    used = [
        f"{mark} {meaning}"
        for mark, meaning in MARKS.items()
        if any(mark in c for line in cells[1:] if len(line) == len(HEAD) for c in line[4:8])
    ]
    return "\n".join([text, *used])


def name(row: dict[str, Any]) -> str:
    """The name of a contest: "int_matmul W4 g128 14336x4096 M=1"."""
    return " ".join(filter(None, (row["op"], row["detail"], _shape(row), _tokens(row) and f"M={_tokens(row)}")))


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """The summary of a record, for one line of JSON."""
    rows, checks = record["rows"], record["checks"]
    goals = [row for row in rows if row["goal_met"] is not None]
    return {
        "checks": len(checks),
        "red": sum(not c["green"] for c in checks),
        "red_ops": sorted({c["op"] for c in checks if not c["green"]}),
        "red_rows": [name(row) for row in rows if row["ours"] in row["unsound"]],
        "unfinished": sorted({rest["op"] for rest in record["unfinished"]}),
        "contests": sum(row["index"] >= 0 for row in rows),
        "timed": sum(row["status"] == "timed" for row in rows),
        "not_timed": sorted({f"{row['op']}: {row['status']}" for row in rows if row["status"] != "timed"}),
        "goals_met": sum(row["goal_met"] for row in goals),
        "goals_missed": [name(row) for row in goals if not row["goal_met"]],
        "duration_s": record["run"]["duration_s"],
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["op"], row["detail"], _shape(row), _tokens(row))
    if row["status"] not in ("timed", "unsound"):
        return (*head, row["status"] + (", and what follows" if row.get("rest") else ""))
    seconds, ours = row["seconds"], row["seconds"][row["ours"]]
    baseline = seconds.get(row["baseline"])
    other = row["strongest"]
    return (
        *head,
        _us(ours) + "*" * (row["how"][row["ours"]] == "loop") + _soundness(row),
        _us(baseline) if baseline else "-",
        next((_us(seconds[n]) for n in ("bfloat16", "float16") if seconds.get(n)), "-"),
        f"{'~' * _noisy(row)}{'^' * _drifted(row)}{row['speedup']:.2f}x" if row["speedup"] else "-",
        _goal(row),
        f"{row['roofline']:.0%} {_short(row['bound'])}" if row["roofline"] else "-",
        f"{other} {_us(seconds[other])} ({seconds[other] / ours:.2f}x)" if other else "-",
    )


def _drifted(row: dict[str, Any]) -> bool:
    clocks = row["clocks"]
    return bool(clocks) and max(clocks) > 1.03 * min(clocks)


def _soundness(row: dict[str, Any]) -> str:
    return "!" if row["ours"] in row["unsound"] else "?" if row.get("red_checks") else ""


def _noisy(row: dict[str, Any]) -> bool:
    spreads = [
        (row["quartiles"][n], row["seconds"][n]) for n in (row["ours"], row["baseline"]) if row["seconds"].get(n)
    ]
    return any(high - low > 0.1 * median for (low, high), median in spreads)


def _goal(row: dict[str, Any]) -> str:
    wanted = [f"{row['goal']:g}x"] if row["goal"] is not None else []
    wanted += [f"{row['goal_us']:g}us"] if row["goal_us"] is not None else []
    wanted += [f"{row['goal_bandwidth']:.0%} of copy"] if row.get("goal_bandwidth") else []  # older records have none
    verdict = {True: " met", False: " MISSED", None: ""}[row["goal_met"]]
    return " ".join(wanted) + verdict if wanted else "-"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    if len(cells) < len(widths):  # a row that was not timed: words up to the end of the line
        *cells, rest = cells
        return "  ".join([*(_padded(c, i, widths) for i, c in enumerate(cells)), rest]).rstrip()
    return "  ".join(_padded(c, i, widths) for i, c in enumerate(cells)).rstrip()


def _padded(cell: str, i: int, widths: list[int]) -> str:
    return cell.ljust(widths[i]) if i in LEFT else cell.rjust(widths[i])


def _shape(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["shape"]))


def _tokens(row: dict[str, Any]) -> str:
    return str(row["tokens"] or "")  # not every op has tokens


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _short(bound: str) -> str:
    return {"bytes": "mem", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}.get(bound, bound)
