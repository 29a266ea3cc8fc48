"""Speculative decoding beside llama.cpp and ik_llama.cpp: a 16-bit model with look-up, with a 4-bit draft, with both.

    python seeds/peers/speculation.py --draft runs/a-saved-4-bit-model --targets F16.gguf BF16.gguf \\
        --draft-files Q4_0.gguf IQ4_NL.gguf --out speculation.json --write speculation.md

The texts are those of `eval.speed.lossless`: free text, editing and a summary, greedily, behind chat prompts. Tokens
per second are of whole texts, their prompts included. The programs of others are tried once with each of their settings
below and each file; what is fastest over all three kinds of text is timed, in turns with ours. They write by their own
rounding, so that their texts, and the lengths of these, may differ from ours; a table says how long they are.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from interop_environments import environment_variables, ready
from tqdm.auto import tqdm

from compress import load_compressed, load_model
from eval.machine.hardware import hardware
from eval.speed.lossless import KINDS, LOOK_UP, PLAIN, measure_lossless, with_look_up
from eval.writing.generation import encode_prompt, end_tokens, write
from kernels.step.accelerate import accelerate
from kernels.support.deploy import deployed

DRAFT = "draft"
BOTH = with_look_up(DRAFT)
WAYS = (PLAIN, LOOK_UP, DRAFT, BOTH)
# Of llama.cpp's `llama-speculative-simple`: without guesses, a sequence of tokens is looked up that no text repeats.
SIMPLE = "--spec-type ngram-simple --spec-ngram-simple-size-n"
LOOKED_UP = [
    *(f"{SIMPLE} {n} --spec-ngram-simple-size-m {m}" for n, m in [(2, 8), (3, 15), (12, 48)]),
    *(f"--spec-type ngram-cache --spec-draft-n-max {n}" for n in (8, 16)),
]
DRAFTED = [f"--spec-draft-n-max {n} --spec-draft-p-min {p}" for n, p in [(3, 0.0), (8, 0.75), (16, 0.75)]]
LLAMA = {
    PLAIN: [f"{SIMPLE} 1024"],
    LOOK_UP: LOOKED_UP,
    DRAFT: [f"--spec-type draft-simple {drafted}" for drafted in DRAFTED],
    BOTH: [
        f"--spec-type ngram-simple,draft-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 15 {drafted}"
        for drafted in DRAFTED
    ],
}
# Of ik_llama.cpp's `llama-lookup`. Its `llama-speculative` ends with a segmentation fault after the first token, since
# it copies a sampler (DRY) without a vocabulary.
IK = {PLAIN: ["--draft 0"], LOOK_UP: ["--draft 4", "--draft 8", "--draft 16"]}


@dataclass(frozen=True)
class Setting:
    """A program of others with one of its settings; draft: its GGUF file, or none."""

    tool: str
    way: str
    target: Path
    draft: Path | None
    arguments: str

    def command(self, place: Path, prompt: str, given: argparse.Namespace) -> list[str]:
        """The command that writes behind a prompt."""
        program = "llama-lookup" if self.tool == "ik_llama.cpp" else "llama-speculative-simple"
        parts = [place / "build" / "bin" / program, "-m", self.target, *(["-md", self.draft] if self.draft else [])]
        parts += ["-p", prompt, "-n", given.tokens, "-t", given.threads, "-c", 2048, "--temp", 0]
        parts += ["--no-escape", *(["-rtr"] if self.tool == "ik_llama.cpp" else [])]
        return [str(part) for part in (*parts, *self.arguments.split())]

    def __str__(self) -> str:
        files = self.target.stem + (f" with {self.draft.stem}" if self.draft else "")
        return f"{self.tool}, {self.way}: {files}, `{self.arguments}`"


def settings(given: argparse.Namespace) -> Iterator[Setting]:
    """All that are tried."""
    for tool, ways in {"llama.cpp": LLAMA, "ik_llama.cpp": IK}.items():
        for way, many in ways.items():
            drafts = given.draft_files if way in (DRAFT, BOTH) else [None]
            for target, draft, arguments in product(given.targets, drafts, many):
                yield Setting(tool, way, target, draft, arguments)


def written(setting: Setting, prompts: list[tuple[str, int]], given: argparse.Namespace) -> tuple[int, float]:
    """(tokens, seconds) of the texts behind prompts (text, tokens), by the program's own clock.

    Raises:
        RuntimeError: the program ends in another way, or reads other tokens than ours.
    """
    place = (given.environments / setting.tool.replace(".", "")).absolute()
    variables = environment_variables(place, given.threads)
    variables["LD_LIBRARY_PATH"] = str(place / "build" / "bin")
    tokens, seconds = 0, 0.0
    for prompt, length in prompts:
        command = setting.command(place, prompt, given)
        out = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", cwd=given.work)
        said = out.stdout + out.stderr
        found = dict(re.findall(r"(encoded|decoded) +(\d+ tokens in +[\d.]+) seconds", said))
        if out.returncode or len(found) < 2:
            raise RuntimeError(f"{setting} ended with {out.returncode}: {said.strip()[-400:]}")
        read, spent = found["encoded"].split(" tokens in ")
        if int(read) != length:
            raise RuntimeError(f"{setting} read {read} tokens of a prompt of {length}")
        count, decoded = found["decoded"].split(" tokens in ")
        tokens, seconds = tokens + int(count), seconds + float(spent) + float(decoded)
    return tokens, seconds


def fastest(prompts: Mapping[str, list[tuple[str, int]]], given: argparse.Namespace) -> dict[tuple[str, str], Setting]:
    """Of every tool and way, the setting with the least seconds per token, as the mean over the kinds of text."""
    seconds: dict[Setting, float] = {}
    for setting in tqdm(list(settings(given)), desc="settings of others", unit="setting"):
        times = [written(setting, texts, given) for texts in prompts.values()]
        seconds[setting] = statistics.fmean(spent / tokens for tokens, spent in times)
    best: dict[tuple[str, str], Setting] = {}
    for setting in sorted(seconds, key=seconds.__getitem__):
        best.setdefault((setting.tool, setting.way), setting)
    return best


def table(speeds: Mapping[str, Mapping[str, list[float]]], lengths: Mapping[str, Mapping[str, int]]) -> str:
    """Markdown: medians of tokens per second and of the ratio to plain writing of the same tool in the same round."""
    lines = [["", *(f"{kind}, tokens/s (× its plain)" for kind in KINDS), "tokens written"], ["---", *["---:"] * 4]]
    for name, kinds in speeds.items():
        plain = speeds[f"{name.split(', ')[0]}, {PLAIN}"]
        cells = []
        for kind, own in kinds.items():
            ratio = statistics.median(a / b for a, b in zip(own, plain[kind], strict=True))
            cells.append(f"{statistics.median(own):,.0f} ({ratio:.2f})")
        lines.append([name, *cells, " + ".join(str(lengths[name][kind]) for kind in KINDS)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page(found: dict, best: Mapping[tuple[str, str], Setting], given: argparse.Namespace) -> str:
    """The note."""
    lines = [
        f"# Speculative decoding beside llama.cpp and ik_llama.cpp: {given.model} on {hardware()['cpu']}",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {hardware()['cpu']}, {given.threads} threads.",
        "",
        *("```", "python " + shlex.join(sys.argv), "```", ""),
        f"A 16-bit model writes up to {given.tokens} tokens behind each prompt, greedily; medians of {given.rounds}"
        " rounds in turns, prompts included. The settings of others are the fastest of those that the script tries:",
        "",
        *(f"- {setting}" for setting in best.values()),
        "",
        table(found["speeds"], found["tokens"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", type=Path, required=True, help="folder of a saved model, our draft")
    parser.add_argument("--targets", type=Path, nargs="+", required=True, help="GGUF files of the model in 16 bits")
    parser.add_argument("--draft-files", type=Path, nargs="+", required=True, help="GGUF files of drafts")
    parser.add_argument("--tokens", type=int, default=192, help="most tokens of a text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"))
    parser.add_argument("--work", type=Path, default=Path("runs/interop"), help="folder for logs of others")
    parser.add_argument("--out", type=Path, required=True, help="file for the JSON record")
    parser.add_argument("--write", type=Path, help="file for the note")
    given = parser.parse_args()
    given.targets = [file.absolute() for file in given.targets]
    given.draft_files = [file.absolute() for file in given.draft_files]
    for file in (*given.targets, *given.draft_files):
        if not file.is_file():
            parser.error(f"--targets and --draft-files: there is no file {file}")
    if not given.draft.is_dir():
        parser.error(f"--draft (={given.draft}) must be the folder of a saved model")
    if min(given.rounds, given.threads) < 1 or given.tokens < 2:
        parser.error("--rounds and --threads must be at least 1, and --tokens at least 2")
    for folder in (given.work, given.out.parent, *([given.write.parent] if given.write else [])):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("llamacpp", "ik_llamacpp"):
        ready(given.environments, name)
    torch.set_num_threads(given.threads)
    baseline, tokenizer = load_model(given.model)
    models = {"baseline": baseline, DRAFT: load_compressed(given.draft, dtype=torch.bfloat16)}
    encoded = {kind: [encode_prompt(tokenizer, text) for text in texts] for kind, texts in KINDS.items()}
    prompts = {kind: [(tokenizer.decode(ids[0]), ids.shape[1]) for ids in own] for kind, own in encoded.items()}
    best = fastest(prompts, given)
    names = [*(f"ours, {way}" for way in WAYS), *(f"{tool}, {way}" for tool, way in best)]
    speeds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in names}
    lengths: dict[str, dict[str, int]] = {name: {} for name in names}
    plain, ends = accelerate(deployed(baseline)), end_tokens(baseline, tokenizer)
    for kind, own in encoded.items():
        texts = [write(plain, ids, ends=ends, new_tokens=given.tokens)[0] for ids in own]
        for way in WAYS:
            lengths[f"ours, {way}"][kind] = sum(len(text.tokens) + text.ended for text in texts)
    found = {
        "command": shlex.join(sys.argv),
        "settings": {f"{tool}, {way}": str(setting) for (tool, way), setting in best.items()},
        "speeds": speeds,
        "tokens": lengths,
    }
    for _ in tqdm(range(given.rounds), desc="rounds", unit="round"):
        lossless = measure_lossless(models, tokenizer, guess_tokens=given.tokens, speed_rounds=1).record
        for one in lossless.speeds:
            speeds[f"ours, {one.way}"][one.kind].append(one.tokens_per_s)
            if not one.same:
                raise RuntimeError(f"{one.way} wrote another text: {one.kind}")
        for (tool, way), setting in best.items():
            for kind, texts in prompts.items():
                tokens, seconds = written(setting, texts, given)
                speeds[f"{tool}, {way}"][kind].append(tokens / seconds)
                lengths[f"{tool}, {way}"][kind] = tokens
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.write:
        given.write.write_text(page(found, best, given))
    print(table(speeds, lengths))


if __name__ == "__main__":
    main()
