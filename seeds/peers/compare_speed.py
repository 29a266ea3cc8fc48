"""Decoding on a CPU beside llama.cpp: our models in 16, 4 and 8 bits in turns with llama-bench on its own files.

    python seeds/peers/compare_speed.py --environments .venv-interop --work runs/interop

runs after `compare_gguf.py`, whose environment and files of llama.cpp it uses. Ours are rounded to nearest: which codes
a weight has does not change the speed. One round times every model of ours and every file of llama.cpp once, each after
the same number of tokens read; the table shows medians over the rounds and the span. Prints a line of JSON last.
"""

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import gguf
import torch
from interop_environments import environment_variables

from compress import apply, load_model
from compress.recipe import parse_recipe
from eval.machine.hardware import hardware
from eval.machine.size import size
from eval.speed.attention import fast_attention
from eval.speed.deploy import deployed
from eval.speed.native_step import native_step
from eval.speed.speed import CompiledDecoder, Variant, make, serve, static_cache
from eval.speed.speed import _step as eager_step

OURS = {
    "16 bits": "",
    "4 bits, embedding 8": "rtn(bits=4, group_size=32), rtn(bits=8, group_size=32, where=embedding)",
    "4 bits, embedding 6": "rtn(bits=4, group_size=32), rtn(bits=6, group_size=32, where=embedding)",
    "8 bits, embedding 8": "rtn(bits=8, group_size=32), rtn(bits=8, group_size=32, where=embedding)",
    "3 bits, embedding 6": "rtn(bits=3, group_size=32), rtn(bits=6, group_size=32, where=embedding)",
    "2 bits, embedding 6": "rtn(bits=2, group_size=32), rtn(bits=6, group_size=32, where=embedding)",
    "iq4_nl with int6 scales, embedding 6": "rtn(bits=4, group_size=32, grid=iq4_nl, scale_dtype=int6), "
    "rtn(bits=6, group_size=32, where=embedding)",
}
TYPES = ("F16", "Q8_0", "Q4_0", "IQ4_NL", "IQ4_XS")


@dataclass
class Row:
    """One contestant: its bytes without the tokenizer, and the decoded tokens per second of each round."""

    name: str
    nbytes: int
    decode: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.decode)


def ours(model_name: str, recipe: str, prompt_tokens: int, new_tokens: int) -> tuple[Variant, int]:
    """A model whose prompt is read eagerly and whose tokens are decoded by the native step; and its stored bytes."""
    model, _ = load_model(model_name)
    if recipe:
        model = apply(parse_recipe(recipe), model).model
    variant = Variant(model, True, lambda m: (fast_attention(deployed(m)),) * 2)
    make(variant)
    cache = variant.cache = static_cache(variant.model, -(-(prompt_tokens + new_tokens + 1) // 64) * 64)
    prompt = eager_step(variant.model, cache)
    ids, positions = torch.arange(prompt_tokens)[None] * 7919 % 1000, torch.arange(prompt_tokens)[None]

    def restore() -> None:
        cache.reset()
        prompt(ids, positions)

    restore()
    step = native_step(variant.model, cache, ids[:, :1], torch.tensor([[prompt_tokens]]), restore)
    variant.step = CompiledDecoder(prompt, step)
    return variant, size(variant.model).stored_bytes


def tensor_bytes(file: Path) -> int:
    """Of a GGUF file without its tokenizer, which other formats keep beside the weights."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


def llama_bench(
    environments: Path, file: Path, *, prompt_tokens: int, new_tokens: int, repeats: int, threads: int
) -> list[float]:
    """Tokens per second that llama-bench decodes after the prompt, of each repetition."""
    place = (environments / "llamacpp").absolute()
    what = {"-p": 0, "-n": new_tokens, "-d": prompt_tokens, "-r": repeats, "-t": threads, "-o": "json"}
    command = [place / "build" / "bin" / "llama-bench", "-m", file, *(part for pair in what.items() for part in pair)]
    variables = environment_variables(place, threads)
    done = subprocess.run([str(part) for part in command], env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]["samples_ts"]


def files(options: argparse.Namespace) -> dict[str, Path]:
    """llama.cpp's files by type, of those that are there."""
    folder = options.work / options.model / "gguf-peers"
    source = next(iter(sorted((folder / "source").glob("*.gguf"))), None)
    found = {kind: next(iter(sorted(folder.glob(f"{kind}-*.gguf"))), None) for kind in options.types if kind != "F16"}
    named = ({"F16": folder / "F16.gguf"} if "F16" in options.types else {}) | found
    if "F16" in named and not named["F16"].is_file() and source is not None:
        place = (options.environments / "llamacpp").absolute()
        quantise = [place / "build" / "bin" / "llama-quantize", source, named["F16"], "F16"]
        variables = environment_variables(place, options.threads)
        subprocess.run([str(part) for part in quantise], env=variables, capture_output=True, check=True)
    return {kind: file for kind, file in named.items() if file is not None and file.is_file()}


def table(rows: list[Row], options: argparse.Namespace) -> str:
    out = [
        f"{time.strftime('%Y-%m-%d')}, {hardware()['cpu']}, {options.threads} threads:"
        f" {options.new_tokens} tokens after {options.prompt_tokens}, {options.rounds} rounds in"
        f" turns, {options.repeats} repetitions in each.",
        "",
        "| | MB | decode, tokens/s | lowest to highest |",
        "| --- | ---: | ---: | ---: |",
    ]
    for r in rows:
        out.append(f"| {r.name} | {r.nbytes / 1e6:.1f} | {r.median:.1f} | {min(r.decode):.1f} to {max(r.decode):.1f} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=3, help="of every contestant in a round, which takes their median"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"))
    parser.add_argument("--work", type=Path, default=Path("runs/interop"))
    parser.add_argument("--types", nargs="*", default=TYPES, help="of llama.cpp's files")
    parser.add_argument("--ours", nargs="*", default=list(OURS), choices=list(OURS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    variants, rows = {}, {}
    for name in options.ours:
        variants[name], nbytes = ours(options.model, OURS[name], options.prompt_tokens, options.new_tokens)
        rows[name] = Row(f"ours, {name}", nbytes)
    theirs = files(options)
    rows |= {kind: Row(f"llama.cpp {kind}", tensor_bytes(file)) for kind, file in theirs.items()}
    for _ in range(options.rounds):
        for name, variant in variants.items():
            runs = [serve(variant, options.prompt_tokens, options.new_tokens)[1] for _ in range(options.repeats)]
            rows[name].decode.append(statistics.median(len(seconds) / sum(seconds) for seconds in runs))
        for kind, file in theirs.items():
            how = {key: getattr(options, key) for key in ("prompt_tokens", "new_tokens", "repeats", "threads")}
            rows[kind].decode.append(statistics.median(llama_bench(options.environments, file, **how)))
    print(table(list(rows.values()), options))
    print(json.dumps([asdict(row) for row in rows.values()]))


if __name__ == "__main__":
    main()
