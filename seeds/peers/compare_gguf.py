"""GGUF files of this workbench beside those that llama.cpp makes with an importance matrix from the same text.

    python seeds/peers/compare_gguf.py --write reports/published/interop-gguf.md

runs after `make interop`, whose environment of llama.cpp it uses, and whose checkpoints unless `--ours` names files or
`--make` recipes, which are applied on the same calibration windows and saved as GGUF files.
With `--make-only`, seeds/bytes_and_loss.py can score the files beside recipes of any format.
Every file's weights are dequantised by gguf's decoder and scored by the same code in float32, without rounding of
activations; speeds are those of llama-bench. What is there already is used again: files, and the scores beside them.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import interop_work as work
import torch
from interop_environments import environment_variables
from interop_table import gguf_weights
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from compress import apply, load_model, save_compressed
from compress.checkpoint.save import write_checkpoint
from compress.checkpoint.save_format import Checkpoint, CheckpointInfo
from compress.inputs.calibration import calibration
from compress.recipe import parse_recipe
from eval.machine.hardware import hardware
from eval.text.perplexity import Perplexity, token_losses
from eval.text.windows import Window, predictions, windows
from kernels.support.deploy import cast

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_M", "IQ3_M", "IQ3_XXS", "Q2_K", "IQ2_M")
OURS = (work.GPTQ32, work.AWQ)


@dataclass
class File:
    """A GGUF file or the model of a recipe.

    perplexity: {text: (value, standard error)}. decode, prefill: tokens/s of
    llama-bench, of a file.
    """

    model: str
    name: str
    nbytes: int
    perplexity: dict[str, tuple[float, float]]
    decode: float | None = None
    prefill: float | None = None


def source_file(folder: Path, model_name: str) -> Path:
    """The uncompressed model in 16 bits, written by our own writer."""
    target = folder / "source"
    if not target.is_dir():
        model, tokenizer = load_model(model_name)
        info = CheckpointInfo(recipe=[], model={"name": model_name}, calibration=None)
        write_checkpoint(Checkpoint(cast(model, torch.bfloat16), tokenizer, info), target, "gguf")
    return work.checkpoint_file(target)


def made(options: argparse.Namespace, folder: Path, model_name: str, recipe: str) -> Path:
    """The GGUF file of a recipe of ours."""
    target = folder / f"ours-{options.samples}-{re.sub('[^a-z0-9]+', '-', recipe.lower()).strip('-')}"
    if not target.is_dir():
        model, tokenizer = load_model(model_name)
        batches = calibration(tokenizer, **calibrated(options))
        save_compressed(apply(parse_recipe(recipe), model, batches), target, tokenizer, save_format="gguf")
    return work.checkpoint_file(target)


def calibrated(options: argparse.Namespace) -> dict[str, str | int]:
    """The tokens for our recipes and for the importance matrix."""
    return {"corpus": options.calibration, "samples": options.samples, "seqlen": options.seqlen}


def calibration_text(options: argparse.Namespace, folder: Path, model_name: str) -> Path:
    """The text of the calibration windows of our recipes."""
    _, tokenizer = load_model(model_name)
    batches = calibration(tokenizer, **calibrated(options))
    path = folder / f"calibration-{options.samples}.txt"
    path.write_text("\n\n".join(tokenizer.decode(batch[0], skip_special_tokens=True) for batch in batches))
    return path


def quantised(options: argparse.Namespace, folder: Path, model_name: str) -> dict[str, Path]:
    """llama.cpp's own files, by type."""
    source = source_file(folder, model_name)
    matrix = folder / f"importance-{options.samples}.gguf"
    if not matrix.is_file():
        text = calibration_text(options, folder, model_name)
        program(options, "llama-imatrix", "-m", source, "-f", text, "-o", matrix, "-c", str(options.seqlen))
    files = {}
    for kind in options.types:
        files[f"llama.cpp {kind}, importance matrix"] = file = folder / f"{kind}-{options.samples}.gguf"
        if not file.is_file():
            program(options, "llama-quantize", "--imatrix", matrix, source, file, kind)
    return {"uncompressed, 16 bits": source} | files


def program(options: argparse.Namespace, name: str, *command: str | Path) -> str:
    """The output of one of llama.cpp's programs.

    Raises:
        RuntimeError: it fails; the message has its last lines.
    """
    place = (options.environments / "llamacpp").absolute()
    line = [str(place / "build" / "bin" / name), *(str(part) for part in command)]
    if name != "llama-quantize":
        line += ["-t", str(options.threads)]
    done = subprocess.run(line, env=environment_variables(place, options.threads), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} fails: {done.stderr[-500:]}")
    return done.stdout


