"""The model card of a checkpoint: `README.md` with the front matter that hubs read."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from compress.checkpoint.gguf.embedded import EMBEDDED, gguf_file
from compress.checkpoint.save_format import Checkpoint, SaveFormat, Verification
from compress.dropped import dropped_parts
from compress.embedding import find_ends
from compress.linear import compressed_linears

CARD = "README.md"
LICENSE = "The license of the base model applies."
_SCORES = "## Scores\n"
_NO_SCORES = "The run that made this checkpoint recorded no scores.\n"
_REPEAT = "## How to make it again\n"
# Explanations that are added to the reasons of `compress.walk.blocks.kept_weights`, by a word in them.
_MORE = {
    "outside the blocks": "methods take the linears inside the blocks, and the head's rounding would reach every logit",
    "Embedding": "it is looked up, not multiplied, and no method of the recipe takes it",
    "Router": "rounding it would send tokens to other experts",
    "routes tokens": "rounding it would send them to other experts",
    "Norm": "a vector, next to nothing in bytes",
}
_HEAD_BYTES = 1 << 16  # first bytes of a GGUF file: enough for its general metadata
_LICENSE_KEY = b"general.license"


def write_card(
    checkpoint: Checkpoint, save_format: SaveFormat, verification: Verification, folder: Path, *, title: str
) -> None:
    """Write the card of a checkpoint that has been written and verified.

    Args:
        folder: the folder of the checkpoint. title: the name that the folder will get.
    """
    info, model = checkpoint.info, checkpoint.model
    base, recipe = _base_name(info.model["name"]), ", ".join(_call(**one) for one in info.recipe)
    front = _front_matter(checkpoint, save_format)
    stored = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf"))
    dtype = str(model.dtype).removeprefix("torch.")
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n",
        f"# {title}\n",
        f"`{base}`, compressed by `{', '.join(one['method'] for one in info.recipe)}`, in the format "
        f"`{save_format.name}`. It is loaded by {' and '.join(save_format.read_by(model).rsplit(', ', 1))}. "
        f"Weight files: {stored / 1e6:,.1f} MB; what is "
        f"not compressed is in {dtype}. {'' if 'license' in front else LICENSE}".rstrip()
        + "\n",
        f"## How to load it\n\n{save_format.how_to_load(model).strip().replace('PATH', title)}\n",
        f"## Method\n\n{_methods(info.recipe)}\n{_calibration(info.calibration)}\n{_earlier(info.model)}",
        f"## What was done to each weight\n\n{_weights(checkpoint)}",
        f"{_SCORES}\n{_NO_SCORES}",
        f"{_REPEAT}\n{_python(info.model['name'], dtype, recipe, info.calibration, save_format.name)}",
        f"## Verified\n\n{_verified(verification)}",
    ]
    (folder / CARD).write_text("\n".join(sections), encoding="utf-8")


def add_scores(folder: Path, record: Mapping[str, Any]) -> None:
    """Put the scores of a run record, and the command that repeats the run, into the card of a checkpoint.

    A card without these sections, because its owner has rewritten it, is not changed.
    """
    path = folder / CARD
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    scores = record.get("scores") or {}
    if table := _score_table(scores.get("baseline") or {}, scores.get("compressed") or {}):
        text = _with_section(text, _SCORES, table)
    if command := (record.get("provenance") or {}).get("command"):
        commit = (record.get("provenance") or {}).get("commit")
        where = f", at commit `{commit}`," if commit else ""
        repeated = f"In a checkout of the workbench{where} this command repeats the run:\n\n```sh\n{command}\n```\n"
        text = _with_section(text, _REPEAT, repeated)
    path.write_text(text, encoding="utf-8")


def _with_section(text: str, heading: str, content: str) -> str:
    start = text.find(heading)
    if start < 0:
        return text
    end = text.find("\n## ", start + len(heading))
    return f"{text[:start]}{heading}\n{content}{text[end:] if end >= 0 else ''}"


def _score_table(baseline: Mapping[str, Any], compressed: Mapping[str, Any]) -> str:
    metrics = [name for name in {**baseline, **compressed} if not name.endswith("_stderr")]
    if not metrics:
        return ""
    rows = [f"| {name} | {_value(baseline, name)} | {_value(compressed, name)} |" for name in metrics]
    head = "| metric | base model | this checkpoint |\n|---|---|---|\n"
    note = "Numbers after ± are standard errors. Speeds and memory are those of the machine that `record.json` names.\n"
    return head + "\n".join(rows) + f"\n\n{note}"


def _value(scores: Mapping[str, Any], name: str) -> str:
    value, error = scores.get(name), scores.get(f"{name}_stderr")
    if not isinstance(value, int | float):
        return "–"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
    if not isinstance(error, int | float):
        return shown
    return f"{shown} ± {error:,.0f}" if error >= 10 else f"{shown} ± {error:.2g}"


def _front_matter(checkpoint: Checkpoint, save_format: SaveFormat) -> dict[str, Any]:
    info = checkpoint.info
    front: dict[str, Any] = {}
    if is_hub_id(info.model["name"]):
        front |= {"base_model": info.model["name"], "base_model_relation": "quantized"}
    if known := license_of(info.model["name"]):
        front["license"] = known
    parts = [part for linear in compressed_linears(checkpoint.model).values() for part in linear.spec()["parts"]]
    parts += [part[inner] for part in parts for inner in ("values", "inner") if inner in part]
    bits = sorted({f"{part['bits']}-bit" for part in parts if part.get("bits")})
    methods = [one["method"].replace("_", "-") for one in info.recipe]
    tags = ["compressed", *methods, *bits, save_format.name, checkpoint.model.config.model_type]
    return front | {
        "library_name": save_format.library,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(tags)),
    }


def is_hub_id(name: str) -> bool:
    """Whether a model's name is the name of a repository of a hub, and not of a folder or a package."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def license_of(model_name: str) -> str:
    """The license that a local model's card or a GGUF file names; "" if it is not known."""
    folder = Path(model_name).expanduser()
    if (folder / CARD).is_file():
        front = re.match(r"---\n(.*?)\n---", (folder / CARD).read_text(encoding="utf-8", errors="replace"), re.DOTALL)
        found = re.search(r"^license: *([\w.+-]+) *$", front[1], re.MULTILINE) if front else None
        return found[1] if found else ""
    try:
        path = gguf_file(model_name) if model_name in EMBEDDED or folder.is_file() else None
    except ValueError:  # its package is no longer installed
        return ""
    if path is None:
        return ""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    start = head.find(_LICENSE_KEY) + len(_LICENSE_KEY)
    if start < len(_LICENSE_KEY) or int.from_bytes(head[start : start + 4], "little") != 8:  # 8: a string
        return ""
    length = int.from_bytes(head[start + 4 : start + 12], "little")
    return head[start + 12 : start + 12 + length].decode(errors="replace")


