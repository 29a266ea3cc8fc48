"""What commands share that learn something of a model from calibration texts and write it to a file."""

import argparse

from torch import Tensor, nn

from compress.inputs.calibration import calibration
from compress.inputs.model import load_model


def given(description: str | None, *, samples: int) -> tuple[nn.Module, list[Tensor], str]:
    """The model, the calibration texts and the path of the file that the command line names.

    Args:
        description: docstring of the command, whose first line its help shows.
        samples: texts where the command line names no number.

    Raises:
        ValueError: no such model or corpus.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="what `load_model` takes")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--corpus", default="pydocs", help="what `calibration` takes")
    parser.add_argument("--samples", type=int, default=samples, help="texts")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens of each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model)
    texts = {"corpus": options.corpus, "samples": options.samples, "seqlen": options.seqlen, "seed": options.seed}
    return model, calibration(tokenizer, **texts), options.out
