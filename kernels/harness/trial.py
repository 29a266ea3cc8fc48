"""Checks and times ops in a process of `kernels.harness.validate`; each result is sent as soon as it is known."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels import tuning
from kernels.harness.roofline import Ceilings, least_seconds
from kernels.harness.table import name as name_of
from kernels.harness.timing import settle, time_in_turns
from kernels.harness.verify import OpVerdict, apart, fresh, verify
from kernels.interpreter import interpreting
from kernels.support.declarations import OWN, Check, Contest, TimedSizes
from kernels.support.errors import kind_and_first_line

Line = dict[str, Any]
BROKEN = 3  # exit status: the device no longer answers in this process
DECLARED = (
    "shape",
    "tokens",
    "ours",
    "baseline",
    "copies",
    "least_bytes",
    "flops",
    "rate",
    "goal",
    "goal_us",
    "goal_bandwidth",
    "tune_key",
)
FOUND = ("speedup", "strongest", "goal_met", "least_seconds", "bound", "roofline", "configuration")
WORTH = 0.99  # a configuration is recorded if it takes less than this share of the heuristic's time


class Broken(RuntimeError):
    """The device no longer answers; another process must continue."""


class Log:
    """Sends lines, and tells the time left until `until` (of time.time())."""

    def __init__(self, send: Callable[[Line], None], phase: str, until: float) -> None:
        self.send, self.phase, self.until = send, phase, until

    def write(self, kind: str, **fields: Any) -> Line:
        line = {"kind": kind, "phase": self.phase, **fields}
        self.send(line)
        return line

    def end(self, following: int | None = None, pending: str = "") -> None:
        """The last line: the item with which another process would continue, and the ops that are not finished."""
        self.write("end", next=following, pending=pending)

    def left(self) -> float:
        return self.until - time.time()


def checks(log: Log, ops: Sequence[str], device: torch.device, part: tuple[int, int], start: int) -> None:
    """Run every check of the ops with every implementation that runs here; `part` (i, n): only the i-th of n shares."""
    warnings.filterwarnings("ignore", message=".*[Dd]eterministic.*")  # of `poisoned`
    items: list[tuple[str, Check, str]] = []
    for op in ops:
        try:
            made = import_module(f"kernels.{op}.cases").checks(device)
            items += [(op, c, i) for c in made for i in _impls(c, device)]
        except Exception as error:
            unmade = {"name": "(making the checks)", "impl": "", "error": None, "tolerance": None, "green": False}
            log.write("check", op=op, index=-1, **unmade, message=kind_and_first_line(error))
            _must_answer(device)
    began, done = time.monotonic(), 0
    for index, (op, check, impl) in enumerate(items):
        if index < start or index % part[1] != part[0]:
            continue
        if log.left() <= (time.monotonic() - began) / max(done, 1):  # what one takes on average
            log.end(index, ",".join(dict.fromkeys(op for op, *_ in items[index:])))
            return
        log.write("begin", op=op, index=index, name=check.name, impl=impl)
        line = log.write("check", op=op, index=index, **run_check(check, impl))
        done += 1
        if not line["green"]:
            print(f"RED  {check.op}: {check.name} ({impl}): {line['message']}", flush=True)
            _must_answer(device)
    log.end()


def run_check(check: Check, impl: str) -> Line:
    """{name, impl, error, tolerance, green, message}; an exception makes the check red."""
    error, message = None, ""
    try:
        error = check.error(impl)
    except Exception as raised:
        message = kind_and_first_line(raised)
    green = error is not None and error <= check.allowed(impl)
    if error is not None and not green:
        message = f"relative RMS error {error:.2e} is over {check.allowed(impl):.0e}"
        if math.isnan(error):
            message = "NaN: an element was never written, or two runs of the same call differ"
        error = error if math.isfinite(error) else None
    return {
        "name": check.name,
        "impl": impl,
        "error": error,
        "tolerance": check.allowed(impl),
        "green": green,
        "message": message,
    }


def contests(
    log: Log,
    ops: Sequence[str],
    device: torch.device,
    toy: bool,
    start: int,
    ceilings: Ceilings | None,
    folder: Path | None,
    asked: TimedSizes = OWN,
    tune: bool = False,
    time_red: bool = False,
    tuned: dict[tuple[str, str], dict | None] | None = None,
) -> None:
    """Time the contests of the ops, which take turns, from `start` on, while there is time.

    Args:
        folder: also receives the configurations that are recorded.
        asked: the sizes that the user wants timed.
        tune: search launch configurations first.
        time_red: also time contestants whose outputs are wrong.
        tuned: (op, key) -> the configuration that an earlier process found.
    """
    began, done = time.monotonic(), 0
    tuned = tuned or {}
    for index, contest, pending in _numbered(log, ops, device, toy, asked):
        if index < start:
            began = time.monotonic()
            continue
        contest = goals_here(contest, device)
        if log.left() <= (time.monotonic() - began) / max(done, 1):  # average time to make and to time one
            log.write("contest", index=index, **row_of(contest, "skipped: budget"), rest=True)
            log.end(index, pending)
            return
        log.write("begin", index=index, **row_of(contest, ""))
        try:
            key = (contest.op, contest.tune_key or "")
            if tune and contest.tune_key and contest.candidates and key not in tuned:
                tuned[key] = tune_contest(contest, log, device, folder)
            chosen = tuning.trying(*key, tuned[key]) if key in tuned else nullcontext()
            with chosen:
                row = measure(contest, device, ceilings, time_red=time_red)
            row["configuration"] = tuned.get(key)
            if not toy and (best := winner(contest, row)):
                tuned[key] = contest.configurations[best]
                _keep(contest, tuned[key], log, device, folder, seconds=row["seconds"])
                print(f"{contest.op} {contest.tune_key}: {best} is recorded", flush=True)
        except Exception as error:
            row = row_of(contest, f"error: {kind_and_first_line(error)}")
        log.write("contest", index=index, **row)
        print(sentence(row), flush=True)
        done += 1
        if row["status"] != "timed" or any(row["notes"].values()):
            _must_answer(device)
        del contest
        if device.type == "cuda":
            torch.cuda.empty_cache()
    log.end()


def warm(
    log: Log, ops: Sequence[str], device: torch.device, toy: bool, part: tuple[int, int], tune: bool,
    asked: TimedSizes = OWN,
) -> None:  # fmt: skip
    """Call everything to be timed once, so that several processes compile and cache it in parallel."""
    for index, contest, _ in _numbered(log, ops, device, toy, replace(asked, rivals=False)):
        if log.left() <= 0:
            break
        if index % part[1] == part[0]:
            _call_once(contest, device, contest.candidates if tune and contest.tune_key else [])
        del contest
        if device.type == "cuda":  # other processes warm up at the same time
            torch.cuda.empty_cache()
    log.end()


def measure(
    contest: Contest,
    device: torch.device,
    ceilings: Ceilings | None,
    *,
    rounds: int | None = None,
    time_red: bool = False,
) -> Line:
    """Check the outputs of one contest and time the contestants that are right; kernels/harness/validate.py describes
    the row.

    Args:
        time_red: also time contestants that are wrong.
    """
    verdict = verify(contest, device)
    checked = {"unsound": verdict.red, "unchecked": list(verdict.unchecked)}
    if contest.ours in verdict.red and not time_red:
        return {**row_of(contest, f"not timed: red here: {verdict.red[contest.ours]}"), **checked}
    named = [name for name in (contest.baseline, *contest.rivals) if name not in verdict.red]
    took = time_in_turns(
        {name: call for name, call in contest.contestants.items() if time_red or name not in verdict.red},
        contest.copies,
        device,
        seconds=1.0,
        alike=(contest.ours, *named),
        graph=contest.graph,
        rounds=1 if interpreting() else rounds,
    )
    left_out = {name: f"not timed: red here: {why}" for name, why in verdict.red.items() if name not in took}
    seconds = {name: took[name].seconds if name in took else None for name in contest.contestants}
    fastest = min(
        (name for name in named if seconds.get(name)), key=lambda name: seconds[name], default=contest.baseline
    )
    ours, baseline = seconds[contest.ours], seconds.get(fastest) if fastest not in verdict.red else None
    others = {n: s for n, s in seconds.items() if s is not None and n != contest.ours and n not in verdict.red}
    least, bound = least_seconds(contest, ceilings) if ceilings else (None, None)
    return {
        **row_of(contest, _status(contest, ours, took[contest.ours].note, verdict)),
        **checked,
        "baseline": fastest,
        "seconds": seconds,
        "quartiles": {name: [t.low, t.high] for name, t in took.items()},
        "how": {name: t.how for name, t in took.items()},
        "eager": {name: t.eager for name, t in took.items() if t.eager is not None},
        "notes": {name: t.note for name, t in took.items() if t.note} | left_out,
        "rounds": max(t.rounds for t in took.values()),
        "clocks": list(next(iter(took.values())).clocks),
        "speedup": baseline / ours if ours and baseline else None,
        "strongest": min(others, key=lambda name: others[name]) if others else None,
        "goal_met": None if contest.ours in verdict.red else goal_met(contest, ours, baseline, ceilings),
        "least_seconds": least,
        "bound": bound,
        "roofline": least / ours if least and ours else None,
    }


def _status(contest: Contest, ours: float | None, note: str, verdict: OpVerdict) -> str:
    if ours is None:
        return f"error: {note}"
    return "unsound" if contest.ours in verdict.red else "timed"


def goal_met(contest: Contest, ours: float | None, baseline: float | None, ceilings: Ceilings | None) -> bool | None:
    """Were the contest's goals reached? None if it has none, or if that cannot be known here."""
    allowed = []  # seconds; None: not known
    if contest.goal is not None:
        allowed.append(baseline / contest.goal if baseline else None)
    if contest.goal_us is not None:
        allowed.append(contest.goal_us / 1e6)
    if contest.goal_bandwidth is not None:
        moved = ceilings and contest.least_bytes / ceilings.bandwidth
        allowed.append(moved / contest.goal_bandwidth if moved else None)
    if ours is None or not allowed or None in allowed or interpreting():
        return None
    return ours <= min(allowed)


