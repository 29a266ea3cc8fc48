"""Check every kernel, then time it against its roofline.

`python -m kernels.harness.validate --budget 540 --out DIR` needs torch and nothing else, and triton for the Triton
kernels. It runs these phases in order: it describes the machine, measures its two ceilings (bandwidth and arithmetic;
not with --checks-only), runs the checks of every op (not with --no-checks; outputs are poisoned first, and every kernel
runs twice and must give equal bits), searches launch configurations (only with --tune), and times the contests. Each
contest first compares the output of every contestant with the right result at that shape and in that configuration.
Contestants with wrong outputs are not timed; --time-red times them too, and the row then says that it is unsound. A red
check elsewhere marks the rows of its op. With --checked DIR, the checks are those of an earlier run, and an op that was
red there is not timed. That a kernel is right before it has a speed is the rule of MultiKernelBench (arXiv:2507.17773);
nothing else of that benchmark, whose kernels are written by language models, is here.

The checks of all ops are dealt out to as many processes as there are cores. All contests run in one process, and the
ops take turns, the first contests of all of them first. When a process crashes or hangs, that is recorded and a new
process continues with the next case, so that one op cannot stop another. A case that did not fit into the budget is a
row that says so. $WORKBENCH_COMMIT names the commit where the checkout has no history. The exit status is 1 if a check
is red. A goal that was missed is marked in the table and does not change the status.

DIR receives rows.jsonl (one line per result, written when it is known), log.txt (the standard error of the processes),
table.txt, <gpu>.json (configurations found, also in kernels/tuned) and record.json:

    schema_version
    run          started, duration_s, phases_s {phase: seconds}, budget_s, command, device, ops, shapes, tokens, dtype,
                 only, toy, tuned, checks_only, no_checks, time_red, meaningful (false in Triton's interpreter and for
                 toy sizes, where times are meaningless), left_out (true: products did without `overlapped`, because its
                 own checks are not green)
    environment  python, torch, triton (null: none), cuda, system, cpu, cpu_capability, cores, threads, commit, dirty,
                 gpu: null or {name, capability, sms, l2_bytes, memory_bytes, shared_memory_bytes, driver}
    ceilings     null or {bandwidth [bytes/s of a copy], read (the same of reading alone; null: not measured apart),
                 rates: {type: operations/s}, notes, cache [bytes of the largest one before memory, or null]}
    checks       [{op, index, name, impl, error, tolerance, green, message}]
    unfinished   [{op, phase, next}]   work for which the budget was too small
    rows         [{op, index, detail, shape, tokens, status, ...}]
                 status         "timed", "skipped: budget", "not timed: ...", "error: ...", "crashed: ...",
                                "unsound" (timed with --time-red although ours is wrong)
                 rest           true if the contests after this one were left out too
                 ours, baseline names of contestants; `seconds` may lack the baseline (not installed)
                 seconds        {contestant: median of one call, null where it failed}
                 quartiles, how ("graph", "loop", "clock"), notes   {contestant: ...}
                 eager          on a GPU: {contestant: one call from Python, launches included; a single sample}
                 speedup        seconds[baseline] / seconds[ours]
                 strongest      the fastest contestant except ours
                 goal, goal_us, goal_bandwidth, goal_met    the goals: a speed-up, microseconds, a share of the
                 bandwidth; null if there is no goal (on this GPU)
                 least_bytes, flops, rate, least_seconds, bound ("bytes" or the rate),
                 roofline = least_seconds / seconds[ours]
                 tune_key, configuration    null: the heuristic's, or the one in kernels/tuned
                 copies, rounds
                 clocks         MHz of the multiprocessors after the first round and the last; [] where not known
                 unsound        {contestant: the fault in its output at this shape}
                 unchecked      contestants whose right output is not known
                 red_checks     number of red checks of this op
    tuning       [{op, key, configuration (null: the heuristic is as fast), seconds, candidates, rejected}]; without
                 candidates: of a contestant of ours that won its contest
    summary      {checks, red (number), red_ops, red_rows (ours is wrong there), unfinished, contests, timed,
                 goals_met, goals_missed, not_timed, duration_s}
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.harness import checked, roofline, trial
from kernels.harness.jobs import TrialJob, Workers
from kernels.harness.table import summary, table
from kernels.harness.trial import Line
from kernels.interpreter import interpreting
from kernels.packed_matmul import hopper
from kernels.support import declarations
from kernels.support.files import write_whole

SCHEMA_VERSION = 1
PREPARING = 0.5  # largest share of the budget for checks and compilation; with --tune, more is compiled
PREPARING_TUNED = 0.65
PREPARING_ALONE = 0.3  # with --no-checks: compilation alone, of what is timed first
CLOSING = 3.0  # seconds kept for the table
OF_LINES = ("kind", "phase")  # fields of a line that the record does not have


def main(arguments: list[str] | None = None) -> int:
    return Validation(_options(arguments)).run()


class Validation:
    """One run of everything that `options` requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started, self.began = options, datetime.now(UTC), time.monotonic()
        self.deadline = self.began + options.budget - CLOSING
        self.left: list[TrialJob] = []
        self.phases: dict[str, float] = {}
        self.environment: Line | None = None
        self.checked = checked.lines_of(options.checked) if options.checked else []
        options.out.mkdir(parents=True, exist_ok=True)
        self.lines: list[Line] = []
        self.file = options.out / "rows.jsonl"
        for old in (self.file, options.out / "log.txt"):
            old.unlink(missing_ok=True)
        parallel = options.device == "cuda" or interpreting()
        self.count = max(1, (os.cpu_count() or 1) - 2) if parallel else 1

    def run(self) -> int:
        ops, options = list(self.options.ops), self.options
        print(f"{len(ops)} ops on {options.device}, {options.budget:.0f} s, into {options.out}", flush=True)
        if options.checks_only:  # nothing that needs them
            self.environment = roofline.environment(torch.device(options.device))
            print(_machine(self.environment), flush=True)
        else:
            self._do([TrialJob("ceilings")], self.began + 0.25 * options.budget)
        share = PREPARING_TUNED if options.tune else PREPARING_ALONE if options.no_checks else PREPARING
        ready = self.began + share * options.budget
        if not options.no_checks:
            self._do(self._parts("checks"), self.deadline if options.checks_only else ready)
        if not options.checks_only:
            if options.device == "cuda":
                self._do(self._parts("warm"), ready)
            self._do([TrialJob("contests")], self.deadline)
        self._do(self._taken("checks"), self.deadline)  # with the time that contests did not need
        record = self.save()
        text = table(record)
        (options.out / "table.txt").write_text(text + "\n")
        print(f"\n{text}\n{json.dumps(record['summary'])}", flush=True)
        return 1 if record["summary"]["red_ops"] or record["summary"]["red_rows"] else 0

    def note(self, line: Line) -> None:
        """Keep a line, and append it to rows.jsonl."""
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def save(self) -> dict[str, Any]:
        """Write record.json from the lines so far."""
        record = self.record()
        write_whole(json.dumps(record, indent=1), self.options.out / "record.json")
        return record

    def record(self) -> dict[str, Any]:
        lines, options = self.lines, self.options
        red = [line for line in _latest(lines, "check", "impl") if not line["green"]]
        machine = {line["kind"]: _fields(line) for line in lines if line["kind"] in ("environment", "ceilings")}
        made = {
            "schema_version": SCHEMA_VERSION,
            "run": {
                "started": self.started.isoformat(timespec="seconds"),
                "duration_s": round(time.monotonic() - self.began, 1),
                "phases_s": {phase: round(seconds, 1) for phase, seconds in self.phases.items()},
                "budget_s": options.budget,
                "command": " ".join(["python -m kernels.harness.validate", *sys.argv[1:]]),
                "device": options.device,
                "ops": list(options.ops),
                "shapes": options.shapes,
                "tokens": options.tokens,
                "dtype": options.dtype,
                "only": options.only,
                "toy": options.toy,
                "tuned": options.tune,
                "checks_only": options.checks_only,
                "no_checks": options.no_checks,
                "time_red": options.time_red,
                "left_out": self._left_out(),
                "meaningful": not (interpreting() or options.toy),
            },
            "environment": machine.get("environment") or self.environment or roofline.environment(torch.device("cpu")),
            "ceilings": machine.get("ceilings"),
            "checks": _latest(lines, "check", "impl"),
            "unfinished": [
                {"op": op, "phase": job.phase, "next": job.start}
                for job in self.left
                for op in (job.pending.split(",") if job.pending else options.ops)
            ],
            "rows": [
                {**row, "red_checks": sum(line["op"] == row["op"] for line in red)}
                for row in _latest(lines, "contest") + self._untimed(lines)
            ],
            "tuning": [_fields(line) for line in lines if line["kind"] == "tuned"],
        }
        return {**made, "summary": summary(made)}

    def _do(self, jobs: list[TrialJob], until: float) -> None:
        """Run the jobs; unfinished ones are added to `self.left`. Nothing else runs while contests are timed."""
        if not jobs:
            return
        phase, began = jobs[0].phase, time.monotonic()
        ops = self._sound(list(self.options.ops)) if phase in ("warm", "contests") else list(self.options.ops)
        known = [line for line in self.lines if line["kind"] in ("ceilings", "tuned")]
        threads = max(1, (os.cpu_count() or 1) // self.count)  # of parallel processes: waiting threads occupy cores
        leave = phase in ("warm", "contests") and self._left_out()
        work = partial(_work, self.options, ops, known, threads if phase in ("checks", "warm") else 0, leave)
        workers = Workers(work, self.count, self.note, self.options.out / "log.txt", self.save)
        left = workers.run(jobs, until, alone=phase in ("ceilings", "contests"))
        self.left += left if phase != "warm" else []  # not worth another try
        self.phases[phase] = self.phases.get(phase, 0.0) + time.monotonic() - began

    def _taken(self, phase: str) -> list[TrialJob]:
        taken = [job for job in self.left if job.phase == phase]
        self.left = [job for job in self.left if job.phase != phase]
        return taken

    def _sound(self, ops: list[str]) -> list[str]:
        """Ops that have checks. Contests check their own outputs, so they do not wait for red or late checks."""
        unsound = self._unsound(self.lines)
        return [op for op in ops if op not in unsound]

    def _unsound(self, lines: list[Line]) -> dict[str, str]:
        """Op -> why it must not be timed."""
        if self.options.no_checks:
            return dict.fromkeys(checked.red_ops(self.checked), "not timed: its checks are red")
        checks = [line for line in lines if line["kind"] == "check"]
        none = set(self.options.ops) - {line["op"] for line in checks}
        late = [job for job in self.left if job.phase == "checks"]
        none -= {op for job in late for op in (job.pending.split(",") if job.pending else none)}
        unmade = {line["op"] for line in checks if line["index"] < 0}
        why = (
            (none, "not timed: no checks"),
            (unmade, "not timed: its checks could not be made"),
        )
        return {op: reason for ops, reason in why for op in ops}

    def _left_out(self) -> bool:
        """Whether `overlapped`, which can hang, must not be timed: its own checks, here or earlier, are not green."""
        if self.options.device != "cuda" or (self.options.no_checks and not self.options.checked):
            return False  # without checks, its outputs at each shape decide, as for all contestants
        return not checked.overlapped_is_green(self.checked if self.options.checked else self.lines)

    def _untimed(self, lines: list[Line]) -> list[Line]:
        """A row for each op whose contests were not run."""
        unsound = {} if self.options.checks_only else self._unsound(lines)
        return [{**trial.bare_row(op, unsound[op]), "index": -1} for op in self.options.ops if op in unsound]

    def _parts(self, phase: str) -> list[TrialJob]:
        return [TrialJob(phase, i, self.count) for i in range(self.count)]


def _fields(line: Line) -> Line:
    return {name: value for name, value in line.items() if name not in OF_LINES}


def _latest(lines: list[Line], kind: str, *by: str) -> list[Line]:
    """The last line of this kind for each op and index: a skipped item may have been done later."""
    found = {
        (line["op"], line["index"], *(line[name] for name in by)): _fields(line)
        for line in lines
        if line["kind"] == kind
    }
    order = {op: i for i, op in enumerate(dict.fromkeys(line["op"] for line in lines if "op" in line))}
    return [found[key] for key in sorted(found, key=lambda key: (order[key[0]], *key[1:]))]


def _work(
    options: argparse.Namespace, ops: list[str], known: list[Line], threads: int, leave: bool, job: TrialJob,
    until: float, send: Callable[[Line], None],
) -> None:  # fmt: skip
    """The work of a process that `Workers` started.

    Args:
        known: lines of processes before.
        leave: whether products do without `overlapped`.
    """
    device, log, part = torch.device(options.device), trial.Log(send, job.phase, until), (job.part, job.of)
    if threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    torch.manual_seed(time.time_ns() % 2**31)  # fresh inputs, where an op does not seed its own
    try:
        with torch.no_grad(), hopper.left_out(leave):
            if job.phase == "ceilings":
                print(_machine(log.write("environment", **roofline.environment(device))), flush=True)
                line = log.write("ceilings", **asdict(roofline.measure(device, toy=options.toy)))
                rates = ", ".join(f"{name} {rate / 1e12:.4g} T/s" for name, rate in line["rates"].items())
                read = f", read {line['read'] / 1e9:.4g} GB/s" if line["read"] else ""
                bandwidth = f"ceilings: copy {line['bandwidth'] / 1e9:.4g} GB/s{read}; {rates}"
                print(bandwidth, *line["notes"], sep="\n  ", flush=True)
                log.end()
            elif job.phase == "checks":
                trial.checks(log, ops, device, part, job.start)
            elif job.phase == "warm":
                trial.warm(log, ops, device, options.toy, part, options.tune, asked_sizes(options))
            else:
                tuned = {(x["op"], x["key"]): x["configuration"] for x in known if x["kind"] == "tuned"}
                ceilings = trial.ceilings_in(known)
                how = {"asked": asked_sizes(options), "time_red": options.time_red, "tuned": tuned}
                where = job.start, ceilings, options.out
                trial.contests(log, ops, device, options.toy, *where, tune=options.tune, **how)
    except trial.Broken as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(trial.BROKEN)  # clean-up may hang on a broken device


def _machine(environment: Line) -> str:
    gpu = environment["gpu"]
    where = (
        f"{environment['cpu']} ({environment['cpu_capability']}), "
        f"{environment['threads']} of {environment['cores']} cores"
    )
    if gpu:
        where = (
            f"{gpu['name']}, {gpu['sms']} SMs, L2 {gpu['l2_bytes'] >> 20} MB, {gpu['memory_bytes'] >> 30} GB, "
            f"driver {gpu['driver']}; {where}"
        )
    commit = (
        f"commit {environment['commit'][:12]}{' and changes' if environment['dirty'] else ''}"
        if environment["commit"]
        else ""
    )
    versions = f"python {environment['python']}, torch {environment['torch']}, triton {environment['triton']}"
    warning = "\nTriton's interpreter: times mean nothing" if interpreting() else ""
    return f"{where}\n{versions} {commit}{warning}"


def asked_sizes(options: argparse.Namespace) -> declarations.TimedSizes:
    """The sizes to time according to the options; ValueError if they cannot be read."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",") if shape]
    tokens = [int(number) for number in options.tokens.split(",") if number]
    if any(len(shape) != 2 or min(shape) < 1 for shape in shapes) or any(number < 1 for number in tokens):
        raise ValueError
    only = tuple(tuple(words.split()) for words in options.only.split(",") if words.strip())
    return declarations.TimedSizes(tuple(shapes), tuple(tokens), getattr(torch, options.dtype), only)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.harness.validate", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("GPU_OUT") or os.environ.get("OUT") or "runs/gpu"),
        help="folder to which results are written as they come; default: $GPU_OUT, $OUT or runs/gpu",
    )
    parser.add_argument("--ops", default=",".join(declarations.OPS), help="ops to run, separated by commas")
    parser.add_argument(
        "--shapes", default="", help="shapes of weights, out x in, instead of those of each op: 4096x4096,14336x4096"
    )
    parser.add_argument("--tokens", default="", help="numbers of tokens at once, instead of those of each op: 1,16,256")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="dtype of the activations"
    )
    parser.add_argument(
        "--only",
        default="",
        help='contests whose names have these words, as "int_matmul W4 M=1"; several of them separated by commas',
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true", help="find this GPU's fastest launch configurations first")
    parser.add_argument("--toy", action="store_true", help="use tiny shapes, only to see that everything runs")
    parser.add_argument("--time-red", action="store_true", help="also time kernels that failed a check, as unsound")
    parser.add_argument("--checks-only", action="store_true", help="time nothing")
    parser.add_argument("--no-checks", action="store_true", help="time at once; contests compare their own outputs")
    parser.add_argument(
        "--checked",
        type=Path,
        help="folder of an earlier run: --no-checks, but nothing is timed whose checks were red there",
    )
    options = parser.parse_args(arguments)
    options.no_checks |= options.checked is not None
    options.ops = tuple(dict.fromkeys(op for op in options.ops.split(",") if op))
    if unknown := [op for op in options.ops if op not in declarations.OPS] or (not options.ops and ["nothing"]):
        parser.error(f"`--ops` (={', '.join(unknown)}) must be among {', '.join(declarations.OPS)}")
    try:
        asked_sizes(options)
    except ValueError:
        parser.error(
            f"`--shapes` (={options.shapes}) and `--tokens` (={options.tokens}) must look like 4096x4096,64x64 and 1,16"
        )
    if options.no_checks and options.checks_only:
        parser.error("`--no-checks` and `--checks-only` together leave nothing to do")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` (=cuda) needs a GPU that torch can see; cpu works")
    if options.budget < 5:
        parser.error(f"`--budget` (={options.budget:g}) must be at least 5 seconds")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes it started are ended too
    sys.exit(main())
