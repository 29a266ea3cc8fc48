"""load_compressed: the model of a folder that `save_compressed` wrote."""

import json
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from compress.dropped import Dropped
from compress.linear import CompressedLinear, replace
from compress.walk.experts import split_experts

LAYOUT = "workbench.json"  # which linear is stored how; beside transformers' config.json
WEIGHTS = "model.safetensors"
VERSION = 1
COMPUTED = "computed:"  # before the names of buffers that are not part of the state dict


def load_compressed(path: str | Path, *, device: str = "cpu") -> nn.Module:
    """The compressed model: a transformers model with its linears stored small, in evaluation mode.

    Its tokenizer, if one was saved, loads from the same folder with `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: the folder is not there, is not a compressed model, or was written by a newer workbench.
    """
    path = Path(path)
    if not (path / LAYOUT).is_file():
        raise ValueError(f"`path` (={str(path)!r}) is not a compressed model: it has no {LAYOUT}")
    layout = json.loads((path / LAYOUT).read_text())
    if layout["version"] > VERSION:
        raise ValueError(
            f"`path` (={str(path)!r}) has layout version {layout['version']}; this workbench reads up to {VERSION}"
        )
    if layout["class"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"`path` (={str(path)!r}) names the class {layout['class']!r} in {LAYOUT}, which is not a causal language "
            "model of transformers"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = getattr(transformers, layout["class"])(config)
        if layout["split_experts"]:
            split_experts(model)
        for name, spec in layout.get("dropped", {}).items():
            replace(model, name, Dropped(**spec))
    # A file's tensors may begin anywhere; where they do matters to some products, in the last bit.
    tensors = {name: t if t.data_ptr() % 64 == 0 else t.clone() for name, t in load_file(path / WEIGHTS).items()}
    for name, spec in layout["linears"].items():
        own = {
            key.removeprefix(f"{name}."): tensors.pop(key) for key in [k for k in tensors if k.startswith(f"{name}.")]
        }
        replace(model, name, CompressedLinear.from_tensors(spec, own, getattr(torch, layout["dtype"])))
    for name in [key for key in tensors if key.startswith(COMPUTED)]:
        owner, _, buffer = name.removeprefix(COMPUTED).rpartition(".")
        model.get_submodule(owner).register_buffer(buffer, tensors.pop(name), persistent=False)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty or unexpected:
        raise ValueError(
            f"`path` (={str(path)!r}) does not fit its own config: missing {empty[:3]}, unexpected {unexpected[:3]}"
        )
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.name_or_path = str(path)
    return model.eval().requires_grad_(False).to(device)
