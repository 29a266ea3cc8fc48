"""How fast tokens are decoded behind long contexts, by what the KV cache keeps, and what compressing it takes.

    python seeds/cache_speed.py --out cache-speed.json --file runs/interop/smollm2-135m/gguf-peers/F16.gguf \\
        --write reports/published/cache-speed.md

Three measurements, each in turns:

1. Decoding, and the attention within a step, behind `--contexts` tokens of random numbers: the embedded model, and one
   layer of Llama-3-8B's shape with random weights. Beside them torch's own attention, and llama.cpp with `--file`.
2. The attention behind `--tokens` tokens of a real text where heads keep different numbers of positions (`ada`,
   `global`), against the same budget shared out evenly.
3. A prompt of `--read-tokens` read with each policy attached, against the prompt alone, by the accelerated model.

What is in `--out` already is not measured again.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from scoring import command
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from compress import accelerate, held_out, load_model
from compress.kv import CompressedCache, attached
from compress.kv.policy import CacheMethod, Policy, Projecting, Storage
from compress.kv.reading.method import Reading
from compress.kv.timed import FilledCache
from compress.recipe import parse_recipe
from eval.machine.hardware import hardware
from eval.run_record import provenance
from eval.speed.cache_speed import FULL, SDPA, measure_cache_speed
from eval.speed.device_lock import undisturbed

SLOTS = (Policy, Storage, Reading, Projecting)
LLAMA_CPP = "llama.cpp F16"
LAYER = "one layer of Llama-3-8B's shape"
MADE_UP = (
    "kv_int(bits=8)",
    "kv_int(bits=4)",
    "streaming(budget=0.25)",
    "quest(budget=0.25)",
    "tidaldecode(budget=0.25)",
)
OF_LAYER = ("kv_int(bits=8)", "kv_int(bits=4)", "streaming(budget=0.25)", "quest(budget=0.25, full_layers=0)")
SHARED = "snapkv(budget=0.25, allocation={})"
ALLOCATIONS = ("uniform", "ada", "global")
READ_WITH = ("snapkv", "expected_attention", "h2o", "kvzip", "gemfilter")


def slots(text: str) -> list[CacheMethod | None]:
    """Policy, storage, reading and projection of a recipe; None for missing ones."""
    methods = parse_recipe(text) if text else []
    return [next((m for m in methods if isinstance(m, kind)), None) for kind in SLOTS]


def layer_of_8b() -> nn.Module:
    """One layer with 32 heads of 128 channels over 8 of keys, between a small embedding and its head."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=1024, rope_theta=500000.0, max_position_embeddings=131072, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).bfloat16().eval()


def behind(model: nn.Module, contexts: Sequence[int], recipes: Sequence[str], given: argparse.Namespace) -> dict:
    """Seconds per token, of the whole model and of its attention, by variant and context."""
    variants = {
        name: lambda text=text: FilledCache(model, max(contexts), *slots(text))
        for name, text in ((FULL, ""), *((recipe, recipe) for recipe in recipes))
    }
    with attached(model):
        speed = measure_cache_speed(model, variants, contexts, new_tokens=given.new_tokens, rounds=given.rounds)
    return {"tokens_per_s": speed.tokens_per_s, "attention_s": speed.attention_s, "execution": speed.execution}


def of_llama_cpp(file: Path, contexts: Sequence[int], given: argparse.Namespace) -> dict[int, list[float]]:
    """Tokens per second that llama-bench decodes after each context."""
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    from compare_speed import llama_bench

    how = {"prompt_tokens": 0, "new_tokens": given.new_tokens, "repeats": 1, "threads": torch.get_num_threads()}
    read = [c for c in contexts if c <= given.longest_read]
    return {c: llama_bench(given.environments, file, depth=c, **how) for c in tqdm(read, desc="llama.cpp")}


def read(model: nn.Module, ids: Tensor, methods: Sequence[CacheMethod]) -> tuple[float, CompressedCache]:
    """Seconds to read a prompt with methods of the cache attached, and its cache."""
    with attached(model, methods) as attachment:
        cache = attachment.cache()
        start = time.perf_counter()
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start, cache


