"""What one calibration for many recipes saves in time, and what it costs in accuracy.

$ python seeds/shared_calibration.py time --blocks 6 --samples 128 --out time.json
$ python seeds/shared_calibration.py accuracy --out accuracy.json

`time` applies twelve recipes one after another, each by itself as a run does it by default, and then all of them from
one pass over the model (`calibrate="once"`); loading the model is not counted in either. `accuracy` scores recipes that
were calibrated in both ways on the same held-out windows. Both print a markdown table and write a JSON record after
every recipe; a record that is there already is continued.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ablation_gptq import Scorer
from torch import Tensor, nn

from compress import METHODS, apply, held_out, load_model
from compress.apply import apply_each
from compress.inputs.calibration import beginning, calibration
from compress.linear import sharing_copy
from compress.recipe import parse_recipe
from compress.walk.blocks import find_blocks
from eval.run_record import provenance
from eval.text.windows import mean_and_stderr, windows

RECIPES = (
    "rtn(bits=4)",
    "gptq(bits=3)",
    "gptq(bits=4)",
    "gptq(bits=8)",
    "gptq(bits=4, group_size=32)",
    "gptq(bits=4, symmetric=False)",
    "awq(bits=4)",
    "awq, gptq(bits=4, symmetric=False)",
    "smoothquant, int8",
    "wanda(ratio=0.5)",
    "wanda(pattern='2:4')",
    "sparsegpt(ratio=0.5)",
)
SCORED = ("gptq(bits=4)", "gptq(bits=3)", "awq(bits=4)", "wanda(ratio=0.5)")


def loaded(given: argparse.Namespace) -> tuple[nn.Module, Any, list[Tensor]]:
    """The model with its first blocks, its tokenizer, and calibration tokens."""
    model, tokenizer = load_model(given.model)
    if given.blocks:
        _, blocks = find_blocks(model)
        del blocks[given.blocks :]
        model.config.num_hidden_layers = given.blocks
    batches = calibration(tokenizer, corpus=given.corpus, samples=given.samples, seqlen=given.seqlen, seed=0)
    return model, tokenizer, batches


def measure_time(given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Seconds of every recipe by itself, and of all of them from one pass."""
    alone = record.setdefault("alone", {})
    model, _, batches = loaded(given)
    apply([METHODS["gptq"]()], sharing_copy(model), batches[:1])  # loads the kernels
    for text in RECIPES:
        if text not in alone:
            start = time.perf_counter()
            apply(parse_recipe(text), sharing_copy(model), batches)
            alone[text] = round(time.perf_counter() - start, 2)
            write(given, record)
    if "together" not in record:
        start = time.perf_counter()
        results = apply_each({text: parse_recipe(text) for text in RECIPES}, model, batches, calibrate="once")
        record["together"] = round(time.perf_counter() - start, 2)
        # The first recipe's time holds the pass.
        record["each"] = {text: round(result.seconds, 2) for text, result in results.items()}
        write(given, record)


def time_table(record: dict[str, Any]) -> str:
    """Markdown: the seconds of each recipe by itself and among the others, and their sums."""
    lines = ["| recipe | by itself, s | from the saved statistics, s |", "| --- | ---: | ---: |"]
    lines += [f"| `{text}` | {seconds:.1f} | {record['each'][text]:.1f} |" for text, seconds in record["alone"].items()]
    total = sum(record["alone"].values())
    lines.append(f"| all twelve | {total:.1f} | {record['together']:.1f}, {record['together'] / total:.2f} of that |")
    return "\n".join(lines) + "\n\nThe first row from saved statistics holds the pass that collects them."


@torch.no_grad()
def measure_accuracy(given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Negative log-likelihood and KL divergence per window of each recipe in both ways."""
    model, tokenizer, batches = loaded(given)
    scores = record.setdefault("windows", {})
    scorers = {}
    for text, limit in zip(given.texts, given.windows, strict=True):
        ids = held_out(tokenizer, corpus=text)
        scorers[text] = Scorer(
            model, windows(ids, window=given.window, limit=limit, beginning=beginning(tokenizer), bos="each")
        )
        if text not in scores:
            scores[text] = {"baseline": scorers[text].score(model)}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in given.only or SCORED:
            for how in ("sequential", "once"):
                name = f"{recipe}, {how}"
                if all(name in each for each in scores.values()):
                    continue
                kept = folder if how == "once" else None
                result = apply(parse_recipe(recipe), sharing_copy(model), batches, calibrate=how, work_path=kept)
                for text, scorer in scorers.items():
                    scores[text][name] = scorer.score(result.model)
                write(given, record)


def accuracy_table(record: dict[str, Any]) -> str:
    """Markdown: perplexity and KL of each recipe in both ways, and the paired difference of the KL divergences."""
    head = ["recipe"]
    for text in record["windows"]:
        head += [f"{text}: perplexity, sequential", "once", "KL, sequential", "once", "once - sequential"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for recipe in (one for one in SCORED if all(f"{one}, once" in rows for rows in record["windows"].values())):
        cells = [f"`{recipe}`"]
        for rows in record["windows"].values():
            walked, once = rows[f"{recipe}, sequential"], rows[f"{recipe}, once"]
            ones = [1] * len(walked)
            nll = [torch.tensor([w[0] for w in each]).mean().exp().item() for each in (walked, once)]
            kl = [mean_and_stderr([w[1] for w in each], ones) for each in (walked, once)]
            paired = mean_and_stderr([b[1] - a[1] for a, b in zip(walked, once, strict=True)], ones)
            cells += [f"{value:.2f}" for value in nll] + [f"{mean:.4f} ± {error:.4f}" for mean, error in kl]
            cells += [f"{paired[0]:+.4f} ± {paired[1]:.4f}"]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write(given: argparse.Namespace, record: dict[str, Any]) -> None:
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "accuracy"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of the model that are kept; 0: all")
    parser.add_argument("--corpus", default="pydocs", help="to calibrate on")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens in each")
    parser.add_argument("--texts", nargs="+", default=["wikitext2", "essays"], help="to score on")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, nargs="+", default=[6, 4], help="of each text")
    parser.add_argument("--only", nargs="*", choices=SCORED, help="recipes to score now; all if not given")
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    given = parser.parse_args()
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "only")}
    about = provenance(shlex.join(["python", *sys.argv]), "cpu", "float32", "float32")
    record = {"settings": settings, "provenance": about}
    if given.out and given.out.exists():
        record = json.loads(given.out.read_text())
        if record["settings"] != settings:
            raise ValueError(f"`--out` (={given.out}) holds a record of other settings: {record['settings']}")
    if given.what == "time":
        measure_time(given, record)
        print(time_table(record))
    else:
        measure_accuracy(given, record)
        print(accuracy_table(record))


if __name__ == "__main__":
    main()
