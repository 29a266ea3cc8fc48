"""`model.generate` as transformers runs it and accelerated, greedily and by sampling, beside the decoding step alone:
tokens per second, in turns.

python seeds/generate_speed.py smollm2-135m-int4 --prompt-tokens 512 --new-tokens 64
python seeds/generate_speed.py smollm2-135m-int4 --cache 'snapkv(budget=0.25), kv_int(bits=4)' --prompt-tokens 2048
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import DynamicCache, GenerationConfig

from compress import accelerate, load_compressed
from compress.kv import attach
from compress.recipe import parse_recipe

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
GREEDY = {"do_sample": False}


def by_generate(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **how: object) -> Callable[[int], float]:
    """Seconds of one call of `generate` that writes a number of tokens, whatever they are."""

    def seconds(new_tokens: int) -> float:
        own, plain = model.generation_config, GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, **how)
        model.generation_config = plain
        start = time.perf_counter()
        try:
            model.generate(ids, attention_mask=mask, generation_config=plain)
        finally:
            model.generation_config = own
        return time.perf_counter() - start

    return seconds


def by_step(model: nn.Module, ids: torch.Tensor) -> Callable[[int], float]:
    """Seconds of a prompt without padding, and of the steps behind it, each called directly."""

    def seconds(new_tokens: int) -> float:
        start, cache = time.perf_counter(), DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            steps, tokens = model.acceleration.steps(cache, len(ids)), ids[:, -1:]
            for _ in range(new_tokens - 1):
                tokens = steps(tokens)
        return time.perf_counter() - start

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a saved model, as `save_compressed` writes it")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--padding", type=int, default=0, help="places of padding before the first sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", default="", help="a recipe of methods of the cache, for all")
    given = parser.parse_args()
    methods = parse_recipe(given.cache) if given.cache else []
    plain = load_compressed(given.folder, dtype="bfloat16")
    fast = accelerate(copy.deepcopy(plain))
    for model in (plain, fast) if methods else ():
        attach(model, methods)
    vocabulary = plain.get_input_embeddings().num_embeddings
    ids = (torch.arange(given.batch * given.prompt_tokens) * 7919 % vocabulary).view(given.batch, -1)
    mask = torch.ones_like(ids)
    mask[0, : given.padding] = 0
    timed = {
        "transformers, greedy": by_generate(plain, ids, mask, **GREEDY),
        "transformers, sampling": by_generate(plain, ids, mask, **SAMPLING),
        "accelerated, greedy": by_generate(fast, ids, mask, **GREEDY),
        "accelerated, sampling": by_generate(fast, ids, mask, **SAMPLING),
    }
    if not (methods or given.padding):
        timed["step alone"] = by_step(fast, ids)
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in timed}
    for turn in tqdm(range(given.rounds + 1), desc="generate", unit="round"):
        for name, seconds in timed.items():
            first, all_of_them = seconds(1), seconds(1 + given.new_tokens)
            if turn:  # the first round warms up
                taken[name][0].append(first)
                taken[name][1].append(all_of_them - first)
    for name, (prompts, steps) in taken.items():
        found = {
            "how": name,
            "prompt_tokens_per_s": round(ids.numel() / statistics.median(prompts), 1),
            "decode_tokens_per_s": round(given.batch * given.new_tokens / statistics.median(steps), 1),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
