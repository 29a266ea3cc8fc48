"""Turns a model into a smaller one.

>>> model, tokenizer = load_model("smollm2-135m")
>>> batches = calibration(tokenizer, corpus="c4", samples=128, seqlen=512)
>>> result = apply([METHODS["gptq"](bits=4, group_size=64)], model, batches)
>>> save_compressed(result, "out", tokenizer)
"""

from compress.apply import apply
from compress.calibration import calibration, held_out
from compress.checkpoint import load_compressed, save_compressed
from compress.method import Method
from compress.model import load_model
from compress.result import Result
from compress.weights.gptq import GPTQ
from compress.weights.rtn import RTN

METHODS: dict[str, type[Method]] = {"rtn": RTN, "gptq": GPTQ}

__all__ = [
    "METHODS", "Method", "Result", "apply", "calibration", "held_out", "load_compressed", "load_model", "save_compressed",
]  # fmt: skip
