"""The configuration from which transformers and vLLM build a model, and which models they can build from one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.checkpoint.files import fill, take_generation_config
from compress.checkpoint.load import plain_config
from compress.checkpoint.save_format import Checkpoint
from compress.checkpoint.tied import stored_once, true_config
from compress.checkpoint.workbench import write_configuration
from compress.dropped import dropped_parts
from compress.linear import CompressedLinear, compressed_linears
from kernels.support.errors import first_line


def problem_for_transformers(model: nn.Module, save_format: str) -> str:
    """The reason why a model cannot be written as quantised linears of a transformers class; "" if it can.

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
    with init_empty_weights(include_buffers=False):
        built = type(model)(model.config)
    if any(isinstance(module, Conv1D) for module in built.modules()):
        return f"{start}its weights lie in Conv1D modules, which its readers do not quantise"
    return ""


def problem_of_quantised(model: nn.Module, names: Sequence[str]) -> str:
    """The reason why transformers cannot build this model with these linears quantised; "" if it can.

    It makes them first, and takes their `weight` away before it calls `_init_weights` of the class for every module.
    """
    with init_empty_weights(include_buffers=False):
        built = type(model)(true_config(model))
    modules = dict(built.named_modules())
    for name in names:
        if (linear := modules.get(name)) is None:  # an expert, which transformers takes from one tensor for all
            continue
        if type(linear) is not nn.Linear:
            return f"{name} is a {type(linear).__name__}, and readers quantise nn.Linear alone"
        del linear.weight
    for name, module in built.named_modules():
        try:
            built._init_weights(module)
        except Exception as error:
            return (
                f"transformers cannot load it, because {type(built).__name__} initialises {name}: {first_line(error)}"
            )
    return ""


def load_complete(kind: Any, folder: Path | None, **more: Any) -> nn.Module:
    """The model that a class of transformers loads.

    Raises:
        RuntimeError: tensors are missing, or there are too many.
    """
    loaded, info = kind.from_pretrained(folder, trust_remote_code=False, output_loading_info=True, **more)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            raise RuntimeError(f"transformers reports {problem} of the saved model: {sorted(info[problem])[:3]}")
    return loaded


def write_reader_configuration(checkpoint: Checkpoint, folder: Path, quantization: dict[str, Any] | None) -> None:
    """Write configuration and tokenizer, with the model's class, its dtype, and the quantisation of its weights."""
    write_configuration(checkpoint, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # from the checkpoint from which this model was loaded
    config["architectures"] = [type(checkpoint.model).__name__]
    config["dtype"] = str(checkpoint.model.dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def other_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor outside compressed linears, each shared one once."""
    inside = tuple(f"{name}." for name in compressed_linears(model))
    return ((name, tensor) for name, tensor in stored_once(model) if not name.startswith(inside))


def linear_names(model: nn.Module) -> list[str]:
    """Names of the linears of the model, compressed or not, which readers find as linears.

    Routers of a mixture are among them: transformers has classes of their own for them, and vLLM builds linears.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | CompressedLinear) or _routes(module)
    ]


def _routes(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def model_of_tensors(kind: type[nn.Module], folder: Path, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model of a class of transformers, from a configuration and its weights under transformers' names.

    Raises:
        ValueError: weights are missing, or the model has no place for some.
    """
    with init_empty_weights(include_buffers=False):
        model = kind(plain_config(folder))
    fill(model, tensors)
    take_generation_config(model, folder)
    return model.eval().requires_grad_(False)
