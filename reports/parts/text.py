"""Text from records on a page: without control characters, of limited length, and links that lead to files only."""

import re
from collections.abc import Iterable
from html import escape
from urllib.parse import quote

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


# A query string that signs a URL, and absolute paths of this machine: no page needs them.
_SIGNED = re.compile(r"""(\w+://[^\s?"'<>]+)\?[^\s"'<>]*(?:sign|token|credential|expires|key|auth)[^\s"'<>]*""", re.I)
_PATH = re.compile(
    r"""(?<![\w:/.~-])(?:file://)?(?:/|~/|[A-Za-z]:\\)(?:[^\s/\\"'<>:,;()]+[/\\])+([^\s/\\"'<>:,;()]*)"""
)


def clean(text: object, limit: int = 400) -> str:
    """Text without terminal colours, control characters and marks that change its direction, of at most `limit`
    characters."""
    shown = _CONTROL.sub("", str(text)[: 8 * limit + 100])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def public(text: object, limit: int = 400) -> str:
    """The text of an exception for a page: URLs without signatures, absolute paths reduced to their last part."""
    shown = str(text)[: 8 * limit + 100]
    return clean(_PATH.sub(r"…/\1", _SIGNED.sub(r"\1?…", shown)), limit)


def coded(text: object) -> str:
    """Text as HTML that is safe, with names between backticks as code."""
    return re.sub(r"`([^`\s][^`]*)`", r"<code>\1</code>", escape(str(text)))


def link(folder: str, file: str = "") -> str:
    """A relative link to a file of a folder; "" if the folder is unknown. A colon is quoted, as no link here has a
    scheme."""
    return quote(f"{folder.rstrip('/')}/{file}" if file else folder, safe="/.~-_") if folder else ""


def listed(words: list[str], most: int = 6, count: int | None = None) -> str:
    """Words separated by commas: at most `most`, then the number of further words, of `count` in all."""
    more = (len(words) if count is None else count) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def plural(count: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def measured_up_to(parameters: Iterable[int | None]) -> list[str]:
    """A sentence on the largest model on which a verdict rests; [] if no size is known.

    Args:
        parameters: the number of parameters of each model.
    """
    largest = max(filter(None, parameters), default=0)
    if not largest:
        return []
    size = f"{largest / 1e9:,.3g} billion" if largest >= 1e9 else f"{largest / 1e6:,.3g} million"
    return [f"The largest model measured here has {size} parameters; larger ones may behave otherwise."]
