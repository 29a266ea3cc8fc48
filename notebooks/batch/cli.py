"""`workbench`: executes notebooks in batch, one or a whole sweep, and compares their results.

$ workbench run gptq -p bits 3 -p group_size 32
$ workbench plan quickstart
$ workbench run quickstart              # the same command, or `resume`, continues after an interruption
$ workbench status quickstart
$ workbench compare quickstart          # writes a page; of two runs it also gives a verdict and an exit status
$ workbench report                      # writes all pages again: runs/index.html, comparisons, papers

`notebooks.batch.verbs` has the verbs about models, data and finished runs: compress, fit, eval, chat, cost,
explain, export, list, compare, repeat, table, data.
"""

import argparse
import re
import sys
from importlib.metadata import version
from pathlib import Path

from notebooks.batch.verbs import (
    chat,
    compare,
    completion,
    compress,
    cost,
    data,
    explain,
    listing,
    repeat,
    score,
    table,
)
from notebooks.study.parameters import bounded, from_here, parse_value, read_parameters, type_name

DISTRIBUTION = "model-compression-workbench"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run failed or a verdict is negative, 2 wrong arguments, 130 interrupted."""
    parser = _parser()
    completion.complete(parser)
    options = parser.parse_args(_apart(sys.argv[1:] if arguments is None else arguments))
    try:
        return options.does(options)
    except ValueError as error:
        print(f"workbench: {bounded(str(error), 200_000)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `workbench status | head`
        sys.stderr.close()
        return 0


def _apart(arguments: list[str]) -> list[str]:
    """The arguments, with `-p NAME=VALUE` as `-p NAME VALUE`."""
    given: list[str] = []
    for one in arguments:
        joined = given[-1:] in (["-p"], ["--parameter"]) and re.match(r"\w+=", one)
        given += one.split("=", 1) if joined else [one]
    return given


def _parser() -> argparse.ArgumentParser:
    from notebooks.batch.engines.engine import ENGINES

    parser = argparse.ArgumentParser(
        prog="workbench", description="Execute the workbench's notebooks in batch, and compare their results."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version(DISTRIBUTION)}")
    parser.add_argument(
        "--runs", type=Path, default=None, help="folder of runs (default: $WORKBENCH_RUNS, or runs/ in the checkout)"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, does, help: str, *positional: tuple) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help)
        for argument, how in positional:
            made.add_argument(argument, **how)
        made.add_argument("--runs", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        made.set_defaults(does=does, track="")
        return made

    what = ("what", {"help": "notebook or sweep: a name (gptq, quickstart), or the path of an .ipynb or .yml file"})
    sweep = {"nargs": "?", "help": "a name in notebooks/sweeps, or a .yml file (default: the sweep started last)"}
    planned = command("plan", _plan, "check a notebook or a sweep, and list its runs with their expected time", what)
    planned.add_argument("--force", action="store_true", help="plan finished runs again, too")
    planned.add_argument("--stale", action="store_true", help="plan stale runs again, too")
    run = command("run", _run, "execute a notebook, or the runs of a sweep that are not finished", what)
    resume = command("resume", _resume, "continue a sweep that was interrupted", ("sweep", sweep))
    compressed, fitted = (compress.declare(command, verb) for verb in compress.NOTEBOOKS)
    for one in (compressed, fitted):
        one.set_defaults(does=_compress)
    repeated = repeat.declare(command)
    repeated.set_defaults(does=_repeat, stale=True, gpus=None)
    for one in (compressed, fitted, repeated):
        one.set_defaults(timeout=None, cell_timeout=None, parallel=None, engine="local", slurm=[], address="", trust=[])
    for one in (planned, run, compressed, fitted, repeated):
        one.add_argument(
            "-p",
            "--parameter",
            nargs=2,
            action="append",
            default=[],
            metavar=("NAME", "VALUE"),
            help="a parameter of the notebook, also as NAME=VALUE; `workbench parameters NOTEBOOK` lists them",
        )
    for one in (planned, run, resume):
        one.add_argument(
            "--trust",
            metavar="FOLDER",
            action="append",
            default=[],
            help="allow notebooks and task files of this folder to be executed while a sweep is planned; they are "
            "code ($WORKBENCH_TRUST names folders that are always allowed)",
        )
    for one in (run, compressed, fitted):
        one.add_argument("--force", action="store_true", help="execute finished runs again, too")
    run.add_argument("--timeout", metavar="SECONDS", default=None, help="time limit of each run")
    run.add_argument("--cell-timeout", metavar="SECONDS", default=None, help="time limit of each cell")
    for one in (run, resume, compressed, fitted):
        one.add_argument(
            "--stale", action="store_true", help="execute runs again that were made by other code of the workbench"
        )
        one.add_argument(
            "--gpus", metavar="N", type=int, default=None, help="GPUs of each run; overrides the sweep's `gpus`"
        )
    for one in (run, resume):
        at_once = (
            "how many runs are executed at once on this machine (default: 1), or how many jobs SLURM runs at once "
            "(default: no limit); for Ray, `ray start --num-cpus` sets it. No run computes while another one is timed"
        )
        one.add_argument("--parallel", metavar="N", type=int, default=None, help=at_once)
        one.add_argument(
            "--engine",
            choices=ENGINES,
            default="local",
            help="where runs are executed: on this machine (default), on a Ray cluster, or as jobs of SLURM",
        )
        one.add_argument(
            "--slurm",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="an option of SLURM jobs; overrides the sweep's `slurm`: partition, account, qos, constraint, "
            "time_min (minutes), cpus, memory_gb (GB), exclusive",
        )
        sent = "send the record of each run that finishes to MLflow, by its own settings (MLFLOW_TRACKING_URI)"
        one.add_argument("--track", choices=("mlflow",), default="", help=sent)
        one.add_argument("--address", default="", help="HOST:PORT of the Ray cluster's head (default: this machine)")
    status = command("status", _status, "list finished, running, failed and waiting runs of a sweep", ("sweep", sweep))
    status.add_argument("--lines", action="store_true", help="print the last lines of failed runs, too")
    command(
        "report",
        _report,
        "write pages again from their records",
        ("run", {"nargs": "*", "metavar": "RUN", "help": "key or folder of a run (default: all pages)"}),
    )
    command(
        "parameters",
        _list,
        "list a notebook's parameters",
        ("notebook", {"help": "a name (gptq), or the path of an .ipynb file"}),
    )
    exported = command(
        "export",
        _export,
        "write a saved model in the format of another library, and check it by loading it there",
        (
            "checkpoint",
            {
                "metavar": "CHECKPOINT",
                "type": Path,
                "help": "folder of a model that was saved in the format `workbench`",
            },
        ),
    )
    exported.add_argument("--format", required=True, help="compressed-tensors, gptq, bitsandbytes or gguf")
    exported.add_argument(
        "--to", metavar="FOLDER", type=Path, default=None, help="new folder to write (default: CHECKPOINT-FORMAT)"
    )
    for verb in (score, chat, cost, explain, listing, compare, table, data):
        verb.declare(command)
    return parser


def _seconds(option: str, value: str | float | None) -> float | None:
    """A limit of time, from the command line or from a stored plan; None for no limit.

    Raises:
        ValueError: the value is no positive number of seconds.
    """
    try:
        seconds = None if value is None else float(value)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"`{option}` (={value!r}) must be a number of seconds, such as 3600")
    return int(seconds) if seconds is not None and seconds.is_integer() else seconds


def _runs(options: argparse.Namespace) -> Path:
    from notebooks.batch.status import runs_folder

    return runs_folder(options.runs or "")


def _plan(options: argparse.Namespace) -> int:
    from notebooks.batch.plan import plan

    print(plan(_planned(options), runs=_runs(options), force=options.force, stale=options.stale))
    return 0


def _run(options: argparse.Namespace) -> int:
    return _execute(_planned(options), options)


def _planned(options: argparse.Namespace):
    """The sweep of a command line, or its single run."""
    from eval.tasks.trust import trust
    from notebooks.batch.sweep import is_sweep, read_sweep, single

    trust(options.trust)
    if is_sweep(options.what):
        if options.parameter:
            raise ValueError(f"`-p` gives parameters to a notebook; those of a sweep are written in {options.what}")
        return read_sweep(options.what)
    declared = read_parameters(options.what)
    given = {
        name: parse_value(text, declared[name].type) if name in declared else text for name, text in options.parameter
    }
    given = {name: from_here(name, value) for name, value in given.items()}
    return single(options.what, given)


def _compress(options: argparse.Namespace) -> int:
    from notebooks.batch.job import is_stale
    from notebooks.batch.run_folder import RunFolder
    from notebooks.batch.status import folder_of
    from notebooks.study.identity import packages_code

    options.what, options.parameter = compress.NOTEBOOKS[options.verb], compress.given(options)
    try:
        sweep = _planned(options)
    except ValueError as error:
        raise compress.in_own_words(error) from error
    (planned,), runs = sweep.runs, _runs(options)
    again = options.stale and is_stale(RunFolder(folder_of(planned, runs)).manifest(), packages_code())
    if not (options.force or again):
        compress.take_over(planned, runs)
    status = _execute(sweep, options)
    return status or compress.complete(planned, runs)


def _repeat(options: argparse.Namespace) -> int:
    from eval.record.rows import typed
    from eval.record.schema import read_record
    from notebooks.batch.status import folder_of

    options.what, recorded = repeat.command_of(options.record)
    options.parameter = recorded + options.parameter  # the last value of a name counts
    sweep, runs = _planned(options), _runs(options)
    first, written = read_record(Path(options.record)), folder_of(sweep.runs[0], runs) / "record.json"
    options.force = Path(options.record).resolve() == written.resolve()  # this run is finished, and replaces its record
    if status := _execute(sweep, options):
        return status
    rows = repeat.compared(typed(first), typed(read_record(written)))
    print(repeat.table(rows))
    return repeat.status_of(rows)


def _resume(options: argparse.Namespace) -> int:
    from eval.tasks.trust import trust
    from notebooks.batch.status import kept_sweep, last_sweep, sweep_folder, sweep_name
    from notebooks.batch.sweep import read_sweep

    trust(options.trust)
    runs = _runs(options)
    name = sweep_name(options.sweep or last_sweep(runs))
    kept = kept_sweep(name, runs)
    written = Path(kept["file"])
    options.force, options.timeout, options.cell_timeout = False, kept["timeout_s"], kept["cell_timeout_s"]
    where = written if written.is_file() else sweep_folder(name, runs) / "sweep.yml"
    return _execute(read_sweep(where, name=name, place=written.parent), options)


def _execute(sweep, options: argparse.Namespace) -> int:
    from dataclasses import replace

    from notebooks.batch import pages
    from notebooks.batch.plan import run_sweep
    from notebooks.batch.sweep import with_gpus

    runs = _runs(options)
    limits = {
        "timeout_s": _seconds("--timeout", options.timeout) or sweep.timeout_s,
        "cell_timeout_s": _seconds("--cell-timeout", options.cell_timeout) or sweep.cell_timeout_s,
    }
    sweep = with_gpus(sweep, options.gpus)
    engine = _engine(options, sweep, runs)
    alone = not sweep.source
    again = {"force": bool(options.force), "stale": options.stale, "tracker": options.track}
    found = run_sweep(replace(sweep, **limits), runs=runs, engine=engine, **again)
    unfinished = [one for one in found if one.status == "failed"]
    failed = [one for one in unfinished if one.failure.get("kind") != "interrupt"]
    left = [one for one in found if one.status in ("waiting", "busy", "running")]
    for one in failed:
        print(f"workbench: {one.key} failed: {one.failure['kind']}: {one.failure['error']}", file=sys.stderr)
        for line in one.failure.get("lines", [])[-3:]:
            print(f"    {line}", file=sys.stderr)
        print(f"  see {one.folder}.failed", file=sys.stderr)
    for one in left:
        print(
            f"workbench: {one.key}: {'another process executes it' if one.status == 'busy' else one.status}",
            file=sys.stderr,
        )
    if alone and found[0].status in ("known", "finished"):
        what = _known(found[0].folder) if found[0].status == "known" else f"done in {found[0].seconds:.0f} s"
        print(f"{what}\nreport: {Path(found[0].folder) / 'report.html'}")
    if not alone:
        done, before = (sum(one.status == word for one in found) for word in ("finished", "known"))
        stopped = f"interrupted: {len(unfinished) - len(failed)}, " if len(unfinished) > len(failed) else ""
        print(f"runs done now: {done}, done before: {before}, failed: {len(failed)}, {stopped}left: {len(left)}")
        print(f"comparison: {pages.write_comparison_of_sweep(sweep.name, runs).path}")
    print(f"all runs: {pages.write_index(runs).path}")
    interrupted = len(unfinished) > len(failed) or any(one.status == "waiting" for one in left)
    if interrupted:
        print("workbench: interrupted; the same command continues", file=sys.stderr)
    return 130 if interrupted else int(bool(failed or left))


def _engine(options: argparse.Namespace, sweep, runs: Path):
    """The engine that the options name.

    Raises:
        ValueError: an option belongs to another engine, or the engine cannot be used here.
    """
    from notebooks.batch.engines.local import Local
    from notebooks.batch.engines.ray import Ray
    from notebooks.batch.engines.slurm import Slurm

    for name, given, engine in (("address", options.address, "ray"), ("slurm", options.slurm, "slurm")):
        if given and options.engine != engine:
            raise ValueError(f"`--{name}` (={given}) needs `--engine {engine}`; the engine is {options.engine}")
    if options.engine == "slurm":
        return Slurm(runs, sweep.slurm.changed_by(options.slurm), parallel=options.parallel)
    if options.engine == "local":
        return Local(1 if options.parallel is None else options.parallel)
    if options.parallel is not None:
        raise ValueError(
            f"`--parallel` (={options.parallel}) is for this machine; of Ray, `ray start --num-cpus` says how many"
        )
    return Ray(options.address)


def _known(folder: str) -> str:
    from notebooks.batch.job import is_stale
    from notebooks.batch.run_folder import RunFolder
    from notebooks.study.identity import packages_code

    if is_stale(RunFolder(Path(folder)).manifest(), packages_code()):
        return "finished before, by other code of the workbench (--stale executes it again)"
    return "finished before (--force executes it again)"


def _status(options: argparse.Namespace) -> int:
    from notebooks.batch.status import status

    print(status(options.sweep, runs=_runs(options), lines=options.lines))
    return 0


def _report(options: argparse.Namespace) -> int:
    from notebooks.batch import pages

    for path in pages.write_all(_runs(options), options.run):
        print(path)
    return 0


def _list(options: argparse.Namespace) -> int:
    for p in read_parameters(options.notebook).values():
        print(f"{p.name}: {type_name(p.type)} = {p.default!r}  {p.help}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from notebooks.batch.export import export

    try:
        print(export(options.checkpoint, options.format, options.to))
    except (OSError, RuntimeError) as error:  # the disk is full, or the reader gives another model
        said = str(getattr(error, "strerror", None) or error).replace("`path` (=", "`--to` (=")
        print(f"workbench: {said}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
