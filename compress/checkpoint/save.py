"""save_compressed: a compressed model in a folder, loaded again and compared before it counts as saved."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from compress.checkpoint.save_format import Checkpoint, SaveFormat, Story
from compress.checkpoint.workbench import Workbench
from compress.linear import compressed_linears
from compress.result import Result

SAVE_FORMATS: dict[str, SaveFormat] = {one.name: one for one in (Workbench(),)}
STORY = "compression.json"  # how the model was made


def save_compressed(
    result: Result,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    save_format: str = "workbench",
) -> Path:
    """Write a compressed model to a folder.

    The folder appears by one rename, after its content was loaded again by the reader of its format and gave the same
    logits as the model in memory; an interruption leaves nothing under its name.

    Args:
        path: a folder that does not exist, or is empty.
        save_format: one of SAVE_FORMATS.

    Raises:
        ValueError: there is something at `path` already, or the format cannot hold this model.
        RuntimeError: what was written does not give the same model; nothing is left at `path`.
    """
    return write_checkpoint(Checkpoint(result.model, tokenizer, Story.of(result)), path, save_format)


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, save_format: str) -> Path:
    """As `save_compressed`, for a model whose story is known, such as one that was loaded from another checkpoint."""
    path, writer = Path(path), format_named(save_format)
    if problem := writer.problem_of_model(checkpoint.model):
        raise ValueError(problem)
    for name, linear in compressed_linears(checkpoint.model).items():
        if problem := writer.problem(linear.spec()):
            raise ValueError(f"`save_format` (={save_format!r}) cannot hold {name}: {problem}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"`path` (={str(path)!r}) exists already; give a new one, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        writer.write(checkpoint, part)
        (part / STORY).write_text(json.dumps(asdict(checkpoint.story), indent=1))
        writer.verify(checkpoint, part)
        part.chmod(0o755)
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def format_named(save_format: str) -> SaveFormat:
    """The format of this name.

    Raises:
        ValueError: there is none.
    """
    if save_format not in SAVE_FORMATS:
        raise ValueError(f"`save_format` (={save_format!r}) must be one of {', '.join(SAVE_FORMATS)}")
    return SAVE_FORMATS[save_format]
