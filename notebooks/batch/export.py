"""`workbench export`: a checkpoint that the workbench saved, written in another format."""

import sys
import time
from pathlib import Path

from compress.checkpoint.card import add_scores
from compress.checkpoint.checksums import CHECKSUMS, check_files
from compress.checkpoint.load import LAYOUT, empty_model, layout_specs, read_layout
from compress.checkpoint.save import check_holds, export_checkpoint, format_named
from eval.record.manifest import MANIFEST, seal
from eval.record.reading import read_json
from eval.record.schema import read_record, write_record
from notebooks.study.parameters import OWN_FORMAT, SAVE_FORMAT
from notebooks.study.saved import Saved, file_sizes


def export(source: Path, save_format: str, target: Path | None = None) -> Saved:
    """Write a checkpoint in another format, and load it again with that format's reader.

    The record of the run that saved the checkpoint is copied, too.

    Args:
        source: a folder that `save_compressed` wrote in the workbench's own format.
        target: a folder that does not exist, or is empty; None: beside the source, with the format behind its name.

    Raises:
        ValueError: before the weights are read, if the source is no such folder or lacks a file, the target exists, or
            the format cannot hold the model; after that, if a file of the source was changed.
        OSError: the disk has not enough room. RuntimeError: the reader gave another model. No target is left in these
            cases.
    """
    source = source.expanduser().absolute()
    target = target or source.with_name(f"{source.name}-{save_format}")
    begin = time.monotonic()
    try:
        _check(source, save_format, target)
        print(
            f"workbench: {source.name}, {_bytes(source) / 1e6:,.1f} MB, is read, written as {save_format}, loaded "
            "again and compared",
            file=sys.stderr,
        )
        export_checkpoint(source, target, save_format)
    except ValueError as error:
        said = str(error).replace("`path` (=", "`CHECKPOINT` (=").replace("`save_format` (=", "`--format` (=")
        raise ValueError(said) from error
    saved = Saved.of(target, save_format, time.monotonic() - begin, _bytes(source))
    if (source / "record.json").is_file():
        record = read_record(source / "record.json")
        write_record(record, target / "record.json")
        add_scores(target, record)
    sealed = read_json(source / MANIFEST)
    if sealed.get("key"):  # the exported model belongs to the attempt that made its source
        own = {name: sealed[name] for name in ("key", "attempt") if name in sealed}
        seal(target, own | {SAVE_FORMAT: save_format})
    return saved


def _bytes(folder: Path) -> int:
    """Bytes of a checkpoint, without the files that a run has put beside it."""
    return sum(size for name, size in file_sizes(folder).items() if name not in (MANIFEST, "record.json"))


def _check(source: Path, save_format: str, target: Path) -> None:
    """Raise ValueError for everything that can be known before the weights are read."""
    format_named(save_format)
    if not source.is_dir():
        raise ValueError(f"`CHECKPOINT` (={str(source)!r}): there is no such folder")
    if not (source / LAYOUT).is_file():
        raise ValueError(
            f"`CHECKPOINT` (={str(source)!r}) is no checkpoint in the workbench's own format (it has no {LAYOUT}), "
            f"from which the others are written; save the model with `save_format` {OWN_FORMAT!r}"
        )
    if save_format == OWN_FORMAT:
        raise ValueError(f"`--format` (={save_format!r}) is already the format of CHECKPOINT")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"`--to` (={str(target)!r}) exists already; name a new folder, or remove it first")
    if (source / CHECKSUMS).is_file():
        check_files(source, content=False)
    layout = read_layout(source)
    check_holds(save_format, empty_model(source, layout), layout_specs(layout))
