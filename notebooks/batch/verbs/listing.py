"""`workbench list`: the runs of a folder with what they measured; `--delete` removes those that are listed."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

STATES = ("finished", "stale", "failed", "damaged", "running")
_WIDE = 60  # characters of a recipe, where the output is a terminal


def declare(command) -> None:
    """The options of `workbench list`."""
    words = {
        "nargs": "*",
        "metavar": "TEXT",
        "help": "list only runs whose key, notebook, model or recipe holds each of these texts",
    }
    parser = command(
        "list", listing, "list runs with recipe, KL, bytes, speed, age and state; or delete them", ("text", words)
    )
    parser.add_argument(
        "--state", choices=STATES, action="append", default=[], help="list only runs of this state; may be given again"
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete the listed runs, after a question; never one that is running"
    )
    parser.add_argument("--yes", action="store_true", help="delete without a question")


def listing(options: argparse.Namespace) -> int:
    """List the runs, or delete them. Exit status 1: nothing was deleted, or not everything."""
    from notebooks.batch.pages import index_rows
    from notebooks.batch.status import aligned, runs_folder

    folder = runs_folder(options.runs or "")
    if options.delete and not (options.text or options.state):
        raise ValueError("`--delete` needs a text or a --state, so that it does not stand for all runs")
    if options.yes and not options.delete:
        raise ValueError("`--yes` belongs to --delete")
    rows = index_rows(folder) if folder.is_dir() else []
    chosen = [row for row in rows if _is_listed(row, options.text, options.state)]
    if not chosen:
        among = f" of the {len(rows)} there" if rows else "; `workbench run NOTEBOOK` starts one"
        print(f"no run in {folder} is listed{among}")
        return int(options.delete)
    chosen.sort(key=lambda row: _age(row, folder))
    head = ("run", "recipe", "state", "KL", "MB", "tokens/s", "age")
    print(aligned([head, *(_cells(row, folder) for row in chosen)]))
    return _delete([row.key for row in chosen], folder, options.yes) if options.delete else 0


def _is_listed(row, texts: Sequence[str], states: Sequence[str]) -> bool:
    """Whether a row holds all of these texts, and has one of these states; a stale run is finished, too."""
    there = " ".join((row.key, row.notebook, row.model, row.recipe)).lower()
    own = {row.status.partition(" ")[0]} | ({"stale"} if row.stale else set())
    return all(text.lower() in there for text in texts) and (not states or bool(own & set(states)))


def _cells(row, folder: Path) -> tuple[str, ...]:
    from notebooks.batch.status import duration

    recipe = row.recipe or row.notebook
    if sys.stdout.isatty() and len(recipe) > _WIDE:
        recipe = f"{recipe[:_WIDE]}…"
    state = "stale" if row.stale else row.status + (f": {row.failure}" if row.failure else "")
    size = None if row.stored_bytes is None else row.stored_bytes / 1e6
    numbers = ((row.kl, "{:.4f}"), (size, "{:,.1f}"), (row.decode, "{:,.0f}"))
    shown = ("" if value is None else form.format(value) for value, form in numbers)
    age = _age(row, folder)
    return row.key, recipe, state, *shown, duration(age) if age < 86400 else f"{age / 86400:.0f} days"


def _age(row, folder: Path) -> float:
    """Seconds since a run was started, or, without a record, since its folders have changed."""
    try:
        begun = datetime.fromisoformat(row.started).replace(tzinfo=UTC)
    except ValueError:
        begun = datetime.fromtimestamp(_changed(row.key, folder), UTC)
    return max(0.0, (datetime.now(UTC) - begun).total_seconds())


def _changed(key: str, folder: Path) -> float:
    from notebooks.batch.run_folder import RunFolder

    places = RunFolder(folder / key)
    return max((path.stat().st_mtime for path in (*places.everything(), places.lease) if path.exists()), default=0.0)


def _delete(keys: Sequence[str], folder: Path, sure: bool) -> int:
    """Delete runs after a question that names what goes; those that an attempt works on stay, and what is no run."""
    from notebooks.batch.leases import held
    from notebooks.batch.pages import write_index
    from notebooks.batch.run_folder import RunFolder

    places = [RunFolder(folder / key, key) for key in keys]
    staying = {place.folder.name: "running" for place in places if held(place.lease)}
    staying |= {place.folder.name: "no run: it has no notebook" for place in places if not place.holds_run()}
    going = [place for place in places if place.folder.name not in staying]
    for key, why in staying.items():
        print(f"workbench: {key} is {why}, and stays", file=sys.stderr)
    if not going:
        return 1
    print(f"\nThis deletes {len(going)} run{'s' * (len(going) != 1)} with their notebooks, records and pages:")
    for place in going:
        for path in place.everything():
            print(f"  {path}  {_bytes(path) / 1e6:,.1f} MB")
        if saved := place.manifest().get("values", {}).get("save_path"):
            print(f"  (its model in {saved} stays)")
    if not sure and not _agreed():
        print("workbench: nothing was deleted", file=sys.stderr)
        return 1
    deleted = [place for place in going if _remove(place)]
    print(f"deleted: {len(deleted)} of {len(keys)}; all runs: {write_index(folder).path}")
    return int(len(deleted) < len(keys))


def _agreed() -> bool:
    """The answer to the question.

    Raises:
        ValueError: there is nobody to answer.
    """
    if not sys.stdin.isatty():
        raise ValueError("`--delete` asks before it deletes, and there is no terminal to answer; --yes answers")
    return input("Delete? [y/N] ").strip().lower() in ("y", "yes")


def _remove(place) -> bool:
    """Remove a run, by the holder of its lease; False if another process works on it by now."""
    from notebooks.batch.leases import take
    from notebooks.batch.processes import mark

    lease = take(place.lease, mark(place.folder.parent, place.key))
    if lease is None:
        print(f"workbench: {place.key} is running by now, and stays", file=sys.stderr)
        return False
    try:
        for path in place.everything():
            shutil.rmtree(path)
    except OSError as error:
        print(f"workbench: {place.key} cannot be deleted: {error.strerror}: {error.filename}", file=sys.stderr)
        return False
    finally:
        lease.release()
    return True


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
