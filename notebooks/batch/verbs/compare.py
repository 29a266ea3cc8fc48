"""`workbench compare`: runs on one page; of two runs also a verdict, or the answer of a gate, with an exit status."""

import argparse
from pathlib import Path


def declare(command) -> None:
    """The options of `workbench compare`."""
    several = {
        "nargs": "+",
        "metavar": "RUN",
        "help": "a sweep, the key or the folder of a run, the folder of a saved model, or a record",
    }
    parser = command("compare", compare, "compare runs on one page; two runs also get a verdict", ("named", several))
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="page to write")
    parser.add_argument(
        "--recovery-threshold",
        metavar="SHARE",
        type=float,
        default=None,
        help="share of the first run's accuracy that the second run must keep (default: 0.99)",
    )
    parser.add_argument(
        "--allowed-loss",
        metavar="SHARE",
        type=float,
        default=0.05,
        help="loss of accuracy that the smallest recipe may have, with which the page begins (default: 0.05)",
    )
    parser.add_argument(
        "--gate",
        metavar="FILE.yml",
        type=Path,
        default=None,
        help="limits by metric that the second run must keep; exit status 0: all are kept, 1: one is not, or a metric "
        "is missing or not finite in one of the runs, 2: the gate or the runs cannot be read",
    )


def compare(options: argparse.Namespace) -> int:
    """Exit status: 0, or for two runs that of their verdict or gate."""
    from notebooks.batch import pages
    from notebooks.batch.status import runs_folder

    threshold = 0.99 if options.recovery_threshold is None else options.recovery_threshold
    if not 0 < threshold <= 2:
        raise ValueError(f"`--recovery-threshold` (={threshold}) must be a share, such as 0.99")
    gate = _gate(options)
    named = [_record_of(name) for name in options.named]
    names = [Path(name).stem if Path(name).suffix in (".yml", ".json") else name for name in options.named]
    title = " and ".join(names) if len(names) < 3 else f"{len(names)} runs"
    shown = {"page": str(options.output or ""), "title": title, "allowed_loss": options.allowed_loss}
    made = pages.compared(named, runs_folder(options.runs or ""), **shown)
    count, status = len(made.outcomes), 0
    for option, given in (("--recovery-threshold", options.recovery_threshold), ("--gate", options.gate)):
        if given is not None and count != 2:
            raise ValueError(f"`{option}` (={given}) is for two runs; these are {count}")
    if gate is not None:
        answer = gate.of(*(pages.finished(one) for one in made.outcomes))
        print(answer)
        status = answer.exit_code
    elif count == 2 and (len(options.named) == 2 or options.recovery_threshold is not None):
        verdict = pages.verdict_of(made.outcomes, threshold)
        print(verdict.text)
        status = verdict.exit_code
    else:
        print(made.leaderboard.markdown(), end="")
    print(f"page: {made.write().path}")
    return status


def _gate(options: argparse.Namespace):
    """The gate that `--gate` names; None without it."""
    import yaml

    from notebooks.batch.sweep.loader import Loader
    from reports.compare.gate import gate_of

    if options.gate is None:
        return None
    if options.recovery_threshold is not None:
        raise ValueError("`--gate` and `--recovery-threshold` both decide the exit status; give one of them")
    try:
        content = yaml.load(options.gate.read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise ValueError(f"`--gate` (={str(options.gate)!r}) cannot be read: {said}") from error
    return gate_of(content, str(options.gate))


def _record_of(name: str) -> str:
    """The record beside a saved model, if this is the folder of one; else the name itself."""
    folder = Path(name).expanduser()
    of_model = (folder / "record.json").is_file() and not (folder / "notebook.ipynb").is_file()
    return str(folder / "record.json") if of_model else name
