"""Write the texts that a model writes by itself into a file, a corpus on which it can be calibrated or distilled.

$ python -m compress.commands.write_text --model smollm2-135m --out written.jsonl

`corpus=written.jsonl` then names it, where no text like that of the model's training is at hand.

Source: arXiv:2305.17888, section 3.1. There a text's second to fifth tokens are the likeliest ones; here all tokens
after the first one are drawn.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.inputs.model import load_model
from kernels.special_tokens import beginning
from kernels.support.errors import check_positive
from kernels.support.files import whole_file

TOGETHER = 16  # texts that are written at once


@torch.no_grad()
def texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, samples: int, seqlen: int, seed: int = 0
) -> Iterator[Tensor]:
    """Token ids [T] of texts: a random first token, and then tokens as probable as the model predicts them.

    A text has `seqlen` tokens, with the special ones with which texts begin, or fewer if the model ends it. The same
    seed gives the same texts on the same device; a larger number of `samples` changes at most the last 16 of them. The
    state of torch's generators stays as it is.

    Raises:
        ValueError: a number is not positive, or a text has no room for a token.
    """
    check_positive(samples=samples, seqlen=seqlen)
    prefix, special = beginning(tokenizer), set(tokenizer.all_special_ids)
    if seqlen < len(prefix) + 2:
        raise ValueError(f"`seqlen` (={seqlen}) must be at least {len(prefix) + 2} for this tokenizer")
    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    ends = torch.tensor([] if end is None else end).flatten()
    known = min(model.get_input_embeddings().num_embeddings, len(tokenizer))
    words = torch.tensor([i for i in range(known) if i not in special])
    for start in tqdm(range(0, samples, TOGETHER), desc="texts that the model writes", unit="batch"):
        count = min(TOGETHER, samples - start)
        with torch.random.fork_rng():
            torch.manual_seed(1_000_003 * seed + start)
            first = words[torch.randint(len(words), (count, 1))]
            ids = torch.cat([torch.tensor(prefix, dtype=torch.long).expand(count, -1), first], 1).to(model.device)
            with _plain_sampling(model, end):
                new = seqlen - ids.shape[1]
                written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
        for row in written.cpu():
            ended = torch.isin(row[ids.shape[1] :], ends).nonzero()
            yield row[: ids.shape[1] + int(ended[0])] if len(ended) else row


@contextmanager
def _plain_sampling(model: PreTrainedModel, end: int | list[int] | None) -> Iterator[None]:
    """While the context lasts, `generate` draws tokens as probable as the model predicts them: the checkpoint's own
    settings (penalties of repetitions, tokens that are left out) do not apply."""
    own = model.generation_config
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(**how, eos_token_id=end, pad_token_id=0)  # padding behind ends
    try:
        yield
    finally:
        model.generation_config = own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or folder of a model, as `load_model` takes it")
    parser.add_argument("--out", required=True, help="file to write, a .jsonl with a text in each line")
    parser.add_argument("--dtype", default="float32", help="dtype of the model; bfloat16 is faster on some CPUs")
    parser.add_argument("--device", default="cpu", help="device to compute on: cpu, cuda")
    parser.add_argument("--samples", type=int, default=512, help="number of texts; calibration takes three quarters")
    parser.add_argument("--seqlen", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out = Path(options.out)
    if out.suffix != ".jsonl" or not out.parent.is_dir() or out.exists():
        parser.error(f"`--out` (={options.out}) must be a new file whose name ends in .jsonl, in a folder that exists")
    if min(options.samples, options.seqlen) < 1:
        parser.error(f"`--samples` (={options.samples}) and `--seqlen` (={options.seqlen}) must be positive")
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    found = texts(model, tokenizer, samples=options.samples, seqlen=options.seqlen, seed=options.seed)
    with whole_file(out) as part, part.open("w", encoding="utf-8") as file:
        for ids in found:
            file.write(json.dumps({"text": tokenizer.decode(ids, skip_special_tokens=True)}) + "\n")
    print(f"{options.out}: {options.samples} texts")


if __name__ == "__main__":
    main()