def winner(contest: Contest, row: Line) -> str | None:
    """The fastest contestant that runs this op in another configuration, if it is right and faster than ours by more
    than noise: the quartiles over several rounds do not touch."""
    seconds, ours, how = row["seconds"], row["ours"], row["how"]
    known = [name for name in contest.configurations if seconds.get(name) and name not in row["unchecked"]]
    right = [name for name in known if name not in row["unsound"] and how[name] == how[ours]]
    if row["status"] != "timed" or row["rounds"] < 2 or not right:
        return None
    best = min(right, key=lambda name: seconds[name])
    clear = row["quartiles"][best][1] < row["quartiles"][ours][0]
    return best if clear and seconds[best] < WORTH * seconds[ours] else None


def tune_contest(contest: Contest, log: Log, device: torch.device, folder: Path | None) -> dict | None:
    """Find and record the fastest of the contest's candidates whose outputs equal those of the heuristic.

    Returns:
        its configuration, or None if the heuristic is as fast
    """
    under = partial(tuning.under, contest.op, contest.tune_key or "", call=contest.contestants[contest.ours])
    expected = fresh(under(configuration=None))()
    sound, rejected = {}, {}
    for number, candidate in enumerate(contest.candidates):
        try:
            result = fresh(under(configuration=candidate))
            first, second = result(), result()
            difference = apart(first, expected) or (apart(first, second, exact=True) and "two runs differ")
        except Exception as error:
            settle(device)
            rejected[number] = kind_and_first_line(error)
            continue
        if difference is None:
            sound[number] = candidate
        else:
            rejected[number] = difference
    took = time_in_turns(
        {"heuristic": under(configuration=None), **{str(n): under(configuration=c) for n, c in sound.items()}},
        contest.copies,
        device,
        rounds=1 if interpreting() else None,
    )
    seconds = {name: t.seconds for name, t in took.items() if t.seconds}
    best = min(seconds, key=lambda name: seconds[name])
    won = best != "heuristic" and seconds[best] < WORTH * seconds.get("heuristic", float("inf"))
    configuration = contest.candidates[int(best)] if won else None
    found = {"seconds": seconds, "candidates": contest.candidates, "rejected": {str(n): w for n, w in rejected.items()}}
    _keep(contest, configuration, log, device, folder, **found)
    return configuration


