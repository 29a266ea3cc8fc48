"""Calibration batches, and the held-out tokens of the same corpus for scores."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from html import escape
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.inputs.corpus import apart, load_text
from compress.inputs.text_files import Chat
from compress.walk.identity import tokens_sha256
from kernels.special_tokens import beginning
from kernels.support.errors import check_positive, first_line

TODAY = datetime(2024, 7, 26)  # for chat templates that write the date, so that the same text has the same tokens


class Batches(list[Tensor]):
    """Calibration batches, LongTensors [1, seqlen], with a description of their origin (`identity`)."""

    identity: dict
    cut: Callable[[Sequence[int]], list[Tensor]]  # windows of the corpus by their numbers
    left: list[int]  # numbers of the windows that are not among the batches, in the order of the seed

    def further(self, count: int) -> list[Tensor]:
        """At most `count` further windows of the same corpus, the same ones in the same order for any count."""
        return self.cut(self.left[:count])

    def beyond(self, count: int) -> "Batches":
        """The same batches, whose further windows are those after the first `count` ones."""
        return self._with(self.left[count:])

    def texts(self, tokens: int, count: int) -> tuple[list[Tensor], "Batches"]:
        """At most `count` texts [1, tokens] of neighbouring windows that are not among the batches, spread over the
        corpus; and the same batches, whose further windows are not in these texts.

        Raises:
            ValueError: no neighbouring windows are left that hold so many tokens.
        """
        ids, prefix, step = self.cut.args
        windows = -(-(tokens - len(prefix)) // step)
        runs, run = list[list[int]](), list[int]()
        for number in sorted(self.left):
            run = [*run, number] if run and number == run[-1] + 1 else [number]
            if len(run) == windows:
                runs.append(run)
                run = []
        if not runs:
            raise ValueError(
                f"`tokens` (={tokens}) are more than neighbouring windows hold that are not among the "
                f"{self.identity['samples']} of the calibration: fewer `samples`, or another corpus"
            )
        chosen = [runs[i * len(runs) // count] for i in range(count)] if len(runs) > count else runs
        made = [_windows(ids[run[0] * step :], prefix, tokens - len(prefix), [0])[0] for run in chosen]
        gone = {number for run in chosen for number in run}
        return made, self._with([number for number in self.left if number not in gone])

    def _with(self, left: list[int]) -> "Batches":
        """The same batches with other further windows."""
        same = Batches(self)
        same.identity, same.cut, same.left = self.identity, self.cut, left
        return same

    def _repr_html_(self) -> str:
        i = self.identity
        return (
            f"<p><b>{i['samples']} × {i['seqlen']} tokens</b> of {escape(str(i['corpus']))} "
            f"(calibration part, seed {i['seed']}), "
            f"sha256 <code>{i['sha256'][:12]}</code>"
            + (f"; {i['overlap']} documents left out, which are scored" if i["overlap"] else "")
            + "</p>"
        )


def calibration(
    tokenizer: PreTrainedTokenizerBase,
    *,
    corpus: str = "pydocs",
    samples: int = 128,
    seqlen: int = 512,
    seed: int = 0,
    scored: str = "",
) -> Batches:
    """Draw windows of the calibration part of a corpus, without overlap, in an order that the seed fixes.

    Args:
        scored: the corpus on whose evaluation part the model will be scored; "": not known. Documents that it holds,
            too, are left out, and counted in the identity of the batches as `overlap`.

    Raises:
        ValueError: a number is not positive, or the corpus is too short for samples x seqlen.
    """
    check_positive(samples=samples, seqlen=seqlen)
    documents, overlap = apart(corpus, scored)
    ids, prefix = _tokens(tokenizer, documents), torch.tensor(beginning(tokenizer), dtype=torch.long)
    step = seqlen - len(prefix)
    if step < 1:
        raise ValueError(f"`seqlen` (={seqlen}) must be at least {len(prefix) + 1} for this tokenizer")
    there = len(ids) // step
    if there < samples:
        most = f"at most {there} samples of {seqlen}" if there else f"`seqlen` of at most {len(ids) + len(prefix)}"
        without = f" without the {overlap} documents that are scored, too" * bool(overlap)
        raise ValueError(
            f"`samples` (={samples}) x `seqlen` (={seqlen}) needs {samples * seqlen} tokens; the calibration part of "
            f"`corpus` (={corpus!r}) has {len(ids)}{without}: take {most}, or another corpus"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(there, generator=generator).tolist()
    cut = partial(_windows, ids.int(), prefix, step)
    batches = Batches(cut(order[:samples]))
    batches.cut, batches.left = cut, order[samples:]
    batches.identity = {
        "corpus": corpus,
        "samples": samples,
        "seqlen": seqlen,
        "seed": seed,
        "sha256": tokens_sha256(batches),
        "overlap": overlap,
        **({"scored": scored} if overlap else {}),
    }
    return batches


def held_out(tokenizer: PreTrainedTokenizerBase, *, corpus: str = "pydocs") -> Tensor:
    """Tokens [1, n] of the evaluation part of a corpus, its documents joined by blank lines, with no special tokens;
    chats as the tokeniser's template writes them."""
    return _tokens(tokenizer, load_text(corpus, "evaluation"))[None]


def _windows(ids: Tensor, prefix: Tensor, step: int, numbers: Sequence[int]) -> list[Tensor]:
    """Windows [1, len(prefix) + step] of tokens [n], each with the prefix before it."""
    return [torch.cat([prefix, ids[i * step : (i + 1) * step].long()])[None] for i in numbers]


def _tokens(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Tensor:
    """Tokens [n] of these documents, joined by blank lines; of chats, as the tokeniser's template writes them."""
    parts = []
    for are_chats, several in groupby(documents, lambda document: isinstance(document, Chat)):
        some = list(several)
        parts.append("".join(_written(tokenizer, chat) for chat in some) if are_chats else "\n\n".join(some))
    text = "\n\n".join(parts)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]


def _written(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """A chat in the form on which the model was trained, without the special tokens with which every window begins."""
    try:
        text = tokenizer.apply_chat_template(chat.messages, tokenize=False, strftime_now=TODAY.strftime)
    except Exception as error:  # templates refuse what they do not know by errors of their own
        raise ValueError(
            f"`corpus`: the chat template of this tokeniser does not write the chat that begins with {chat[:60]!r}: "
            f"{first_line(error)}"
        ) from error
    return text.removeprefix(tokenizer.decode(beginning(tokenizer)))
