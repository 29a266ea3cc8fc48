"""Short names for texts in files, for metrics, records and pages, which must not contain paths of this machine."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEXTS = ("corpus", "eval_corpus", "haystack", "scored")  # parameters of notebooks, or of calibration, that name a text


def text_name(corpus: str | None) -> str | None:
    """The name of a text in metrics: for a file its stem and six digits of its content's hash; else the name itself.

    Two different files of one name get different names, and a copy in another folder gets the same name.
    """
    if not corpus or not _is_file(corpus):
        return corpus
    path = Path(corpus).expanduser()
    with path.open("rb") as file:
        return f"{path.stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:6]}"


def with_short_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a run, with the short names of its texts."""
    return {
        name: text_name(value) if name in TEXTS and isinstance(value, str) else value for name, value in values.items()
    }


def short_path(path: str) -> str:
    """A file's path for provenance: below the user's home folder as `~/...`, else its last two parts."""
    if not _is_file(path):
        return path
    place = Path(path).expanduser().absolute()
    if place.is_relative_to(Path.home()):
        return f"~/{place.relative_to(Path.home())}"
    return f"…/{place.parent.name}/{place.name}"


def _is_file(text: str) -> bool:
    # os.path.isfile: Path.is_file raises for a text, such as a list of recipes, that is too long for a file's name.
    return ("/" in text or "." in text) and os.path.isfile(os.path.expanduser(text))
