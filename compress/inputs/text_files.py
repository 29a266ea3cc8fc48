"""Documents of local files of text or of chats: .txt, .json, .jsonl, .parquet. Each file is opened by its name, and
nothing is written, so that neither patterns in names nor the state of any cache matters."""

import codecs
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kernels.support.errors import first_line

CHATS = "messages"  # the usual name of a column of chats
STRINGS = ("string", "large_string")  # types of columns that hold text
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def documents_of(path: Path) -> list[str]:
    """The documents of a file: the paragraphs of a .txt, or the rows of the column of texts or chats of another file.

    Raises:
        ValueError: the file cannot be read, is not in UTF-8 (or UTF-16 with its mark), or has no such column.
    """
    try:
        return READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`corpus` (={str(path)!r}) is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it "
            "in that encoding, for example with `iconv -f latin1 -t utf-8`"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"`corpus` (={str(path)!r}) is no valid JSON: {first_line(error)}") from error
    except OSError as error:
        raise ValueError(f"`corpus` (={str(path)!r}) cannot be read: {first_line(error)}") from error


class Chat(str):
    """A conversation. As a text it has the turns one after the other; `messages` is for a tokeniser's chat template."""

    messages: list[dict[str, str]]


def text_column(corpus: str, texts: list[str], columns: Iterable[str]) -> str:
    """The column that holds the documents: "text", or "messages", or the only one of those that hold text."""
    columns = list(columns)
    column = next((name for name, own in (("text", texts), (CHATS, columns)) if name in own), None)
    column = column or (texts[0] if len(texts) == 1 else None)
    if column is None:
        raise ValueError(
            f"`corpus` (={corpus!r}) needs a column named text, or {CHATS} with chats; it has {', '.join(columns)}"
        )
    return column


def documents_in(corpus: str, column: str, values: Iterable[Any]) -> list[str]:
    """The documents in a column: texts, or chats if it is their column; missing values are left out."""
    there = [value for value in values if value is not None]
    texts = column != CHATS or all(isinstance(value, str) for value in there)
    return there if texts else [_chat(corpus, value) for value in there]


def _chat(corpus: str, messages: Any) -> str:
    turns = messages if isinstance(messages, list) and messages else [None]
    if not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns) or not all(
        isinstance(turn.get("content"), str) for turn in turns
    ):
        raise ValueError(
            f"`corpus` (={corpus!r}): each entry of {CHATS} must be a list of turns, such as "
            f"[{{'role': 'user', 'content': 'Hello'}}], and one is {str(messages)[:80]!r}"
        )
    chat = Chat("\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns))
    chat.messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    return chat


def _paragraphs(path: Path) -> list[str]:
    return _decoded(path).replace("\r\n", "\n").split("\n\n")


def _json(path: Path) -> list[str]:
    text = _decoded(path)
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError:  # one document a line
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    return _texts_of(path, rows if isinstance(rows, list) else [rows])


def _texts_of(path: Path, rows: list[Any]) -> list[str]:
    """The values of the text column of these rows, without missing ones."""
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"`corpus` (={str(path)!r}) must hold one object for each document, with its text or chat")
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    texts = [name for name, own in values.items() if all(isinstance(value, str | None) for value in own) and any(own)]
    if not rows:
        return []
    column = text_column(str(path), texts, values)
    return documents_in(str(path), column, values[column])


def _parquet(path: Path) -> list[str]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            schema = file.schema_arrow
            kinds = {field.name: getattr(field.type, "value_type", field.type) for field in schema}  # of a dictionary
            texts = [name for name, kind in kinds.items() if str(kind) in STRINGS]
            column = text_column(str(path), texts, schema.names)
            return documents_in(str(path), column, file.read([column]).column(column).to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(f"`corpus` (={str(path)!r}) cannot be read: {first_line(error)}") from error


def _decoded(path: Path) -> str:
    """The text of a file: UTF-8, or the encoding that its mark tells."""
    data = path.read_bytes()
    text = data.decode(next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8"))
    if "\0" in text:
        raise ValueError(
            f"`corpus` (={str(path)!r}) holds bytes of 0, which no text has: it may be UTF-16 without its mark; save "
            "it in UTF-8"
        )
    return text


READERS: dict[str, Callable[[Path], list[str]]] = {
    ".parquet": _parquet, ".jsonl": _json, ".json": _json, ".txt": _paragraphs,
}  # fmt: skip
