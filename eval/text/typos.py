"""Text with typos, on which models are scored beside the text itself."""

import random
import string
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.text.names import text_name


def corrupted(text: str, rate: float, seed: int = 0) -> str:
    """The text with typos in a share of its letters, drawn evenly from three kinds: a letter that is swapped with the
    next character, left out, or replaced by another one of a to z (arXiv:1711.02173 corrupts words likewise).

    Args:
        rate: the probability that a letter is a typo, 0 to 1; a letter with which another is swapped is none.

    Raises:
        ValueError: the rate is not from 0 to 1.
    """
    check_typos(rate)
    draw, made, characters = random.Random(seed), list[str](), iter(text)
    for letter in characters:
        if not letter.isalpha() or draw.random() >= rate:
            made.append(letter)
        elif (kind := draw.randrange(3)) == 0:
            made += [next(characters, ""), letter]
        elif kind == 1:
            made.append(draw.choice(string.ascii_lowercase.replace(letter.lower(), "")))
    return "".join(made)


def check_typos(rate: float) -> None:
    """Raise ValueError if the rate is not from 0 to 1."""
    if not 0 <= rate <= 1:
        raise ValueError(f"`typos` (={rate!r}) must be a share of the letters, from 0 to 1")


def with_typos(
    texts: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, rate: float, seed: int = 0
) -> dict[str, Tensor]:
    """Texts {corpus: ids [1, n]}, and behind each the same with typos as "<corpus>-typos-<rate>", read by the tokenizer
    again, which makes more tokens of it. A rate of 0 adds none."""
    both: dict[str, Tensor] = {}
    for corpus, ids in texts.items():
        both[corpus] = ids
        if rate:
            text = corrupted(tokenizer.decode(ids[0], clean_up_tokenization_spaces=False), rate, seed)
            found = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
            both[f"{text_name(corpus)}-typos-{rate:g}"] = found.input_ids
    return both
