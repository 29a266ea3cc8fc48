"""save_compressed: safetensors, config and the story of the compression, reloaded and compared before it counts."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from compress.checkpoint.load import COMPUTED, LAYOUT, VERSION, WEIGHTS, load_compressed
from compress.dropped import dropped_parts
from compress.linear import compressed_linears
from compress.result import Result
from compress.walk.experts import SplitExperts


def save_compressed(result: Result, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Write a compressed model to a folder.

    The folder appears by one rename, after its content was loaded again and gave bit for bit the same logits as the
    model in memory; an interruption leaves nothing under its name.

    Args:
        path: a folder that does not exist, or is empty.

    Raises:
        ValueError: there is something at `path` already, or the model is of a class that transformers does not have.
        RuntimeError: what was written does not give the same model; nothing is left at `path`.
    """
    path = Path(path)
    check_saveable(result.model)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"`path` (={str(path)!r}) exists already; give a new one, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write(result, part, tokenizer)
        _compare(result.model, load_compressed(part))
        part.chmod(0o755)
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def check_saveable(model: nn.Module) -> None:
    """Raise ValueError if a saved model of this class could not be loaded again; worth asking before long work."""
    if getattr(transformers, type(model).__name__, None) is not type(model):
        raise ValueError(
            f"`model` is a {type(model).__module__}.{type(model).__name__}, which is not a class of transformers: it "
            "can be compressed and scored, but a saved one could not be loaded without its code"
        )


def _write(result: Result, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    model = result.model
    linears = compressed_linears(model)
    layout = {
        "version": VERSION,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "split_experts": any(isinstance(m, SplitExperts) for m in model.modules()),
        "linears": {name: linear.spec() for name, linear in linears.items()},
        "dropped": {name: part.spec() for name, part in dropped_parts(model).items()},
    }
    story = {
        "recipe": [{"method": m.name, "knobs": m.values()} for m in result.recipe],
        "model": result.identity,
        "calibration": result.calibration,
        "layers": [asdict(record) for record in result.layers],
        "drops": [asdict(record) for record in result.drops],
        "kept": result.kept,
    }
    (folder / LAYOUT).write_text(json.dumps(layout, indent=1))
    (folder / "compression.json").write_text(json.dumps(story, indent=1))
    save_file(_tensors(model), folder / WEIGHTS, metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, each shared tensor (a tied embedding) once, under its first name, and what was computed.

    Floats that a model computes when it is made (rotary frequencies) are small, and a cast may have rounded them.
    """
    stored = model.state_dict()
    own = tuple(f"{name}." for name in compressed_linears(model))  # lay out again what they need beside their state
    computed = {
        COMPUTED + n: b
        for n, b in model.named_buffers()
        if n not in stored and b.is_floating_point() and not n.startswith(own)
    }
    tensors, seen = {}, set()
    for name, tensor in (stored | computed).items():
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else name
        if key not in seen:
            seen.add(key)
            tensors[name] = tensor.cpu().contiguous()
    return tensors


@torch.no_grad()
def _compare(model: nn.Module, again: nn.Module) -> None:
    device = next(model.parameters()).device
    ids = (torch.arange(32) * 7919 % model.get_input_embeddings().num_embeddings)[None].to(device)
    if again.config._attn_implementation != model.config._attn_implementation:
        again.set_attn_implementation(model.config._attn_implementation)
    training = model.training
    expected, found = model.eval()(ids).logits, again.to(device)(ids).logits
    model.train(training)
    if not torch.equal(expected, found):
        worst = (expected - found).abs().max().item()
        raise RuntimeError(
            f"the saved model gives other logits than the one in memory (largest difference {worst:.2e})"
        )
