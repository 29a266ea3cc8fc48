"""What a compressed cache costs in plain text: KL from the full cache on the tokens behind a prompt, and bytes.

    python seeds/cache_continuation.py "snapkv(budget=0.25); kvzip(budget=0.25); kv_int(bits=4)" --out continuation.json

Each text is read once, and every recipe compresses a copy of its cache, without seeing what follows, as the notebook
`kv_eviction` does. Then the next tokens of the text are read behind it. Texts are of the evaluation part of a corpus.
Bytes are those of the cache behind the prompt, with float32 counted as 16 bits, as a share of the full cache's.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from compress import load_model
from compress.inputs.corpus import load_text
from compress.kv import attached
from compress.method import Method
from compress.recipe import parse_recipes
from eval.record.files import write_whole
from notebooks.study.caches import parts


def windows(tokenizer, corpus: str, tokens: int, count: int) -> list[Tensor]:
    """Tokens [1, tokens] of so many texts, of different documents where there are enough long ones."""
    found: list[Tensor] = []
    for text in load_text(corpus, "evaluation"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if ids.shape[1] >= tokens:
            found.append(ids[:, :tokens])
        if len(found) == count:
            return found
    raise ValueError(f"`samples` (={count}): {corpus} has {len(found)} texts of {tokens} tokens")


@torch.no_grad()
def losses(
    model: nn.Module, ids: Tensor, prompt: int, recipes: dict[str, Sequence[Method]]
) -> dict[str, tuple[float, float]]:
    """{recipe: KL in nats per token behind the prompt, share of the full cache's bytes}"""
    with attached(model) as attachment:
        observed = attachment.cache(observes=True)
        model(ids[:, :prompt], past_key_values=observed, logits_to_keep=1)

        def behind(methods: Sequence[Method]) -> tuple[Tensor, int]:
            cache = observed.compressed(*parts(methods))
            cache.paused, held = True, cache.nbytes_16  # what follows is no prompt
            return model(ids[:, prompt:], past_key_values=cache).logits.log_softmax(-1), held

        full, most = behind([])
        found = {}
        for name, methods in recipes.items():
            given, held = behind(methods)
            found[name] = (full.exp() * (full - given)).sum(-1).mean().item(), held / most
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
        kl, held = torch.tensor([of[name] for of in of_texts], dtype=torch.float64).unbind(1)
        error = kl.std().item() / len(kl) ** 0.5 if len(kl) > 1 else None
        rows[name] = {"kl": kl.mean().item(), "kl_stderr": error, "bytes": held.mean().item()}
        print(f"{name:<50} KL {kl.mean():.4f} (standard error {error or 0:.4f}), bytes {held.mean():.3f}")
    if options.out:
        write_whole(json.dumps({"settings": vars(options), "rows": rows}, indent=1), Path(options.out))


if __name__ == "__main__":
    main()
