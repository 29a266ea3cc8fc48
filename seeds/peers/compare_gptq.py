"""GPTQ beside its peers: the same model, the same calibration tokens, the same text to score on, one machine.

Each peer lives in a virtual environment of its own (README.md beside this file), so the steps are separate commands:

$ .venv/bin/python seeds/peers/compare_gptq.py prepare /tmp/peers/work
$ .venv/bin/python seeds/peers/compare_gptq.py ours /tmp/peers/work
$ /tmp/peers/llmc/bin/python seeds/peers/compare_gptq.py llmcompressor /tmp/peers/work
$ GPTQMODEL_CPU_WORKERS=2 /tmp/peers/gptqmodel/bin/python seeds/peers/compare_gptq.py gptqmodel /tmp/peers/work
$ .venv/bin/python seeds/peers/compare_gptq.py score /tmp/peers/work

Every step writes its results into the folder. `score` prints a table and a JSON line.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BITS, GROUP_SIZE = 4, 64
SAMPLES, SEQLEN = 128, 512
WINDOW, MAX_WINDOWS = 2048, 40


def prepare(folder: Path, name: str = "smollm2-135m") -> None:
    """A model in float32, and the calibration tokens."""
    from compress import load_model
    from compress.inputs.calibration import calibration

    model, tokenizer = load_model(name)
    batches = calibration(tokenizer, corpus="c4", samples=SAMPLES, seqlen=SEQLEN)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    torch.save(torch.cat(batches), folder / "calibration.pt")


def ours(folder: Path) -> None:
    from compress import METHODS, apply, load_model
    from compress.linear import compressed_linears

    model, _ = load_model(str(folder / "model"))
    batches = list(torch.load(folder / "calibration.pt")[:, None])
    start = time.perf_counter()
    result = apply([METHODS["gptq"](bits=BITS, group_size=GROUP_SIZE)], model, batches)
    seconds = time.perf_counter() - start
    keep(folder, "ours", seconds, {n: m.dequantize() for n, m in compressed_linears(result.model).items()})


def rounding(folder: Path) -> None:
    from compress import METHODS, apply, load_model
    from compress.linear import compressed_linears

    model, _ = load_model(str(folder / "model"))
    start = time.perf_counter()
    result = apply([METHODS["rtn"](bits=BITS, group_size=GROUP_SIZE)], model)
    seconds = time.perf_counter() - start
    keep(folder, "rounding", seconds, {n: m.dequantize() for n, m in compressed_linears(result.model).items()})


def llmcompressor(folder: Path) -> None:
    model, seconds = with_llmcompressor(folder / "model", torch.load(folder / "calibration.pt"), GROUP_SIZE)
    # The solver leaves each weight on its grid, in float32; the packing comes only when a checkpoint is saved.
    linears = {n: m for n, m in model.named_modules() if hasattr(m, "weight_scale")}
    keep(folder, "llmcompressor", seconds, {n: m.weight.detach().float() for n, m in linears.items()})


def with_llmcompressor(source: Path, ids: Tensor, group_size: int, **weights: str) -> tuple[nn.Module, float]:
    """The model of a folder quantised by llm-compressor's GPTQ, and seconds; weights are more of its settings."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    grid = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": {**grid, "actorder": "static", **weights}}
    recipe = GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"], dampening_frac=0.01)
    return model, one_shot(model, recipe, ids)


def one_shot(model: nn.Module, recipe: Any, ids: Tensor) -> float:
    """llm-compressor's recipe on a model, in place, calibrated on ids [samples, seqlen]; the seconds that it took."""
    from datasets import Dataset
    from llmcompressor import oneshot

    samples, seqlen = ids.shape
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": [[1] * seqlen] * samples})
    start = time.perf_counter()
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=samples,
        max_seq_length=seqlen,
        shuffle_calibration_samples=False,
    )
    return time.perf_counter() - start


