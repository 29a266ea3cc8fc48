"""What prompts out of cached chunks lose and save, by the share of tokens that are computed again.

    python seeds/chunk_reuse.py --contexts 20 --write reports/published/chunk-reuse.md

Each context is a stretch of a held-out text: chunks, and the tokens behind them as the question. Chunks are read alone,
each behind the token that texts begin with, or in earlier prompts: half of the chunks and as many of another context,
in an order that is drawn. KL and loss are those of the question's tokens, KL from the pass over the whole prompt. Times
are of one pass each, in turns.
"""

import argparse
import random
import shlex
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from scoring import write_rows
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress import held_out, load_model
from compress.inputs.calibration import beginning
from compress.kv.reuse import Chunk, ChunkStore, blend
from compress.kv.reuse.blend import CHOICES
from eval.machine.hardware import hardware


def divergence(right: Tensor, got: Tensor) -> float:
    """KL in nats per token of logits [1, q, vocabulary]."""
    right, got = right.float().log_softmax(-1), got.float().log_softmax(-1)
    return (right.exp() * (right - got)).sum(-1).mean().item()


def loss(logits: Tensor, question: Tensor) -> float:
    """Mean loss of the question's tokens after the first one, in nats."""
    return nn.functional.cross_entropy(logits[0, :-1].float(), question[0, 1:]).item()


def earlier(store: ChunkStore, texts: list[Tensor], others: list[Tensor], seed: int) -> list[Chunk]:
    """The chunks of a prompt, from readings in two earlier prompts; others: as many chunks of another context."""
    drawn, middle = random.Random(seed), len(texts) // 2
    for part in (slice(middle), slice(middle, None)):
        prompt = [*texts[part], *others[part]]
        drawn.shuffle(prompt)
        store.read_together(prompt)
    return store.select(texts)


def measure(given: argparse.Namespace) -> dict[tuple[str, str, float], dict[str, list[float]]]:
    """{(reading, choice, share): {measure: a value for each context}}; ("whole", "", 1) is the pass over the prompt."""
    model, tokenizer = load_model(given.model)
    ids = held_out(tokenizer, corpus=given.text)
    ids, start = ids.reshape(1, -1), beginning(tokenizer)
    length = given.chunks * given.chunk_tokens + given.question_tokens
    if ids.shape[1] < (given.contexts + 1) * length:
        needed = (given.contexts + 1) * length
        raise ValueError(f"`--contexts` (={given.contexts}) needs {needed} tokens, and the text has {ids.shape[1]}")
    prefix = torch.tensor([start or [tokenizer.bos_token_id]])
    found: dict[tuple[str, str, float], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for i in tqdm(range(given.contexts), desc="contexts", unit="context"):
        text, other = (ids[:, j * length : (j + 1) * length] for j in (i, i + 1))
        question = text[:, given.chunks * given.chunk_tokens :]
        texts, others = (list(x[:, : -given.question_tokens].split(given.chunk_tokens, 1)) for x in (text, other))
        store = ChunkStore(model, prefix)
        readings = {"alone": [store.prefix, *map(store.read, texts)]}
        readings["earlier prompts"] = earlier(ChunkStore(model, prefix), texts, others, i)
        whole = torch.cat([prefix, text], 1)
        began = time.perf_counter()
        right = model(whole, use_cache=True, logits_to_keep=given.question_tokens).logits
        found["whole", "", 1.0]["seconds"].append(time.perf_counter() - began)
        found["whole", "", 1.0]["loss"].append(loss(right, question))
        for reading, chunks in readings.items():
            choices = [choose for choose in CHOICES if reading != "alone" or choose != "context"]
            ways = [(choose, share) for share in given.shares for choose in choices[: None if share else 1]]
            for choose, share in ways:
                began = time.perf_counter()
                blended = blend(model, chunks, question, share=share, choose=choose, seed=i)
                row = found[reading, choose if share else "none", share]
                row["seconds"].append(time.perf_counter() - began)
                row["kl"].append(divergence(right, blended.logits))
                row["loss"].append(loss(blended.logits, question))
                row["again"].append(len(blended.places) / (given.chunks * given.chunk_tokens))
    return found


def table(found: dict[tuple[str, str, float], dict[str, list[float]]]) -> str:
    """Markdown: a row for each reading, choice and share."""
    whole = found["whole", "", 1.0]
    head = "| chunks read | computed again | chosen by | KL | loss | time of the whole prompt's |"
    lines = [head, "| --- | ---: | --- | ---: | ---: | ---: |"]
    seconds = statistics.median(whole["seconds"])
    lines.append(f"| | whole prompt | | | {statistics.mean(whole['loss']):.3f} | {seconds:.2f} s |")
    for (reading, choose, _), row in sorted(found.items(), key=lambda item: (item[0][0], item[0][2])):
        if reading == "whole":
            continue
        error = statistics.stdev(row["kl"]) / len(row["kl"]) ** 0.5
        taken = statistics.median(a / b for a, b in zip(row["seconds"], whole["seconds"], strict=True))
        kl, nats = f"{statistics.mean(row['kl']):.4f} ± {error:.4f}", statistics.mean(row["loss"])
        again = statistics.mean(row["again"])
        lines.append(f"| {reading} | {again:.0%} | {choose} | {kl} | {nats:.3f} | {taken:.2f}× |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", default="essays", help="held-out text")
    parser.add_argument("--contexts", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=8, help="of a context")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.05, 0.15, 0.3])
    parser.add_argument("--write", type=Path, help="file for the note")
    parser.add_argument("--out", help="JSON to write")
    given = parser.parse_args()
    with torch.no_grad():
        found = measure(given)
    text = table(found)
    print(text)
    rows = {
        f"{reading}, {share:g} by {choose}": {name: statistics.mean(values) for name, values in row.items()}
        for (reading, choose, share), row in found.items()
    }
    write_rows(given.out, given, rows)
    if given.write:
        about = f"{given.chunks} chunks of {given.chunk_tokens} tokens, then {given.question_tokens}; {given.text}"
        lines = [
            f"# Prompts out of cached chunks: {given.model}",
            "",
            f"Measured on {time.strftime('%Y-%m-%d')} on {hardware()['cpu']}, {torch.get_num_threads()} threads, in"
            f" float32: {given.contexts} contexts of {about}. KL from the pass over the whole prompt, nats per token"
            " with the standard error over contexts; times are medians of ratios.",
            "",
            *("```", "python " + shlex.join(sys.argv), "```", ""),
            text,
        ]
        given.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
