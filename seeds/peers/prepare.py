"""The model and the calibration tokens that every tool gets, and calls of the tools that several scripts make.

    .venv/bin/python seeds/peers/prepare.py /tmp/peers/work

writes the model, in float32, and 128 x 512 tokens of C4 into the folder. Each peer lives in a virtual environment of
its own (README.md beside this file), in which the other scripts import this one.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

BITS = 4
SAMPLES, SEQLEN = 128, 512


def prepare(folder: Path, name: str = "smollm2-135m") -> None:
    """A model in float32, and the calibration tokens."""
    from compress import load_model
    from compress.inputs.calibration import calibration

    model, tokenizer = load_model(name)
    batches = calibration(tokenizer, corpus="c4", samples=SAMPLES, seqlen=SEQLEN)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    torch.save(torch.cat(batches), folder / "calibration.pt")


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="a name or folder for `load_model`")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        prepare(options.folder, options.model)
