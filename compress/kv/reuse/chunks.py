"""The cache of a text that was read without the texts that will come before it in the prompt."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache

from compress.kv.reuse.context import ChunkContext, attention_noted
from compress.kv.rotation import rotaries_of
from compress.walk.capture import device_of
from compress.walk.identity import weights_sha256

KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Chunk:
    """The cached part of one text.

    Attributes:
        ids: [n], its tokens. start: the position of the first one when it was read.
        keys, values: of each layer [1, H_kv, n, D]; keys are rotated to the positions from `start` on.
        context: its attention to the texts that it was read behind; without texts if it was read alone.
    """

    ids: Tensor
    start: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    context: ChunkContext

    @property
    def name(self) -> str:
        """The name of its text: the same for all readings of it."""
        return _digest(self.ids.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.nbytes for t in (*self.keys, *self.values))


class ChunkStore:
    """Reads texts behind the same prefix, alone or together, and keeps their keys and values.

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
        if not rotaries_of(model):
            raise ValueError(
                f"`model` ({type(model).__name__}) has no rotary position embeddings, so that keys cannot be moved to "
                "other positions; a Llama, Qwen, Mistral, Gemma or Phi works"
            )
        if prefix.shape[-1] == 0:
            raise ValueError("`prefix` holds no token; the token that texts begin with works")
        self.model, self.folder = model, None if folder is None else Path(folder)
        self._ids = prefix.reshape(1, -1).cpu()
        self._kept: dict[str, dict[str, Chunk]] = {}  # by text, by the texts before it
        self._weights = f"{weights_sha256(model)} {model.dtype}" if folder is not None else ""
        self.prefix = self._alone(self._ids, 0)

    def read(self, ids: Tensor) -> Chunk:
        """The chunk of a text that is read behind the prefix alone: a stored one, or else read now.

        Args:
            ids: [1, n] or [n] tokens, without the prefix.

        Raises:
            ValueError: `ids` has no token, or more than one text.
        """
        return self._alone(_one_text(ids), self._ids.shape[1])

    @torch.no_grad()
    def read_together(self, texts: Sequence[Tensor]) -> list[Chunk]:
        """Read the texts of a prompt, one behind the other, and keep each with its attention to those before it.

        What a server computes for a first prompt is kept for later ones in this way (Cache-Craft). The attention is
        computed in full: a prompt of T tokens takes 4 H T² bytes for a moment, with H heads.

        Returns:
            The prefix and the chunks, for a `blend` in this order.

        Raises:
            ValueError: no text, a text without tokens, or a model that does not return its attention.
        """
        if not texts:
            raise ValueError("`texts` is empty: the tokens of at least one text are needed")
        parts = [self._ids, *map(_one_text, texts)]
        bounds = [0]
        for part in parts:
            bounds.append(bounds[-1] + part.shape[1])
        with attention_noted(self.model, bounds) as noted:
            layers = self._layers(torch.cat(parts, 1))
        chunks, names = [self.prefix], [_digest(part[0].tolist()) for part in parts]
        for i in range(1, len(parts)):
            mine = noted[bounds[i] : bounds[i + 1]]
            lengths = tuple(part.shape[1] for part in parts[1:i])
            inter = tuple(mine[:, 1:i].sum(0).tolist())
            context = ChunkContext(tuple(names[1:i]), lengths, inter, mine[:, i].sum().item(), mine[:, 1:i].sum(1))
            chunks.append(_cut(layers, parts[i][0], bounds[i], context))
            self._keep(chunks[-1])
        return chunks

    def select(self, texts: Sequence[Tensor]) -> list[Chunk]:
        """The chunks for a prompt: of each text the stored reading of which least must be computed again behind the
        texts before it (`ChunkContext.overhead`). A text that was never read is read alone.

        Returns:
            The prefix and the chunks, for a `blend` in this order.
        """
        chunks, names = [self.prefix], []
        for ids in map(_one_text, texts):
            readings = self._readings(ids) or [self.read(ids)]
            chunks.append(min(readings, key=lambda chunk: chunk.context.overhead(names)))
            names.append(chunks[-1].name)
        return chunks

    def _alone(self, ids: Tensor, start: int) -> Chunk:
        """ids [1, n], from position `start` on; 0: they are the prefix itself."""
        kept = self._stored(self._text(ids, start), _digest([]), ids)
        if kept is None:
            tokens = torch.cat([self._ids, ids], 1) if start else ids
            context = ChunkContext((), (), (), 1.0, torch.zeros(ids.shape[1]))
            kept = _cut(self._layers(tokens), ids[0], start, context)
            self._keep(kept)
        return kept

    @torch.no_grad()
    def _layers(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of all positions, by layer."""
        cache = DynamicCache()  # all layers keep all positions
        self.model(tokens.to(device_of(self.model)), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _text(self, ids: Tensor, start: int) -> str:
        return _digest([self._weights, self._ids.tolist(), ids.reshape(1, -1).tolist(), bool(start)])

    def _readings(self, ids: Tensor) -> list[Chunk]:
        """All stored readings of a text."""
        text = self._text(ids, 1)
        for path in self.folder.glob(f"{text}-*.safetensors") if self.folder is not None else ():
            self._stored(text, path.stem.removeprefix(f"{text}-"), ids)
        return list(self._kept.get(text, {}).values())

    def _stored(self, text: str, before: str, ids: Tensor) -> Chunk | None:
        """The reading of a text behind the texts with this digest; None if there is none."""
        kept, path = self._kept.setdefault(text, {}), self._path(text, before)
        if before not in kept and path is not None and path.is_file():
            kept[before] = _loaded(path, ids.reshape(-1), device_of(self.model))
        return kept.get(before)

    def _keep(self, chunk: Chunk) -> None:
        text, before = self._text(chunk.ids, chunk.start), _digest(list(chunk.context.before))
        self._kept.setdefault(text, {})[before] = chunk
        if (path := self._path(text, before)) is not None:
            _save(chunk, path)

    def _path(self, text: str, before: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{text}-{before}.safetensors"


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _one_text(ids: Tensor) -> Tensor:
    if ids.numel() == 0 or ids.numel() != ids.shape[-1]:
        raise ValueError(f"`ids` {tuple(ids.shape)} must be the tokens of one text, [n] or [1, n] with n > 0")
    return ids.reshape(1, -1).cpu()


def _cut(layers: Sequence[tuple[Tensor, Tensor]], ids: Tensor, start: int, context: ChunkContext) -> Chunk:
    cut = [[t[:, :, start : start + len(ids)].clone() for t in layer] for layer in layers]
    return Chunk(ids, start, *map(tuple, zip(*cut, strict=True)), context)


def kinds_of(model: nn.Module) -> set[str]:
    """The kinds of a decoder's layers.

    Raises:
        ValueError: some keep no keys and values of single positions.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = {"sliding_attention" if sliding else "full_attention"}
    if unknown := sorted(kinds - KINDS):
        raise ValueError(f"`model` has layers ({', '.join(unknown)}) that keep no keys and values of single positions")
    return kinds


def _save(chunk: Chunk, path: Path) -> None:
    """Write a file beside its final place and move it there, so that a killed process leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{kind}.{i}": t.contiguous() for kind in ("keys", "values") for i, t in enumerate(getattr(chunk, kind))}
    context = {name: value for name, value in vars(chunk.context).items() if name != "outside"}
    about = {"start": str(chunk.start), "context": json.dumps(context)}
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as scratch:  # each process has its own
        save_file({**tensors, "outside": chunk.context.outside}, f"{scratch}/{path.name}", about)
        Path(scratch, path.name).replace(path)


def _loaded(path: Path, ids: Tensor, device: torch.device) -> Chunk:
    with safe_open(path, "pt", device=str(device)) as file:
        about, count = file.metadata(), len(file.keys()) // 2
        layers = [(file.get_tensor(f"keys.{i}"), file.get_tensor(f"values.{i}")) for i in range(count)]
        outside = file.get_tensor("outside").cpu()
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(about["context"]).items()}
    return Chunk(
        ids, int(about["start"]), *map(tuple, zip(*layers, strict=True)), ChunkContext(**given, outside=outside)
    )
