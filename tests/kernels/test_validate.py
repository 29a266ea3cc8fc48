"""The judge judged: red checks stop timing, crashes are survived, budgets are kept, and the record has its shape."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.harness import checked, jobs, model, roofline, timing, trial, validate, worst
from kernels.harness.table import rows_table, table
from kernels.harness.verify import OpVerdict, verify
from kernels.support import capture, declarations
from kernels.support.declarations import Check, Contest

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
X = torch.arange(1.0, 5.0)


def check(op, name="doubles", run=lambda impl: X * 2, impls=("cpu", "triton")):
    return Check(op, name, run, lambda: X.double() * 2, 1e-5, impls)


def contest(op, detail="toy", pause=0.0, **more):
    def call(factor):
        return lambda i: (time.sleep(pause * factor), X * 2)

    calls = {"ours": call(1), "torch": call(3), "other": call(2)}
    return Contest(
        op,
        detail,
        (4, 4),
        1,
        **{
            "contestants": calls,
            "copies": 2,
            "ours": "ours",
            "baseline": "torch",
            "least_bytes": 64,
            "flops": 32,
            **more,
        },
    )


def op(name, checks, contests):
    """A module like kernels/<op>/cases.py."""
    made = {
        "checks": lambda device: [c(name) for c in checks],
        "contests": lambda device, toy, asked: (c(name) for c in contests),
    }
    return SimpleNamespace(**made)


def raises(text):
    def run(*_):
        raise RuntimeError(text)

    return run


class Pipe:
    """Both ends of a pipe within one process."""

    def __init__(self):
        self.lines, self.ended = [], False

    def send(self, line):
        self.lines.append(line)

    def poll(self):
        return bool(self.lines) or self.ended

    def recv(self):
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def close(self):
        pass


def played(monkeypatch, does):
    """No process is started: `does(job, until, send, work, stderr)` plays it. It returns the exit status, or None if the
    process hangs."""

    class Process:
        pid = 0

        def __init__(self, target, args, daemon):
            self.args = args

        def start(self):
            work, job, until, pipe, stderr = self.args
            self.exitcode = does(job, until, pipe.send, work, stderr)
            pipe.ended = self.exitcode is not None

        def is_alive(self):
            return self.exitcode is None

        def join(self, seconds=None):
            pass

        kill = join

    def pipe(duplex):
        made = Pipe()
        return made, made

    monkeypatch.setattr(jobs, "CONTEXT", SimpleNamespace(Pipe=pipe, Process=Process))
    monkeypatch.setattr(jobs, "wait", lambda pipes, seconds: time.sleep(0.01))
    monkeypatch.setattr(jobs.os, "killpg", lambda pid, number: None)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def log(lines):
    return trial.Log(lines.append, "contests", time.time() + 60)


@pytest.fixture
def ops(monkeypatch):
    """Installs fake ops; the processes that would run them run here instead."""

    def install(**modules):
        monkeypatch.setattr(declarations, "OPS", tuple(modules))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"kernels.{name}.cases", module)
        played(monkeypatch, lambda job, until, send, work, stderr: work(job, until, send) or 0)
        monkeypatch.setattr(roofline, "measure", lambda device, toy: roofline.Ceilings(1e9, {"bfloat16": 1e9}))

    return install


def run(tmp_path, *flags):
    code = validate.main(["--device", "cpu", "--toy", "--out", str(tmp_path), "--budget", "60", *flags])
    return code, json.loads((tmp_path / "record.json").read_text())


def test_green_ops_are_timed_and_the_record_has_its_shape(ops, tmp_path, capsys):
    ops(
        a=op(
            "a",
            [check],
            [lambda n: contest(n, pause=1e-3, goal=1.5), lambda n: contest(n, "slow", 1e-3, goal=9.0, goal_us=1)],
        )
    )
    code, record = run(tmp_path)
    assert code == 0
    promised = validate.__doc__.partition("record.json:")[2]
    fields = {line.split()[0] for line in promised.splitlines() if line.startswith("    ") and line[4] not in " \n"}
    assert set(record) == fields
    for part in ("run", "environment", "summary"):
        text = re.search(rf"^    {part} .*(?:\n {{5}}.*)*", promised, re.M)[0]  # the field and its indented lines
        for field in record[part]:
            assert field in text, f"{part}.{field} is not documented"
    assert [(c["impl"], c["green"]) for c in record["checks"]] == [("cpu", True), ("reference", True)], "no triton here"
    first, second = record["rows"]
    for field in first:
        assert field in promised, f"rows.{field} is not documented"
    assert (
        first["status"] == "timed"
        and set(first["seconds"]) == {"ours", "torch", "other"}
        and first["how"]["ours"] == "clock"
    )
    low, high = first["quartiles"]["ours"]
    assert 0 < low <= first["seconds"]["ours"] <= high
    assert first["speedup"] == first["seconds"]["torch"] / first["seconds"]["ours"] > 1.5 and first["goal_met"] is True
    assert second["goal_met"] is False and first["strongest"] == "other"
    assert first["least_seconds"] == 64e-9 and first["bound"] == "bytes" and 0 < first["roofline"] < 1
    assert record["summary"]["goals_met"] == 1 and record["summary"]["goals_missed"] == ["a slow 4x4 M=1"]
    assert record["run"]["meaningful"] is False and record["environment"]["gpu"] is None
    *text, last = capsys.readouterr().out.strip().splitlines()
    assert json.loads(last) == record["summary"]
    assert any("1.5x met" in line for line in text) and any("9x 1us MISSED" in line for line in text)
    assert (tmp_path / "table.txt").read_text().strip() == table(record)


def test_red_checks_mark_the_rows_of_their_op_alone(ops, tmp_path, capsys):
    written = iter([X * 2, X * 2, X * 2, torch.full((4,), float("nan"))])
    ops(
        wrong=op("wrong", [check, lambda n: check(n, "off", lambda impl: X * 2.002)], [contest]),
        raising=op("raising", [lambda n: check(n, "raises", raises("no such\nthing"))], [contest]),
        flaky=op("flaky", [lambda n: check(n, "twice", lambda impl: next(written))], [contest]),
        unmade=SimpleNamespace(
            checks=raises("cannot be made"), contests=lambda device, toy, asked: iter([contest("unmade")])
        ),
        unchecked=op("unchecked", [], [contest]),
        good=op("good", [check], [contest]),
    )
    code, record = run(tmp_path)
    assert code == 1
    assert record["summary"]["red_ops"] == ["flaky", "raising", "unmade", "wrong"] and record["summary"]["red"] == 6
    status = {row["op"]: row["status"] for row in record["rows"]}
    assert status.pop("unchecked") == "not timed: no checks"
    assert status.pop("unmade") == "not timed: its checks could not be made"
    assert status == dict.fromkeys(("wrong", "raising", "flaky", "good"), "timed")
    assert {r["op"]: r["red_checks"] for r in record["rows"]} == {
        "wrong": 2, "raising": 2, "flaky": 1, "good": 0, "unchecked": 0, "unmade": 1,
    }  # fmt: skip
    lines = {line.split()[0]: line for line in (tmp_path / "table.txt").read_text().splitlines() if "4x4" in line}
    assert "?" in lines["wrong"] and "?" not in lines["good"]
    why = {c["op"]: c["message"] for c in record["checks"] if not c["green"]}
    assert why["wrong"] == "relative RMS error 1.00e-03 is over 1e-05" and why["raising"] == "RuntimeError: no such"
    assert why["flaky"].startswith("NaN") and why["unmade"] == "RuntimeError: cannot be made"
    assert "RED  wrong: off (cpu)" in capsys.readouterr().out
    json.loads((tmp_path / "record.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def expecting(**calls):
    """A contest in which every contestant must return X twice."""

    def made(op):
        calls_ = {"ours": lambda i: X * 2, "torch": lambda i: X * 2, "other": lambda i: X, **calls}
        expected = dict.fromkeys(("ours", "torch"), lambda found: X.double() * 2)
        return contest(op, contestants=calls_, expected=expected)

    return made


@pytest.mark.parametrize("time_red", [False, True])
def test_contestants_wrong_at_the_timed_shape_are_not_timed_or_are_marked(ops, tmp_path, time_red):
    ops(
        a=op(
            "a",
            [check],
            [
                expecting(),
                expecting(ours=lambda i: X * 2.001),
                expecting(ours=lambda i: torch.empty(4)),
                expecting(torch=lambda i: X * 3),
                expecting(ours=raises("no image")),
            ],
        )
    )
    code, record = run(tmp_path, *(["--time-red"] if time_red else []))
    good, wrong, unwritten, rival, raising = record["rows"]
    assert code == 1 and record["summary"]["red_rows"] == ["a toy 4x4 M=1"] * 3
    assert good["status"] == "timed" and not good["unsound"] and good["unchecked"] == ["other"]
    assert wrong["unsound"] == {"ours": "relative RMS error 5.00e-04 is over 1e-05"}
    assert "never written" in unwritten["unsound"]["ours"] and "no image" in raising["unsound"]["ours"]
    assert rival["status"] == "timed" and rival["speedup"] is None and set(rival["unsound"]) == {"torch"}
    assert (rival["seconds"]["torch"] is None) != time_red and rival["strongest"] == "other"
    text = (tmp_path / "table.txt").read_text()
    assert "RED  a toy 4x4 M=1: ours: relative RMS" in text
    if time_red:
        assert wrong["status"] == "unsound" and wrong["seconds"]["ours"] and wrong["goal_met"] is None
        assert "! UNSOUND" in text and raising["status"] == "error: RuntimeError: no image"
    else:
        assert {r["status"].partition(":")[0] for r in (wrong, unwritten, raising)} == {"not timed"}
        assert wrong["seconds"] == {} and "UNSOUND" not in text


def test_libraries_that_add_in_no_order_may_differ_within_the_tolerance():
    runs = iter([X * 2, X * 2 + 1e-6, X * 2, X * 2 + 1e-3, X * 2, X * 2 + 1e-6])
    loose = replace(check("fake", run=lambda impl: next(runs)), repeats=False)
    assert 0 < loose.error("cpu") <= loose.tolerance < loose.error("cpu"), "the second run counts too"
    assert loose.allowed("cpu") == 1e-5
    assert math.isnan(replace(loose, repeats=True).error("cpu")), "others must give the same bits"
    assert replace(loose, tolerances={"triton": 1e-2}).allowed("triton") == 1e-2


def test_sums_in_place_begin_at_zero():
    total = torch.full((4,), 7.0)
    summing = contest("a", contestants={"ours": lambda i: total.add_(X)}, expected={"ours": lambda found: X.double()})
    assert verify(summing, CPU) == OpVerdict({}, ())
    twice = iter([X.clone(), X.clone(), X * 2, X * 2.000001])  # which become zeros first
    flaky = contest("a", contestants={"ours": lambda i: next(twice)}, expected={"ours": lambda found: X.double() * 2})
    assert "two runs" in verify(flaky, CPU).red["ours"]


def test_the_contests_of_every_op_say_what_is_right():
    for name in declarations.OPS:
        for c in import_module(f"kernels.{name}.cases").contests(CPU, True, declarations.OWN):
            assert verify(c, CPU) == OpVerdict({}, ()), c


def test_requested_shapes_reach_the_op(ops, tmp_path):
    def contests(device, toy, asked):
        for shape in asked.shapes:
            for tokens in asked.tokens:
                yield replace(contest("a", str(asked.dtype)), shape=shape, tokens=tokens)

    ops(a=SimpleNamespace(checks=lambda device: [check("a")], contests=contests))
    code, record = run(tmp_path, "--shapes", "8x4,9x9", "--tokens", "2", "--dtype", "float16")
    assert [(row["shape"], row["tokens"], row["detail"]) for row in record["rows"]] == [
        ([8, 4], 2, "torch.float16"),
        ([9, 9], 2, "torch.float16"),
    ]
    assert code == 0 and record["run"]["shapes"] == "8x4,9x9" and record["run"]["dtype"] == "float16"


def test_checks_only_times_nothing(ops, tmp_path):
    ops(a=op("a", [check], [contest]))
    code, record = run(tmp_path, "--checks-only")
    assert code == 0 and len(record["checks"]) == 2 and record["rows"] == []


def test_ops_take_turns_in_one_process_and_some_contests_are_asked_for(ops, tmp_path, monkeypatch):
    made = [lambda n, i=i: contest(n, str(i)) for i in range(2)]
    ops(
        a=op("a", [raises("no checks")], made),
        b=op("b", [check], [*made, raises("cannot be made")]),
        c=op("c", [], made),
    )
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc")
    code, record = run(tmp_path, "--no-checks", "--only", "a 4x4 M=1,b 1, M=16")
    assert code == 0 and record["checks"] == [] and "no checks were run" in table(record)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lines = [x for x in lines if x["kind"] == "contest"]
    assert [(x["op"], x["detail"]) for x in lines] == [("a", "0"), ("a", "1"), ("b", "1"), ("b", "(making it)")]
    assert [row["status"] for row in record["rows"]] == ["timed"] * 3 + ["error: RuntimeError: cannot be made"]
    assert record["environment"]["commit"] == "abc" and set(record["run"]["phases_s"]) == {"ceilings", "contests"}
    monkeypatch.setattr(trial.Log, "left", lambda self: 0)
    _, record = run(tmp_path, "--no-checks")
    assert {(rest["op"], rest["phase"]) for rest in record["unfinished"]} == {(n, "contests") for n in "abc"}


def test_goals_in_microseconds_are_those_of_one_gpu(monkeypatch):
    goal, found = contest("a", goal=1.5, goals_us={"NVIDIA H200": 8.0, "H100 80GB HBM3": 9.0}), {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        kept = trial.goals_here(goal, torch.device("cuda"))
        assert kept.goal == 1.5, "ratios are goals on every GPU"
        found[name.removeprefix("NVIDIA ")] = kept.goal_us
    assert found == {"H100 80GB HBM3": 9.0, "H200": 8.0, "GH200 480GB": None, "H100 PCIe": None}
    assert trial.goals_here(goal, CPU) is goal


def test_all_goals_of_a_contest_must_be_reached():
    ceilings = roofline.Ceilings(64e6, read=128e6)  # the contest's 64 bytes are copied in a microsecond
    both = contest("a", goal=2.0, goal_us=4.0)
    assert [trial.goal_met(both, ours, 6e-6, None) for ours in (2.9e-6, 3.1e-6)] == [True, False]
    assert trial.goal_met(both, 2e-6, None, None) is None, "without its baseline"
    half = contest("a", goal_bandwidth=0.5)
    assert [trial.goal_met(half, ours, None, ceilings) for ours in (1.9e-6, 2.1e-6)] == [True, False]
    assert trial.goal_met(half, 1e-6, None, None) is None, "where the bandwidth is not known"
    assert trial.goal_met(contest("a"), 1e-6, 1e-6, ceilings) is None
    row = {**trial.bare_row("a", "timed"), "goal_bandwidth": 0.5, "goal_met": False}
    row |= {"ours": "x", "seconds": {"x": 2.1e-6}, "how": {"x": "graph"}, "quartiles": {"x": [2e-6, 2e-6]}}
    assert "50% of copy MISSED" in rows_table([row])


def test_contests_beyond_the_budget_are_named_and_resumed(monkeypatch, log, lines):
    made = op("fake", [], [lambda n, i=i: contest(n, str(i), 1e-4) for i in range(4)])
    monkeypatch.setitem(sys.modules, "kernels.fake.cases", made)
    log.until = time.time() + 0.05
    trial.contests(log, ["fake"], CPU, True, 0, None, None)
    rows = [line for line in lines if line["kind"] == "contest"]
    assert [row["status"] for row in rows] == ["timed", "skipped: budget"]
    assert rows[1]["detail"] == "1" and rows[1]["rest"]
    assert (lines[-1]["kind"], lines[-1]["next"], lines[-1]["pending"]) == ("end", 1, "fake")
    log.until = time.time() + 60
    trial.contests(log, ["fake"], CPU, True, 1, None, None)
    assert [(x["index"], x["status"]) for x in validate._latest(lines, "contest")] == [(i, "timed") for i in range(4)]


@pytest.mark.slow
def test_late_ops_get_their_share(ops, tmp_path):
    many = [lambda n, i=i: contest(n, str(i), 0.02) for i in range(100)]
    ops(greedy=op("greedy", [check], many), late=op("late", [check], [contest]))
    began = time.monotonic()
    code, record = run(tmp_path, "--budget", "8")
    assert code == 0 and time.monotonic() - began < 9
    status = {(row["op"], row["status"]) for row in record["rows"]}
    assert status == {("greedy", "timed"), ("greedy", "skipped: budget"), ("late", "timed")}
    (rest,) = record["unfinished"]
    assert rest["op"] == "greedy" and rest["next"] > 1
    assert "and what follows" in table(record) and "from number" in table(record)


def test_unfinished_checks_are_told(monkeypatch, ops, tmp_path):
    slow = [lambda n, i=i: check(n, str(i), lambda impl: (time.sleep(0.3), X * 2)[1], ("cpu",)) for i in range(12)]
    ops(a=op("a", slow, [contest]))
    code, record = run(tmp_path, "--budget", "5")
    assert code == 0 and record["summary"]["red"] == 0 and record["summary"]["checks"] < 24
    assert ("a", "checks") in [(r["op"], r["phase"]) for r in record["unfinished"]]


def test_contests_wait_for_nothing_that_is_late_or_red(tmp_path):
    names = ["gram", "hadamard", "kv_decode", "int_matmul"]
    flags = ["--device", "cpu", "--out", str(tmp_path), "--ops", ",".join(names)]
    validation = validate.Validation(validate._options(flags))
    for name, index in (("gram", 0), ("kv_decode", -1)):
        validation.lines.append({"kind": "check", "op": name, "index": index, "green": False})
    validation.left.append(jobs.TrialJob("checks", pending="hadamard,kv_decode"))
    assert validation._sound(names) == ["gram", "hadamard"], "one has no checks at all, one could not make its own"


def test_a_failing_contestant_or_contest_is_a_note_or_an_error(monkeypatch, log, lines):
    def broken(**more):
        calls = {"ours": lambda i: X, "torch": lambda i: X, **more}
        return lambda n: contest(n, contestants=calls)

    made = [broken(other=raises("no kernel")), broken(torch=raises("no baseline")), broken(ours=raises("bad shape"))]
    monkeypatch.setitem(sys.modules, "kernels.fake.cases", op("fake", [], [*made, raises("out of memory")]))
    trial.contests(log, ["fake"], CPU, True, 0, roofline.Ceilings(1.0), None)
    rows = [line for line in lines if line["kind"] == "contest"]
    errors = [f"error: RuntimeError: {why}" for why in ("bad shape", "out of memory")]
    assert [row["status"] for row in rows] == ["timed", "timed", *errors]
    assert (
        rows[0]["notes"] == {"other": "RuntimeError: no kernel"}
        and rows[0]["seconds"]["other"] is None
        and rows[0]["speedup"]
    )
    assert rows[1]["speedup"] is None


def test_bad_arguments_say_what_works(capsys, tmp_path):
    for flags, words in (
        (["--ops", "nosuch"], "`--ops` (=nosuch)"),
        (["--ops", ""], "`--ops`"),
        (["--shapes", "8by4"], "`--shapes` (=8by4)"),
        (["--budget", "1"], "`--budget` (=1)"),
    ):
        with pytest.raises(SystemExit):
            validate.main(["--out", str(tmp_path), "--device", "cpu", *flags])
        assert words in capsys.readouterr().err


FAKES = """
import os, signal, sys, time, types
import torch
from kernels.support import declarations
from kernels.harness import validate
from kernels.support.declarations import Check, Contest
X = torch.ones(4)
def check(op, run): return Check(op, "c", run, lambda: X.double(), 1e-5, ("cpu",))
def contest(op, name, call): return Contest(op, name, (4,), 1, {"ours": call, "torch": lambda i: X}, 1, "ours", "torch", 8, 8)
def dies(i): print("the last words", file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)
def module(op, checks, contests):
    sys.modules[f"kernels.{op}.cases"] = types.SimpleNamespace(
        checks=lambda device: [check(op, c) for c in checks],
        contests=lambda device, toy, asked: (contest(op, n, c) for n, c in contests))
