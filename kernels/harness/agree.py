"""Do two runs of `kernels.harness.validate` agree? `python -m kernels.harness.agree a/record.json b/record.json`.

Every implementation that both runs timed is compared. The exit status is 1 if a time differs by more than `--within`,
or if the runs have no time in common.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kernels.harness.table import name

WITHIN = 0.03  # of the smaller time


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[float, str]]:
    """The relative differences of all pairs of times, with a description of each; largest first.

    If a run has several rows for a contest, the last one counts.
    """
    times = [
        {(name(row), who): (t, row) for row in run["rows"] for who, t in row["seconds"].items() if t}
        for run in (first, second)
    ]
    found = []
    for key in times[0].keys() & times[1].keys():
        (a, here), (b, there) = times[0][key], times[1][key]
        clocks = " / ".join(str(max(row["clocks"])) for row in (here, there) if row.get("clocks"))
        text = f"{' '.join(key)}: {a * 1e6:,.1f} and {b * 1e6:,.1f} us" + (f" at {clocks} MHz" if clocks else "")
        found.append((max(a, b) / min(a, b) - 1, text))
    return sorted(found, key=lambda one: (-one[0], one[1]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.harness.agree", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("records", nargs=2, type=Path, help="two files record.json")
    parser.add_argument("--within", type=float, default=WITHIN, help="largest relative difference that is allowed")
    options = parser.parse_args(arguments)
    found = differences(*(json.loads(path.read_text()) for path in options.records))
    apart = [text for share, text in found if share > options.within]
    print(f"{len(found) - len(apart)} of {len(found)} times agree within {options.within:.1%}")
    print(*apart, sep="\n", end="\n" if apart else "")
    return 1 if apart or not found else 0


if __name__ == "__main__":
    sys.exit(main())
