"""Bytes of the whole model against perplexity and KL, recipe by recipe.

    python seeds/bytes_and_loss.py --out bytes.json "gptq(bits=4, group_size=32)" \\
        "gptq(bits=4, group_size=32, grid=iq4_nl, scale_dtype=int6), rtn(bits=6, group_size=32, where=embedding)"

Calibrated on C4, scored in float32 on windows of 2048 tokens of raw wikitext-2 and of the essays. Bytes are those of
the model cast to bfloat16. The record is written after every recipe and continued where it is there already.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from compress import apply, held_out, load_model, resize
from compress.formats import SignStack
from compress.inputs.calibration import beginning, calibration
from compress.linear import sharing_copy
from compress.recipe import parse_recipe
from eval.machine.size import size
from eval.run_record import provenance
from eval.speed.deploy import cast
from eval.text.divergence import compare_on_text


@torch.no_grad()
def measure(given: argparse.Namespace, record: dict) -> None:
    """Fill `record["rows"]`: bytes, seconds to compress, and on each text perplexity and KL ± standard errors."""
    baseline, _ = load_model(given.model)
    for recipe in ("", *given.recipes):
        sizes = sorted(given.sizes, reverse=True) if stores_blocks(recipe) else []
        names = {recipe: None} | {f"{recipe}, {size_mb:g} MB": size_mb for size_mb in sizes}
        if names.keys() <= record["rows"].keys():
            continue
        model, tokenizer = load_model(given.model)
        seconds = 0.0
        if recipe:
            batches = calibration(tokenizer, corpus=given.corpus, samples=given.samples, seqlen=given.seqlen, seed=0)
            result = apply(parse_recipe(recipe), model, batches)
            model, seconds = result.model, result.seconds
        for name, size_mb in names.items():
            if size_mb is not None:
                resize(model, size_mb)
            record["rows"][name] = {"seconds": round(seconds, 1)} | score(
                given, baseline, model if recipe else None, tokenizer
            )
            if given.out:
                given.out.write_text(json.dumps(record, indent=1) + "\n")
            print(table(record), flush=True)


def stores_blocks(recipe: str) -> bool:
    """Do the weights that a recipe stores come in blocks, so that `resize` takes the model?"""
    parts = [part for method in (parse_recipe(recipe) if recipe else []) for part in method.stores((64, 64)) or []]
    return any(part["format"] == SignStack.name for part in parts)


def score(
    given: argparse.Namespace, baseline: nn.Module, model: nn.Module | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A row of the record: the bytes in bfloat16, perplexity and KL on each text, of the baseline itself if there is no
    other model."""
    scores, kls = {}, {}
    for text, limit in zip(given.texts, given.windows, strict=True):
        ids = held_out(tokenizer, corpus=text)
        how = {"window": given.window, "limit": limit, "beginning": beginning(tokenizer)}
        perplexities, divergences = compare_on_text(baseline, {"model": model} if model else {}, ids, **how)
        p = perplexities["model" if model else "baseline"]
        scores[text] = (p.value, p.stderr)
        kls |= {text: (d.kl, d.kl_stderr) for d in divergences.values()}
    stored = size(cast(sharing_copy(model or baseline), torch.bfloat16)).stored_bytes
    return {"bytes": stored, "perplexity": scores, "kl": kls}


def table(record: dict) -> str:
    """Markdown, a row for each recipe."""
    texts = record["settings"]["texts"]
    lines = [["recipe", "MB", *(x for text in texts for x in (text, f"KL, {text}")), "seconds"]]
    lines.append(["---", *["---:"] * (2 + 2 * len(texts))])
    for recipe, row in record["rows"].items():
        values = []
        for text in texts:
            (value, stderr), (base, _) = row["perplexity"][text], record["rows"][""]["perplexity"][text]
            values.append(f"{value:,.2f} ± {stderr:,.2f}" + (f" ({value / base - 1:+,.1%})" if recipe else ""))
            kl = row.get("kl", {}).get(text)
            values.append(f"{kl[0]:.4f} ± {kl[1]:.4f}" if kl else "–")
        name = f"`{recipe}`" if recipe else "uncompressed, 16 bits"
        lines.append([name, f"{row['bytes'] / 1e6:.1f}", *values, f"{row['seconds']:.0f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--corpus", default="c4", help="to calibrate on")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens in each")
    parser.add_argument("--texts", nargs="+", default=["wikitext2", "essays"], help="to score on")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, nargs="+", default=[20, 8], help="of each text")
    sizes = "megabytes at which recipes that store weights in blocks are scored, too, without compressing again"
    parser.add_argument("--sizes", type=float, nargs="+", default=[], help=sizes)
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    given = parser.parse_args()
    for recipe in given.recipes:
        parse_recipe(recipe)
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "recipes", "sizes")}
    about = provenance(shlex.join(["python", *sys.argv]), "cpu", "float32", "float32")
    record = {"settings": settings, "provenance": about, "rows": {}}
    if given.out and given.out.exists():
        record = json.loads(given.out.read_text())
        if record["settings"] != settings:
            raise ValueError(f"`--out` (={given.out}) holds a record of other settings: {record['settings']}")
    measure(given, record)


if __name__ == "__main__":
    main()