def _keep(
    contest: Contest, configuration: dict | None, log: Log, device: torch.device, folder: Path | None, **found: Any
) -> None:
    """Record the configuration of the contest's key where calls on this GPU read it, in the folder, and as a line."""
    key = contest.tune_key or ""
    if folder is not None:
        tuning.save(contest.op, key, configuration, folder)
    log.write("tuned", op=contest.op, key=key, configuration=configuration, **found)
    if device.type == "cuda":
        try:
            tuning.save(contest.op, key, configuration)
        except OSError as error:  # packages may be installed where only others may write
            print(f"{contest.op} {key}: no call will use what was found: {kind_and_first_line(error)}", flush=True)


def sentence(row: Line) -> str:
    """A row as one line of text."""
    head = f"{row['op']:<15} {row['detail']:<14} {'x'.join(map(str, row['shape'])):<14} M={row['tokens'] or '-':<6}"
    if row["status"] not in ("timed", "unsound"):
        return f"{head} {row['status']}"
    faster = f"{row['speedup']:.2f}x over {row['baseline']}" if row["speedup"] else "no baseline"
    wrong = "".join(f"; {name} is UNSOUND: {why}" for name, why in row["unsound"].items())
    return f"{head} {row['seconds'][row['ours']] * 1e6:,.1f} us, {faster}{wrong}"


