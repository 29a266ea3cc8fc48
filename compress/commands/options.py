"""Shared code of the commands that learn from a model and calibration texts, and write the result to a file."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from compress.inputs.calibration import calibration
from compress.inputs.model import load_model
from compress.kv.learned.networks import Fitted, averages, summary


def given(
    description: str | None, *, samples: int, more: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> tuple[nn.Module, list[Tensor], argparse.Namespace]:
    """The model, the calibration texts and all options of the command line; the option `out` is the file to write.

    Args:
        description: docstring of the command, whose first line its help shows.
        samples: default number of texts of a corpus.
        more: the command's own options, as `ArgumentParser.add_argument` takes them.

    Raises:
        ValueError: the model or the corpus does not exist.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or folder of a model, as `load_model` takes it")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--dtype", default="float32", help="dtype of the model; bfloat16 is faster on some CPUs")
    parser.add_argument("--corpus", nargs="+", default=["pydocs"], help="texts, as `calibration` takes them")
    parser.add_argument("--samples", type=int, default=samples, help="windows of each corpus")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens of each window")
    parser.add_argument("--seed", type=int, default=0)
    for option, how in more.items():
        parser.add_argument(option, **how)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    texts = {"samples": options.samples, "seqlen": options.seqlen, "seed": options.seed}
    batches = [text for corpus in options.corpus for text in calibration(tokenizer, corpus=corpus, **texts)]
    return model, batches, options


def train_networks(
    train: Callable[..., dict[int, Fitted]],
    description: str | None,
    *,
    samples: int,
    more: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> None:
    """A command that trains networks for a policy: it reads its options, calls `train`, and prints how well they fit,
    in words and as a JSON line.

    Args:
        train: called with the model, the texts, the file to write, and the values of `more`.
        description, samples, more: as for `given`.
    """
    start = time.perf_counter()
    model, batches, options = given(description, samples=samples, more=more)
    fitted = train(model, batches, options.out, *(getattr(options, name.lstrip("-")) for name in more))
    print(f"{options.out}: {summary(fitted)}, {time.perf_counter() - start:.0f} s")
    print(json.dumps({**vars(options), **averages(fitted)}))
