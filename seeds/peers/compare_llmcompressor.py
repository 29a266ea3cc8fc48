"""SmoothQuant, W8A8, AWQ, Wanda and SparseGPT beside llm-compressor, and the 8- and 4-bit formats beside bitsandbytes.

Steps are separate commands, for each tool lives in a virtual environment of its own (README.md beside this file):

$ .venv/bin/python seeds/peers/compare_llmcompressor.py prepare /tmp/peers/work
$ .venv/bin/python seeds/peers/compare_llmcompressor.py ours /tmp/peers/work
$ /tmp/peers/llmc/bin/python seeds/peers/compare_llmcompressor.py llmcompressor /tmp/peers/work
$ .venv/bin/python seeds/peers/compare_llmcompressor.py bitsandbytes /tmp/peers/work
$ .venv/bin/python seeds/peers/compare_llmcompressor.py table /tmp/peers/work

`--cases`, `--samples` and `--windows` make it shorter. Where activations are rounded, the weights alone do not
determine the outputs. So each tool's model is scored in the process that made it, by its own forward pass, with
`score` below, which uses neither tool. `table` puts the results side by side. The settings are available in both tools:

- SmoothQuant at 0.5, folded into norms only, because the peer has no folds from v to o and from up to down.
- int8: weights per channel, rounded to nearest; activations per token, or one static step from the largest magnitude of
  the whole calibration set (the peer's default is a moving average over batches). The peer's grid has 255 steps (codes
  from -128), ours has 254 (codes from -127).
- AWQ: asymmetric, groups of 64, without clipping, which the peer does not have. Two differences remain. With grouped
  heads the peer does not scale v to o, and ours does. The peer searches 20 scales from inputs and weights by the
  block's output, ours from inputs by the linears' outputs.
- 4 and 3 bits rounded to nearest on the same grids, to separate differences of methods from differences of grids.
- Pruning, 50 % anywhere and 2:4. Both tools prune all linears of a block on the inputs that they have in the unpruned
  block, and pass on the outputs of the pruned one. So the first block's inputs are the same in both, and its masks can
  be compared one to one; later blocks of each tool read the outputs of its own pruned ones.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from prepare import one_shot
from prepare import prepare as prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WINDOW, GROUP_SIZE = 2048, 64
GROUPS = f"group_size={GROUP_SIZE}, symmetric=False, scale_dtype='float32'"
SMOOTH = "smoothquant(alpha=0.5, links='norm')"

CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
# The peer's static range is a moving average unless told otherwise; ours is the largest magnitude over all of
# calibration.
TENSOR = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
    "observer": "static_minmax",
}


def groups(bits: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP_SIZE}


# name: (our recipe, the peer's transform, how it stores weights, how it rounds activations). The peer's SmoothQuant
# moves from norms alone, its AWQ from norms and from up into down (v into o only without grouped heads), and clips no
# weights.
CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any] | None]] = {
    "int8": ("int8", None, CHANNEL, TOKEN),
    "smoothquant, int8": (f"{SMOOTH}, int8", "smoothquant", CHANNEL, TOKEN),
    "int8 static": ("int8(activations='tensor')", None, CHANNEL, TENSOR),
    "smoothquant, int8 static": (f"{SMOOTH}, int8(activations='tensor')", "smoothquant", CHANNEL, TENSOR),
    "rtn 4": (f"rtn(bits=4, {GROUPS})", None, groups(4), None),
    "awq 4": (f"awq(bits=4, {GROUPS}, clip=False)", "awq", groups(4), None),
    "rtn 3": (f"rtn(bits=3, {GROUPS})", None, groups(3), None),
    "awq 3": (f"awq(bits=3, {GROUPS}, clip=False)", "awq", groups(3), None),
}
# name: (our recipe, the peer's modifier, its knobs). The masks of both are kept.
PRUNED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wanda 50 %": ("wanda(ratio=0.5, sequential=False)", "WandaPruningModifier", {}),
    "wanda 2:4": ("wanda(pattern='2:4', sequential=False)", "WandaPruningModifier", {"mask_structure": "2:4"}),
    "sparsegpt 50 %": ("sparsegpt(ratio=0.5, sequential=False)", "SparseGPTModifier", {"dampening_frac": 0.01}),
    "sparsegpt 2:4": (
        "sparsegpt(pattern='2:4', sequential=False)",
        "SparseGPTModifier",
        {"mask_structure": "2:4", "dampening_frac": 0.01},
    ),
}


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """The embedded model in float32, the calibration tokens, and the windows of raw wikitext-2 to score on."""
    from compress import held_out, load_model
    from compress.inputs.calibration import beginning
    from eval.text.windows import windows

    prepare_model(folder)
    _, tokenizer = load_model(str(folder / "model"))
    cut = windows(held_out(tokenizer, corpus="wikitext2"), window=WINDOW, beginning=beginning(tokenizer))
    torch.save(
        torch.cat([w.tokens for w in cut]), folder / "windows.pt"
    )  # [n, WINDOW]; all but the first token are scored


def ours(folder: Path, options: argparse.Namespace) -> None:
    from compress import apply, load_model
    from compress.linear import compressed_linears
    from compress.recipe import parse_recipe

    for case in options.cases:
        model, _ = load_model(str(folder / "model"))
        batches = list(torch.load(folder / "calibration.pt")[: options.samples, None])
        start = time.perf_counter()
        result = apply(parse_recipe((CASES | PRUNED)[case][0]), model, batches)
        seconds = time.perf_counter() - start
        if case in PRUNED:
            keep_masks(folder, "ours", case, {n: m.dequantize() for n, m in compressed_linears(result.model).items()})
        keep(folder, "ours", case, options, seconds, len(result.layers), result.model)


def llmcompressor(folder: Path, options: argparse.Namespace) -> None:
    from llmcompressor.modifiers import pruning
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier, SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM

    if not torch.accelerator.is_available():  # its AWQ pins memory even so, and fails
        IntermediatesCache.pin_memory = lambda self, batch_index: None
    transforms = {
        None: lambda: [],
        "awq": lambda: [AWQModifier()],
        "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.5)],
    }
    for case in options.cases:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        if case in PRUNED:
            _, modifier, knobs = PRUNED[case]
            recipe = [getattr(pruning, modifier)(targets=["Linear"], ignore=["re:.*lm_head"], sparsity=0.5, **knobs)]
        else:
            _, transform, weights, activations = CASES[case]
            scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
            quantising = QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
            recipe = [*transforms[transform](), quantising]
        seconds = one_shot(model, recipe, torch.load(folder / "calibration.pt")[: options.samples])
        linears = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
        if case in PRUNED:
            keep_masks(folder, "llmcompressor", case, linears)
        else:
            linears = {n: w for n, w in linears.items() if hasattr(model.get_submodule(n), "weight_scale")}
        keep(folder, "llmcompressor", case, options, seconds, len(linears), model)


def keep_masks(folder: Path, tool: str, case: str, weights: dict[str, Tensor]) -> None:
    """Write which weights of each linear are zero."""
    save_file({name: W.detach() == 0 for name, W in weights.items()}, folder / f"{tool} {case}.safetensors")


def equal_places(folder: Path, case: str) -> dict[str, float]:
    """The shares of places at which both tools' masks are equal, in the first block and in all."""
    ours, theirs = (load_file(folder / f"{tool} {case}.safetensors") for tool in ("ours", "llmcompressor"))
    assert ours.keys() == theirs.keys()
    places = {"masks_equal": ours.keys(), "masks_equal_first_block": [n for n in ours if ".layers.0." in n]}
    same = {name: (ours[name] == theirs[name]).double().sum().item() for name in ours}
    return {what: sum(same[n] for n in names) / sum(ours[n].numel() for n in names) for what, names in places.items()}


