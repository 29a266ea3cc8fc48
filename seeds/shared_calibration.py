"""What one calibration for many recipes saves in time.

$ python seeds/shared_calibration.py --blocks 6 --samples 128 --out time.json

Twelve recipes are applied one after another, each by itself as a run does it by default, and then all of them from one
pass over the model (`calibrate="once"`); loading the model is not counted in either. A markdown table is printed, and a
JSON record is written after every recipe; a record that is there already is continued. What it costs in accuracy is
measured by two runs of `workbench run recipe`, with `-p calibrate sequential` and `-p calibrate once`.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress import METHODS, apply, load_model
from compress.apply import apply_each
from compress.inputs.calibration import calibration
from compress.linear import sharing_copy
from compress.recipe import parse_recipe
from compress.walk.blocks import find_blocks
from eval.run_record import provenance

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


def loaded(given: argparse.Namespace) -> tuple[nn.Module, list[Tensor]]:
    """The model with its first blocks, and calibration tokens."""
    model, tokenizer = load_model(given.model)
    if given.blocks:
        _, blocks = find_blocks(model)
        del blocks[given.blocks :]
        model.config.num_hidden_layers = given.blocks
    batches = calibration(tokenizer, corpus=given.corpus, samples=given.samples, seqlen=given.seqlen, seed=0)
    return model, batches


def measure(given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Seconds of every recipe by itself, and of all of them from one pass."""
    alone = record.setdefault("alone", {})
    model, batches = loaded(given)
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


def table(record: dict[str, Any]) -> str:
    """Markdown: the seconds of each recipe by itself and among the others, and their sums."""
    lines = ["| recipe | by itself, s | from the saved statistics, s |", "| --- | ---: | ---: |"]
    lines += [f"| `{text}` | {seconds:.1f} | {record['each'][text]:.1f} |" for text, seconds in record["alone"].items()]
    total = sum(record["alone"].values())
    lines.append(f"| all twelve | {total:.1f} | {record['together']:.1f}, {record['together'] / total:.2f} of that |")
    return "\n".join(lines) + "\n\nThe first row from saved statistics holds the pass that collects them."


def write(given: argparse.Namespace, record: dict[str, Any]) -> None:
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of the model that are kept; 0: all")
    parser.add_argument("--corpus", default="pydocs", help="to calibrate on")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens in each")
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    given = parser.parse_args()
    settings = {key: value for key, value in vars(given).items() if key != "out"}
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
