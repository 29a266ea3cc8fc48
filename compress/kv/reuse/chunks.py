"""The cache of a text that was read without the texts that will come before it in the prompt."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache

from compress.inputs.model import weights_sha256
from compress.kv.rotation import rotary_of
from compress.walk.capture import device_of

KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Chunk:
    """The cached part of one text.

    Attributes:
        ids: [n], its tokens. start: the position of the first one when it was read.
        keys, values: of each layer [1, H_kv, n, D]; keys are rotated to the positions from `start` on.
    """

    ids: Tensor
    start: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.nbytes for t in (*self.keys, *self.values))


class ChunkStore:
    """Reads texts, each behind the same prefix alone, and keeps their keys and values.

    Args:
        model: a transformers decoder with rotary position embeddings.
        prefix: [1, p] tokens with which every prompt begins, such as a system prompt, or at least the token that texts
            begin with: later tokens attend to it when nothing else fits, so that it must stand before every chunk, and
            once in the prompt.
        folder: where chunks are kept for later processes; None: only in memory.

    Raises:
        ValueError: the model has no rotary embeddings, or its layers keep other data than keys and values.
    """

    def __init__(self, model: nn.Module, prefix: Tensor, folder: str | Path | None = None) -> None:
        kinds_of(model)
        if rotary_of(model) is None:
            raise ValueError(
                f"`model` ({type(model).__name__}) has no rotary position embeddings, so that keys cannot be moved to "
                "other positions; a Llama, Qwen, Mistral, Gemma or Phi would do"
            )
        if prefix.shape[-1] == 0:
            raise ValueError("`prefix` holds no token; the token that texts begin with would do")
        self.model, self.folder = model, None if folder is None else Path(folder)
        self._ids = prefix.reshape(1, -1)
        self._kept: dict[str, Chunk] = {}
        self._weights = f"{weights_sha256(model)} {model.dtype}" if folder is not None else ""
        self.prefix = self._chunk(self._ids.cpu(), 0)

    def read(self, ids: Tensor) -> Chunk:
        """The chunk of a text: a stored one, or else read now.

        Args:
            ids: [1, n] or [n] tokens, without the prefix.

        Raises:
            ValueError: `ids` has no token, or more than one text.
        """
        if ids.numel() == 0 or ids.numel() != ids.shape[-1]:
            raise ValueError(f"`ids` {tuple(ids.shape)} must be the tokens of one text, [n] or [1, n] with n > 0")
        return self._chunk(ids.reshape(1, -1).cpu(), self._ids.shape[1])

    def _chunk(self, ids: Tensor, start: int) -> Chunk:
        """ids [1, n], from position `start` on; 0: they are the prefix itself."""
        name = hashlib.sha256(repr([self._weights, self._ids.tolist(), ids.tolist(), start]).encode()).hexdigest()[:32]
        if name not in self._kept:
            path = None if self.folder is None else self.folder / f"{name}.safetensors"
            if path is not None and path.is_file():
                self._kept[name] = _loaded(path, ids[0], start, device_of(self.model))
            else:
                self._kept[name] = self._computed(ids, start)
                if path is not None:
                    _save(self._kept[name], path)
        return self._kept[name]

    @torch.no_grad()
    def _computed(self, ids: Tensor, start: int) -> Chunk:
        cache = DynamicCache()  # all layers keep all positions
        tokens = torch.cat([self._ids.cpu(), ids], 1) if start else ids
        self.model(tokens.to(device_of(self.model)), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cut = [[t[:, :, start:].clone() for t in (layer.keys, layer.values)] for layer in cache.layers]
        return Chunk(ids[0], start, *map(tuple, zip(*cut, strict=True)))


def kinds_of(model: nn.Module) -> set[str]:
    """The kinds of a decoder's layers.

    Raises:
        ValueError: some keep no keys and values of single positions.
    """
    config = model.config.get_text_config(decoder=True)
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"])
    if unknown := sorted(kinds - KINDS):
        raise ValueError(f"`model` has layers ({', '.join(unknown)}) that keep no keys and values of single positions")
    return kinds


def _save(chunk: Chunk, path: Path) -> None:
    """Write a file beside its final place and move it there, so that a killed process leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{kind}.{i}": t.contiguous() for kind in ("keys", "values") for i, t in enumerate(getattr(chunk, kind))}
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as scratch:  # each process has its own
        save_file(tensors, f"{scratch}/{path.name}")
        Path(scratch, path.name).replace(path)


def _loaded(path: Path, ids: Tensor, start: int, device: torch.device) -> Chunk:
    tensors = load_file(str(path), device=str(device))
    count = len(tensors) // 2
    return Chunk(ids, start, *(tuple(tensors[f"{kind}.{i}"] for i in range(count)) for kind in ("keys", "values")))
