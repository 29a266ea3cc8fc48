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

import torch

from compress import apply, held_out, load_model
from compress.inputs.calibration import beginning, calibration
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
        if recipe in record["rows"]:
            continue
        model, tokenizer = load_model(given.model)
        seconds = 0.0
        if recipe:
            batches = calibration(tokenizer, corpus=given.corpus, samples=given.samples, seqlen=given.seqlen, seed=0)
            result = apply(parse_recipe(recipe), model, batches)
            model, seconds = result.model, result.seconds
        scores, kls = {}, {}
        for text, limit in zip(given.texts, given.windows, strict=True):
            ids = held_out(tokenizer, corpus=text)
            how = {"window": given.window, "limit": limit, "beginning": beginning(tokenizer)}
            perplexities, divergences = compare_on_text(baseline, {"model": model} if recipe else {}, ids, **how)
            p = perplexities["model" if recipe else "baseline"]
            scores[text] = (p.value, p.stderr)
            kls |= {text: (d.kl, d.kl_stderr) for d in divergences.values()}
        stored = size(cast(model, torch.bfloat16)).stored_bytes
        record["rows"][recipe] = {"bytes": stored, "seconds": round(seconds, 1), "perplexity": scores, "kl": kls}
        if given.out:
            given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(table(record), flush=True)


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
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    given = parser.parse_args()
    for recipe in given.recipes:
        parse_recipe(recipe)
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "recipes")}
    about = provenance(shlex.join(["python", *sys.argv]), "cpu", "float32", "float32")
    record = {"settings": settings, "provenance": about, "rows": {}}
    if given.out and given.out.exists():
        record = json.loads(given.out.read_text())
        if record["settings"] != settings:
            raise ValueError(f"`--out` (={given.out}) holds a record of other settings: {record['settings']}")
    measure(given, record)


if __name__ == "__main__":
    main()
