"""Bits shared out among layers against the same bits everywhere, at equal bytes of the whole model.

$ python seeds/mixed_precision.py --out mixed.json
$ python seeds/mixed_precision.py --model gemma3-270m --uniform "gptq(bits=4, group_size=32, scale_dtype=int6)" \
    --choices "gptq(bits={3, 4, 5, 6}, group_size=32, scale_dtype=int6)" --out mixed-gemma3.json

Every rule of `mixed` gets the bytes that the uniform recipe takes, and all are solved from one calibration
(`calibrate="once"`) on a text that is not scored. A markdown table is printed, and a JSON record is written after every
recipe; a record that is there already is continued, and so are the measured losses in `--work`.
"""

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from ablation_gptq import Scorer

from compress import apply, held_out, load_model
from compress.inputs.calibration import beginning, calibration
from compress.linear import sharing_copy
from compress.recipe import call, parse_recipe
from eval.machine.size import size
from eval.run_record import provenance
from eval.text.windows import mean_and_stderr, windows
from kernels.support.deploy import cast

RULES = ("kl_scaled", "fisher", "kl", "cosine", "zscore", "shuffled")


@torch.no_grad()
def measure(given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Bytes, and negative log-likelihood and KL divergence per window, of each recipe."""
    model, tokenizer = load_model(given.model)
    batches = calibration(tokenizer, corpus=given.corpus, samples=given.samples, seqlen=given.seqlen, seed=0)
    scorers = {}
    for text, limit in zip(given.texts, given.windows, strict=True):
        own = windows(
            held_out(tokenizer, corpus=text),
            window=given.window,
            limit=limit,
            beginning=beginning(tokenizer),
            bos="each",
        )
        scorers[text] = Scorer(model, own)
        record.setdefault("baseline", {}).setdefault(text, None)
        record["baseline"][text] = record["baseline"][text] or scorers[text].score(model)
    rows = record.setdefault("recipes", {})
    for rule in ("uniform", *given.rules):
        if rule in rows:
            continue
        budget = rows["uniform"]["bytes"] / 1e6 if rule != "uniform" else 0.0
        how = {"budget_mb": budget, "choices": given.choices, "loss": rule, "tokens": given.tokens}
        recipe = given.uniform if rule == "uniform" else call("mixed", **how)
        result = apply(parse_recipe(recipe), sharing_copy(model), batches, calibrate="once", work_path=given.work)
        scores = {text: scorer.score(result.model) for text, scorer in scorers.items()}
        stored = size(cast(result.model, torch.bfloat16)).stored_bytes
        rows[rule] = {"recipe": recipe, "bytes": stored, "seconds": round(result.seconds, 1), "scores": scores}
        if given.out:
            given.out.write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict[str, Any]) -> str:
    """Markdown: bytes, perplexity, KL and the paired difference of KL to the uniform choice."""
    texts = list(record["baseline"])
    head = ["rule", "MB", *(f"{text}: {what}" for text in texts for what in ("perplexity", "KL", "KL - uniform"))]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for rule, row in record["recipes"].items():
        cells = [rule, f"{row['bytes'] / 1e6:.2f}"]
        for text in texts:
            own, even = row["scores"][text], record["recipes"]["uniform"]["scores"][text]
            ones = [1] * len(own)
            each = [w[1] for w in own], [a[1] - b[1] for a, b in zip(own, even, strict=True)]
            kl, paired = ([x if x is not None else math.nan for x in mean_and_stderr(values, ones)] for values in each)
            perplexity = torch.tensor([w[0] for w in own]).mean().exp().item()
            cells += [f"{perplexity:.2f}", f"{kl[0]:.4f} ± {kl[1]:.4f}", f"{paired[0]:+.4f} ± {paired[1]:.4f}"]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--uniform", default="gptq(bits=3, group_size=32, scale_dtype=int6)", help="its bytes are shared"
    )
    parser.add_argument("--choices", default="gptq(bits={2, 3, 4, 5}, group_size=32, scale_dtype=int6)")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--tokens", type=int, default=512, help="on which losses are measured")
    parser.add_argument("--corpus", default="c4", help="to calibrate and to measure losses on")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens in each")
    parser.add_argument("--texts", nargs="+", default=["wikitext2", "essays"], help="to score on")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, nargs="+", default=[6, 6], help="of each text")
    parser.add_argument("--work", type=Path, default=Path("mixed-work"), help="where statistics and losses are kept")
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    given = parser.parse_args()
    settings = {key: str(value) for key, value in vars(given).items() if key not in ("out", "rules", "work")}
    about = provenance(shlex.join(["python", *sys.argv]), "cpu", "float32", "float32")
    record = {"settings": settings, "provenance": about}
    if given.out and given.out.exists():
        record = json.loads(given.out.read_text())
        if record["settings"] != settings:
            raise ValueError(f"`--out` (={given.out}) holds a record of other settings: {record['settings']}")
    measure(given, record)
    print(table(record))


if __name__ == "__main__":
    main()