module("crashing", [lambda impl: X], [("before", lambda i: X), ("dies", dies), ("behind", lambda i: X)])
declarations.OPS = ("crashing",)
if __name__ == "__main__":
    sys.exit(validate.main())
"""


@pytest.mark.slow
def test_real_processes_crash_and_the_others_go_on(tmp_path):
    script = tmp_path / "fakes.py"
    script.write_text(FAKES)
    command = [
        sys.executable,
        str(script),
        "--device",
        "cpu",
        "--toy",
        "--budget",
        "120",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    status = {(row["op"], row["detail"]): row["status"] for row in record["rows"]}
    assert status["crashing", "before"] == status["crashing", "behind"] == "timed"
    assert status["crashing", "dies"] == "crashed: signal SIGSEGV, the last words"
    assert "the last words" in (tmp_path / "out" / "log.txt").read_text()
    assert record["ceilings"]["bandwidth"] > 0 and {"bfloat16", "float32"} <= set(record["ceilings"]["rates"])


@pytest.fixture
def workers(tmp_path, monkeypatch, lines):
    """Workers with played processes, which begin an item and then go on as `does(job, send)` says."""

    def make(does):
        def process(job, until, send, work, stderr):
            send({"kind": "begin", "op": "a", "index": job.start, "name": "c", "impl": "triton"})
            status = does(job, send)
            if status == 0:
                send({"kind": "end", "next": None, "pending": ""})
            elif status == 1:
                Path(stderr).write_text("no device")
            return status

        played(monkeypatch, process)
        monkeypatch.setattr(jobs, "LATE", 0)
        return jobs.Workers(lambda *_: None, 4, lines.append, tmp_path / "log.txt", lambda: None)

    return make


def hangs_at_first(job, send):
    return None if job.start == 0 else 0


def of(kind, lines):
    return [x for x in lines if x["kind"] == kind]


def test_a_process_over_its_time_is_ended_and_gone_on_behind(workers, lines):
    workers = workers(hangs_at_first)
    left = workers.run([jobs.TrialJob("contests")], time.monotonic() + 1.2, alone=True)
    assert left == [jobs.TrialJob("contests", start=1, restarts=1)]
    assert [x["status"] for x in of("contest", lines)] == ["over its time"]
    assert workers.run(left, time.monotonic() + 20) == []


def test_a_check_that_is_under_way_when_the_time_is_up_is_not_red(workers, lines):
    (again,) = workers(hangs_at_first).run([jobs.TrialJob("checks")], time.monotonic() + 1.2)
    assert again.start == 0 and not of("check", lines)


def test_a_process_that_hangs_is_ended_soon(workers, lines, monkeypatch):
    monkeypatch.setattr(jobs, "SILENT", 0.2)
    assert workers(hangs_at_first).run([jobs.TrialJob("checks")], time.monotonic() + 50) == []
    (red,) = of("check", lines)
    assert (red["name"], red["impl"], red["green"], red["message"]) == ("c", "triton", False, "silent for 0 s")


def test_a_check_that_kills_its_process_is_red(workers, lines):
    crashes = workers(lambda job, send: -11 if job.start == 0 else 0)
    assert crashes.run([jobs.TrialJob("checks", i, 2) for i in range(2)], time.monotonic() + 20) == []
    assert [x["message"] for x in of("check", lines)] == ["crashed: signal SIGSEGV"] * 2


def test_a_job_that_never_gets_anywhere_is_given_up(workers, lines, tmp_path):
    (left,) = workers(lambda job, send: 1).run([jobs.TrialJob("contests")], time.monotonic() + 20)
    rows = of("contest", lines)
    assert left.restarts == len(rows) == jobs.RESTARTS + 1
    assert {row["status"] for row in rows} == {"crashed: exit 1, no device"}
    assert "no device" in (tmp_path / "log.txt").read_text()


def _ignores_the_end(job, until, send):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send({"kind": "begin", "op": str(os.getpid()), "index": 0})
    time.sleep(60)


def _leaves_processes_behind(folder):
    jobs.os.killpg = jobs.CONTEXT.Process.kill = lambda *_: None  # as if their driver held them
    jobs.DEAD = jobs.LATE = 0.2
    note = (folder / "processes").open("a", buffering=1)
    workers = jobs.Workers(_ignores_the_end, 3, lambda line: print(line["op"], file=note), folder / "log", lambda: None)
    workers.run([jobs.TrialJob("warm", i, 3) for i in range(3)], time.monotonic() + 1.5)


def test_python_exits_although_processes_cannot_be_ended(tmp_path, monkeypatch):
    """At its exit Python waits for the processes that it started, except for those that were killed."""
    monkeypatch.setattr(jobs, "CONTEXT", multiprocessing.get_context("fork"))
    process = jobs.CONTEXT.Process(target=_leaves_processes_behind, args=(tmp_path,))
    process.start()
    until = time.monotonic() + 8
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(0.05)
    left = [int(line) for line in (tmp_path / "processes").read_text().split()]
    alive = [pid for pid in left if Path(f"/proc/{pid}").exists()]
    for pid in [*alive, process.pid] if process.is_alive() else alive:
        os.kill(pid, signal.SIGKILL)
    assert process.exitcode == 0 and len(alive) == len(left) == 3


def test_crashes_between_contests_that_went_well_are_not_counted_together(workers, lines):
    def every_second(job, send):
        send({"kind": "contest", "op": "a", "index": job.start, "status": "timed"})
        send({"kind": "begin", "op": "a", "index": job.start + 1})
        return -11 if job.start < 12 else 0

    assert workers(every_second).run([jobs.TrialJob("contests")], time.monotonic() + 60, alone=True) == []
    status = {x["index"]: x["status"] for x in of("contest", lines)}
    assert [status[n] for n in (0, 2, 12)] == ["timed"] * 3
    assert sum(s == "crashed: signal SIGSEGV" for s in status.values()) == 6 > jobs.RESTARTS


class Cuda:
    """As much of torch.cuda as timing needs, on a clock of its own."""

    def __init__(self, monkeypatch, captures=lambda: True):
        self.now, self.capturing, self.recorded, self.forgotten = 0.0, False, [], 0
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class Graph:
            def replay(self):
                for took in self.nodes:
                    cuda.now += took

        @contextmanager
        def graph(g, pool=None):
            cuda.capturing, cuda.recorded = True, []
            yield
            cuda.capturing, g.nodes = False, cuda.recorded
            if not captures():
                raise RuntimeError("operation not permitted when stream is capturing")

        for name, stand_in in (
            ("Event", Event),
            ("CUDAGraph", Graph),
            ("graph", graph),
            ("synchronize", lambda *_: None),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(timing, "settle", lambda device: None)
        self.clocks = iter((1980, 1755))
        monkeypatch.setattr(timing, "sm_clock", lambda device: next(self.clocks, None))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(capture, "_forget_capture", lambda: setattr(cuda, "forgotten", cuda.forgotten + 1))

    def kernel(self, seconds, launch=20e-6):
        def call(i):
            if self.capturing:
                self.recorded.append(seconds)
            else:
                self.now += max(seconds, launch)

        return call


def test_graphs_take_the_launches_out(monkeypatch):
    cuda = Cuda(monkeypatch)
    calls = {"fast": cuda.kernel(5e-6), "slow": cuda.kernel(1e-3), "raises": raises("no kernel image")}
    took = timing.time_in_turns(calls, 8, "cuda", alike=("fast", "slow"))
    assert took["fast"].how == took["slow"].how == "graph"
    assert took["fast"].seconds == pytest.approx(5e-6) and took["slow"].seconds == pytest.approx(1e-3)
    assert took["fast"].eager == pytest.approx(20e-6), "the launch is told apart"
    assert took["fast"].calls % 8 == 0 and took["slow"].rounds == 15
    assert took["fast"].calls * 5e-6 >= timing.SAMPLE, "sized by the graph's time, not by that of launches"
    assert took["fast"].clocks == took["slow"].clocks == (1980, 1755)
    assert took["raises"].seconds is None and took["raises"].note == "RuntimeError: no kernel image"


def test_without_graphs_ours_and_the_baseline_are_timed_alike(monkeypatch):
    outcomes = iter([True, True, False, True, True])  # a walk, and as many as a sample needs
    cuda = Cuda(monkeypatch, lambda: next(outcomes))
    calls = {"ours": cuda.kernel(5e-6), "baseline": cuda.kernel(40e-6), "other": cuda.kernel(10e-6)}
    took = timing.time_in_turns(calls, 8, "cuda", alike=("ours", "baseline"))
    assert {t.how for t in took.values()} == {"loop"} and took["ours"].seconds == pytest.approx(20e-6)
    outcomes = iter([True, True, True, True, False])
    took = timing.time_in_turns(calls, 8, "cuda", alike=("ours", "baseline"))
    assert [t.how for t in took.values()] == ["graph", "graph", "loop"] and "capturing" in took["other"].note
    assert cuda.forgotten == 2


def test_a_gpu_is_warm_before_it_is_timed(monkeypatch):
    cuda = Cuda(monkeypatch)
    begun = []

    def call(i):
        begun.append(cuda.now)
        cuda.kernel(1e-3)(i)

    timing.time_in_turns({"a": call}, 1, "cuda", rounds=1, graph=False)
    samples = len(begun) - 2  # two walks prepare; warming and the round take samples of alike length
    assert samples * 1e-3 >= timing.WARMING + timing.SAMPLE and begun[-1] < timing.WARMING + 5 * timing.SAMPLE


def test_the_clock_is_asked_of_whoever_knows_it(monkeypatch):
    gpu, known = torch.device("cuda", 0), SimpleNamespace(returncode=0, stdout="1755\n")
    assert timing.sm_clock(CPU) is None
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    assert timing.sm_clock(gpu) == 1980
    monkeypatch.setattr(torch.cuda, "clock_rate", raises("nvidia-ml-py is not installed"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7-a"))
    asked = []
    monkeypatch.setattr(timing.subprocess, "run", lambda command, **_: asked.append(command) or known)
    assert timing.sm_clock(gpu) == 1755 and asked[0][:3] == ["nvidia-smi", "-i", "GPU-7-a"]
    known.stdout = "[N/A]"
    assert timing.sm_clock(gpu) is None


def test_rows_whose_clock_changed_are_marked():
    row = {
        **trial.bare_row("a", "timed"),
        "ours": "x",
        "baseline": "y",
        "seconds": {"x": 1.0, "y": 2.0},
        "speedup": 2.0,
    }
    row |= {"how": {"x": "graph"}, "quartiles": {"x": [1, 1], "y": [2, 2]}}
    assert "^2.00x" in rows_table([{**row, "clocks": [1980, 1755]}]) and "^ the clock" in rows_table(
        [{**row, "clocks": [1980, 1755]}]
    )
    assert "^" not in rows_table([{**row, "clocks": [1980, 1965]}]) + rows_table([row])


def test_results_go_where_the_environment_says(monkeypatch):
    for variable, value in (("OUT", "b"), ("GPU_OUT", "a")):
        monkeypatch.setenv(variable, value)
        assert validate._options(["--device", "cpu"]).out == Path(value)
    assert validate._options(["--device", "cpu", "--out", "c"]).out == Path("c")


SCRIPT = ROOT / "kernels" / "harness" / "quarter_hour.sh"
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" >"$CALLS/$$.part" && mv "$CALLS/$$.part" "$CALLS/$$.call"
while [ ! -f "$CALLS/$$.end" ]; do sleep 0.05; done
cat "$CALLS/$$.said"; exit "$(cat "$CALLS/$$.end")"
"""
PROGRAMS = {
    f"kernels.harness.{program.__name__.rpartition('.')[2]}": program.main for program in (validate, model, worst)
}


