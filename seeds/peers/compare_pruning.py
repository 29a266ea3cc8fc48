"""Wanda and SparseGPT beside llm-compressor: which weights go, and what the pruned models give.

$ .venv/bin/python seeds/peers/compare_pruning.py prepare /tmp/peers/prune
$ .venv/bin/python seeds/peers/compare_pruning.py ours /tmp/peers/prune
$ /tmp/peers/llmc/bin/python seeds/peers/compare_pruning.py llmcompressor /tmp/peers/prune
$ .venv/bin/python seeds/peers/compare_pruning.py table /tmp/peers/prune

`--cases`, `--samples` and `--windows` make it shorter. Both tools prune all linears of a block on the inputs that they
have in the unpruned block, and pass on the outputs of the pruned one. So the inputs of the first block are the same in
both tools, and its masks can be compared one to one; later blocks of each tool read the outputs of its own pruned ones.
It prunes 50 % anywhere and 2:4 on 32 x 512 tokens of C4; the published figures are with `--samples 16 --windows 10
--cases "wanda 50 %" "sparsegpt 50 %"`.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from compare_gptq import keep, one_shot
from compare_gptq import prepare as prepare_model
from safetensors.torch import load_file

WINDOW = 2048
# name: (our recipe, the peer's modifier, its knobs)
CASES: dict[str, tuple[str, str, dict]] = {
    "wanda 50 %": ("wanda(ratio=0.5, sequential=False)", "WandaPruningModifier", {"sparsity": 0.5}),
    "wanda 2:4": (
        "wanda(pattern='2:4', sequential=False)",
        "WandaPruningModifier",
        {"sparsity": 0.5, "mask_structure": "2:4"},
    ),
    "sparsegpt 50 %": (
        "sparsegpt(ratio=0.5, sequential=False)",
        "SparseGPTModifier",
        {"sparsity": 0.5, "dampening_frac": 0.01},
    ),
    "sparsegpt 2:4": (
        "sparsegpt(pattern='2:4', sequential=False)",
        "SparseGPTModifier",
        {"sparsity": 0.5, "mask_structure": "2:4", "dampening_frac": 0.01},
    ),
}  # fmt: skip


def prepare(folder: Path, options: argparse.Namespace) -> None:
    prepare_model(folder)


def ours(folder: Path, options: argparse.Namespace) -> None:
    from compress import apply, load_model
    from compress.linear import compressed_linears
    from compress.recipe import parse_recipe

    for case in options.cases:
        model, _ = load_model(str(folder / "model"))
        batches = list(torch.load(folder / "calibration.pt")[: options.samples, None])
        result = apply(parse_recipe(CASES[case][0]), model, batches)
        keep(
            folder,
            f"ours {case}",
            result.seconds,
            {n: m.dequantize() for n, m in compressed_linears(result.model).items()},
        )


def llmcompressor(folder: Path, options: argparse.Namespace) -> None:
    from llmcompressor.modifiers import pruning
    from transformers import AutoModelForCausalLM

    for case in options.cases:
        _, modifier, knobs = CASES[case]
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        recipe = getattr(pruning, modifier)(targets=["Linear"], ignore=["re:.*lm_head"], **knobs)
        seconds = one_shot(model, recipe, torch.load(folder / "calibration.pt")[: options.samples])
        linears = {n: m.weight.detach().float() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        keep(folder, f"llmcompressor {case}", seconds, {n: w for n, w in linears.items() if "lm_head" not in n})


def table(folder: Path, options: argparse.Namespace) -> None:
    """Equal places of the masks, in the first block and in all; perplexity of both, window by window."""
    from compress import held_out, load_model
    from compress.inputs.calibration import beginning
    from eval.text.perplexity import perplexity

    model, tokenizer = load_model(str(folder / "model"))
    ids, rows = held_out(tokenizer, corpus="wikitext2"), []
    for case in options.cases:
        files = [folder / f"{tool} {case}.safetensors" for tool in ("llmcompressor", "ours")]
        if not all(file.is_file() for file in files):
            continue
        both = [load_file(file) for file in files]
        assert both[0].keys() == both[1].keys()
        places = [0, 0], [0, 0]
        for name in both[0]:
            same = ((both[0][name] == 0) == (both[1][name] == 0)).sum().item()
            for counted in (places[0],) * (".layers.0." in name) + (places[1],):
                counted[0], counted[1] = counted[0] + same, counted[1] + both[0][name].numel()
        found = []
        for weights in both:
            for name, W in weights.items():
                model.get_submodule(name).weight.copy_(W)
            found.append(perplexity(model, ids, window=WINDOW, limit=options.windows, beginning=beginning(tokenizer)))
        zeros = [sum((W == 0).sum().item() for W in weights.values()) / places[1][1] for weights in both]
        seconds = [
            json.loads((folder / f"{tool} {case}.json").read_text())["seconds"] for tool in ("llmcompressor", "ours")
        ]
        a, b = (torch.tensor(p.sums, dtype=torch.float64) / torch.tensor(p.counts) for p in found)
        ratio = found[1].value / found[0].value
        stderr = ratio * (b - a).std().item() / math.sqrt(len(a))
        rows.append(
            {
                "case": case,
                "samples": options.samples,
                "windows": len(a),
                "masks_equal_first_block": places[0][0] / places[0][1],
                "masks_equal": places[1][0] / places[1][1],
                "zeros": zeros,
                "seconds": seconds,
                "perplexity": [p.value for p in found],
                "ratio": ratio,
                "ratio_stderr": stderr,
            }
        )
        print(
            f"{case:<16} masks equal: first block {100 * rows[-1]['masks_equal_first_block']:.3f} %, all "
            f"{100 * rows[-1]['masks_equal']:.3f} %   perplexity {found[0].value:.3f} and {found[1].value:.3f}, ratio "
            f"{ratio:.4f} ± {stderr:.4f}   {seconds[0]:.0f} s and {seconds[1]:.0f} s",
            flush=True,
        )
    print(json.dumps({"threads": torch.get_num_threads(), "rows": rows}))


STEPS = {f.__name__: f for f in (prepare, ours, llmcompressor, table)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare pruning with llm-compressor.")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--samples", type=int, default=32, help="calibration samples of 512 tokens, up to 128")
    parser.add_argument("--windows", type=int, default=10, help=f"windows of {WINDOW} tokens to score on")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        STEPS[options.step](options.folder, options)
