"""Hashes of source code that do not change with its comments, docstrings and layout.

Parsing all packages takes seconds. The hash of each file's normal form is therefore kept in the user's cache folder,
under the hash of its content.
"""

import ast
import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from kernels.support.user_cache import cache_folder

SUFFIXES = (".py", ".cpp", ".inc", ".json")
KEPT = 5000  # largest number of stored hashes; a larger file is discarded


def code_sha256(*places: Path) -> str:
    """Hash of the code in these files, and in all files below these folders."""
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    digest, known = hashlib.sha256(), len(_kept())
    for file in files:
        if file.suffix in SUFFIXES:
            stat = file.stat()
            digest.update(f"{file.name} {_file_sha256(str(file), stat.st_size, stat.st_mtime_ns)}\n".encode())
    if len(_kept()) > known:
        _keep()
    return digest.hexdigest()


@cache
def _file_sha256(path: str, size: int, changed_ns: int) -> str:
    suffix, content = Path(path).suffix, Path(path).read_bytes()
    name = hashlib.sha256(suffix.encode() + content).hexdigest()
    if name not in _kept():
        _kept()[name] = hashlib.sha256(_NORMAL[suffix](content.decode()).encode()).hexdigest()
    return _kept()[name]


@cache
def _kept_file() -> Path | None:
    """The file of stored hashes, named after this Python and this module, which determine the normal form; or None."""
    own = hashlib.sha256(Path(__file__).read_bytes() + sys.version.encode()).hexdigest()[:16]
    try:
        return cache_folder("sources") / f"{own}.json"
    except ValueError:
        return None


@cache
def _kept() -> dict[str, str]:
    """{hash of a file's suffix and content: hash of its normal form}."""
    with suppress(OSError, ValueError, AttributeError):
        kept = json.loads(_kept_file().read_text())
        if isinstance(kept, dict) and len(kept) <= KEPT:
            return kept
    return {}


def _keep() -> None:
    """Write the known hashes; if the folder cannot be written, the only cost is time."""
    if file := _kept_file():
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        with suppress(OSError):
            part.write_text(json.dumps(_kept()))
            os.replace(part, file)


def normal(source: str) -> str:
    """Python code without comments, docstrings and layout; the text itself if it cannot be parsed (magics)."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source.strip()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _has_docstring(node: ast.AST) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _normal_cpp(text: str) -> str:
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())


def _normal_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


_NORMAL = {".py": normal, ".cpp": _normal_cpp, ".inc": _normal_cpp, ".json": _normal_json}
