"""Hashes of source code that do not change with its comments, docstrings and layout."""

import ast
import hashlib
import json
import re
from functools import cache
from pathlib import Path

SUFFIXES = (".py", ".cpp", ".inc", ".json")


def code_sha256(*places: Path) -> str:
    """Hash of the code in these files, and in all files below these folders."""
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    digest = hashlib.sha256()
    for file in files:
        if file.suffix in SUFFIXES:
            stat = file.stat()
            digest.update(f"{file.name} {_file_sha256(str(file), stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@cache
def _file_sha256(path: str, size: int, changed_ns: int) -> str:
    text = Path(path).read_text(encoding="utf-8")
    return hashlib.sha256(_NORMAL[Path(path).suffix](text).encode()).hexdigest()


def normal(source: str) -> str:
    """Python code without comments, docstrings and layout; the text itself where it cannot be parsed (magics)."""
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
