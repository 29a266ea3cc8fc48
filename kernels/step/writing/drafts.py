"""Whether a model can guess the tokens of another one: the same tokens, and positions for the whole text."""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from torch import nn

from kernels.support.positions import positions

TOKENIZER = "tokenizer.json"


def check_vocabulary(model: nn.Module, draft: nn.Module, parameter: str) -> None:
    """Check that a draft guesses the tokens of a model.

    The numbers of tokens are compared. If both models come from a folder, or from the hub's cache, with a
    tokenizer.json, the tokens are compared, too, except added ones: those of an instructed model may have other names.
    Of other models only the number is known, so that a draft with as many tokens and another tokenizer is accepted; the
    model then accepts few of its guesses.

    Raises:
        ValueError: the vocabularies differ.
    """
    ours, theirs = (one.config.get_text_config().vocab_size for one in (model, draft))
    if ours != theirs:
        raise ValueError(
            f"`{parameter}` has a vocabulary of {theirs} tokens, the model one of {ours}; a draft must have the same"
        )
    mine, other = map(_tokenizer_of, (model, draft))
    if mine is None or other is None or mine == other:
        return
    if differs := _difference((mine, mine.stat().st_mtime_ns), (other, other.stat().st_mtime_ns)):
        raise ValueError(
            f"`{parameter}` (={str(other.parent)!r}) has another tokenizer than the model (={str(mine.parent)!r}): "
            f"{differs}; a draft must have the same"
        )


def check_positions(model: nn.Module, draft: nn.Module, prompt: int, length: int) -> None:
    """Check that a draft has positions for a text of so many tokens, of which the prompt has some; a model that has
    fewer itself warns of it.

    Raises:
        ValueError: it has fewer.
    """
    needed, there = min(length, positions(model)), positions(draft)
    if there < needed:
        fits = f"`max_new_tokens` at most {there - prompt}" if there > prompt else "the prompt shorter"
        raise ValueError(
            f"`assistant_model` or `draft` has `max_position_embeddings` (={there}), and the text may get "
            f"{needed} tokens; the draft must have as many positions, or {fits}"
        )


def _tokenizer_of(model: nn.Module) -> Path | None:
    """The tokenizer.json beside the files that a model was loaded from, or None if it is not known."""
    for name in filter(None, (getattr(model.config, "_name_or_path", ""), getattr(model, "name_or_path", ""))):
        if (file := Path(name).expanduser() / TOKENIZER).is_file():
            return file
        with suppress(ValueError):  # no name of the hub
            if isinstance(cached := try_to_load_from_cache(name, TOKENIZER), str):
                return Path(cached)
    return None


@lru_cache
def _difference(ours: tuple[Path, int], theirs: tuple[Path, int]) -> str:
    """The first token that two files, each with the time of its last change, have in different places; "" if none is
    known."""
    (mine, added), (other, more) = (_tokens(path) for path, _ in (ours, theirs))
    for number in sorted((mine.keys() & other.keys()) - added - more):
        if mine[number] != other[number]:
            return f"its token {number} is {other[number]!r}, and the model's {mine[number]!r}"
    return ""


def _tokens(file: Path) -> tuple[dict[int, str], set[int]]:
    """The tokens of a tokenizer.json by number, and the numbers of added ones; none of a file of another kind."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary, added = content["model"]["vocab"], {one["id"] for one in content["added_tokens"]}
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            return {number: token for number, (token, _) in enumerate(vocabulary)}, added
        return {number: token for token, number in vocabulary.items()}, added
    return {}, set()
