"""`workbench`: run a notebook as one batch run, with its parameters checked before a kernel starts; tables of its records.

$ workbench run gptq -p bits 3 -p group_size 128
$ workbench parameters gptq
$ workbench table runs/*/record.json
$ workbench table --update README.md
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from eval.record import read_record
from notebooks.parameters import check_parameters, notebook_path, parse_value, read_parameters
from notebooks.run import ROOT, run_key
from reports.table import markdown, strengths_markdown, updated


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 the notebook failed, 2 the command makes no sense."""
    parser = argparse.ArgumentParser(prog="workbench", description="Run the workbench's notebooks in batch.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="execute a notebook; prints the path of its report")
    run.add_argument("notebook", help="name (gptq) or path")
    run.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    run.add_argument("--timeout", type=int, default=None, help="seconds that a cell may take")
    listing = commands.add_parser("parameters", help="list a notebook's parameters")
    listing.add_argument("notebook")
    table = commands.add_parser("table", help="print the models of records side by side, as Markdown")
    table.add_argument("records", nargs="*", metavar="RECORD.json")
    table.add_argument("--update", metavar="FILE", help="make the tables of a Markdown file anew from the records that it names")
    options = parser.parse_args(arguments)
    try:
        if options.command == "table":
            return _table(options.records, options.update)
        if options.command == "parameters":
            return _list(options.notebook)
        return _run(options.notebook, dict(options.parameter), options.timeout)
    except ValueError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return 2


def _list(notebook: str) -> int:
    for p in read_parameters(notebook).values():
        print(f"{p.name}: {getattr(p.type, '__name__', p.type)} = {p.default!r}  {p.help}")
    return 0


def _table(records: list[str], file: str | None) -> int:
    if bool(records) == bool(file):
        raise ValueError("`table` takes records, or --update with a file that names them")
    if records:
        read = [read_record(path) for path in records]
        print(markdown(read), end="")
        for record in read:
            if record.get("strengths", {}).get("lines"):
                print("\n" + strengths_markdown([record]), end="")
        return 0
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"`--update` (={file!r}) is no file")
    before = path.read_text(encoding="utf-8")
    after = updated(before, lambda name: read_record(path.parent / name))
    if after != before:
        path.write_text(after, encoding="utf-8")
    print(f"{path}: {'tables made anew' if after != before else 'up to date'}")
    return 0


def _run(notebook: str, given: dict[str, str], timeout: int | None) -> int:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    path = notebook_path(notebook)
    declared = read_parameters(path)
    wanted = {name: parse_value(text, declared[name].type) if name in declared else text for name, text in given.items()}
    wanted = {name: _from_here(name, value) for name, value in wanted.items()}
    values = check_parameters(wanted, declared)
    key = run_key(path.stem, values)
    folder = Path(values.get("run_path") or ROOT / "runs" / key).expanduser().absolute()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "record.json").is_file():
        raise ValueError(f"`run_path` (={str(folder)!r}) holds other things than a run, which would take its place; give a new one")
    part = folder.with_name(f".{folder.name}.running")  # takes the folder's place when all is done
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    places = {"run_path": str(part), "work_path": values.get("work_path") or str(folder.with_name(f".{folder.name}.work"))}
    places = {name: place for name, place in places.items() if name in declared}
    print(f"running {path.name} for {folder}", flush=True)
    start = time.monotonic()
    try:
        papermill.execute_notebook(str(path), str(part / "notebook.ipynb"), parameters={**wanted, **places}, cwd=str(ROOT),
                                   execution_timeout=timeout, progress_bar=sys.stderr.isatty(), log_output=False)  # fmt: skip
        failure = None if (part / "report.html").is_file() else "it ended without a report"
    except PapermillExecutionError as error:
        failure = f"{error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    except KeyboardInterrupt:
        failure = "interrupted"
    if failure is not None:
        failed = folder.with_name(f"{folder.name}.failed")
        _promote(part, failed)
        print(f"workbench: {path.name} failed: {failure}\n  see {failed / 'notebook.ipynb'}", file=sys.stderr)
        return 1
    _promote(part, folder)
    if not values.get("work_path"):
        shutil.rmtree(places.get("work_path", part), ignore_errors=True)
    print(f"done in {time.monotonic() - start:.0f} s\nreport: {folder / 'report.html'}")
    return 0


def _from_here(name: str, value: object) -> object:
    """A path that was given relative to where the command was typed, made absolute: the notebook runs in the checkout."""
    if not isinstance(value, str) or not value:
        return value
    path = Path(value).expanduser()
    # os.path.exists: Path.exists raises for a text, such as a list of recipes, that is too long for a file's name
    is_path = name.endswith("_path") or ((path.suffix or "/" in value) and os.path.exists(path))
    return str(path.absolute()) if is_path else value


def _promote(part: Path, folder: Path) -> None:
    """Put `part` in the place of `folder`; what was there goes only when the new one stands."""
    book = part / "notebook.ipynb"
    if book.is_file():  # its links point at where it was written
        book.write_text(book.read_text(encoding="utf-8").replace(str(part), str(folder)), encoding="utf-8")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
