"""Text of others on our pages: without control characters, not endless, and links that lead to files only."""

import re
from urllib.parse import quote

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: object, limit: int = 400) -> str:
    """Text without terminal colours and control characters (and without marks that turn its direction), at most so
    long."""
    shown = _CONTROL.sub("", str(text)[: 8 * limit + 100])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def link(folder: str, file: str = "") -> str:
    """A relative link to a file of a folder; "" where the folder is unknown. A colon is quoted: no link of ours has a
    scheme."""
    return quote(f"{folder.rstrip('/')}/{file}" if file else folder, safe="/.~-_") if folder else ""


def listed(words: list[str], most: int = 6) -> str:
    """Words with commas; how many more there are, beyond so many."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def plural(count: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
