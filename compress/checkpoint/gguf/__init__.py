"""GGUF, the file format of llama.cpp: block types, names and layouts of weights, tokenizers, and the writer."""

from compress.checkpoint.gguf.save import GGUF

__all__ = ["GGUF"]
