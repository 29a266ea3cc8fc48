"""The tables of families, methods and knobs in the READMEs, generated from `METHODS`.

`python -m compress.guide` writes them again between the markers `<!-- families -->`, `<!-- methods -->` or
`<!-- knobs -->` and `<!-- end -->`; a test checks that nothing would change.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path

from compress import METHODS
from compress.method import Method

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "compress/README.md", "compress/methods.md", "compress/knobs.md")
MOST = 1 << 15  # an upper limit above this only guards against typing errors
FAMILIES = {
    "weights": "quantisation of weights", "tuning": "quantisation of weights",
    "activations": "quantisation of activations", "rotations": "quantisation of activations",
    "recover": "recovery by training", "pruning": "pruning", "correction": "parts that are added",
    "smoothing": "KV cache", "eviction": "KV cache", "storing": "KV cache", "learned": "KV cache",
    "reading": "KV cache", "projecting": "KV cache",
}  # families of the methods of every folder  # fmt: skip


def families_table() -> str:
    """One row per family: its methods, with links to their files."""
    links: dict[str, list[str]] = {family: [] for family in FAMILIES.values()}
    for name, method in METHODS.items():
        links[FAMILIES[_folder_of(method)]].append(f"[`{name}`]({_file(method)})")
    rows = [f"| {family} | {', '.join(own)} |" for family, own in links.items()]
    return "\n".join(["| family | methods |", "|---|---|", *rows])


def methods_table() -> str:
    """One row per method: its name, purpose, source and file; links are from compress/methods.md."""
    rows = ["| method | what it does | source | file |", "|---|---|---|---|"]
    for name, method in METHODS.items():
        source = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", method.source)
        file = _file(method).removeprefix("compress/")
        rows.append(f"| `{name}` | {_summary(method)} | {source} | [{file}]({file}) |")
    return "\n".join(rows)


def knobs_table() -> str:
    """One table per folder of methods: each knob with the methods that have it."""
    folders: dict[str, dict[str, type[Method]]] = {}
    for name, method in METHODS.items():
        folders.setdefault(_folder_of(method), {})[name] = method
    return "\n\n".join(_folder(folder, methods) for folder, methods in folders.items())


def updated(text: str) -> str:
    """The text with its generated tables made again."""
    tables: dict[str, Callable[[], str]] = {
        "families": families_table,
        "methods": methods_table,
        "knobs": knobs_table,
    }
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        text = pattern.sub(lambda match, table=table: f"{match[1]}\n{table()}\n\n{match[2]}", text)
    return text


def _folder(folder: str, methods: dict[str, type[Method]]) -> str:
    owners: dict[tuple[str, str], list[str]] = {}  # (knob, its description) -> methods
    for name, method in methods.items():
        for knob, field in method.knobs().items():
            owners.setdefault((knob, _description(field)), []).append(f"`{name}`")
    rows = [f"**`{folder}/`**", "", "| knob | methods | default | values | meaning |", "|---|---|---|---|---|"]
    for (knob, description), names in owners.items():
        rows.append(f"| `{knob}` | {'all' if len(names) == len(methods) else ', '.join(names)} | {description} |")
    return "\n".join(rows)


def _description(field: Field) -> str:
    choices, limits = field.metadata["choices"], field.metadata["range"]
    values = ", ".join(map(str, choices))
    if limits:
        values = f"{limits[0]} or more" if limits[1] > MOST else f"{limits[0]} to {limits[1]}"
    default = "(empty)" if field.default == "" else f"`{field.default}`"
    return f"{default} | {values} | {field.metadata['help']}"


def _summary(method: type[Method]) -> str:
    return " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split()).rstrip(".")


def _file(method: type[Method]) -> str:
    return method.__module__.replace(".", "/") + ".py"


def _folder_of(method: type[Method]) -> str:
    return Path(_file(method)).parent.name


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