def gptqmodel(folder: Path) -> None:
    saved = folder / "gptqmodel-saved"
    seconds = with_gptqmodel(folder / "model", torch.load(folder / "calibration.pt"), saved, group_size=GROUP_SIZE)
    keep(folder, "gptqmodel", seconds, gptq_weights(saved))


def with_gptqmodel(source: Path, ids: Tensor, saved: Path, **settings: float) -> float:
    """Quantise the model of a folder by GPTQModel and save it; the seconds that the quantisation took."""
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(source), QuantizeConfig(bits=BITS, **settings), dtype=torch.float32)
    data = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
    start = time.perf_counter()
    model.quantize(data, batch_size=1)
    seconds = time.perf_counter() - start
    model.save(str(saved))
    return seconds


def gptq_weights(saved: Path) -> dict[str, Tensor]:
    """The dequantised weights [out, in] of a folder in the GPTQ checkpoint format, by name of the linear."""
    tensors = load_tensors(saved)
    names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    return {name: unpack_gptq(name, tensors) for name in names}


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def unpack_gptq(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """W [out, in] of a layer in the GPTQ checkpoint format (zero points stored less one)."""
    nibbles = torch.arange(0, 32, BITS, dtype=torch.int32)
    mask = (1 << BITS) - 1
    packed, zeros = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]  # [in/8, out], [groups, out/8]
    codes = ((packed[:, None] >> nibbles[:, None]) & mask).reshape(-1, packed.shape[1])  # [in, out]
    zero = ((zeros[..., None] >> nibbles) & mask).reshape(zeros.shape[0], -1) + 1  # [groups, out]
    group = tensors[f"{name}.g_idx"].long()
    return ((codes - zero[group]).float() * tensors[f"{name}.scales"].float()[group]).t().contiguous()


def score(folder: Path) -> None:
    """Perplexity of each result on raw wikitext-2, in float32."""
    from compress import held_out, load_model
    from compress.inputs.calibration import beginning
    from eval.text.perplexity import perplexity

    rows = []
    for name in ("", "rounding", "llmcompressor", "gptqmodel", "ours"):
        model, tokenizer = load_model(str(folder / "model"))
        about = {"seconds": None}
        if name:
            if not (folder / f"{name}.json").is_file():
                continue
            about = json.loads((folder / f"{name}.json").read_text())
            tensors = load_file(folder / f"{name}.safetensors")
            assert len(tensors) == about["linears"] == 7 * model.config.num_hidden_layers, f"{name} left linears out"
            for linear, weight in tensors.items():
                model.get_submodule(linear).weight.copy_(weight)
        ids = held_out(tokenizer, corpus="wikitext2")
        p = perplexity(model, ids, window=WINDOW, limit=MAX_WINDOWS, beginning=beginning(tokenizer))
        rows.append({"name": name or "float32", "seconds": about["seconds"], "perplexity": p.value, "stderr": p.stderr})
    for row in rows:
        took = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
        print(f"{row['name']:<14} {took:>7}  perplexity {row['perplexity']:.3f} ± {row['stderr']:.2f}")
    print(json.dumps({"threads": torch.get_num_threads(), "rows": rows}))


def keep(folder: Path, name: str, seconds: float, weights: dict[str, Tensor]) -> None:
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"seconds": seconds, "linears": len(weights)}))
    print(f"{name}: {len(weights)} linears in {seconds:.0f} s")


STEPS = {f.__name__: f for f in (prepare, rounding, ours, llmcompressor, gptqmodel, score)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare GPTQ with its peers.")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="for `prepare`: a name or folder for `load_model`; smollm2-135m if not given")
    options = parser.parse_args()
    if options.model and options.step != "prepare":
        parser.error(f"`--model` (={options.model}) goes with `prepare`; the other steps take what that wrote")
    options.folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        STEPS[options.step](options.folder, *[options.model] * bool(options.model))