def keep(
    folder: Path, tool: str, case: str, options: argparse.Namespace, seconds: float, linears: int, model: nn.Module
) -> None:
    """Score a model and write the results to a file."""
    assert linears == 7 * model.config.num_hidden_layers, f"{tool} left linears out"
    sums = score(model, torch.load(folder / "windows.pt")[: options.windows])
    about = {"tool": tool, "case": case, "samples": options.samples, "seconds": seconds, "sums": sums}
    (folder / f"{tool} {case}.json").write_text(json.dumps(about))
    print(
        f"{tool}: {case}: {seconds:.0f} s, perplexity {math.exp(sum(sums) / len(sums) / (WINDOW - 1)):.3f}", flush=True
    )


def score(model: nn.Module, windows: Iterable[Tensor]) -> list[float]:
    """The summed negative log-likelihood of each window's tokens but the first, by any model that gives logits."""
    sums = []
    for tokens in windows:
        logits = model(tokens[None], use_cache=False).logits[0]
        parts = zip(logits[:-1].split(256), tokens[1:].split(256), strict=True)
        sums.append(sum(nn.functional.cross_entropy(x.float(), t, reduction="sum").item() for x, t in parts))
    return sums


def table(folder: Path, options: argparse.Namespace) -> None:
    """The tools' results side by side, on the windows scored for both, and our perplexity divided by the peer's."""
    rows = []
    for case in options.cases:
        files = {tool: folder / f"{tool} {case}.json" for tool in ("llmcompressor", "ours")}
        if not all(file.is_file() for file in files.values()):
            continue
        peer, mine = (json.loads(file.read_text()) for file in files.values())
        assert peer["samples"] == mine["samples"], (
            f"{case}: calibrated on {peer['samples']} and {mine['samples']} samples"
        )
        n = min(len(peer["sums"]), len(mine["sums"]))
        a, b = (torch.tensor(about["sums"][:n], dtype=torch.float64) / (WINDOW - 1) for about in (peer, mine))
        ratio = (b - a).mean().exp().item()
        stderr = ratio * (b - a).std().item() / math.sqrt(n)  # of windows, in pairs
        row = {"case": case, "samples": mine["samples"], "windows": n, "ratio": ratio, "ratio_stderr": stderr}
        for about, x in ((peer, a), (mine, b)):
            row |= {f"{about['tool']}_perplexity": x.mean().exp().item(), f"{about['tool']}_seconds": about["seconds"]}
        row |= equal_places(folder, case) if case in PRUNED else {}
        rows.append(row)
        print(
            f"{case:<26} {peer['seconds']:>6.0f} s {a.mean().exp():8.3f}   {mine['seconds']:>6.0f} s "
            f"{b.mean().exp():8.3f}"
            f"   {ratio:.4f} ± {stderr:.4f}"
            + "".join(f"   {name} {share:.3%}" for name, share in row.items() if name.startswith("masks"))
        )
    print(json.dumps({"threads": torch.get_num_threads(), "rows": rows}))


