"""Speed on a CPU beside llama.cpp, ik_llama.cpp and OpenVINO, and what each variant loses: our models in turns with
theirs.

    python seeds/peers/compare_speed.py --model smollm2-135m --accuracy 4 --out speed.json \\
        --ours "4 bits: rtn(bits=4, group_size=32)" "4 bits, iq4_nl: runs/bytes/a-saved-model" \\
        --files runs/interop/smollm2-135m/gguf-peers/{F16,Q4_0-128,IQ4_XS-128}.gguf \\
        --openvino OUT/openvino16 OUT/openvino-w4g64 --write speed.md

The uncompressed model is always a contestant. `--ours` are names with recipes without calibration, or with folders of
saved models. `--ik` times every file by ik_llama.cpp as well, its weights repacked when they are loaded; alone, without
other sequences. `--openvino` are folders that `dense_peers.py openvino --keep` and `openvino16 --keep` wrote.
One round times every model of ours, every file and every folder once: a prompt, and tokens decoded after it; tables
show medians over the rounds and their span. `--accuracy` scores all of them by the same code on windows of wikitext-2.
`--grid` repeats the decoding with other numbers of threads and sequences and behind longer prompts. `--model random-1b`
is of Llama-3.2-1B's shape with random weights, `random-moe` four layers of Qwen3-30B-A3B with half of its experts; with
`--files F16 Q4_0` it writes and quantises such files first. What is in `--out` already is not measured again.
"""

import argparse
import copy
import json
import shlex
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import gguf
import torch
from interop_environments import environment_variables, ready
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig

from compress import apply, held_out, load_compressed, load_model, save_compressed
from compress.inputs.calibration import beginning
from compress.inputs.model import located
from compress.linear import compressed_linears
from compress.recipe import parse_recipe
from eval.machine.hardware import hardware
from eval.machine.size import size
from eval.speed.speed import clear, contestants, make, make_ready, serve
from eval.text.divergence import compare_on_text
from kernels.support.deploy import cast, deployed

BASELINE = "ours, 16 bits"
RANDOM = {  # shapes of models with random weights
    "random-1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, rope_theta=500000.0, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "random-moe": Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True,
        num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SpeedPoint:
    """Settings of a timing: threads, sequences at a time, tokens read before decoding."""

    threads: int
    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.batch} sequences, {self.prompt_tokens} tokens before"


@dataclass
class SpeedRow:
    """One contestant: bytes without the tokenizer, tokens per second of each round by point, perplexity and KL from
    the uncompressed model (value, standard error), the KL of its prompts as they are timed, how it ran, and the points
    at which it did not (how its program ended)."""

    nbytes: int
    decode: dict[str, list[float]] = field(default_factory=dict)
    prefill: dict[str, list[float]] = field(default_factory=dict)
    perplexity: tuple[float, float] | None = None
    kl: tuple[float, float] | None = None
    kl_timed: tuple[float, float] | None = None
    execution: str = ""
    failed: dict[str, str] = field(default_factory=dict)


