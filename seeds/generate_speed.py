"""`model.generate` of a saved model as transformers runs it, and accelerated: tokens per second of prompt and of steps.

python seeds/generate_speed.py smollm2-135m-int4 --prompt-tokens 512 --new-tokens 64
python seeds/generate_speed.py smollm2-135m-int4 --cache 'snapkv(budget=0.25), kv_int(bits=4)' --prompt-tokens 2048
"""

import argparse
import copy
import json
import statistics
import time

import torch
from torch import nn
from tqdm.auto import tqdm

from compress import accelerate, load_compressed
from compress.kv import attach
from compress.recipe import parse_recipe


def seconds(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int) -> float:
    """Seconds of one greedy call of `generate`."""
    how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    start = time.perf_counter()
    model.generate(ids, attention_mask=mask, **how)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a saved model, as `save_compressed` writes it")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--padding", type=int, default=0, help="places of padding before the first sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", default="", help="a recipe of methods of the cache, for both")
    given = parser.parse_args()
    methods = parse_recipe(given.cache) if given.cache else []
    plain = load_compressed(given.folder, dtype="bfloat16")
    models = {"transformers": plain, "accelerated": accelerate(copy.deepcopy(plain))}
    for model in models.values() if methods else ():
        attach(model, methods)
    vocabulary = plain.get_input_embeddings().num_embeddings
    ids = (torch.arange(given.batch * given.prompt_tokens) * 7919 % vocabulary).view(given.batch, -1)
    mask = torch.ones_like(ids)
    mask[0, : given.padding] = 0
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in models}
    for turn in tqdm(range(given.rounds + 1), desc="generate", unit="round"):
        for name, model in models.items():
            first, all_of_them = seconds(model, ids, mask, 1), seconds(model, ids, mask, 1 + given.new_tokens)
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