def _base_name(name: str) -> str:
    """A model's name without the local folders of its path."""
    return name if is_hub_id(name) else Path(name).name


def _call(method: str, knobs: Mapping[str, Any]) -> str:
    return f"{method}({', '.join(f'{name}={value!r}' for name, value in knobs.items())})"


def _methods(recipe: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        f"| {one['method']} | {', '.join(f'{name}={value!r}' for name, value in one['knobs'].items())} |"
        for one in recipe
    )
    return "| method, in order | knobs |\n|---|---|\n" + "\n".join(rows) + "\n"


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "No calibration text was used.\n"
    corpus = calibration["corpus"]
    text = f"`{_base_name(corpus)}`, seed {calibration['seed']}" if corpus else "tokens that the caller gave"
    return (
        f"Calibration: {calibration['samples']} samples of {calibration['seqlen']} tokens, {text}; sha256 of the "
        f"tokens: `{calibration['sha256']}`.\n"
    )


def _earlier(identity: Mapping[str, Any]) -> str:
    """The compression steps that were applied to the model before this recipe."""
    earlier = identity.get("compressed_before")
    if not earlier:
        return ""
    recipe = ", ".join(_call(**one) for one in earlier["recipe"])
    made = f"`{_base_name(identity['name'])}` is `{_base_name(earlier['model']['name'])}`, compressed by `{recipe}`.\n"
    return f"{made}{_earlier(earlier['model'])}"


