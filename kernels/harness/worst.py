"""Calls the slowest product of some runs of `kernels.harness.validate`, for a profiler.

`ncu --profile-from-start off python -m kernels.harness.worst DIR...` looks into the record.json of each folder for the
timed row with the smallest speed-up, makes its contest again, and calls ours once between `cudaProfilerStart` and
`cudaProfilerStop`, after calls that compile it. The exit status is 1 if no row was timed.
"""

import argparse
import json
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels.harness.table import name
from kernels.harness.timing import settle
from kernels.harness.trial import row_of
from kernels.harness.validate import asked_sizes
from kernels.support.declarations import Contest

CALLS = 3  # calls before the one that is profiled


def worst_row(records: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The timed row with the smallest speed-up over the strongest baseline, and the `run` of its record."""
    timed = [(row, record["run"]) for record in records for row in record["rows"] if row["status"] == "timed"]
    return min((one for one in timed if one[0]["speedup"]), key=lambda one: one[0]["speedup"], default=None)


def contest_of(row: dict[str, Any], run: dict[str, Any]) -> Contest:
    """The contest of a row again, without other libraries' kernels."""
    asked = replace(asked_sizes(Namespace(**run)), rivals=False)
    made = import_module(f"kernels.{row['op']}.cases").contests(torch.device(run["device"]), run["toy"], asked)
    return next(contest for contest in made if name(row_of(contest, "")) == name(row))


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.harness.worst", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs")
    files = [folder / "record.json" for folder in parser.parse_args(arguments).folders]
    found = worst_row([json.loads(file.read_text()) for file in files if file.is_file()])
    if found is None:
        print("no row was timed", flush=True)
        return 1
    print(f"{name(found[0])}: {found[0]['speedup']:.2f}x over {found[0]['baseline']}", flush=True)
    contest = contest_of(*found)
    call = contest.contestants[contest.ours]
    for _ in range(CALLS):
        call(0)
    device = torch.device(found[1]["device"])
    settle(device)
    with torch.cuda.profiler.profile() if device.type == "cuda" else nullcontext():
        call(contest.copies - 1)
    settle(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