def quarter_hour(folder, which, answer, *flags, **variables):
    """Run the script. Instead of starting Python it calls this process, in which everything is imported; `answer`
    takes the module and its arguments, and returns the exit status. Returns the calls, the log and the exit status."""
    folder.mkdir(exist_ok=True)
    executable(folder / "python", STAND_IN)
    environment = {
        **os.environ, "PYTHON": str(folder / "python"), "CALLS": str(folder), "WORK": str(folder / "work"),
        "OUT": str(folder / "out"), "TRITON_CACHE_DIR": str(folder / "none"), "METHODS_S": "0", **variables,
    }  # fmt: skip
    script, calls = subprocess.Popen(["sh", str(SCRIPT), which, *flags], env=environment, stdout=subprocess.DEVNULL), []
    try:
        while script.poll() is None:
            for call in folder.glob("*.call"):
                _, module, *arguments = call.read_text().splitlines()
                calls.append((module.rpartition(".")[2], arguments))
                with call.with_suffix(".said").open("w") as said, redirect_stdout(said):
                    code = answer(module, arguments)
                call.unlink()
                call.with_suffix(".end").write_text(str(code))
            time.sleep(0.02)
    finally:
        script.kill()
    return calls, (folder / "out" / "log.txt").read_text(), script.wait()