def _weights(checkpoint: Checkpoint) -> str:
    info = checkpoint.info
    rows: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for layer in info.layers:
        size = layer["shape"][0] * layer["shape"][1]
        rows[(f"compressed: {layer['format']}, {layer['bits_per_weight']:.2f} bits per weight", "")].append(
            (layer["name"], size)
        )
    for kept in info.kept:
        size = 1
        for length in kept["shape"]:
            size *= length
        rows[("kept", _why(kept["reason"]))].append((kept["name"], size))
    text = "| weights | parameters | what was done | why |\n|---|---|---|---|\n"
    for (done, why), members in rows.items():
        names = f"{len(members)}, such as `{members[0][0]}`" if len(members) > 1 else f"`{members[0][0]}`"
        text += f"| {names} | {sum(size for _, size in members):,} | {done} | {why} |\n"
    if find_ends(checkpoint.model).tied:
        text += "\nThe output head shares the weight of the embedding.\n"
    text += _unreached(info.layers)
    whole = [drop for drop in info.drops if drop.get("left") is None]
    if gone := [drop["name"] for drop in whole if drop["order"]] or list(dropped_parts(checkpoint.model)):
        text += f"\nDropped: {', '.join(f'`{name}`' for name in gone)}.\n"
    for drop in {(drop["kind"], drop["of"]): drop for drop in info.drops if drop.get("left") is not None}.values():
        text += f"\nOf {drop['of']:,} {drop['kind']} in each block {drop['left']:,} are left.\n"
    return text


def _unreached(layers: Sequence[Mapping[str, Any]]) -> str:
    """The weights, experts for the most part, that no calibration token reached; "" if the methods needed none."""
    names = [layer["name"] for layer in layers if not layer["tokens"]]
    if not names or len(names) == len(layers):
        return ""
    return (
        f"\nNo calibration token reached {len(names)} of the {len(layers)} compressed weights, such as `{names[0]}`: "
        "they were rounded without knowing their inputs.\n"
    )


def _why(reason: str) -> str:
    """The reason why a weight was kept, for readers who do not know the methods."""
    more = next((text for word, text in _MORE.items() if word in reason), "")
    return f"{reason}; {more}" if more else reason


def _python(name: str, dtype: str, recipe: str, calibration: Mapping[str, Any] | None, save_format: str) -> str:
    known = calibration is not None and calibration["corpus"]
    settings = ("corpus", "samples", "seqlen", "seed", "scored")
    given = ", ".join(f"{key}={calibration[key]!r}" for key in settings if key in calibration) if known else ""
    batches = f"calibration(tokenizer, {given})" if known else "[]" if calibration is None else "..."
    return f"""```python
from compress import apply, calibration, load_model, save_compressed
from compress.recipe import parse_recipe

model, tokenizer = load_model({_base_name(name)!r}, dtype={dtype!r})
batches = {batches}
result = apply(parse_recipe({recipe!r}), model, batches)
save_compressed(result, "out", tokenizer, save_format={save_format!r})
```
"""


def _verified(verification: Verification) -> str:
    remarks = "".join(f"- {remark}\n" for remark in verification.remarks)
    return (
        f"Before this checkpoint was called saved, it was loaded again with {verification.reader} and compared with "
        f"the model in memory: {verification}.\n" + (f"\n{remarks}" if remarks else "")
    )
