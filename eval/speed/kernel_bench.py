"""Runs `kernels.harness.validate` for a notebook, in its own process and with a progress bar."""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from eval.record.html import html_table
from eval.speed.device_lock import undisturbed
from kernels.harness.table import rows_table
from kernels.interpreter import installed, interpreting
from kernels.support.declarations import OPS

DTYPES = ("bfloat16", "float16", "float32")
LEAST_BUDGET = 20.0  # seconds; a smaller budget is enough for the ceilings only


@dataclass(frozen=True)
class KernelPlan:
    """The planned benchmark, with a representation for Jupyter.

    ops:    names of ops.
    shapes: (out, in) of the weights; empty: each op's own.
    tokens: rows of x; empty: each op's own.
    dtype:  of the activations.
    device: "cuda" or "cpu".
    budget: seconds for everything.
    toy:    tiny shapes, to test that it runs.
    """

    ops: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    dtype: str
    device: str
    budget: float
    toy: bool

    def _repr_html_(self) -> str:
        shapes = ", ".join(f"{out} × {columns}" for out, columns in self.shapes) or "each op's own"
        tokens = ", ".join(map(str, self.tokens)) or "each op's own"
        rows = {
            "ops": ", ".join(self.ops),
            "shapes": shapes,
            "tokens": tokens,
            "dtype": self.dtype,
            "device": self.device,
            "budget": f"{self.budget:.0f} s{', toy sizes' if self.toy else ''}",
        }
        return html_table((), rows.items())


@dataclass(frozen=True)
class KernelBench:
    """The results: the record of `kernels.harness.validate`, whose docstring has its shape."""

    plan: KernelPlan
    found: dict[str, Any]

    def _repr_html_(self) -> str:
        summary = self.found["summary"]
        return (
            f"<p>{summary['checks'] - summary['red']} of {summary['checks']} checks passed; "
            f"{summary['timed']} of {summary['contests']} contests "
            f"timed.</p><pre>{escape(rows_table(self.found['rows']))}</pre>"
        )


def plan_kernels(
    *,
    ops: str = "",
    shapes: str = "",
    tokens: int | str = "",
    dtype: str = "bfloat16",
    device: str = "auto",
    budget: float = 540,
    toy: bool = False,
) -> KernelPlan:
    """Read a notebook's parameters.

    Args:
        ops: names separated by commas; empty: all.
        shapes: of weights, out x in, such as "4096x4096, 14336x4096"; empty: each op's own.
        tokens: numbers of tokens, such as "1, 16, 256", or one (papermill reads `-p tokens 3` as an int); empty: each
            op's own.
        device: "cuda", "cpu", or "auto" for a GPU if there is one.
        budget: seconds.

    Raises:
        ValueError: an invalid value; the message names the parameter and the valid values.
    """
    names = tuple(_parts(ops)) or OPS
    for name in names:
        if name not in OPS:
            raise ValueError(f"`ops` (={ops!r}) must be among {', '.join(OPS)}")
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"`device` (={device!r}) must be 'auto', 'cuda' or 'cpu'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`device` (='cuda') needs a GPU that torch can see; 'cpu' works")
    if device == "cuda" and not installed():
        raise ValueError("`device` (='cuda') needs triton: pip install triton")
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` (={dtype!r}) must be one of {', '.join(DTYPES)}")
    if not LEAST_BUDGET <= budget < math.inf:
        raise ValueError(f"`budget` (={budget:g}) must be at least {LEAST_BUDGET:.0f} seconds, and finite")
    sizes = []
    for part in _parts(shapes):
        match = re.fullmatch(r"(\d+) ?[x×] ?(\d+)", part)
        if not match or min(map(int, match.groups())) < 1:
            raise ValueError(f"`shapes` (={shapes!r}) must look like '4096x4096, 14336x4096': out x in")
        sizes.append((int(match[1]), int(match[2])))
    counts = _parts(str(tokens))
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise ValueError(f"`tokens` (={tokens!r}) must be positive numbers such as '1, 16, 256'")
    return KernelPlan(names, tuple(sizes), tuple(map(int, counts)), dtype, device, float(budget), toy)


def bench_kernels(plan: KernelPlan, folder: str | Path) -> KernelBench:
    """Check every op, then time it, and write all results to `folder`.

    Raises:
        RuntimeError: the benchmark ended without a record.
    """
    folder = Path(folder)
    ends = [folder / "record.json", folder / "table.txt"]  # the table is written last
    for old in ends:
        old.unlink(missing_ok=True)  # results of an earlier run must not be taken for this one's
    command = [sys.executable, "-m", "kernels.harness.validate", "--device", plan.device, "--budget", str(plan.budget)]
    command += ["--out", str(folder), "--ops", ",".join(plan.ops), "--dtype", plan.dtype]
    command += ["--shapes", ",".join(f"{out}x{columns}" for out, columns in plan.shapes)] if plan.shapes else []
    command += ["--tokens", ",".join(map(str, plan.tokens))] if plan.tokens else []
    command += ["--toy"] if plan.toy else []
    said: list[str] = []
    with undisturbed(plan.device):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2]
        )
        try:
            for line in _with_progress(process, plan.budget):
                said.append(line)
        finally:
            if process.poll() is None:  # the notebook was interrupted
                process.terminate()
            code = process.wait()
    if code not in (0, 1) or not all(end.is_file() for end in ends):  # 1: a check is red, see the record
        raise RuntimeError(f"the benchmark ended with status {code}: {said[-1] if said else 'it printed nothing'}")
    return KernelBench(plan, json.loads((folder / "record.json").read_text()))


def _with_progress(process: subprocess.Popen, budget: float) -> Iterator[str]:
    began = time.monotonic()
    interpreted = " (interpreter)" if interpreting() else ""
    with tqdm(total=round(budget), unit="s", desc=f"kernels{interpreted}", leave=False) as bar:
        assert process.stdout is not None
        for line in process.stdout:
            bar.n = min(round(time.monotonic() - began), bar.total)
            bar.set_postfix_str(line.strip()[:60])
            yield line.rstrip()


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