def ceilings_in(lines: list[Line]) -> Ceilings | None:
    """The ceilings among the lines of a run."""
    found = [line for line in lines if line["kind"] == "ceilings"]
    if not found:
        return None
    last = found[-1]
    return Ceilings(last["bandwidth"], last["rates"], tuple(last["notes"]), last["read"], last["cache"])


def _numbered(
    log: Log, ops: Sequence[str], device: torch.device, toy: bool, asked: TimedSizes
) -> Iterator[tuple[int, Contest, str]]:
    """The requested contests with their numbers and the ops that are not finished; several ops take turns, the first
    contests of all of them first. Each is logged before it is made, so that a contest that ends the process can be
    identified."""

    def of(op: str) -> Iterator[Contest]:
        yield from import_module(f"kernels.{op}.cases").contests(device, toy, asked)

    made, index = {op: of(op) for op in ops}, -1
    while made:
        for op in list(made):
            index += 1
            log.write("begin", op=op, index=index)
            try:
                contest = next(made[op], None)
            except Exception as error:  # a generator that raised gives no further contests
                if log.phase == "contests":
                    row = bare_row(op, f"error: {kind_and_first_line(error)}", "(making it)")
                    log.write("contest", index=index, **row)
                _must_answer(device)
                contest = None
            if contest is None:
                del made[op]
            elif asked.wants(name_of(row_of(contest, ""))):
                yield index, contest, ",".join(made)
            del contest  # frees its memory before the next one is made


def goals_here(contest: Contest, device: torch.device) -> Contest:
    """The contest with the goal in microseconds that was set for this GPU, if one was. Ratios to a baseline and to the
    bandwidth are goals on every GPU."""
    if device.type != "cuda" or not contest.goals_us:
        return contest
    name = torch.cuda.get_device_name(device)
    return replace(contest, goal_us=next((us for gpu, us in contest.goals_us.items() if gpu in name), None))


def bare_row(op: str, status: str, detail: str = "") -> Line:
    """A row for an op or contest that could not be timed."""
    empty = {"shape": [], "rounds": 0, "seconds": {}, "quartiles": {}, "how": {}, "eager": {}, "notes": {}}
    empty |= {"unsound": {}, "unchecked": [], "clocks": []}
    return {"op": op, "detail": detail, "status": status, **dict.fromkeys(DECLARED), **dict.fromkeys(FOUND), **empty}


def row_of(contest: Contest, status: str) -> Line:
    return {**bare_row(contest.op, status, contest.detail), **{name: getattr(contest, name) for name in DECLARED}}


def _call_once(contest: Contest, device: torch.device, candidates: list[dict]) -> None:
    for call in contest.contestants.values():
        _attempt(call, device)
    for candidate in candidates:
        with tuning.trying(contest.op, contest.tune_key or "", candidate):
            _attempt(contest.contestants[contest.ours], device)


def _impls(check: Check, device: torch.device) -> tuple[str, ...]:
    """The implementations of a check that can run here; a Triton kernel needs a GPU or the interpreter."""
    anywhere = device.type == "cuda" or interpreting()
    return (*(i for i in check.impls if i != "reference" and (anywhere or i != "triton")), "reference")


def _attempt(call: Callable[[int], object], device: torch.device) -> None:
    with suppress(Exception):
        call(0)
    _must_answer(device)


def _must_answer(device: torch.device) -> None:
    try:
        settle(device)
    except Exception as error:
        raise Broken(kind_and_first_line(error)) from error
