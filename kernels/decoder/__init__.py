"""`Decoder`: one decoding step of a whole decoder of the Llama family on a GPU, for CUDA graphs. See README.md."""

from kernels.decoder.model import Decoder
from kernels.decoder.weights import LLAMA_8B, TOY, Layer, Shape, Weights, random_weights, rounded_weights

__all__ = ["LLAMA_8B", "TOY", "Decoder", "Layer", "Shape", "Weights", "random_weights", "rounded_weights"]
