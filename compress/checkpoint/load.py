"""load_compressed: the model of a folder that `save_compressed` wrote."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from compress.checkpoint.checksums import CHECKSUMS, check_files
from compress.checkpoint.classes import is_known
from compress.checkpoint.save_format import STORY, Story
from compress.checkpoint.shards import Shards
from compress.checkpoint.tied import tie_by_content
from compress.dropped import Dropped
from compress.embedding import embedding_from, leave_untied
from compress.kv.attach import attach
from compress.kv.policy import cache_method
from compress.linear import CompressedLinear, replace
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
    if (path / CHECKSUMS).is_file():
        check_files(path)
    layout = read_layout(path)
    if layout["format_version"] > 1 and not (path / CHECKSUMS).is_file():
        raise ValueError(f"`path` (={str(path)!r}) lacks {CHECKSUMS}; download or copy the folder again")
    model = empty_model(path, layout)
    # Tensors may begin at any address of a file; alignment changes the last bit of some products.
    tensors = {name: t if t.data_ptr() % 64 == 0 else t.clone() for name, t in Shards(path).all().items()}
    for name, spec in layout["linears"].items():
        replace(model, name, CompressedLinear.from_tensors(spec, _taken(tensors, f"{name}."), dtype_of(layout)))
    head = model.get_output_embeddings() if layout["embeddings"] else None
    for name, spec in layout["embeddings"].items():
        own = _taken(tensors, f"{name}.")
        replace(model, name, embedding_from(model.get_submodule(name), spec, own, dtype_of(layout), head))
    leave_untied(model)
    if layout["stream"]:
        rotation = make_transform(layout["stream"], _taken(tensors, f"{STREAM}.rotation."))
        rotate_stream(model, find_blocks(model)[1], rotation)
        tensors |= {f"{STREAM}.rotation.{name}": t for name, t in rotation.state_dict().items()}
    computed = _taken(tensors, COMPUTED)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    tie_by_content(model, tensors)
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty or unexpected:
        raise ValueError(
            f"`path` (={str(path)!r}) does not fit its own config: missing {empty[:3]}, unexpected {unexpected[:3]}"
        )
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.name_or_path = str(path)
    remember_story(model, path)
    if dtype is not None:
        model.to(dtype)
    for name, tensor in computed.items():
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner).register_buffer(buffer, tensor, persistent=False)
    model = model.eval().requires_grad_(False).to(device)
    methods = [cache_method(one["method"], one["knobs"]) for one in layout["caches"]] if caches else []
    if methods:
        attach(model, methods)
    return model


def load_outline(path: Path) -> nn.Module:
    """The compressed model of a folder without its weights: on the meta device, with its compressed linears.

    Raises:
        ValueError: as in `load_compressed`, but only the sizes of the files are compared.
    """
    if (path / CHECKSUMS).is_file():
        check_files(path, content=False)
    layout = read_layout(path)
    model = empty_model(path, layout)
    for name, spec in layout["linears"].items():
        replace(model, name, AwayLinear(spec, dtype_of(layout)))
    leave_untied(model)
    model.to_be_rotated = bool(layout["stream"])
    remember_story(model, path)
    model.to("meta").tie_weights()
    return model.eval()


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
    if not is_known(layout["class"]):
        raise ValueError(
            f"{shown} names the class {layout['class']!r} in {LAYOUT}, which is not a causal language model of "
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
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with empty_weights():
        model = getattr(transformers, layout["class"])(config)
        if layout["split_experts"]:
            split_experts(model)
        for name, spec in layout["dropped"].items():
            replace(model, name, Dropped(**spec))
    return model


def remember_story(model: nn.Module, path: Path) -> None:
    """Keep the earlier compression steps with a model, so that they are part of the record of later ones."""
    if (path / STORY).is_file():
        story = Story.read(path)
        model.made_by = {"compressed_before": {"recipe": story.recipe, "model": story.model}}


def dtype_of(layout: dict[str, Any]) -> torch.dtype:
    """The dtype of the activations."""
    return getattr(torch, layout["dtype"])


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors below a name from a dict, and return them by the rest of their names."""
    return {key.removeprefix(prefix): tensors.pop(key) for key in [k for k in tensors if k.startswith(prefix)]}
