"""How many greedy texts change with the batch and the number of threads, in bfloat16 and in float32.

    python seeds/reproducible.py > reproducible.txt

The same prompts, all of one length, are continued one at a time, and several together, with one thread and with more,
by transformers' own `generate`. Both dtypes have the same weights, rounded to bfloat16. What counts is the number of
texts that are those of one prompt at a time with all threads. The last line is JSON.

Source: "Give Me FP32 or Give Me Death?", arXiv:2506.09501.
"""

import argparse
import json
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from compress import held_out, load_model
from kernels.support.deploy import cast, deployed


@torch.no_grad()
def texts(model, prompts: Sequence[Tensor], batch: int, threads: int, tokens: int) -> list[list[int]]:
    """The continuation of every prompt."""
    torch.set_num_threads(threads)
    found = []
    for i in tqdm(range(0, len(prompts), batch), desc=f"{model.dtype}, batch {batch}, {threads} threads", unit="batch"):
        ids = torch.cat(list(prompts[i : i + batch]))
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        found += model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **how)[:, ids.shape[1] :].tolist()
    return found


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The number of equal tokens before the first that differs; None: all are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--corpus", default="wikitext2")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8])
    given = parser.parse_args()
    model, tokenizer = load_model(given.model)
    ids, most = held_out(tokenizer, corpus=given.corpus), torch.get_num_threads()
    prompts = ids[:, : given.prompts * given.prompt].split(given.prompt, 1)
    settings = [(1, most)] + [(batch, most) for batch in given.batches]
    settings += [(batch, 1) for batch in (1, *given.batches) if most > 1]
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        small = cast(deployed(model, torch.bfloat16), dtype)
        found = {one: texts(small, prompts, *one, given.tokens) for one in settings}
        expected = found.pop((1, most))
        for (batch, threads), written in found.items():
            places = [first_difference(a, b) for a, b in zip(expected, written, strict=True)]
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."), "batch": batch, "threads": threads,
                    "equal": places.count(None), "of": len(places),
                    "first differences": sorted(place for place in places if place is not None),
                }
            )  # fmt: skip
    torch.set_num_threads(most)
    print("| dtype | batch | threads | equal texts |\n| --- | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row['dtype']} | {row['batch']} | {row['threads']} | {row['equal']} of {row['of']} |")
    print(json.dumps({**vars(given), "threads": most, "rows": rows}))


if __name__ == "__main__":
    main()
