"""Time and memory of GPTQ by the width of the model: one Llama-shaped block of random weights at each hidden size.

$ python seeds/gptq_scaling.py --write reports/published

prints a markdown table and a JSON line, and writes `gptq-scaling.md` with the table and `gptq-scaling.svg`, its figure.
Each size runs in a process of its own, so that its peak memory is its own.

$ python seeds/gptq_scaling.py --linear 4096 14336

prints the seconds of one linear [out, in]: its factorisation, and its solving.
"""

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from transformers import LlamaConfig, LlamaForCausalLM

import compress.walk.statistics as statistics
import compress.walk.walk as walk
import compress.weights.gptq as gptq
from compress import METHODS, apply
from eval.machine.hardware import hardware
from eval.run_record import provenance

SHAPES = {576: (1536, 9, 3), 1024: (2816, 16, 4), 2048: (5632, 32, 8), 4096: (14336, 32, 8)}  # MLP, heads, kv heads
PHASES = ("the block itself", "Gram matrices", "factorisation", "solving", "errors for the record")
BITS_AND_GROUP = {"bits": 4, "group_size": 64}


def one_block(hidden: int, intermediate: int, heads: int, kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config).eval()


def measure(hidden: int, samples: int, seqlen: int) -> dict[str, float]:
    """Seconds of each phase and MB of memory for GPTQ of one block, in this process."""
    torch.manual_seed(0)
    batches = [torch.randint(1000, (1, seqlen)) for _ in range(samples)]
    apply([METHODS["gptq"](**BITS_AND_GROUP)], one_block(64, 128, 2, 2), batches[:1])  # loads the kernels
    model = one_block(hidden, *SHAPES[hidden])
    weights = sum(p.nbytes for p in model.model.layers.parameters()) / 1e6
    seconds: defaultdict[str, float] = defaultdict(float)

    def timed(phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[phase] += time.perf_counter() - start

        return call

    statistics.gram = timed("Gram matrices", statistics.gram)
    gptq.factorise = timed("factorisation", gptq.factorise)
    gptq.gptq = timed("solving", gptq.gptq)
    walk._energy = timed("errors for the record", walk._energy)
    gptq.GPTQ.peer = timed("errors for the record", gptq.GPTQ.peer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    start = time.perf_counter()
    apply([METHODS["gptq"](**BITS_AND_GROUP)], model, batches)
    total = time.perf_counter() - start
    seconds["the block itself"] = total - sum(seconds.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {**seconds, "total": total, "peak MB": peak - before, "hidden": hidden, "weights MB": weights}


def measure_linear(out: int, columns: int) -> dict[str, float]:
    """Seconds for one weight [out, columns] with the Gram matrix of 2,048 tokens whose channels differ in size."""
    torch.manual_seed(0)
    W, x = torch.randn(out, columns) / 50, torch.randn(2048, columns) * (torch.rand(columns) * 3)
    H = x.t() @ x * (2 / len(x))
    begin = time.perf_counter()
    factor = gptq.factorise(H, 0.01, gptq.column_order(H.diagonal(), "group", BITS_AND_GROUP["group_size"]))
    middle = time.perf_counter()
    gptq.gptq(W, factor, **BITS_AND_GROUP)
    end = time.perf_counter()
    return {"factorisation": middle - begin, "solving": end - middle, "total": end - begin}


def table(rows: list[dict[str, float]]) -> str:
    heads = ["hidden size", "MLP", "parameters, M", *(f"{phase}, s" for phase in PHASES), "together, s", "memory, MB"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---:' for _ in heads)} |"]
    for row in rows:
        hidden = int(row["hidden"])
        parameters = (2 * hidden + 2 * hidden * SHAPES[hidden][2] // SHAPES[hidden][1]) * hidden
        parameters = (parameters + 3 * hidden * SHAPES[hidden][0]) / 1e6
        seconds = [f"{row[phase]:.2f}" for phase in (*PHASES, "total")]
        cells = [f"{hidden:,}", f"{SHAPES[hidden][0]:,}", f"{parameters:.1f}", *seconds, f"{row['peak MB']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Seconds of each phase, and memory, against the hidden size; both axes logarithmic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    sizes = [row["hidden"] for row in rows]
    for phase in PHASES:
        left.plot(sizes, [row[phase] for row in rows], "o-", label=phase)
    right.plot(sizes, [row["peak MB"] for row in rows], "o-", color="tab:red", label="GPTQ of one block")
    right.plot(sizes, [row["weights MB"] for row in rows], "o--", color="tab:gray", label="the block's own weights")
    for axes, label in ((left, "seconds per block"), (right, "MB beyond the model")):
        axes.set(xscale="log", yscale="log", xlabel="hidden size", ylabel=label, xticks=sizes)
        axes.set_xticklabels([f"{size:,.0f}" for size in sizes])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--write", type=Path, help="folder for the table and the figure")
    parser.add_argument("--only", type=int, help="measure this hidden size in this process, and print JSON")
    parser.add_argument("--linear", type=int, nargs=2, metavar=("OUT", "IN"), help="measure one linear of this shape")
    given = parser.parse_args()
    if given.linear:
        print(json.dumps(measure_linear(*given.linear)))
        return
    if given.only:
        print(json.dumps(measure(given.only, given.samples, given.seqlen)))
        return
    rows = []
    for hidden in SHAPES:
        again = ["--samples", str(given.samples), "--seqlen", str(given.seqlen), "--only", str(hidden)]
        done = subprocess.run([sys.executable, __file__, *again], stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"hidden size {hidden}: {rows[-1]['total']:.1f} s", file=sys.stderr, flush=True)
    print(table(rows))
    about = provenance(" ".join(sys.argv), "cpu", "float32", "float32")
    print(json.dumps({"rows": rows, "provenance": about}, default=str))
    if given.write:
        note = (
            "# GPTQ by the width of the model\n\nOne Llama-shaped block of random weights, "
            f"`gptq(bits=4, group_size=64)` on {given.samples} x {given.seqlen} tokens in float32, "
            f"{torch.get_num_threads()} threads of {hardware()['cpu']}. Memory is what the process took beyond the "
            "model and the libraries. Command: `python seeds/gptq_scaling.py --write reports/published`; "
            f"[figure](gptq-scaling.svg).\n\n{table(rows)}\n"
        )
        (given.write / "gptq-scaling.md").write_text(note)
        draw(rows, given.write / "gptq-scaling.svg")


if __name__ == "__main__":
    main()