def executable(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def value(arguments, flag):
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def test_a_toy_quarter_of_an_hour(ops, tmp_path, monkeypatch):
    """The parts of the first command on toy sizes, the model's included; what was red in its checks is not timed."""
    names = ("int_matmul", "kv_decode", "w8a8_matmul", "w4a8_matmul")
    monkeypatch.setattr(model, "STEPS", 2)
    wrong = [lambda n: check(n, "off", lambda impl: X * 2.002)]
    ops(**{name: op(name, wrong if name == "w8a8_matmul" else [check], [contest]) for name in names})
    calls, log, status = quarter_hour(
        tmp_path, "first", lambda module, arguments: PROGRAMS[module](arguments), "--device", "cpu", "--toy",
        MODEL_FLAGS="--batch 2 --no-roofline",
    )  # fmt: skip
    ends = dict(re.findall(r"== (\S+) ended with (\d)", log))
    assert ends == {"checks": "1", "model": "0", "contests": "0", "eight-bits": "0"} and status == 1
    assert {"log.txt", "rows.jsonl", "record.json", "table.txt", "model.jsonl"} <= set(os.listdir(tmp_path / "out"))
    assert len(os.listdir(tmp_path / "out")) <= 8
    rows = {}
    for part in ("contests", "eight-bits"):
        record = json.loads((tmp_path / "work" / "parts" / part / "record.json").read_text())
        rows |= {row["op"]: row["status"] for row in record["rows"]}
    assert rows == {**dict.fromkeys(names, "timed"), "w8a8_matmul": "not timed: its checks are red"}
    lines = map(json.loads, (tmp_path / "out" / "model.jsonl").read_text().splitlines())
    steps = [(line["kind"], line.get("way"), line.get("error", "")) for line in lines if "kind" in line]
    red = "not timed: the checks of w8a8_matmul are red"
    assert steps == [
        ("int8", None, red), ("fp8", None, red),
        ("bfloat16", "fused graph", ""), ("bfloat16", "own graph", ""), ("int4", "fused graph", ""),
    ]  # fmt: skip


def test_the_first_command_keeps_within_nine_and_a_half_minutes(tmp_path):
    calls, log, status = quarter_hour(tmp_path, "first", lambda *_: 0)
    (checks, model, contests, eight_bits) = (arguments for _, arguments in calls)
    assert [name for name, _ in calls] == ["validate", "model", "validate", "validate"] and status == 0
    assert "--checks-only" in checks and value(checks, "--ops") is None
    assert value(model, "--kinds") == "bfloat16,int4,int8,fp8"
    assert value(contests, "--ops") == "int_matmul,kv_decode" and value(contests, "--tokens") is None
    assert value(eight_bits, "--ops") == "w8a8_matmul,w4a8_matmul" and value(eight_bits, "--tokens") == "1,64,256,2048"
    assert {value(timed, "--checked") for timed in (model, contests, eight_bits)} == {value(checks, "--out")}
    limits = {name: int(seconds) for name, seconds in re.findall(r"== (\S+), at .*: at most (\d+) s", log)}
    assert limits["model"] == 200 and limits["contests"] == 130 and limits["eight-bits"] == 70
    assert sum(limits.values()) + 5 * len(limits) + 15 <= 570, "with killing what does not end, and clocks"
    calls, _, _ = quarter_hour(tmp_path, "first", lambda *_: 0, CHECKS_S="0", MODEL_S="0", EIGHT_BITS_S="0", ONLY="W4")
    assert [value(arguments, "--only") for _, arguments in calls] == ["W4"]


@pytest.mark.parametrize(("ncu", "programs"), [
    (None, ["validate", "validate"]), ("echo ==ERROR== ERR_NVGPUCTRPERM", ["validate", "validate"]),
    ("echo '==PROF== Profiling a: 100% - 8 passes'", ["validate", "worst"]),
])  # fmt: skip
def test_the_second_command_tunes_and_profiles_the_worst_or_tunes_more(tmp_path, ncu, programs):
    if ncu:
        executable(tmp_path / "bin" / "ncu", f'#!/bin/sh\nwhile [ "$1" != "$PYTHON" ]; do shift; done\n{ncu}\n"$@"\n')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    calls, log, status = quarter_hour(tmp_path, "second", lambda *_: 0, PATH=path, RED="")
    if ncu and "ERROR" in ncu:
        programs = [programs[0], "worst", programs[1]]
    assert [name for name, _ in calls] == programs and status == 0
    tuned = [arguments for name, arguments in calls if name == "validate"]
    assert all("--tune" in arguments and value(arguments, "--checked") for arguments in tuned)
    assert value(tuned[0], "--only").count("14336x4096") == 3
    assert len({value(arguments, "--only") for arguments in tuned}) == len(tuned)
    ends = [int(start) + int(seconds) for start, seconds in re.findall(r"at (\d+) s of .*: at most (\d+) s", log)]
    assert len(ends) == len(calls) and max(ends) <= 170, "three minutes, with the start and the killing"


def test_the_second_command_looks_into_what_was_red(tmp_path):
    executable(tmp_path / "bin" / "compute-sanitizer", '#!/bin/sh\nwhile [ "$1" != "$PYTHON" ]; do shift; done\n"$@"\n')
    parts = tmp_path / "work" / "parts"
    parts.mkdir(parents=True)
    (parts / "first-checks.log").write_text(
        "RED  kv_decode: 3 heads (triton): NaN\nRED  kv_decode: 4\nRED  gram W: x\n"
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    calls, _, _ = quarter_hour(tmp_path, "second", lambda *_: 1, PATH=path)
    assert [value(arguments, "--ops") for _, arguments in calls] == ["kv_decode"] * 2
    assert all("--checks-only" in arguments for _, arguments in calls)


def test_overlapped_is_timed_only_behind_its_own_green_checks(tmp_path):
    def line(index, name, green=True, kind="check"):
        return {"kind": kind, "phase": "checks", "op": "int_matmul", "index": index, "name": name, "green": green}

    own = [line(0, "overlapped, a"), line(1, "overlapped, b"), line(2, "W4")]
    assert checked.overlapped_is_green(own) and checked.red_ops(own) == set()
    hung = [own[0], line(1, "overlapped, b", kind="begin"), own[2]]
    for lines in (
        [], own[2:], own[:2], own[::2] + hung[1:2], [own[0], line(1, "overlapped, b", False), own[2]], hung,
        [own[1], own[2], line(0, "overlapped, a", kind="begin")],
    ):  # fmt: skip
        assert not checked.overlapped_is_green(lines) and not checked.red_ops(lines)
    assert checked.red_ops([*own, line(3, "W3", False)]) == {"int_matmul"}
    flags = ["--device", "cpu", "--ops", "int_matmul", "--out", str(tmp_path)]
    for more, lines, left_out in ((["--checked", str(tmp_path)], hung, True), (["--checked", str(tmp_path)], own, False),
                                  (["--no-checks"], hung, False), ([], [], True)):  # fmt: skip
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        options = validate._options([*flags, *more])
        options.device, options.out = "cuda", tmp_path / "out"
        assert validate.Validation(options)._left_out() == left_out, more


def test_the_row_with_the_smallest_speed_up_is_called_for_a_profiler(ops, tmp_path, capsys):
    called = []

    def slow(name):
        calls = {"ours": lambda i: called.append(i) or time.sleep(2e-3), "torch": lambda i: time.sleep(1e-3)}
        return contest(name, "slow", contestants=calls, copies=5)

    ops(a=op("a", [check], [lambda n: contest(n, pause=1e-3), slow]))
    assert worst.main([str(tmp_path)]) == 1, "nothing was timed there"
    run(tmp_path, "--no-checks", "--only", "a slow,a toy")
    called.clear()
    assert worst.main([str(tmp_path), str(tmp_path / "none")]) == 0
    assert "a slow 4x4 M=1: 0." in capsys.readouterr().out and called == [0] * worst.CALLS + [4]


@pytest.mark.slow
def test_a_quarter_of_an_hour_without_a_gpu(tmp_path):
    """Both commands on toy sizes, in processes of their own; where the machine is busy, little is done in the time, and
    the files come all the same."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work"),
        "CHECKED": "gram", "OPS": "gram,hadamard", "CHECKS_S": "90", "MODEL_S": "120", "CONTESTS_S": "90",
        "EIGHT_BITS_S": "0", "SECOND_S": "90", "PYTHON": sys.executable, "RED": "",
        "MODEL_FLAGS": "--batch 1 --no-roofline", "TRITON_CACHE_DIR": str(tmp_path / "none"),
    }  # fmt: skip
    for which in ("first", "second"):
        subprocess.run(["sh", str(SCRIPT), which, "--device", "cpu", "--toy"], env=environment, capture_output=True)
        log = (tmp_path / "out" / "log.txt").read_text()
        assert {"log.txt", "rows.jsonl", "record.json", "table.txt"} <= set(os.listdir(tmp_path / "out"))
    for part in ("checks", "model", "contests", "tune", "more"):
        assert f"== {part} ended with 0" in log
    assert len(os.listdir(tmp_path / "out")) <= 8


def test_a_machine_with_only_torch_will_do():
    """Nothing that `kernels.harness.validate` imports needs another package."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'matplotlib', 'psutil', 'yaml', 'triton', 'pandas', 'scipy'): sys.modules[name] "
        "= None\n"
        "import kernels.harness.validate, kernels.harness.bench\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
