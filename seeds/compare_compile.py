"""Speed measured block by block against speed measured with the whole model compiled: the same models, in turns.

    python seeds/compare_compile.py [--out table.json]

`eval.speed.regional` compiles one block of a model and calls it for every layer. Until November 2026 the whole pass was
compiled, its weights frozen into the graph, which took a minute for each model; that way lives on in this script alone.
Both prepare the embedded model in 16 bits, in 4 bits, in 8 bits with 8-bit activations, and pruned; then every model is
timed in turns, one way after the other. The table shows medians over the rounds, and the ratio of the new way to the
old (below 1: slower).
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config

from compress import METHODS, apply, calibration, load_model
from eval.machine.hardware import hardware
from eval.speed.device_lock import undisturbed
from eval.speed.speed import Variant, _round, _step, contestants, make, make_ready

FRESH = tempfile.mkdtemp(prefix="compare-compile-")


def whole(variant: Variant, prompt_tokens: int, new_tokens: int) -> None:
    """Compile the whole pass over the prompt and the whole step, with frozen weights."""
    make_ready(variant, make(variant), prompt_tokens, new_tokens)
    eager = _step(variant.model, variant.cache)

    def step(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return eager(tokens, positions)

    step.__code__ = step.__code__.replace()  # of its own: torch.compile looks graphs up by the code
    variant.step = torch.compile(step, fullgraph=True, dynamic=False)
    with inductor_config.patch(freezing=True):
        _round(variant, prompt_tokens, 2)


def by_block(variant: Variant, prompt_tokens: int, new_tokens: int) -> None:
    """Like `measure_speed`, but without compiled code of earlier runs."""
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(FRESH)}):
        make_ready(variant, make(variant), prompt_tokens, new_tokens)
    assert not variant.execution.startswith("eager"), variant.execution


def prepared(way: Callable, model: torch.nn.Module, arguments: argparse.Namespace) -> tuple[Variant, float]:
    """A variant prepared for timing, and the seconds of the preparation."""
    variant = contestants({"baseline": model}, compiled=way is by_block)["baseline"]
    start = time.perf_counter()
    way(variant, arguments.prompt, arguments.new)
    return variant, time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens decoded after it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipes", default="baseline,int4,int8,pruned", help="which models, apart by commas")
    parser.add_argument("--layers", type=int, default=0, help="number of blocks, for a quick look; 0: all")
    parser.add_argument("--out", help="a file for the JSON line")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    if arguments.layers:
        model.model.layers = model.model.layers[: arguments.layers]
        model.config.num_hidden_layers = arguments.layers
    batches = calibration(tokenizer, samples=4, seqlen=256)
    recipes = {
        "baseline": [],
        "int4": [METHODS["rtn"](bits=4, group_size=64)],
        "int8": [METHODS["int8"]()],
        "pruned": [METHODS["magnitude"](ratio=0.5)],
    }
    ready: dict[tuple[str, str], tuple[Variant, float]] = {}
    for name in arguments.recipes.split(","):
        one = apply(recipes[name], copy.deepcopy(model), batches).model if recipes[name] else model
        for way, prepare in (("by block", by_block), ("whole", whole)):
            ready[name, way] = prepared(prepare, one, arguments)
            print(f"{name}, {way}: ready after {ready[name, way][1]:.1f} s", flush=True)
    prefill: dict = {key: [] for key in ready}
    decode: dict = {key: [] for key in ready}
    with undisturbed("cpu"), torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        for _ in range(arguments.rounds):
            for key, (variant, _) in ready.items():
                first, later = _round(variant, arguments.prompt, arguments.new)
                prefill[key].append(first)
                decode[key].append(statistics.median(later))
    rows = []
    for name in arguments.recipes.split(","):
        new, old = (name, "by block"), (name, "whole")
        row = {"model": name, "prepare_s": [round(ready[key][1], 1) for key in (new, old)]}
        for metric, values, count in (("prefill", prefill, arguments.prompt), ("decode", decode, 1)):
            speeds = [count / statistics.median(values[key]) for key in (new, old)]
            paired = [b / a for a, b in zip(values[new], values[old], strict=True)]
            row |= {f"{metric}_tokens_per_s": [round(s, 1) for s in speeds]}
            row |= {f"{metric}_ratio": round(statistics.median(paired), 3)}
        rows.append(row)
    print(f"{'':10} {'prepare, s':>16} {'prefill, tokens/s':>26} {'decode, tokens/s':>24}")
    for row in rows:
        cells = [f"{row['model']:10} {row['prepare_s'][0]:6.1f} ({row['prepare_s'][1]:6.1f})"]
        for metric in ("prefill", "decode"):
            new, old = row[f"{metric}_tokens_per_s"]
            cells.append(f"{new:8.1f} ({old:8.1f}) {row[f'{metric}_ratio']:.3f}x")
        print("  ".join(cells))
    settings = vars(arguments) | {"threads": torch.get_num_threads(), "torch": torch.__version__}
    line = json.dumps({"settings": settings, "hardware": hardware(), "rows": rows}, default=str)
    print(line)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
