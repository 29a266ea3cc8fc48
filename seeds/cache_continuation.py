"""What a compressed cache costs in plain text: KL from the full cache on the tokens behind a prompt, and bytes.

    python seeds/cache_continuation.py "snapkv(budget=0.25); kvzip(budget=0.25); kv_int(bits=4)" --out continuation.json

Each text is read once, and every recipe compresses a copy of its cache, without seeing what follows, as the notebook
`kv_eviction` does. Then the next tokens of the text are read behind it. Texts are of the evaluation part of a corpus.
Bytes are those of the cache behind the prompt, with float32 counted as 16 bits, as a share of the full cache's. Of
caches that hold a part of it elsewhere, the share in the memory that attention reads follows, and the share of the full
cache's bytes that one token fetches from elsewhere, as counted in a step of its own.
"""

import argparse
import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from scoring import write_rows
from torch import Tensor, nn

from compress import load_model
from compress.inputs.corpus import load_text
from compress.kv import CompressedCache, attached
from compress.kv.attach import slots_of
from compress.kv.tiers import tiers
from compress.method import Method
from compress.recipe import parse_recipes


def windows(tokenizer, corpus: str, tokens: int, count: int) -> list[Tensor]:
    """Tokens [1, tokens] of several texts, from different documents if there are enough long ones."""
    found: list[Tensor] = []
    for text in load_text(corpus, "evaluation"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if ids.shape[1] >= tokens:
            found.append(ids[:, :tokens])
        if len(found) == count:
            return found
    raise ValueError(f"`samples` (={count}): {corpus} has {len(found)} texts of {tokens} tokens")


class CacheCost(NamedTuple):
    """Results of one text: KL in nats per token after the prompt; bytes of the cache, those of them that attention
    reads in place, and those that a token fetches from elsewhere, all as shares of the full cache's."""

    kl: float
    bytes: float
    near: float
    fetched: float


@torch.no_grad()
def losses(model: nn.Module, ids: Tensor, prompt: int, recipes: dict[str, Sequence[Method]]) -> dict[str, CacheCost]:
    """{recipe: its cost}"""
    with attached(model) as attachment:
        observed = attachment.cache(observes=True)
        model(ids[:, :prompt], past_key_values=observed, logits_to_keep=1)

        def read(cache: CompressedCache, tokens: int) -> Tensor:
            cache.paused = True  # the following tokens are not a prompt
            return model(ids[:, prompt : prompt + tokens], past_key_values=cache).logits.log_softmax(-1)

        whole = observed.compressed(None)
        most, rest, found = whole.nbytes_16, ids.shape[1] - prompt, {}
        full = read(whole, rest)
        for name, methods in recipes.items():
            cache = observed.compressed(*slots_of(methods))
            held, before = cache.nbytes_16, tiers(cache)
            fetched = 0
            if before.far:
                step = copy.deepcopy(cache)
                read(step, 1)
                fetched = tiers(step).fetched - before.fetched
            far, fetched = (x * 2 // model.dtype.itemsize for x in (before.far, fetched))
            kl = (full.exp() * (full - read(cache, rest))).sum(-1).mean().item()
            found[name] = CacheCost(kl, held / most, (held - far) / most, fetched / most)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", help="apart by semicolons, each with an optional name before a colon")
    parser.add_argument("--out", help="JSON to write")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--corpus", default="pydocs")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--following", type=int, default=128)
    options = parser.parse_args()
    recipes = parse_recipes(options.recipes)
    model, tokenizer = load_model(options.model)
    for method in {m for methods in recipes.values() for m in methods}:
        method.check(model)
    texts = windows(tokenizer, options.corpus, options.prompt + options.following, options.samples)
    of_texts = [losses(model, ids, options.prompt, recipes) for ids in texts]
    rows = {}
    for name in recipes:
        kl, *sizes = torch.tensor([of[name] for of in of_texts], dtype=torch.float64).unbind(1)
        error = kl.std().item() / len(kl) ** 0.5 if len(kl) > 1 else None
        held, near, fetched = (of.mean().item() for of in sizes)
        rows[name] = {"kl": kl.mean().item(), "kl_stderr": error, "bytes": held, "near": near, "fetched": fetched}
        rows[name]["kl_of_texts"] = kl.tolist()
        elsewhere = f", near {near:.3f}, fetched a token {fetched:.4f}" if fetched else ""
        print(f"{name:<50} KL {kl.mean():.4f} (standard error {error or 0:.4f}), bytes {held:.3f}{elsewhere}")
    write_rows(options.out, options, rows)


if __name__ == "__main__":
    main()
