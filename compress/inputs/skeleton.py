"""Data of a model that can be read before it is loaded: its configuration, the shapes of its weights, and whether its
files are complete.

Reads headers and configurations only, so that a plan of many runs takes seconds.
"""

from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from compress.checkpoint.gguf.embedded import gguf_file
from compress.checkpoint.load import LAYOUT, load_outline
from compress.checkpoint.shards import Shards
from compress.checkpoint.tied import differ, set_tied
from compress.classes import auto_class
from compress.embedding import find_ends
from compress.inputs.gguf import check_header, check_outline, converted_folder
from compress.inputs.model import decoder_config, located, tiny_config
from kernels.support.errors import first_line, kind_and_first_line


@cache
def skeleton(model_name: str) -> nn.Module:
    """The model on the meta device, with shapes and without weights, and with the stored forms of compressed ones.

    Raises:
        ValueError: the model does not exist, is not a decoder, or has a damaged file.
    """
    if model_name == "tiny":
        return _outline(tiny_config(), model_name)
    if path := gguf_file(model_name):
        folder = converted_folder(path)
        if not folder.is_dir():
            return _of_gguf(model_name, path)
        return _outline(decoder_config(model_name, str(folder)), model_name)
    folder = Path(located(model_name))
    _check_files(model_name, folder)
    if (folder / LAYOUT).is_file():
        return _saved_skeleton(model_name, folder)
    config = decoder_config(model_name, located(model_name))
    model = _outline(config, model_name)
    ends = find_ends(model)
    if ends.tied and _apart(folder, f"{ends.embedding}.weight", f"{ends.head}.weight"):
        set_tied(config, False)
        model = _outline(config, model_name)
    return model


def _outline(config: PreTrainedConfig, model_name: str) -> nn.Module:
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:  # a damaged config may lead to any error of the model's class
        raise ValueError(
            f"`model_name` (={model_name!r}): its config describes no model ({kind_and_first_line(error)})"
        ) from error


def _apart(folder: Path, embedding: str, head: str) -> bool:
    """Whether the files of a folder hold an embedding and a head with values of their own."""
    try:
        shards = Shards(folder)
    except ValueError:  # not a local folder of safetensors
        return False
    there = {embedding, head} <= set(shards.names())
    return there and differ(shards.read(embedding), shards.read(head))


def _saved_skeleton(model_name: str, folder: Path) -> nn.Module:
    try:
        return load_outline(folder)
    except ValueError as error:
        raise ValueError(str(error).replace("`path` (=", "`model_name` (=")) from error


@cache
def cheap_tokenizer(model_name: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, unless it would have to be converted or downloaded first."""
    path = gguf_file("smollm2-135m" if model_name == "tiny" else model_name)
    folder = converted_folder(path) if path else Path(model_name).expanduser()
    if not folder.is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError):  # loading the model will report the reason
        return None


def _of_gguf(model_name: str, path: Path) -> nn.Module:
    try:
        check_header(path)
        outline = _outline(decoder_config(model_name, str(path.parent), gguf_file=path.name), model_name)
        check_outline(outline, path)
        return outline
    except Exception as error:  # a damaged header may lead to any error of the reader
        said = first_line(error)
        raise ValueError(
            said
            if said.startswith("`model_name`")
            else f"`model_name` (={model_name!r}) is a damaged GGUF file: {said}"
        ) from error


def _check_files(model_name: str, folder: Path) -> None:
    """Raise ValueError if a safetensors file of a local folder does not agree with its header."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"`model_name` (={model_name!r}): {file.name} is damaged or not complete: {first_line(error)}; "
                "download or copy it again"
            ) from error
