"""Whole texts beside llama.cpp and ik_llama.cpp: a 16-bit model with look-up, with a 4-bit draft, with both, and
compressed models that write alone, each with its bytes and its loss.

    python seeds/peers/speculation.py --draft runs/a-saved-4-bit-model --targets F16.gguf BF16.gguf \\
        --draft-files Q4_0.gguf IQ4_NL.gguf --accuracy 4 --out speculation.json --write speculation.md \\
        --ours "4 bits: runs/a-saved-4-bit-model" "half of the weights at 0: runs/another" --files Q8_0.gguf Q4_0.gguf

The texts are those of `eval.speed.lossless`: free text, editing and a summary, greedily, behind chat prompts. Tokens
per second are of whole texts, their prompts included. The programs of others are tried once with each of their settings
below and each file; what is fastest over all three kinds of text is timed, in turns with ours. They write by their own
rounding, so that their texts, and the lengths of these, may differ from ours; a table says how long they are. `--ours`
are models of ours that write plainly, by name, as in `compare_speed.py`, as many tokens as the 16-bit model, so that
their speeds can be compared; `--files` are those of the rivals.
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
from compare_speed import BASELINE, Comparison, named_model, tensor_bytes
from interop_environments import environment_variables, ready
from torch import nn
from tqdm.auto import tqdm

from compress import load_compressed
from eval.machine.hardware import hardware
from eval.machine.size import size
from eval.speed.lossless import KINDS, LOOK_UP, PLAIN, measure_lossless, with_look_up
from eval.writing.generation import Written, encode_prompt, end_tokens, write
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
    way: str  # of writing, or the name of a compressed file, which writes plainly
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
    for file, (tool, ways) in product(given.files, {"llama.cpp": LLAMA, "ik_llama.cpp": IK}.items()):
        yield Setting(tool, file.stem.partition("-")[0], file, None, ways[PLAIN][0])
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
        try:
            times = [written(setting, texts, given) for texts in prompts.values()]
        except RuntimeError as error:  # the others go on
            tqdm.write(str(error))
            continue
        seconds[setting] = statistics.fmean(spent / tokens for tokens, spent in times)
    best: dict[tuple[str, str], Setting] = {}
    for setting in sorted(seconds, key=seconds.__getitem__):
        best.setdefault((setting.tool, setting.way), setting)
    return best


def table(found: dict) -> str:
    """Markdown: bytes, losses, medians of tokens per second and of the ratio to the same tool's plain 16 bits in the
    same round."""
    speeds, lengths, sizes = found["speeds"], found["tokens"], found["sizes"]
    losses = [["KL", "---:"]] * bool(found["losses"])
    heads = [["", "---"], ["MB", "---:"], *losses]
    heads += [[title, "---:"] for title in (*(f"{kind}, tokens/s (ratio)" for kind in KINDS), "tokens written")]
    lines = [list(column) for column in zip(*heads, strict=True)]
    for name, kinds in speeds.items():
        plain = speeds[f"{name.split(', ')[0]}, {PLAIN}"]
        cells = [f"{sizes[name] / 1e6:.1f}"]
        if found["losses"]:
            loss = found["losses"].get(name)
            cells.append(f"{loss[0]:.4f} ± {loss[1]:.4f}" if loss else "–")
        for kind, own in kinds.items():
            ratio = statistics.median(a / b for a, b in zip(own, plain[kind], strict=True))
            cells.append(f"{statistics.median(own):,.0f} ({ratio:.2f})")
        lines.append([name, *cells, " + ".join(str(lengths[name][kind]) for kind in KINDS)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def count(text: Written) -> int:
    """Tokens of a text, with the one that ends it."""
    return len(text.tokens) + text.ended


def sizes(comparison: Comparison, draft: nn.Module, best: Mapping[tuple[str, str], Setting]) -> dict[str, int]:
    """{contestant: bytes of its weights, and of its draft's}"""
    own = comparison.rows[BASELINE].nbytes
    found = {f"ours, {way}": own + size(draft).stored_bytes * (way in (DRAFT, BOTH)) for way in WAYS}
    found |= {name: comparison.rows[name].nbytes for name in comparison.models if name != BASELINE}
    for (tool, way), setting in best.items():
        files = [file for file in (setting.target, setting.draft) if file]
        found[f"{tool}, {way}"] = sum(tensor_bytes(file) for file in files)
    return found


def losses(comparison: Comparison, best: Mapping[tuple[str, str], Setting]) -> dict[str, tuple[float, float]]:
    """{compressed contestant: its KL from the uncompressed model, with its standard error}"""
    found = {name: comparison.rows[name].kl for name in comparison.models if name != BASELINE}
    files = {path: comparison.rows[name].kl for name, path in comparison.files.items()}
    found |= {f"{tool}, {way}": files[one.target] for (tool, way), one in best.items() if way not in WAYS}
    return {name: kl for name, kl in found.items() if kl}


def page(found: dict, best: Mapping[tuple[str, str], Setting], given: argparse.Namespace) -> str:
    """The note."""
    lines = [
        f"# Texts beside llama.cpp and ik_llama.cpp: {given.model} on {hardware()['cpu']}",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {hardware()['cpu']}, {given.threads} threads.",
        "",
        *("```", "python " + shlex.join(sys.argv), "```", ""),
        f"The 16-bit model and compressed ones write up to {given.tokens} tokens behind each prompt, greedily; medians"
        f" of {given.rounds} rounds in turns, prompts included; in brackets the ratio to plain 16 bits of the same tool"
        " in the same round. Bytes are those of all weights that are read, drafts too. KL (nats per token, from the"
        f" uncompressed model) is on {given.accuracy} windows of {given.window} tokens of wikitext-2; ways without it"
        " write the texts of 16 bits. The settings of others are the fastest of those that the script tries:",
        "",
        *(f"- {setting}" for setting in best.values()),
        "",
        table(found),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", type=Path, required=True, help="folder of a saved model, our draft")
    parser.add_argument("--targets", type=Path, nargs="+", required=True, help="GGUF files of the model in 16 bits")
    parser.add_argument("--draft-files", type=Path, nargs="+", required=True, help="GGUF files of drafts")
    ours = "name: recipe without calibration, or name: folder of a saved model"
    parser.add_argument("--ours", nargs="*", type=named_model, default=[], help=f"compressed models: {ours}")
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="GGUF files of compressed models")
    parser.add_argument("--accuracy", type=int, default=0, help="windows of wikitext-2 to score; 0: none")
    parser.add_argument("--window", type=int, default=1024)
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
    given.files = [file.absolute() for file in given.files]
    for file in (*given.targets, *given.draft_files, *given.files):
        if not file.is_file():
            parser.error(f"--targets, --draft-files and --files: there is no file {file}")
    kinds = [name for name, _ in given.ours] + [file.stem.partition("-")[0] for file in given.files]
    if taken := sorted(set(WAYS) & set(kinds) | {kind for kind in kinds if kinds.count(kind) > 1}):
        parser.error(f"--ours and --files: names must differ from one another and from {WAYS}: {taken}")
    if not given.draft.is_dir():
        parser.error(f"--draft (={given.draft}) must be the folder of a saved model")
    if min(given.rounds, given.threads) < 1 or given.tokens < 2:
        parser.error("--rounds and --threads must be at least 1, and --tokens at least 2")
    for folder in (given.work, given.out.parent, *([given.write.parent] if given.write else [])):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("llamacpp", "ik_llamacpp"):
        ready(given.environments, name)
    torch.set_num_threads(given.threads)
    named = {file.stem: file for file in (*given.targets, *given.draft_files, *given.files)}
    scored = vars(given) | {"out": None, "files": list(named.values()), "ik": False, "openvino": []}
    comparison = Comparison(argparse.Namespace(**scored))
    if given.accuracy:
        comparison.score(given.accuracy)
    baseline, tokenizer = comparison.models[BASELINE], comparison.tokenizer
    models = {"baseline": baseline, DRAFT: load_compressed(given.draft, dtype=torch.bfloat16)}
    encoded = {kind: [encode_prompt(tokenizer, text) for text in texts] for kind, texts in KINDS.items()}
    prompts = {kind: [(tokenizer.decode(ids[0]), ids.shape[1]) for ids in own] for kind, own in encoded.items()}
    best = fastest(prompts, given)
    alone = {name: accelerate(deployed(model)) for name, model in comparison.models.items() if name != BASELINE}
    names = [*(f"ours, {way}" for way in WAYS), *alone, *(f"{tool}, {way}" for tool, way in best)]
    speeds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in names}
    lengths: dict[str, dict[str, int]] = {name: {} for name in names}
    plain, ends = accelerate(deployed(baseline)), end_tokens(baseline, tokenizer)
    written_by_16_bits = {
        kind: [count(write(plain, ids, ends=ends, new_tokens=given.tokens)[0]) for ids in own]
        for kind, own in encoded.items()
    }
    lengths |= {
        name: {kind: sum(own) for kind, own in written_by_16_bits.items()}
        for name in lengths
        if name.startswith("ours")
    }
    found = {
        "command": shlex.join(sys.argv),
        "settings": {f"{tool}, {way}": str(setting) for (tool, way), setting in best.items()},
        "sizes": sizes(comparison, models[DRAFT], best),
        "losses": losses(comparison, best),
        "speeds": speeds,
        "tokens": lengths,
    }
    for _ in tqdm(range(given.rounds), desc="rounds", unit="round"):
        lossless = measure_lossless(models, tokenizer, guess_tokens=given.tokens, speed_rounds=1).record
        for one in lossless.speeds:
            speeds[f"ours, {one.way}"][one.kind].append(one.tokens_per_s)
            if not one.same:
                raise RuntimeError(f"{one.way} wrote another text: {one.kind}")
        for name, model in alone.items():
            for kind, own in encoded.items():
                began = time.perf_counter()
                for ids, tokens in zip(own, written_by_16_bits[kind], strict=True):  # whatever ends its own texts
                    write(model, ids, ends=(), new_tokens=tokens)
                speeds[name][kind].append(lengths[name][kind] / (time.perf_counter() - began))
        for (tool, way), setting in best.items():
            for kind, texts in prompts.items():
                tokens, seconds = written(setting, texts, given)
                speeds[f"{tool}, {way}"][kind].append(tokens / seconds)
                lengths[f"{tool}, {way}"][kind] = tokens
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.write:
        given.write.write_text(page(found, best, given))
    print(table(found))


if __name__ == "__main__":
    main()