def tensor_bytes(file: Path) -> int:
    """Of a GGUF file without its tokenizer, which other formats keep beside the weights."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


def llama(environments: Path, program: str, threads: int, *arguments: object) -> str:
    """The output of a program of llama.cpp."""
    place = (environments / "llamacpp").absolute()
    command = [str(part) for part in (place / "build" / "bin" / program, *arguments)]
    variables = environment_variables(place, threads)
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


def llama_bench(
    environments: Path, file: Path, *, prompt_tokens: int, new_tokens: int, repeats: int, threads: int, depth: int = 0
) -> list[float]:
    """Tokens per second of each repetition of llama-bench: for reading a prompt, or decoding after `depth` tokens.

    Without its flash attention or with it, whichever is faster: on some processors the default halves the speed.
    """
    what = {
        "-p": prompt_tokens,
        "-n": new_tokens,
        "-d": depth,
        "-r": repeats,
        "-t": threads,
        "-fa": "0,1",
        "-o": "json",
    }
    out = llama(environments, "llama-bench", threads, "-m", file, *(part for pair in what.items() for part in pair))
    return max((found["samples_ts"] for found in json.loads(out)), key=statistics.mean)


def ik_speed(environments: Path, file: Path, point: SpeedPoint, new_tokens: int) -> tuple[float, float]:
    """Tokens per second of a GGUF file by ik_llama.cpp, (prefill, decode), weights repacked for this processor; with
    or without its flash attention and huge pages, whatever is faster."""
    place = (environments / "ik_llamacpp").absolute()
    what = {
        "-p": point.prompt_tokens,
        "-n": 0,
        "-gp": f"{point.prompt_tokens},{new_tokens}",
        "-r": 1,
        "-t": point.threads,
        "-rtr": 1,
        "-fa": "0,1",
        "-thp": "0,1",
        "-o": "json",
    }
    command = [place / "build" / "bin" / "llama-bench", "-m", file, *(part for pair in what.items() for part in pair)]
    variables = environment_variables(place, point.threads)
    out = subprocess.run([str(p) for p in command], env=variables, capture_output=True, text=True, check=True).stdout
    found = json.loads(out)
    read, decoded = ([one for one in found if bool(one["n_gen"]) is writing] for writing in (False, True))
    return max(one["avg_ts"] for one in read), max(one["avg_ts"] for one in decoded)


def file_speed(environments: Path, file: Path, point: SpeedPoint, new_tokens: int) -> tuple[float, float]:
    """Tokens per second of a GGUF file, (prefill, decode), in one repetition after llama.cpp's own warm-up."""
    if point.batch == 1:
        how = {"repeats": 1, "threads": point.threads}
        read = llama_bench(environments, file, prompt_tokens=point.prompt_tokens, new_tokens=0, **how)[0]
        behind = {"prompt_tokens": 0, "new_tokens": new_tokens, "depth": point.prompt_tokens}
        return read, llama_bench(environments, file, **behind, **how)[0]
    positions = point.batch * (point.prompt_tokens + new_tokens)
    what = {"-c": positions, "-npp": point.prompt_tokens, "-ntg": new_tokens, "-npl": point.batch, "-t": point.threads}
    arguments = ["-m", file, *(part for pair in what.items() for part in pair), "--output-format", "jsonl"]
    found = []
    for flash in ("off", "on"):
        out = llama(environments, "llama-batched-bench", point.threads, *arguments, "-fa", flash)
        found.append(next(json.loads(line) for line in out.splitlines() if line.startswith("{")))
    return max(one["speed_pp"] for one in found), max(one["speed_tg"] for one in found)


def folder_speed(environments: Path, folder: Path, point: SpeedPoint, new_tokens: int) -> tuple[float, float]:
    """Tokens per second of a folder of OpenVINO, (prefill, decode), in one repetition after a warm-up."""
    place = (environments / "openvino").absolute()
    what = {"--threads": point.threads, "--batch": point.batch, "--prompt-tokens": point.prompt_tokens}
    arguments = [str(part) for pair in {**what, "--new-tokens": new_tokens}.items() for part in pair]
    program = Path(__file__).with_name("openvino_speed.py")
    command = [place / "bin" / "python", program, folder.absolute() / "saved" / "model.xml", *arguments]
    variables = environment_variables(place, point.threads)
    found = json.loads(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)
    return found["prefill"], found["decode"]


def random_model(name: str) -> tuple[nn.Module, AutoTokenizer]:
    """A decoder of a shape of RANDOM with random weights, and a tokenizer for files of it."""
    tokenizer = AutoTokenizer.from_pretrained(located("smollm2-135m"))
    config = copy.deepcopy(RANDOM[name])
    config.vocab_size, config.dtype = len(tokenizer), torch.bfloat16
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).bfloat16().eval(), tokenizer


def random_files(given: argparse.Namespace, model: nn.Module, tokenizer: AutoTokenizer) -> dict[str, Path]:
    """GGUF files of the random model in the types that `--files` names."""
    folder = given.work / given.model
    made = {kind: folder / f"{kind}.gguf" for kind in map(str, given.files)}
    if all(file.is_file() for file in made.values()):
        return made
    source = next(folder.glob("source/*.gguf"), None)
    if source is None:
        eight = apply(parse_recipe("rtn(bits=8, group_size=32)"), copy.deepcopy(model))
        save_compressed(eight, folder / "source", tokenizer, save_format="gguf")
        source = next(folder.glob("source/*.gguf"))
    for kind, file in made.items():
        if not file.is_file():
            llama(given.environments, "llama-quantize", given.threads, "--allow-requantize", source, file, kind)
    return made


