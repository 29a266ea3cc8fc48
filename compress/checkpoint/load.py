"""load_compressed: the model of a folder that `save_compressed` wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from compress.checkpoint.checksums import CHECKSUMS, check_files
from compress.checkpoint.files import CONFIG, check_config, fill, reading, take_generation_config
from compress.checkpoint.save_format import INFO_FILE, CheckpointInfo
from compress.checkpoint.shards import Shards
from compress.classes import is_known
from compress.dropped import Dropped
from compress.embedding import embedding_from, leave_untied
from compress.kv.attach import attach
from compress.kv.policy import cache_method
from compress.linear import CompressedLinear, is_linear, replace, shape_of
from compress.result import refuse_save_pretrained
from compress.transforms import make_transform
from compress.transforms.stream import STREAM, rotate_stream
from compress.walk.blocks import find_blocks
from compress.walk.experts import split_experts
from compress.walk.offload import AwayLinear, empty_weights

LAYOUT = "workbench.json"  # the stored form of each linear; beside transformers' config.json
# 1: `version` in its place, one file of weights, no checksums, no transforms, no methods of the cache.
# 2: no compressed embeddings. 3: no rotated stream. Each is written if no later version is needed.
FORMAT_VERSION = 4
DTYPES = ("float32", "bfloat16", "float16")
COMPUTED = "computed:"  # before the names of buffers that are not part of the state dict
# Entries of `config.json` that keep other libraries from making a model with random weights of it. transformers only
# warns about an unknown `quant_method`, and shows the value of `transformers_weights` in an error; vLLM refuses the
# method by its name.
NOT_FOR_OTHERS = {
    "quantization_config": {"quant_method": "model-compression-workbench"},
    "transformers_weights": "this folder is in the format of the model compression workbench. Load it with "
    "`from compress import load_model; model, tokenizer = load_model(FOLDER)`, or export it to a format for others",
}


def load_compressed(
    path: str | Path, *, dtype: torch.dtype | str | None = None, device: str = "cpu", caches: bool = True
) -> nn.Module:
    """The compressed model: a transformers model with compressed linears, in evaluation mode.

    Its tokenizer, if one was saved, loads from the same folder with `AutoTokenizer.from_pretrained`. Every file is
    compared with its checksum first.

    Args:
        dtype: of activations and of the weights that are not compressed, also by its name ("bfloat16"); None: the saved
            dtype. Tensors that the model computes itself (rotary frequencies) keep their dtype.
        caches: attach the KV policy and the KV storage of the recipe, so that `generate` uses them for its cache.

    Raises:
        ValueError: the folder does not exist, is not a compressed model, was written by a newer workbench, or has a
            file that is missing, cut short or changed; or the dtype does not exist.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"`dtype` (={dtype!r}) must be one of {', '.join(DTYPES)}")
        dtype = getattr(torch, dtype)
    path = Path(path)
    with reading(path):
        if (path / CHECKSUMS).is_file():
            check_files(path)
        layout = read_layout(path)
        if layout["format_version"] > 1 and not (path / CHECKSUMS).is_file():
            raise ValueError(f"`path` (={str(path)!r}) lacks {CHECKSUMS}; download or copy the folder again")
        model = empty_model(path, layout)
        # Tensors may begin at any address of a file; alignment changes the last bit of some products.
        tensors = {name: t if t.data_ptr() % 64 == 0 else t.clone() for name, t in Shards(path).all().items()}
        _put_stored(model, layout, tensors)
        computed = _taken(tensors, COMPUTED)
        fill(model, tensors)
        take_generation_config(model, path)
        model.name_or_path = str(path)
        remember_origin(model, path)
        if dtype is not None:
            model.to(dtype)
        put_computed(model, computed)
        methods = [cache_method(one["method"], one["knobs"]) for one in layout["caches"]] if caches else []
        if methods:
            attach(model, methods)
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False).to(device)


