"""The configuration from which transformers and vLLM build a model, and which models they can build from one."""

import json
from pathlib import Path
from typing import Any

import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.checkpoint.save_format import Checkpoint
from compress.checkpoint.workbench import write_configuration
from compress.dropped import dropped_parts
from compress.linear import CompressedLinear
from compress.walk.experts import SplitExperts, is_fused_experts


def problem_for_transformers(model: nn.Module, save_format: str) -> str:
    """Why a model cannot be written as quantised linears of a class of transformers; "" if it can.

    Args:
        model: may be on the meta device.
    """
    start = f"`save_format` (={save_format!r}) cannot hold this model: "
    if getattr(transformers, type(model).__name__, None) is not type(model):
        return f"{start}{type(model).__module__}.{type(model).__name__} is not a class of transformers"
    if gone := list(dropped_parts(model)):
        return (
            f"{start}{gone[0]} was dropped, and other libraries build every block with attention and MLP; models with "
            "whole blocks dropped can be held"
        )
    if any(isinstance(module, SplitExperts) or is_fused_experts(module) for module in model.modules()):
        return f"{start}its experts are linears of their own here, for which its readers have no common layout"
    head = model.get_output_embeddings()
    if isinstance(head, CompressedLinear) and model.config.get_text_config().tie_word_embeddings:
        return f"{start}its head is quantised and its embedding is not, and readers tie them"
    with init_empty_weights(include_buffers=False):
        built = type(model)(model.config)
    if any(isinstance(module, Conv1D) for module in built.modules()):
        return f"{start}its weights lie in Conv1D modules, which its readers do not quantise"
    return ""


def write_reader_configuration(checkpoint: Checkpoint, folder: Path, quantization: dict[str, Any] | None) -> None:
    """Write configuration and tokenizer, with the model's class, its dtype, and how its weights are quantised."""
    write_configuration(checkpoint, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # of a checkpoint that this model was loaded from
    config["architectures"] = [type(checkpoint.model).__name__]
    config["dtype"] = str(checkpoint.model.dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