def named_model(text: str) -> tuple[str, str]:
    """(name, recipe or folder) of a value of `--ours`."""
    name, colon, what = text.partition(": ")
    if not colon or not name or not what:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a name and a recipe or a folder, as in '4 bits: rtn(bits=4)' or '4 bits: runs/my-model'"
        )
    return name, what


class Comparison:
    """The contestants of one run and their measurements."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.rows: dict[str, SpeedRow] = {}
        if given.out and given.out.is_file():
            self.rows = {name: SpeedRow(**row) for name, row in json.loads(given.out.read_text())["rows"].items()}
        self.model, self.tokenizer = random_model(given.model) if given.model in RANDOM else load_model(given.model)
        # Every loss is measured against this; `self.model` is a contestant, which is cast in place.
        self.reference = deployed(self.model, torch.float32).eval() if given.accuracy else self.model
        self.models = {BASELINE: self.model}
        for name, what in tqdm(given.ours, desc="models", unit="model"):
            self.models[f"ours, {name}"] = self.ours(what)
        named = {path.stem: path for path in map(Path, given.files)}
        files = random_files(given, self.model, self.tokenizer) if given.model in RANDOM else named
        self.files = {f"llama.cpp {stem.partition('-')[0]}": path for stem, path in files.items()}
        self.repacked = {f"ik_{name}": path for name, path in self.files.items()} if given.ik else {}
        for name, model in self.models.items():
            self.rows.setdefault(name, SpeedRow(size(cast(model, torch.bfloat16)).stored_bytes))
        for name, path in (self.files | self.repacked).items():
            self.rows.setdefault(name, SpeedRow(tensor_bytes(path)))
        self.folders = {f"OpenVINO {path.name.removeprefix('openvino-')}": path for path in given.openvino}
        for name, path in self.folders.items():
            self.rows.setdefault(name, SpeedRow(json.loads((path / "peer.json").read_text())["bytes"]))
        self.rows = {name: self.rows[name] for name in (*self.models, *self.files, *self.repacked, *self.folders)}

    def ours(self, what: str) -> nn.Module:
        """A model by its recipe or its folder."""
        if Path(what).is_dir():
            return load_compressed(what, dtype=torch.bfloat16)
        model = random_model(self.given.model)[0] if self.given.model in RANDOM else load_model(self.given.model)[0]
        return apply(parse_recipe(what), model).model

    def score(self, windows: int) -> None:
        """Perplexity and KL of every contestant from the model in float32, with dequantised weights in float32; of ours
        also the KL in bfloat16, by the kernels that read prompts."""
        ids = held_out(self.tokenizer, corpus="wikitext2")
        how = {"window": self.given.window, "limit": windows, "beginning": beginning(self.tokenizer)}
        for name in tqdm([*self.models, *self.files, *self.folders], desc="accuracy", unit="model"):
            if name in self.models and not self.rows[name].kl_timed:
                timed = deployed(self.models[name])
                _, divergences = compare_on_text(self.reference, {name: timed.eval()}, ids, **how)
                self.rows[name].kl_timed = divergences[name].kl, divergences[name].kl_stderr
            if self.rows[name].perplexity or name == BASELINE:
                continue
            if name in self.files:
                path = self.files[name]
                model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            elif name in self.folders:
                model = AutoModelForCausalLM.from_pretrained(self.folders[name], dtype=torch.float32)
            else:
                model = cast(self.models[name], torch.float32)
            with ExitStack() as stack:
                for linear in compressed_linears(model).values():
                    stack.enter_context(linear.dense())
                perplexities, divergences = compare_on_text(self.reference, {name: model.eval()}, ids, **how)
            for scored, p in perplexities.items():
                self.rows[BASELINE if scored == "baseline" else scored].perplexity = p.value, p.stderr
            self.rows[name].kl = divergences[name].kl, divergences[name].kl_stderr
            self.write()

    def time(self, point: SpeedPoint) -> None:
        """All contestants in turns at one point."""
        given, key = self.given, str(point)
        if all(key in row.failed or len(row.decode.get(key, [])) >= given.rounds for row in self.rows.values()):
            return
        torch.set_num_threads(point.threads)
        variants = contestants(self.models)
        for name, variant in tqdm(variants.items(), desc=f"preparing {key}", unit="model"):
            make_ready(variant, make(variant), point.prompt_tokens, given.new_tokens, point.batch)
            self.rows[name].execution = variant.execution
        for row in self.rows.values():
            row.decode[key], row.prefill[key] = [], []
        for _ in tqdm(range(given.rounds), desc=key, unit="round"):
            for name, variant in variants.items():
                first, later = serve(variant, point.prompt_tokens, given.new_tokens, point.batch)
                self.rows[name].prefill[key].append(point.batch * point.prompt_tokens / first)
                self.rows[name].decode[key].append(point.batch / statistics.median(later))
            others = [(name, file, file_speed) for name, file in self.files.items()]
            others += [(name, file, ik_speed) for name, file in self.repacked.items()]
            others += [(name, folder, folder_speed) for name, folder in self.folders.items()]
            for name, path, speed in others:
                if key in self.rows[name].failed:
                    continue
                try:
                    read, decoded = speed(given.environments, path, point, given.new_tokens)
                except subprocess.CalledProcessError as error:  # the others go on
                    self.rows[name].failed[key] = how_it_died(error)
                    continue
                self.rows[name].prefill[key].append(read)
                self.rows[name].decode[key].append(decoded)
            self.write()
        for variant in variants.values():
            clear(variant)

    def write(self) -> None:
        if self.given.out:
            rows = {name: asdict(row) for name, row in self.rows.items()}
            self.given.out.write_text(json.dumps({"command": shlex.join(sys.argv), "rows": rows}, indent=1) + "\n")


def how_it_died(error: subprocess.CalledProcessError) -> str:
    """A short reason: the signal, or the last line of the program's output."""
    if error.returncode < 0:
        return signal.Signals(-error.returncode).name
    return ((error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"])[-1]


def table(rows: dict[str, SpeedRow], point: SpeedPoint) -> str:
    """Markdown: bytes, loss and speeds at one point."""
    key = str(point)
    with_loss = any(row.kl for row in rows.values())
    columns = ["", "MB", *["perplexity", "KL", "KL as timed"] * with_loss, "decode, tokens/s", "prefill, tokens/s"]
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1)]
    for name, row in rows.items():
        if not row.decode.get(key):
            continue
        loss = [f"{row.perplexity[0]:.2f}" if row.perplexity else "–"]
        loss += [f"{kl[0]:.4f} ± {kl[1]:.4f}" if kl else "–" for kl in (row.kl, row.kl_timed)]
        timed = (row.decode[key], row.prefill[key])
        speeds = [f"{statistics.median(s):,.0f} ({min(s):,.0f} to {max(s):,.0f})" for s in timed]
        lines.append([name, f"{row.nbytes / 1e6:.1f}", *loss * with_loss, *speeds])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def grid(given: argparse.Namespace) -> dict[str, list[SpeedPoint]]:
    """The quantities varied in the panels of the figure: threads, sequences at a time, tokens before."""
    at = {"threads": given.threads, "batch": 1, "prompt_tokens": given.prompt_tokens}
    few = at | {"prompt_tokens": 128}
    return {
        "threads": [SpeedPoint(**at | {"threads": n}) for n in range(1, given.threads + 1)],
        "sequences": [SpeedPoint(**few | {"batch": n}) for n in given.batches],
        "tokens before": [SpeedPoint(**at | {"prompt_tokens": n}) for n in given.contexts],
    }