def _put_stored(model: nn.Module, layout: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put the compressed linears and embeddings, and the rotation of the stream, into a model without weights.

    Args:
        tensors: all tensors of the folder; those of the compressed weights are taken out.
    """
    dtype = dtype_of(layout)
    for name, spec in layout["linears"].items():
        put_linear(model, name, CompressedLinear.from_tensors(spec, _taken(tensors, f"{name}."), dtype))
    head = model.get_output_embeddings() if layout["embeddings"] else None
    for name, spec in layout["embeddings"].items():
        table, own = model.get_submodule(name), _taken(tensors, f"{name}.")
        stored = embedding_from(table, spec, own, dtype, head)
        if shape_of(stored) != shape_of(table):
            raise ValueError(f"{name} is stored as {shape_of(stored)}, and is {shape_of(table)} by {CONFIG}")
        replace(model, name, stored)
    leave_untied(model)
    if layout["stream"]:
        rotation = make_transform(layout["stream"], _taken(tensors, f"{STREAM}.rotation."))
        rotation.check(model.get_input_embeddings().embedding_dim)
        rotate_stream(model, find_blocks(model)[1], rotation)
        tensors |= {f"{STREAM}.rotation.{name}": t for name, t in rotation.state_dict().items()}


def put_linear(model: nn.Module, name: str, linear: nn.Module) -> None:
    """Put a compressed linear into the place of a linear of the same shape.

    Raises:
        ValueError: the model has no such linear.
    """
    module = model.get_submodule(name)
    if not is_linear(module) or shape_of(module) != (linear.out_features, linear.in_features):
        found = f"{shape_of(module)} by {CONFIG}" if is_linear(module) else f"a {type(module).__name__} there"
        raise ValueError(f"{name} is stored as {(linear.out_features, linear.in_features)}, and is {found}")
    replace(model, name, linear)


def put_computed(model: nn.Module, computed: Mapping[str, Tensor]) -> None:
    """Give a model the buffers that it had computed when it was saved."""
    for name, tensor in computed.items():
        owner, _, buffer = name.rpartition(".")
        module = model.get_submodule(owner)
        own = getattr(module, buffer, None)  # none where the config has no layer that needs it
        if own is not None and own.shape != tensor.shape:
            raise ValueError(f"{name} is stored as {tuple(tensor.shape)}, and is another one by {CONFIG}")
        module.register_buffer(buffer, tensor, persistent=False)


def load_outline(path: Path) -> nn.Module:
    """The compressed model of a folder without its weights: on the meta device, with its compressed linears.

    Raises:
        ValueError: as in `load_compressed`, but only the sizes of the files are compared.
    """
    with reading(path):
        if (path / CHECKSUMS).is_file():
            check_files(path, content=False)
        layout = read_layout(path)
        model = empty_model(path, layout)
        for name, spec in layout["linears"].items():
            put_linear(model, name, AwayLinear(spec, dtype_of(layout)))
        leave_untied(model)
        model.to_be_rotated = bool(layout["stream"])
        remember_origin(model, path)
        model.to("meta").tie_weights()
    return model.eval()


def is_ours(quantization: Any) -> bool:
    """Whether a config's `quantization_config` is that of a folder of this workbench."""
    return quantization == NOT_FOR_OTHERS["quantization_config"]


def read_layout(path: Path) -> dict[str, Any]:
    """The content of a folder's `workbench.json`, in the form of the newest version.

    Raises:
        ValueError: the folder is not a compressed model, or was written by a newer workbench.
    """
    shown = f"`path` (={str(path)!r})"
    if not (path / LAYOUT).is_file():
        raise ValueError(f"{shown} is not a compressed model: it has no {LAYOUT}")
    try:
        layout = json.loads((path / LAYOUT).read_text(encoding="utf-8"))
        version = int(layout.get("format_version") or layout["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{shown}: {LAYOUT} is damaged; download or copy it again") from error
    if version > FORMAT_VERSION:
        raise ValueError(f"{shown} has format version {version}; this workbench reads up to {FORMAT_VERSION}")
    if not is_known(layout.get("class")):
        raise ValueError(
            f"{shown} names the class {layout.get('class')!r} in {LAYOUT}, which is not a causal language model of "
            "transformers"
        )
    return {"dropped": {}, "caches": [], "embeddings": {}, "stream": None, **layout, "format_version": version}


def layout_specs(layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The specification of each compressed weight, as `compress.embedding.stored_specs` gives it for a model."""
    own = {
        name: CompressedLinear.spec_of(spec["parts"], bias=False, looked_up=True)
        for name, spec in layout["embeddings"].items()
        if not spec["tied"]
    }
    return layout["linears"] | own


def empty_model(path: Path, layout: dict[str, Any]) -> nn.Module:
    """The model of a folder without its dropped parts, with parameters on the meta device and linears that are not
    compressed yet. Buffers that the model computes have their values."""
    check_config(path)
    with reading(path, CONFIG), empty_weights():
        model = getattr(transformers, layout["class"])(plain_config(path))
    with reading(path, LAYOUT), empty_weights():
        if layout["split_experts"]:
            split_experts(model)
        for name, spec in layout["dropped"].items():
            model.get_submodule(name)
            replace(model, name, Dropped(**spec))
    return model


def plain_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint without its quantisation: the configuration of the original model."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for key in NOT_FOR_OTHERS:
        if hasattr(config, key):
            delattr(config, key)
    return config


def remember_origin(model: nn.Module, path: Path) -> None:
    """Keep the earlier compression steps with a model, so that they are part of the record of later ones."""
    if (path / INFO_FILE).is_file():
        info = CheckpointInfo.read(path)
        model.made_by = {"compressed_before": {"recipe": info.recipe, "model": info.model}}


def dtype_of(layout: dict[str, Any]) -> torch.dtype:
    """The dtype of the activations.

    Raises:
        ValueError: it is not the name of a dtype of floats.
    """
    dtype = getattr(torch, str(layout["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"`dtype` (={layout['dtype']!r}) in {LAYOUT} must be one of {', '.join(DTYPES)}")
    return dtype


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors below a name from a dict, and return them by the rest of their names."""
    return {key.removeprefix(prefix): tensors.pop(key) for key in [k for k in tensors if k.startswith(prefix)]}