def of_heads(model: nn.Module, ids: Tensor, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of the attention of all layers for one token, by allocation, and the positions that heads keep."""
    caches = {one: read(model, ids, parse_recipe(SHARED.format(one)))[1] for one in ALLOCATIONS}
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    q = torch.randn(1, heads, 1, getattr(config, "head_dim", None) or config.hidden_size // heads, dtype=model.dtype)
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "kept": []} for name in caches}
    for name, cache in caches.items():
        found[name]["kept"] = torch.cat([layer.lengths[0] for layer in cache.filled]).tolist()
    for _ in range(rounds + 1):
        for name, cache in caches.items():
            start = time.perf_counter()
            for layer in cache.filled:
                layer.decode(q, q.shape[-1] ** -0.5, None, False)
            found[name]["seconds"].append(time.perf_counter() - start)
    return {name: {**of, "seconds": of["seconds"][1:]} for name, of in found.items()}  # the first warms up


def to_compress(model: nn.Module, ids: Tensor, policies: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds to read a prompt, by policy; "" is none."""
    found: dict[str, list[float]] = {name: [] for name in ("", *policies)}
    for _ in tqdm(range(rounds), desc="prompts", unit="round"):
        for name, seconds in found.items():
            seconds.append(read(model, ids, parse_recipe(name) if name else [])[0])
    return found


class Record:
    """The measurements, as JSON, written after every part."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.parts = json.loads(path.read_text()) if path and path.is_file() else {}
        self.parts.setdefault("provenance", provenance(command(), "cpu", "bfloat16", "bfloat16"))

    def part(self, name: str, measure: Callable[[], object]) -> object:
        """A part, measured if it is not yet in the file."""
        if name not in self.parts:
            self.parts[name] = json.loads(json.dumps(measure()))
            if self.path:
                self.path.write_text(json.dumps(self.parts, indent=1) + "\n")
        return self.parts[name]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def speeds(found: dict, others: dict[str, dict[str, list[float]]]) -> str:
    """Of one model: decoding, attention, and its ratio to the faster one of the full caches; others: tokens per second
    of whole models in other programs, by context."""
    attention, rows = found["attention_s"], []
    contexts = list(attention[FULL])
    for name, seconds in attention.items():
        cells = [f"`{name}`" if "(" in name else {FULL: "full, this kernel"}.get(name, name)]
        for context in contexts:
            whole = found["tokens_per_s"].get(name)
            full = min(attention[one][context][0] for one in (FULL, SDPA))
            cells.append(f"{whole[context][0]:,.1f}" if whole else "–")
            cells.append(f"{seconds[context][0] * 1e3:,.2f} ({seconds[context][0] / full:.2f}×)")
        rows.append(cells)
    for name, timed in others.items():
        medians = [f"{statistics.median(timed[c]):,.1f}" if c in timed else "–" for c in contexts]
        rows.append([name, *(cell for one in medians for cell in (one, "–"))])
    heads = [f"{int(c):,}: {what}" for c in contexts for what in ("tokens/s", "attention, ms")]
    return table(["", *heads], rows)


def page(record: Record, given: argparse.Namespace) -> str:
    """The note."""
    parts, medians = record.parts, statistics.median
    uniform = medians(parts["heads"]["uniform"]["seconds"])
    allocated = [
        [
            f"`{SHARED.format(name)}`",
            f"{min(of['kept']):,} to {max(of['kept']):,}",
            f"{medians(of['seconds']) * 1e3:.2f}",
            f"{medians(of['seconds']) / uniform:.2f}×",
        ]
        for name, of in parts["heads"].items()
    ]
    plain = medians(parts["prompts"][""])
    prompts = [
        [f"`{name}`" if name else "no policy", f"{medians(seconds):.2f}", f"{medians(seconds) / plain:.2f}×"]
        for name, seconds in parts["prompts"].items()
    ]
    return "\n\n".join(
        [
            f"# Speed behind long contexts on {hardware()['cpu']}",
            f"Measured on {time.strftime('%Y-%m-%d')} on {hardware()['cpu']}, {torch.get_num_threads()} threads, in"
            f" bfloat16, batch 1: medians of {given.rounds} rounds in turns ({4 * given.rounds} for the ragged heads,"
            f" {min(given.rounds, 3)} for the prompts).",
            f"```\n{command()}\n```",
            f"**{given.model}.** In brackets: the time of the attention over that of the faster one of the full 16-bit"
            " caches, torch's own attention with shared heads folded into rows being one. The cache holds random"
            " numbers. The whole model runs as an accelerated one does (`kernels/step`). llama.cpp runs in"
            " llama-bench.",
            speeds(parts[given.model], {name: parts[name] for name in (LLAMA_CPP,) if name in parts}),
            f"**{LAYER}**, random weights; tokens per second are those of this layer and a small head.",
            speeds(parts[LAYER], {}),
            f"**Heads that keep different numbers of positions**, behind {given.tokens:,} tokens of {given.text} on"
            f" {given.model}: the attention of all layers for one token.",
            table(["", "positions of a head", "attention, ms", "of uniform"], allocated),
            f"**Time to compress**: reading {given.read_tokens:,} tokens with a policy attached, budget 25 %, by the"
            " accelerated model.",
            table(["", "seconds", "of the prompt alone"], prompts),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name or folder for `load_model`")
    parser.add_argument("--text", default="essays", help="a text for `held_out`")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=8000, help="of the real text, for the attention")
    parser.add_argument("--read-tokens", type=int, default=2000, help="of it, for the prompts")
    parser.add_argument("--recipes", nargs="*", default=MADE_UP, help="methods of the cache, beside the full one")
    parser.add_argument("--layer-recipes", nargs="*", default=OF_LAYER, help="the same for the single layer")
    parser.add_argument("--policies", nargs="*", default=[f"{name}(budget=0.25)" for name in READ_WITH])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", type=Path, help="the model as a GGUF file in 16 bits, for llama.cpp")
    parser.add_argument("--longest-read", type=int, default=8192, help="context that llama.cpp reads, which takes time")
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"), help="where llama.cpp is built")
    parser.add_argument("--out", type=Path, help="file for the JSON record, which is continued")
    parser.add_argument("--write", type=Path, help="file for the note")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    for recipe in (*given.recipes, *given.layer_recipes, *given.policies):
        parse_recipe(recipe)
    record = Record(given.out)
    model, tokenizer = load_model(given.model, dtype="bfloat16")
    ids = held_out(tokenizer, corpus=given.text).reshape(1, -1)[:, : given.tokens]
    with undisturbed(model.device):
        record.part("heads", lambda: of_heads(model, ids, 4 * given.rounds))
        record.part(
            "prompts",
            lambda: to_compress(
                accelerate(copy.deepcopy(model)), ids[:, : given.read_tokens], given.policies, min(given.rounds, 3)
            ),
        )
        if given.file:
            record.part(LLAMA_CPP, lambda: of_llama_cpp(given.file, given.contexts, given))
    record.part(LAYER, lambda: behind(layer_of_8b(), given.contexts, given.layer_recipes, given))
    record.part(given.model, lambda: behind(model, given.contexts, given.recipes, given))
    note = page(record, given)
    print(note)
    if given.write:
        given.write.write_text(note + "\n")


if __name__ == "__main__":
    main()