def bitsandbytes(folder: Path, options: argparse.Namespace) -> None:
    """Codes and scales of every linear in NF4, with double quantisation or without, and in int8 row by row: how many
    are equal."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    from compress import load_model
    from compress.linear import weight_of
    from compress.walk.blocks import targets
    from compress.weights.nf4 import nf4
    from kernels.lut_matmul.layout import unpack_codebook
    from kernels.w8a8_matmul import quantize_weight

    model, _ = load_model(str(folder / "model"))
    equal: dict[str, list[int]] = {}

    def count(what: str, ours: Tensor, theirs: Tensor) -> None:
        assert ours.numel() == theirs.numel()
        same, of = equal.setdefault(what, [0, 0])
        equal[what] = [same + int((ours.flatten() == theirs.flatten()).sum()), of + ours.numel()]

    for name in targets(model):
        W = weight_of(model.get_submodule(name))
        packed, state = quantize_4bit(W, blocksize=GROUP_SIZE, quant_type="nf4", compress_statistics=False)
        ours = nf4(W, group_size=GROUP_SIZE, double_quant=False)
        count("nf4: codes", unpack_codebook(ours.packed), torch.stack([packed >> 4, packed & 15], -1))
        count("nf4: scales", ours.packed.scale, state.absmax)

        _, state = quantize_4bit(W, blocksize=GROUP_SIZE, quant_type="nf4", compress_statistics=True)
        scales = nf4(W, group_size=GROUP_SIZE, double_quant=True).scales
        count("nf4: 8-bit codes of scales", scales.codes, state.absmax)
        count("nf4: scales of scales", scales.absmax, state.state2.absmax)
        count("nf4: mean of scales", scales.offset, state.offset)

        codes, absmax, _ = int8_vectorwise_quant(W.half())
        ours = quantize_weight(W.half(), torch.int8)
        count("int8: scales", ours.scale, absmax / 127)
        count("int8: codes", ours.codes, codes)
        # It multiplies by 127 times a rounded inverse, we divide 127 once: half-way values may be rounded differently.
        half_way = (W.half().double() * 127 / absmax.double()[:, None]).frac().abs() == 0.5
        count("int8: codes, or half-way", ours.codes.where(~half_way, 0), codes.where(~half_way, 0))
    for what, (same, of) in equal.items():
        print(f"{what:<28} {same:>11} of {of:>11} equal")


STEPS = {f.__name__: f for f in (prepare, ours, llmcompressor, table, bitsandbytes)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES | PRUNED, default=[*CASES, *PRUNED], help="some of the comparisons"
    )
    parser.add_argument("--samples", type=int, default=128, help="calibration samples of 512 tokens, up to 128")
    parser.add_argument("--windows", type=int, default=40, help=f"windows of {WINDOW} tokens to score on")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        STEPS[options.step](options.folder, options)