def draw(rows: dict[str, SpeedRow], points: dict[str, list[SpeedPoint]], path: Path) -> None:
    """Decoded tokens per second against the quantity varied in each panel."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(points), figsize=(4.6 * len(points), 4), constrained_layout=True)
    fields = {"threads": "threads", "sequences": "batch", "tokens before": "prompt_tokens"}
    for axes, (what, many) in zip(panels, points.items(), strict=True):
        for name, row in rows.items():
            shown = [p for p in many if row.decode.get(str(p))]
            speeds = [statistics.median(row.decode[str(p)]) for p in shown]
            style = {"marker": "o"} if name.startswith("ours") else {"marker": "s", "linestyle": "--"}
            axes.plot([getattr(p, fields[what]) for p in shown], speeds, label=name, **style)
        axes.set_xlabel(what)
        axes.set_ylabel("decode, tokens per second")
        axes.set_ylim(bottom=0)
        if what != "threads":
            axes.set_xscale("log", base=2)
        ticks = [getattr(p, fields[what]) for p in many]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def page(rows: dict[str, SpeedRow], given: argparse.Namespace) -> str:
    """The note: the table at the chosen lengths, and the figure where other points were measured."""
    first = SpeedPoint(given.threads, 1, given.prompt_tokens)
    scored = (
        f" Perplexity and KL (from the uncompressed model, nats per token) are on {given.accuracy} windows of"
        f" {given.window} tokens of wikitext-2, in float32, with the weights that each file or model holds; as"
        " timed: in bfloat16, by the kernels that read the prompt."
        if given.accuracy
        else ""
    )
    tools = ["llama.cpp"] * bool(given.files) + ["ik_llama.cpp"] * given.ik + ["OpenVINO"] * bool(given.openvino)
    lines = [
        f"# Speed on a CPU beside {', '.join(tools)}: {given.model} on {hardware()['cpu']}",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {hardware()['cpu']}, {given.threads} threads.",
        "",
        *("```", "python " + shlex.join(sys.argv), "```", ""),
        f"A prompt of {given.prompt_tokens} tokens and {given.new_tokens} tokens decoded after it, one sequence, in"
        f" bfloat16: medians of {given.rounds} rounds in turns, with their span. Bytes are those of the whole model"
        f" without its tokenizer.{scored}",
        "",
        table(rows, first),
    ]
    if given.grid:
        lines += ["", f"![Decoding against threads, sequences and context]({given.write.with_suffix('.svg').name})"]
        draw(rows, grid(given), given.write.with_suffix(".svg"))
    failed = [f"{name} with {point}: {how}" for name, row in rows.items() for point, how in row.failed.items()]
    lines += ["", f"Not measured, because the program ended: {'; '.join(failed)}."] if failed else []
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"or one of {', '.join(RANDOM)}")
    ours = "name: recipe without calibration, or name: folder of a saved model"
    parser.add_argument("--ours", nargs="*", type=named_model, default=[], help=ours)
    parser.add_argument("--files", nargs="*", default=[], help="GGUF files of llama.cpp; of a random model, types")
    parser.add_argument("--ik", action="store_true", help="time the files by ik_llama.cpp as well")
    parser.add_argument("--openvino", type=Path, nargs="*", default=[], help="folders of `dense_peers.py --keep`")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--grid", action="store_true", help="other threads, batches and contexts, too")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 2048, 7680])
    parser.add_argument("--accuracy", type=int, default=0, help="windows of wikitext-2 to score; 0: none")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"))
    parser.add_argument("--work", type=Path, default=Path("runs/interop"), help="folder for files of the random model")
    parser.add_argument("--out", type=Path, help="file for the JSON record, which is continued")
    parser.add_argument("--write", type=Path, help="file for the note, with a figure beside it")
    given = parser.parse_args()
    if given.ik and given.grid:
        parser.error("--ik times one sequence at a time: leave --grid out")
    if given.ik and not given.files:
        parser.error("--ik times the files of --files, and there are none")
    torch.set_grad_enabled(False)
    for name in ["llamacpp"] * bool(given.files) + ["ik_llamacpp"] * given.ik:
        ready(given.environments, name)
    comparison = Comparison(given)
    if given.accuracy:
        comparison.score(given.accuracy)
    points = [SpeedPoint(given.threads, 1, given.prompt_tokens)]
    if given.grid:
        points = list(dict.fromkeys([*points, *(point for many in grid(given).values() for point in many)]))
    for point in points:
        comparison.time(point)
        print(table(comparison.rows, point), flush=True)
    if given.write:
        given.write.write_text(page(comparison.rows, given))


if __name__ == "__main__":
    main()
