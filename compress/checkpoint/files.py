"""The files of a model's folder: which of them hold its weights, and one error for all that is wrong with them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from compress.checkpoint.checksums import CHECKSUMS, listed_files
from compress.checkpoint.tied import tie_by_content
from compress.embedding import CompressedEmbedding
from compress.linear import CompressedLinear
from kernels.support.errors import first_line, kind_and_first_line

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_LAYERS = re.compile(r"(num|n)_(hidden_|decoder_)?(layers?|blocks)")
_SIZES = re.compile(r"(num|n|d)_\w+|\w*(size|dim|rank|heads|experts|channels|width|embd)")
_NO_SIZES = re.compile(r"\w*(position|context|ctx|window|chunk|length|token|block_size|bucket|group)\w*")


@contextmanager
def reading(folder: str | Path, file: str = "") -> Iterator[None]:
    """Turn any error of a block that reads a model's folder into a ValueError that names the folder, and the file.

    A damaged or hostile file can lead to any error of the libraries that parse it and build a model from it.
    """
    where = f"`path` (={str(folder)!r}){f': {file}' if file else ''}"
    try:
        yield
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{where} cannot be loaded: {first_line(error)}") from error
    except Exception as error:
        raise ValueError(
            f"{where} cannot be loaded ({kind_and_first_line(error)}); it may be damaged, or its files from two models"
        ) from error


def weight_files(folder: Path) -> dict[str, str]:
    """The safetensors file of each tensor of a folder, by its index or by the header of its only file.

    Raises:
        ValueError: the folder has no safetensors; a file is missing, damaged, outside the folder, or not among those
            that `checksums.json` lists; or the index names a tensor that its file does not hold.
    """
    index = (folder / INDEX).is_file()
    if not index and not (folder / ONE_FILE).is_file():
        raise ValueError(f"`path` (={str(folder)!r}) holds neither {ONE_FILE} nor {INDEX}")
    where = _index(folder) if index else dict.fromkeys(_names(folder, ONE_FILE), ONE_FILE)
    files = sorted(set(where.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ValueError(f"`path` (={str(folder)!r}) lacks {', '.join(missing)}, which {INDEX} names")
    listed = listed_files(folder) if (folder / CHECKSUMS).is_file() else {*files, INDEX}
    if unlisted := sorted({*files, *([INDEX] if index else [])} - listed):
        raise ValueError(f"`path` (={str(folder)!r}) holds weights in {unlisted[0]}, which {CHECKSUMS} does not list")
    if index:
        held = {name: set(_names(folder, name)) for name in files}
        for name, file in where.items():
            if name not in held[file]:
                raise ValueError(f"`path` (={str(folder)!r}): {file} lacks {name}, which {INDEX} says is there")
    return where


def _index(folder: Path) -> dict[str, str]:
    with reading(folder, INDEX):
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not where or not all(isinstance(file, str) for file in where.values()):
            raise ValueError("its `weight_map` does not name a file for each tensor")
        for file in sorted(set(where.values())):
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
                raise ValueError(f"it names {file!r}; weights are read from files in the folder only")
    return where


def _names(folder: Path, file: str) -> list[str]:
    with opened(folder / file) as stored:
        return list(stored.keys())


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open safetensors file.

    Raises:
        ValueError: the file is damaged or not complete.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is damaged or not complete: {first_line(error)}; download or copy it again"
        ) from error


def check_config(folder: Path) -> None:
    """Compare the sizes in a folder's `config.json` with the size of its weights, before a model is built from them.

    Raises:
        ValueError: the file is damaged, or names more layers than there are tensors, or a size beyond the bits of all
            weights.
    """
    with reading(folder, CONFIG):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a configuration")
    if not (folder / INDEX).is_file() and not (folder / ONE_FILE).is_file():
        return  # weights in another format, which the library that reads them checks
    where = weight_files(folder)
    bits = 8 * sum((folder / file).stat().st_size for file in set(where.values()))
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        check_sizes(part, len(where), bits, f"`path` (={str(folder)!r}): {CONFIG}")


def check_sizes(config: dict[str, Any], tensors: int, bits: int, where: str) -> None:
    """Raise ValueError if a configuration names more layers than tensors, or a size beyond the bits of all weights.

    Args:
        where: the file, as the beginning of the message.
    """
    for key, value in config.items():
        if _LAYERS.fullmatch(key):
            check_size(key, value, tensors, "tensors", where)
        elif _SIZES.fullmatch(key) and not _NO_SIZES.fullmatch(key):
            check_size(key, value, bits, "bits", where)


def check_size(key: str, value: Any, most: int, unit: str, where: str) -> None:
    """Raise ValueError if a size is larger than the number of tensors, or of bits, that the weights have.

    Args:
        key: the size's name in the file.
        value: the size; what is not a number is left to the code that reads it.
        unit: of `most`: "tensors" or "bits".
        where: the file, as the beginning of the message.
    """
    if isinstance(value, int | float) and value > most:
        held = f"{most} tensors" if unit == "tensors" else f"{most // 8} bytes of weights"
        raise ValueError(f"{where} has `{key}` (={value}), and there are {held}")


def check_parameters(model: nn.Module, folder: Path) -> None:
    """Raise ValueError if a model on the meta device has more parameters than its folder has bits of weights."""
    if not (folder / INDEX).is_file() and not (folder / ONE_FILE).is_file():
        return
    bits = 8 * sum((folder / file).stat().st_size for file in set(weight_files(folder).values()))
    check_count(model, bits, f"`path` (={str(folder)!r}): {CONFIG}")


def check_count(model: nn.Module, bits: int, where: str) -> None:
    """Raise ValueError if a model on the meta device has more parameters than there are bits of weights.

    Args:
        where: the file that describes the model, as the beginning of the message.
    """
    if (count := sum(p.numel() for p in model.parameters())) > bits:
        raise ValueError(f"{where} describes a model of {count} parameters, and there are {bits // 8} bytes of weights")


def check_filled(model: nn.Module, lacking: Iterable[str], unused: Iterable[str] = ()) -> None:
    """The check of every loader: each weight of the model came from a file, and each tensor of the file has a place.

    Args:
        lacking: the model's weights that no file held. unused: the file's tensors that the model does not have.

    Raises:
        ValueError: there are any.
    """
    for problem, names in (("lacks", sorted(lacking)), ("does not use", sorted(unused))):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            owner = "its file" if problem == "lacks" else f"the model of its config ({type(model).__name__})"
            raise ValueError(f"{owner} {problem} {len(names)} of the weights: {shown}")


def take_generation_config(model: nn.Module, folder: Path) -> None:
    """Give a model the settings of `generate` in its folder, if there are any."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model on the meta device its weights; compressed ones are in their places already.

    Raises:
        ValueError: weights are missing, or the model has no place for some.
        RuntimeError: a weight has another shape.
    """
    missing, unused = model.load_state_dict(tensors, strict=False, assign=True)
    tie_by_content(model, tensors)
    stored = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, CompressedEmbedding | CompressedLinear))
    empty = {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta}
    empty |= {name for name, _ in model.named_buffers()}  # buffers of the state that no file held
    check_filled(model, {name for name in missing if name in empty and not name.startswith(stored)}, unused)
