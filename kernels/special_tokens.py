"""Special tokens that a tokenizer puts around a text. This module is in `kernels` because every other package may
import `kernels`."""

from transformers import PreTrainedTokenizerBase


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that this tokenizer puts before every text ([] or [bos]); models that have one rely on it.

    Tokens that it puts behind a text, such as one that ends it, do not matter here.
    """
    with_special, without = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    starts = range(len(with_special) - len(without) + 1)
    return with_special[: next((i for i in starts if with_special[i : i + len(without)] == without), 0)]
