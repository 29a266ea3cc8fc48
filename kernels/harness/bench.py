"""Micro-benchmarks of the ops against the strongest baselines on this machine's CPU: `python -m kernels.harness.bench`.

Prints a table and, last, one JSON line. It times the contests that the ops declare in their cases.py: weights are
rotated through more memory than the last-level cache holds, and the contestants are timed in turns; each figure is the
median. A contestant whose output is wrong at the shape to be timed is not timed, and the exit status is 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module

import torch
import torch.nn.functional as F

from kernels.harness.roofline import measure as ceilings_of
from kernels.harness.table import rows_table
from kernels.harness.trial import bare_row, measure, sentence
from kernels.linear import linear
from kernels.support import declarations
from kernels.support.declarations import OWN, Contest
from kernels.support.errors import kind_and_first_line

CPU = torch.device("cpu")
CPU_OPS = ("linear", "prompt_attention")  # not in kernels.support.declarations: CPUs alone have them


def linear_contest(tokens: int, columns: int) -> Contest:
    """float32 products compared with torch's own."""
    x, W = torch.randn(tokens, columns), torch.randn(columns, columns)
    calls = {"cpu": lambda i: linear(x, W, impl="cpu"), "torch": lambda i: F.linear(x, W)}
    least, flops = 4 * (2 * tokens * columns + columns * columns), 2 * tokens * columns * columns
    return Contest("linear", "float32", (columns, columns), tokens, calls, 2, "cpu", "torch", least, flops, "float32")


def contests_of(op: str, quick: bool) -> Iterator[Contest]:
    """The contests that the op declares for a CPU."""
    if op == "linear":
        yield from (linear_contest(2048, columns) for columns in ((576,) if quick else (576, 1536, 4096)))
    else:
        yield from import_module(f"kernels.{op}.cases").contests(CPU, quick, OWN)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    every = (*declarations.OPS, *CPU_OPS)
    parser = argparse.ArgumentParser(
        prog="python -m kernels.harness.bench", description="Benchmark the kernels on this machine's CPU."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="use small shapes, only to see that everything runs")
    parser.add_argument("--ops", default=",".join(every), help="ops to run, separated by commas")
    options = parser.parse_args(arguments)
    ops = [op for op in options.ops.split(",") if op]
    if unknown := [op for op in ops if op not in every]:
        parser.error(f"`--ops` (={', '.join(unknown)}) must be among {', '.join(every)}")
    print(
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; speed-up against the baseline"
    )
    ceilings = ceilings_of(CPU, toy=options.quick)
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in ceilings.rates.items())
    print(f"ceilings: memory {ceilings.bandwidth / 1e9:.1f} GB/s; products, in G operations/s: {rates}")
    rows = []
    for op in ops:
        try:
            for contest in contests_of(op, options.quick):
                rows.append(measure(contest, CPU, ceilings, rounds=options.rounds))
                print(sentence(rows[-1]), flush=True)
        except Exception as error:  # the other ops still run; the exit status reports the failure
            rows.append(bare_row(op, f"error: {kind_and_first_line(error)}"))
            print(sentence(rows[-1]), flush=True)
    print(f"\n{rows_table(rows)}")
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "bandwidth": ceilings.bandwidth,
                "rates": ceilings.rates,
                "rows": rows,
            }
        )
    )
    return 1 if any(row["status"].startswith("error") or row["unsound"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
