"""save_compressed: a compressed model in a folder, loaded again and compared before it counts as saved."""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress.checkpoint.card import write_card
from compress.checkpoint.checksums import write_checksums
from compress.checkpoint.compressed_tensors import CompressedTensors
from compress.checkpoint.gguf import GGUF
from compress.checkpoint.gptq import GPTQFormat
from compress.checkpoint.interop.bitsandbytes import Bitsandbytes
from compress.checkpoint.load import load_compressed
from compress.checkpoint.save_format import INFO_FILE, Checkpoint, CheckpointInfo, SaveFormat, Verification
from compress.checkpoint.shards import SHARD_BYTES, room_for, weight_bytes
from compress.checkpoint.workbench import Workbench
from compress.embedding import stored_specs
from compress.kv.attach import attached_methods
from compress.result import Result
from compress.transforms.stream import stream_of
from compress.walk.offload import is_offloaded

SAVE_FORMATS: dict[str, SaveFormat] = {
    one.name: one for one in (Workbench(), CompressedTensors(), GPTQFormat(), Bitsandbytes(), GGUF())
}


def save_compressed(
    result: Result,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    save_format: str = "workbench",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a compressed model to a folder.

    The content is loaded again by the reader of its format and must give the same logits as the model in memory; only
    then does the folder get its name, by one rename. After an interruption there is no folder of that name.

    Args:
        path: a folder that does not exist, or is empty.
        save_format: one of SAVE_FORMATS.
        shard_bytes: size above which weights are written into a further file.

    Raises:
        ValueError: `path` exists and is not an empty folder, or the format cannot hold this model.
        OSError: the disk has not enough room; nothing is left at `path`.
        RuntimeError: the written files do not give the same model; nothing is left at `path`.
    """
    return write_checkpoint(
        Checkpoint(result.model, tokenizer, CheckpointInfo.of(result), shard_bytes), path, save_format
    )


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, save_format: str) -> Path:
    """`save_compressed` for a model whose origin is known, such as one that was loaded from another checkpoint."""
    path, writer = Path(path), format_named(save_format)
    check_holds(save_format, checkpoint.model, stored_specs(checkpoint.model))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"`path` (={str(path)!r}) exists already; give a new one, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        with room_for(weight_bytes(checkpoint.model), path):
            writer.write(checkpoint, part)
            (part / INFO_FILE).write_text(json.dumps(asdict(checkpoint.info), indent=1))
            write_checksums(part)
        verification = _with_caches(writer, checkpoint, writer.verify(checkpoint, part))
        verification.write(part)
        write_card(checkpoint, writer, verification, part, title=path.name)
        part.chmod(0o755)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def _with_caches(writer: SaveFormat, checkpoint: Checkpoint, verification: Verification) -> Verification:
    """The verification, with a remark and a warning if the format does not hold the recipe's cache methods."""
    methods = ", ".join(map(str, attached_methods(checkpoint.model)))
    if writer.holds_caches or not methods:
        return verification
    remark = f"{writer.name} checkpoints hold no methods of the KV cache: {methods} is not part of this one"
    warnings.warn(remark, stacklevel=4)
    return replace(verification, remarks=(*verification.remarks, remark))


def export_checkpoint(source_folder: str | Path, target_folder: str | Path, save_format: str) -> Path:
    """Turn a checkpoint of this workbench into another format.

    Args:
        source_folder: a folder that `save_compressed` wrote with save_format="workbench".
        target_folder: a folder that does not exist, or is empty.

    Raises:
        ValueError: as in `load_compressed`, `CheckpointInfo.read` and `save_compressed`.
        RuntimeError: the written files do not give the same model.
    """
    source = Path(source_folder)
    format_named(save_format)
    model, info = load_compressed(source), CheckpointInfo.read(source)
    tokenizer = None
    if (source / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    return write_checkpoint(Checkpoint(model, tokenizer, info), target_folder, save_format)


def check_holds(
    save_format: str, model: nn.Module, linears: Mapping[str, dict[str, Any]], made_by: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError if a format cannot hold this model; the message names the formats that can.

    Args:
        model: may be on the meta device.
        linears: the specification of each of its linears, as `CompressedLinear.spec()` gives it.
        made_by: for each linear, the methods that store it, if they are known.
    """
    writer, made_by = format_named(save_format), made_by or {}
    if is_offloaded(model) and not writer.takes_disk:
        ways = " or ".join(repr(one.name) for one in SAVE_FORMATS.values() if one.takes_disk)
        raise ValueError(
            f"`save_format` (={save_format!r}) is written from memory, and this model's weights lie on disk: {ways} "
            "works; `export_checkpoint` can convert that later if the compressed model fits into memory"
        )
    if problem := _problem_of_model(writer, model, linears):
        raise ValueError(problem + _instead(model, linears))
    for name, spec in linears.items():
        if problem := writer.problem(spec):
            by = f", as {made_by[name]} stores it" if name in made_by else ""
            shown = f"`save_format` (={save_format!r}) cannot hold {name}{by}: {problem}"
            raise ValueError(shown + _instead(model, linears))
    if problem := writer.problem_together(model, linears):
        raise ValueError(problem + _instead(model, linears))


def _problem_of_model(writer: SaveFormat, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
    if not writer.holds_rotations and (stream_of(model) is not None or getattr(model, "to_be_rotated", False)):
        return f"`save_format` (={writer.name!r}) has no place for transforms of inputs that act while the model runs"
    return writer.problem_of_model(model, linears)


def _instead(model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
    """The formats that can hold a model, as the end of a message; "" if there are none."""
    others = [
        repr(one.name)
        for one in SAVE_FORMATS.values()
        if not _problem_of_model(one, model, linears)
        and not any(map(one.problem, linears.values()))
        and not one.problem_together(model, linears)
    ]
    return f"; {' or '.join(others)} works" if others else ""


def format_named(save_format: str) -> SaveFormat:
    """The format of this name.

    Raises:
        ValueError: there is no such format.
    """
    if save_format not in SAVE_FORMATS:
        raise ValueError(f"`save_format` (={save_format!r}) must be one of {', '.join(SAVE_FORMATS)}")
    return SAVE_FORMATS[save_format]
