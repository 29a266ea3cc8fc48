"""Compressed models on disk: each is saved, reloaded and compared before it counts as saved."""

from compress.checkpoint.load import load_compressed
from compress.checkpoint.resize import resize
from compress.checkpoint.save import save_compressed

__all__ = ["load_compressed", "resize", "save_compressed"]
