"""Micro-benchmarks of the ops against the strongest baselines on this machine: `python -m kernels.bench`.

Prints a table and, last, one JSON line. Weights are rotated through more memory than the last-level cache holds, and the
contestants are timed in turns; each figure is the median.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.gram import gram
from kernels.int_matmul import int_matmul, pack, to_tiles
from kernels.linear import linear

WEIGHT_BYTES = 128 << 20  # of 16-bit weights that are rotated
SHAPES = ((576, 576), (1536, 576), (576, 1536), (4096, 4096), (14336, 4096))
TOKENS = (1, 4, 16, 64, 256)


def time_in_turns(contestants: dict[str, Callable[[int], object]], weights: int, rounds: int) -> dict[str, float]:
    """Median seconds of one call of each contestant, called with the index of the weight to use."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, call in contestants.items():
            start = time.perf_counter()
            for i in range(weights):
                call(i)
            if turn:  # the first turn warms up
                seconds[name].append((time.perf_counter() - start) / weights)
    return {name: statistics.median(s) for name, s in seconds.items()}


@torch.no_grad()
def bench_int_matmul(out: int, columns: int, tokens: int, rounds: int, group_size: int = 64) -> dict:
    """int_matmul at 4 bits against bfloat16, as torch does it and prepacked."""
    n = max(2, min(64, WEIGHT_BYTES // (2 * out * columns)))
    x = torch.randn(tokens, columns).bfloat16()
    codes = torch.randint(0, 16, (out, columns))
    scale = (torch.rand(out, columns // group_size) * 0.01).bfloat16()
    small = [to_tiles(pack(codes.roll(i, 0), scale, None, bits=4, group_size=group_size), torch.bfloat16) for i in range(n)]
    dense = [torch.randn(out, columns).bfloat16() for _ in range(n)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, tokens) for w in dense]
    took = time_in_turns({
        "int4": lambda i: int_matmul(x, small[i]),
        "bfloat16": lambda i: F.linear(x, dense[i]),
        "bfloat16 prepacked": lambda i: torch.ops.mkldnn._linear_pointwise(x, packed[i], None, "none", [], ""),
    }, n, rounds)  # fmt: skip
    return {"op": "int_matmul", "shape": [out, columns], "tokens": tokens, "seconds": took,
            "speedup": took["bfloat16 prepacked"] / took["int4"]}  # fmt: skip


@torch.no_grad()
def bench_float32(op: str, tokens: int, columns: int, rounds: int) -> dict:
    """gram and linear in float32 against torch's own product."""
    x, W, H = torch.randn(tokens, columns), torch.randn(columns, columns), torch.zeros(columns, columns)
    calls = {
        "gram": {"cpu": lambda i: gram(x, H, impl="cpu"), "torch": lambda i: gram(x, H, impl="reference")},
        "linear": {"cpu": lambda i: linear(x, W, impl="cpu"), "torch": lambda i: F.linear(x, W)},
    }[op]
    took = time_in_turns(calls, 2, rounds)
    return {"op": op, "shape": [columns, columns], "tokens": tokens, "seconds": took, "speedup": took["torch"] / took["cpu"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark the kernels on this machine's CPU.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one small shape, to see that it runs")
    options = parser.parse_args()
    shapes, many = (SHAPES[:1], TOKENS[:2]) if options.quick else (SHAPES, TOKENS)
    rows = []

    def show(row: dict) -> None:
        rows.append(row)
        took = "   ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in row["seconds"].items())
        shape = "x".join(map(str, row["shape"]))
        print(f"{row['op']:<11} {shape:<11} M={row['tokens']:<5} {row['speedup']:.2f}x   {took}", flush=True)

    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; speed-up against the strongest baseline")
    for out, columns in shapes:
        for tokens in many:
            show(bench_int_matmul(out, columns, tokens, options.rounds))
    for op in ("gram", "linear"):
        for columns in [c for _, c in shapes[1:4]] or [576]:
            show(bench_float32(op, 2048, columns, options.rounds))
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
