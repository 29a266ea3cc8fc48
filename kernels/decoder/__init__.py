"""`Decoder`: one step of decoding of a whole Llama-shaped decoder on a GPU, which graphs can capture. See README.md."""

from kernels.decoder.model import Decoder
from kernels.decoder.weights import LLAMA_8B, TOY, Layer, Shape, Weights, random_weights, rounded_weights

__all__ = ["LLAMA_8B", "TOY", "Decoder", "Layer", "Shape", "Weights", "random_weights", "rounded_weights"]