@torch.no_grad()
def score(options: argparse.Namespace, model_name: str, file: Path, shell: nn.Module) -> dict[str, tuple[float, float]]:
    """Perplexity of a file's dequantised weights, in the same model, in float32; kept beside the file."""
    found, read = {}, False
    for text, count in zip(options.texts, options.windows, strict=True):
        kept = file.parent / f"{file.name}.{text}.{count}x{options.window}.json"
        cut = scored_windows(model_name, text, count, options.window)
        if not kept.is_file():
            if not read:
                shell.load_state_dict(gguf_weights(file))
                read = True
            progress = tqdm(cut, desc=f"{file.stem}, {text}", unit="window", leave=False)
            work.kept_json(kept, [float(token_losses(*predictions(shell, window)).sum()) for window in progress])
        p = Perplexity.of(json.loads(kept.read_text()), [window.scored for window in cut])
        found[text] = p.value, p.stderr
    return found


@cache
def scored_windows(model_name: str, text: str, count: int, length: int) -> list[Window]:
    """The first windows of a held-out text."""
    first, ids = work.text_tokens(load_model(model_name)[1], text)
    return windows(ids[None], window=length, limit=count, beginning=first)


def rate(options: argparse.Namespace, file: Path, *what: str) -> float:
    out = program(options, "llama-bench", "-m", file, "-r", str(options.rounds), "-o", "json", *what)
    return sorted(json.loads(out)[0]["samples_ts"])[options.rounds // 2]


def measured(options: argparse.Namespace, model: str, name: str, file: Path, shell: nn.Module) -> File:
    losses = score(options, model, file, shell)
    prompt = str(work.SPEED_PROMPT)
    decode = rate(options, file, "-p", "0", "-n", str(work.SPEED_TOKENS), "-d", prompt)
    prefill = rate(options, file, "-p", prompt, "-n", "0")
    return File(model, name, file.stat().st_size, losses, decode=decode, prefill=prefill)


def table(rows: list[File], options: argparse.Namespace) -> str:
    shown = shlex.join(["python", "seeds/peers/compare_gguf.py", *sys.argv[1:]])
    scored = ", ".join(f"{n} of {text}" for text, n in zip(options.texts, options.windows, strict=True))
    out = [
        "# GGUF files: ours, and those of other tools",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {hardware()['cpu']}, {options.threads} threads,"
        " after `make interop`:",
        "",
        "```",
        shown,
        "```",
        "",
        f"The importance matrix is from the {options.samples} × {options.seqlen} tokens that calibrated our recipes."
        " The scorer is the same for all: a file's weights through gguf's decoder, float32, activations not rounded,"
        f" windows of {options.window} tokens: {scored}. Bytes are those of the whole model. Speeds are llama-bench's"
        f" medians of {options.rounds}: {work.SPEED_TOKENS} tokens after {work.SPEED_PROMPT}.",
        "",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        columns = ["model", "MB", *options.texts, "decode, tokens/s", "prefill, tokens/s"]
        out += [f"**{model}**", "", "| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
        for r in (row for row in rows if row.model == model):
            figures = ["–" if figure is None else f"{figure:,.0f}" for figure in (r.decode, r.prefill)]
            losses = [f"{value:.2f} ± {stderr:.2f}" for value, stderr in r.perplexity.values()]
            out.append("| " + " | ".join([r.name, f"{r.nbytes / 1e6:.1f}", *losses, *figures]) + " |")
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=work.MODELS)
    parser.add_argument("--calibration", default="c4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"))
    parser.add_argument("--work", type=Path, default=Path("runs/interop"))
    parser.add_argument("--types", nargs="+", default=TYPES, help="of llama-quantize")
    parser.add_argument("--samples", type=int, default=work.SAMPLES, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=work.SEQLEN, help="tokens in each")
    parser.add_argument("--texts", nargs="+", default=["wikitext2"], help="to score on")
    parser.add_argument("--windows", type=int, nargs="+", default=[work.WINDOWS], help="of each text")
    parser.add_argument("--window", type=int, default=work.WINDOW)
    parser.add_argument("--ours", nargs="*", type=Path, help="GGUF files of ours; those of `make interop` if not given")
    parser.add_argument(
        "--make", nargs="*", default=[], help="recipes whose GGUF files are made, if they are not there"
    )
    parser.add_argument("--make-only", action="store_true", help="make the files, and measure nothing")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        folder = options.work / model / "gguf-peers"
        folder.mkdir(parents=True, exist_ok=True)
        files = quantised(options, folder, model)
        if options.make_only:
            continue
        if options.ours is None and not options.make:
            there = {r: options.work / model / work.FOLDERS[r] / "gguf" for r in OURS}
            files |= {f"`{recipe}`": work.checkpoint_file(place) for recipe, place in there.items()}
        for recipe in options.make:
            files[f"`{recipe}`"] = made(options, folder, model, recipe)
        files |= {file.stem: file for file in options.ours or ()}
        source = source_file(folder, model)
        shell = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        progress = tqdm(files.items(), desc=model, unit="file")
        found = [measured(options, model, name, file, shell) for name, file in progress]
        rows += found
    text = table(rows, options)
    print(text)
    if options.write and rows:
        options.write.write_text(text)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    sys.exit(main())
