"""The checkpoints of this workbench in the libraries that read them: same tokens, same perplexity, how fast.

    make interop                                                    # all of it: about an hour on two cores
    python seeds/peers/interop.py --models smollm2-135m --formats gguf --write reports/published/interop.md

It makes throwaway environments (README.md beside this file), compresses the models, saves them in every format, gives
each checkpoint to its readers, and compares. What is there already is used again: environments, compressed models,
checkpoints and answers lie in two folders that are kept; `--again` asks the readers once more. The step `time` is
the only one with a clock: leave the machine alone while it runs. The table is printed, and last one line of JSON with
everything. The exit code is 1 if a reader fails, or gives another model.

- **Folders.** Environments are kept in `.venv-interop/` (8 GB; more where `torch==2.13.0` is a CUDA build),
  checkpoints and answers in `runs/interop/`. Remove a folder to make it again. `--environments` and `--work` name other
  folders.
- **Steps.** `--steps environments save here read time table`, or some of them. Readers are timed in `read`, the
  workbench in `time` (`--rounds 0` times nothing). vLLM compiles each model at its first start, which takes a minute.
- **When two models count as different.** (1) A dequantised weight differs by more than 2^-6 of its value, where the
  library shows its weights. (2) The perplexity differs by more than 1 %, or 2 % where activations are rounded to 8
  bits. (3) At the first greedy token that differs, our logit for our token exceeds our logit for theirs by more than
  0.5, or 1.0 with 8-bit activations. The message names the first tensor or token that differs.
- **Exception.** vLLM refuses asymmetric GPTQ checkpoints, so that pair is not in the table.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import interop_work as work
from interop_environments import ENVIRONMENTS, READERS, environment_variables, ready
from interop_table import Row, compare, compare_tensors, gguf_weights, load_answer, markdown
from readers.shared import Task
from tqdm.auto import tqdm

from eval.machine.hardware import hardware

STEPS = ("environments", "save", "here", "read", "time", "table")
DTYPE = "bfloat16"
UNTIMED = ("transformers",)  # it dequantises at load: its speed is that of the uncompressed model, uncompiled


def main() -> int:
    options = arguments()
    pairs = [
        (model, case, reader)
        for model in options.models
        for case in work.CASES
        for reader in case.readers
        if case.save_format in options.formats and reader in options.readers and case.recipe in options.recipes
    ]
    if "environments" in options.steps:
        for name in dict.fromkeys(reader for _, _, reader in pairs):
            ready(options.environments, name)
    failed: list[str] = []
    for step, do in (("save", save), ("here", here), ("read", read), ("time", measure)):
        if step in options.steps:
            failed += do(options, pairs)
    if "table" in options.steps:
        failed += table(options, pairs)
    for line in failed:
        print(f"MISMATCH {line}", file=sys.stderr)
    return 1 if failed else 0


def save(options: argparse.Namespace, pairs: list[tuple]) -> list[str]:
    """Compress, and save in every format."""
    wanted = dict.fromkeys((model, case) for model, case, _ in pairs)
    failed = []
    for model, case in tqdm(wanted, desc="save", unit="checkpoint"):
        work.make(options.work, model, case.recipe, options.calibration)
        try:
            work.export(options.work, model, case)
        except RuntimeError as error:  # written, and not the same model: the writer's own verification
            failed.append(f"{model}, {case.recipe}, {case.save_format}: {error}")
    return failed


def here(options: argparse.Namespace, pairs: list[tuple]) -> list[str]:
    """Greedy tokens and likelihoods of every compressed model in the workbench."""
    for model, recipe in tqdm(dict.fromkeys((m, c.recipe) for m, c, _ in pairs), desc="here", unit="model"):
        folder = folder_of(options, model, recipe)
        if options.again or not (folder / "here.json").is_file():
            given = work.here(work.reference(folder / work.SAVED), tokens_of(options, model))
            work.kept_json(folder / "here.json", asdict(given))
    return []


def read(options: argparse.Namespace, pairs: list[tuple]) -> list[str]:
    """Let every reader continue the prompts and score the windows; keep the weights it sees."""
    failed = []
    for model, case, reader in tqdm(pairs, desc="read", unit="checkpoint"):
        tokens, base = tokens_of(options, model), base_of(options, model, case, reader)
        weights = None if reader in ("vllm", "llamacpp") else str(base) + ".safetensors"
        more = {"prompts": tokens["prompts"], "windows": tokens["windows"], "weights": weights}
        failed += ask(options, model, case, reader, f"{base}.json", new_tokens=work.NEW_TOKENS, **more)
    return failed


def measure(options: argparse.Namespace, pairs: list[tuple]) -> list[str]:
    """Let the readers decode while a clock runs, and then the workbench: all models of one size in turns."""
    failed = []
    timed = [pair for pair in pairs if pair[2] not in UNTIMED and options.rounds]
    for model, case, reader in tqdm(timed, desc="time", unit="checkpoint"):
        tokens, name = tokens_of(options, model), f"{base_of(options, model, case, reader)}.speed.json"
        more = {"speed_prompt": tokens["speed_prompt"], "speed_tokens": work.SPEED_TOKENS}
        failed += ask(options, model, case, reader, name, **more)
    for model in dict.fromkeys(m for m, _, _ in pairs):
        path = options.work / model / "speed.json"
        if (path.is_file() and not options.again) or not options.rounds:
            continue
        folders = {r: folder_of(options, model, r) / work.SAVED for r in work.FOLDERS}
        there = {recipe: folder for recipe, folder in folders.items() if folder.is_dir()}
        work.kept_json(path, work.speeds(there, model, options.rounds))
    return failed


def ask(options: argparse.Namespace, model: str, case: work.Case, reader: str, name: str, **more: object) -> list[str]:
    """Run a reader on a checkpoint, if its answer is not there yet; says what failed."""
    answer, where = Path(name), f"{model}, {case.recipe}, {case.save_format}, {reader}"
    checkpoint = folder_of(options, model, case.recipe) / case.save_format
    if not checkpoint.is_dir():
        return [f"{where}: there is no {checkpoint}"]
    if answer.is_file() and not options.again:
        return []
    task = Task(
        str(work.checkpoint_file(checkpoint)),
        DTYPE,
        options.threads,
        longest=work.WINDOW + 128,
        rounds=options.rounds,
        **more,
    )
    file, log = answer.with_suffix(".task"), answer.with_suffix(".log")
    work.kept_json(file, asdict(task))
    place = (options.environments / reader).absolute()
    command = [place / "bin" / "python", READERS / f"in_{reader}.py", file, answer]
    with log.open("w") as out:
        how = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment_variables(place, options.threads)}
        try:
            done = subprocess.run(command, timeout=options.limit_s, **how)
        except subprocess.TimeoutExpired:
            return [f"{where}: {reader} gave no answer within {options.limit_s} s (`--limit-s`), see {log}"]
    if done.returncode:
        last = [text for text in log.read_text().splitlines() if text.strip()][-1:]
        return [f"{where}: {reader} fails, see {log}: {''.join(last)[:300]}"]
    return []


def table(options: argparse.Namespace, pairs: list[tuple]) -> list[str]:
    """Compare, print the table and the line of JSON, and write the note; says what differs."""
    rows, models = [], {}
    for model, case, reader in tqdm(pairs, desc="compare", unit="checkpoint"):
        folder = folder_of(options, model, case.recipe)
        if (model, case.recipe) not in models:
            models = {(model, case.recipe): work.reference(folder / work.SAVED)}  # one at a time
        rows.append(row_of(options, model, case, reader, models[model, case.recipe]))
    speeds = {m: json.loads(f.read_text()) for m in options.models if (f := options.work / m / "speed.json").is_file()}
    for row in rows:
        if mine := speeds.get(row.model, {}).get(row.recipe):
            there = row.decode[1] if row.decode else None, row.prefill[1] if row.prefill else None
            row.decode = mine["decode_tokens_per_s"], there[0]
            row.prefill = mine["prefill_tokens_per_s"], there[1]
    facts = facts_of(options)
    text = markdown(rows, facts, speeds)
    print(text)
    if options.write:
        options.write.write_text(text)
    print(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows], "speeds_here": speeds}))
    return [f"{r.model}, {r.recipe}, {r.save_format}, {r.reader}: {p}" for r in rows for p in r.problems]


def row_of(options: argparse.Namespace, model: str, case: work.Case, reader: str, mine: object) -> Row:
    """The comparison of one checkpoint in one reader, as far as there are answers."""
    base, folder = base_of(options, model, case, reader), folder_of(options, model, case.recipe)
    answer = load_answer(Path(f"{base}.json"))
    row = Row(model, case.recipe, case.save_format, reader)
    checkpoint = folder / case.save_format
    if answer is None or not checkpoint.is_dir():
        row.problems.append("the reader gave no answer")
        return row
    row.nbytes = work.nbytes(checkpoint)
    ours = work.Here(**json.loads((folder / "here.json").read_text()))
    compare(row, case, tokens_of(options, model)["prompts"], ours, answer, mine)
    weights = Path(f"{base}.safetensors")
    if weights.is_file():
        compare_tensors(row, None, weights, mine)
    elif reader == "llamacpp":
        compare_tensors(row, gguf_weights(work.checkpoint_file(checkpoint)), None, mine)
    row.reader = answer.reader
    if speed := load_answer(Path(f"{base}.speed.json")):
        row.decode, row.prefill = (None, speed.decode_tokens_per_s), (None, speed.prefill_tokens_per_s)
    return row


def tokens_of(options: argparse.Namespace, model: str) -> dict[str, list]:
    """The token ids of all tasks, made once."""
    path = options.work / model / "tokens.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        work.kept_json(path, work.task_tokens(model, options.corpus))
    return json.loads(path.read_text())


def folder_of(options: argparse.Namespace, model: str, recipe: str) -> Path:
    return options.work / model / work.FOLDERS[recipe]


def base_of(options: argparse.Namespace, model: str, case: work.Case, reader: str) -> Path:
    """Beginning of the names of what a reader leaves."""
    return folder_of(options, model, case.recipe) / f"{case.save_format}.{reader}"


def facts_of(options: argparse.Namespace) -> dict:
    machine = hardware()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine if isinstance(machine, str) else machine.get("cpu", str(machine)),
        "command": shlex.join(["python", "seeds/peers/interop.py", "--models", *options.models]),
        "threads": options.threads,
        "rounds": options.rounds,
        "corpus": options.corpus,
        "calibration": f"{work.SAMPLES} windows of {work.SEQLEN} tokens of {options.calibration}",
        "windows": work.WINDOWS,
        "window": work.WINDOW,
        "prompts": work.PROMPTS,
        "new_tokens": work.NEW_TOKENS,
        "speed_prompt": work.SPEED_PROMPT,
        "speed_tokens": work.SPEED_TOKENS,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    formats, recipes = (list(dict.fromkeys(getattr(c, k) for c in work.CASES)) for k in ("save_format", "recipe"))
    parser.add_argument("--models", nargs="+", default=work.MODELS)
    parser.add_argument("--formats", nargs="+", default=formats, choices=formats)
    parser.add_argument("--recipes", nargs="+", default=recipes, choices=recipes)
    readers = [name for name in ENVIRONMENTS if (READERS / f"in_{name}.py").is_file()]
    parser.add_argument("--readers", nargs="+", default=readers, choices=readers)
    parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS, help="steps to run; all if not given")
    parser.add_argument("--corpus", default="wikitext2", help="to score on; the embedded one where it is not here")
    parser.add_argument("--calibration", default="c4", help="to calibrate on; the embedded one where it is not here")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of every timing, of which the median counts; 0: nothing is timed"
    )
    parser.add_argument("--limit-s", type=int, default=900, help="seconds that a reader may take for one checkpoint")
    parser.add_argument("--again", action="store_true", help="ask the readers again, and time again")
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"), help="folder of the environments")
    parser.add_argument("--work", type=Path, default=Path("runs/interop"), help="folder of checkpoints and answers")
    parser.add_argument("--write", type=Path, help="file for the table, such as reports/published/interop.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
