"""GGUF files as ordinary models: converted once, with channels permuted so that weights do not keep the file's own
grid, and kept in the user's cache folder."""

import hashlib
import importlib.util
import os
import struct
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from mmap import ACCESS_READ, mmap
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from compress.checkpoint.files import check_count, check_filled, check_size, reading
from compress.checkpoint.tied import settle_tying
from compress.classes import auto_class
from compress.walk.shards import WorkFolder
from kernels.support.files import sync
from kernels.support.source import code_sha256
from kernels.support.user_cache import cache_folder

# Sizes in a file's header, below the name of its architecture.
SIZES = (
    "embedding_length", "feed_forward_length", "vocab_size", "expert_count", "expert_feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count",
)  # fmt: skip
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
TEXT, ARRAY = 8, 9  # the types of the other values
MOST_DIMENSIONS = 4  # of a tensor
SEED = 0  # seed of the shuffle; part of the cache key


def converted(path: Path) -> Path:
    """Folder with the model of a GGUF file as safetensors and its tokenizer; made at first use, atomically.

    Raises:
        ValueError: the file is damaged, or the package `gguf` is not installed.
    """
    check_installed()
    folder = converted_folder(path)
    if not folder.exists():
        work = WorkFolder(folder.parent)  # removed with `work`, and after a kill by the next one
        part = work.path / folder.name
        part.mkdir()
        with reading(path):
            _convert(path, part)
        for file in part.iterdir():
            sync(file)
        try:
            os.rename(part, folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    return folder


def converted_folder(path: Path) -> Path:
    """The folder for the conversion of a GGUF file, named by the file's content and the converter's code."""
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    made_by = f"{code_sha256(Path(__file__))} {transformers.__version__} {version('gguf')}"
    key = hashlib.sha256(f"{content} {SEED} {made_by}".encode()).hexdigest()[:12]
    return cache_folder() / f"{path.stem}-{key}"


def check_installed() -> None:
    """Raise ValueError if the package that reads GGUF files is not installed: all other models do without it."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("GGUF files are read by the package `gguf`, which is not installed: `pip install gguf` does")


def check_header(path: Path) -> None:
    """Compare the sizes in a GGUF file's header with the size of the file, before a model is built from them.

    Raises:
        ValueError: the header is damaged, or names more blocks than tensors, or a size beyond the bits of the file.
    """
    check_installed()
    from gguf import GGUFReader

    with reading(path):
        _check_extent(path)
        header = GGUFReader(path)
        architecture = header.fields["general.architecture"].contents()
        sizes = {key.removeprefix(f"{architecture}."): field for key, field in header.fields.items()}
        if (
            lacking := {"block_count", "embedding_length"} - sizes.keys()
        ):  # transformers would take those of a large model
            raise ValueError(f"{str(path)!r} does not say its {min(lacking)}; download or copy it again")
        most = {"block_count": (len(header.tensors), "tensors"), **dict.fromkeys(SIZES, (_bits(path), "bits"))}
        for key, held in most.items():
            if key in sizes:
                check_size(key, sizes[key].contents(), *held, f"{str(path)!r}")


def check_outline(model: nn.Module, path: Path) -> None:
    """Raise ValueError if a model on the meta device has more parameters than its GGUF file has bits."""
    check_count(model, _bits(path), f"{str(path)!r}")


def _bits(path: Path) -> int:
    return 8 * path.stat().st_size


@dataclass
class _Cursor:
    """A place in the header of a GGUF file; every step stays inside of the file."""

    content: mmap
    at: int = 4  # behind the letters GGUF
    order: str = "<"

    def skip(self, count: int) -> int:
        """The place before a step of `count` bytes."""
        if count > len(self.content) - self.at:
            raise ValueError(f"its header is damaged: {count} bytes from byte {self.at} on are beyond the file's end")
        self.at += count
        return self.at - count

    def number(self, kind: str) -> int:
        return struct.unpack_from(self.order + kind, self.content, self.skip(struct.calcsize("=" + kind)))[0]

    def skip_text(self) -> None:
        self.skip(self.number("Q"))

    def skip_value(self, kind: int, count: int = 1) -> None:
        """Step over values; numbers at once, however many there are."""
        if kind in WIDTHS:
            self.skip(count * WIDTHS[kind])
            return
        for _ in range(count):
            if kind == TEXT:
                self.skip_text()
            elif kind == ARRAY:
                self.skip_value(self.number("I"), self.number("Q"))
            else:
                raise ValueError(f"its header is damaged: a value before byte {self.at} is of type {kind}")


def _check_extent(path: Path) -> None:
    """Raise ValueError if the header of a GGUF file does not end inside of the file.

    The package `gguf` reads arrays of numbers one by one and does not see the file's end: a length with a flipped bit
    makes it read nothing for hours.
    """
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if content[:4] != b"GGUF":
            raise ValueError("its first bytes are not GGUF")
        header = _Cursor(content)
        if header.number("I") % 2**16 == 0:  # the version, in the other byte order
            header.order = ">"
        tensors, fields = header.number("Q"), header.number("Q")
        for _ in range(fields):
            header.skip_text()
            header.skip_value(header.number("I"))
        for _ in range(tensors):
            header.skip_text()
            if (dimensions := header.number("I")) > MOST_DIMENSIONS:
                raise ValueError(f"its header is damaged: a tensor has {dimensions} dimensions")
            header.skip(8 * dimensions + 4 + 8)  # the dimensions, the type of the values, their place


def _convert(path: Path, target: Path) -> None:
    check_header(path)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "trust_remote_code": False}
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(**where)
        check_outline(auto_class(config).from_config(config, trust_remote_code=False), path)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
    check_filled(loaded, info["missing_keys"], info["unexpected_keys"])
    settle_tying(loaded)
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model = type(loaded)(config).eval()  # a model that was loaded from GGUF cannot be saved
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    del loaded
    if not shuffle(model, SEED):
        warnings.warn(
            f"{path.name}: its weights stay on the grid of the file, so quantising them again with the same groups "
            "gives errors that are too small",
            stacklevel=2,
        )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@torch.no_grad()
def shuffle(model: nn.Module, seed: int) -> bool:
    """Permute hidden units, MLP units and the value channels of each head, in place; the function stays the same.

    The weights of a GGUF file lie on a grid in groups of 32 columns. After the permutation a group of columns mixes
    many of the file's groups, so that quantising the model again is as hard as for a model that was never quantised.

    Returns:
        False, with the model unchanged, if it is not built like Llama (so that its units are not known).

    Raises:
        RuntimeError: the permuted model gives other outputs.
    """
    if not _like_llama(model):
        return False
    ids = torch.arange(16)[None] * 7 % model.config.vocab_size
    before = model(ids).logits
    generator = torch.Generator().manual_seed(seed)
    core, config = model.model, model.config
    hidden = torch.randperm(config.hidden_size, generator=generator)
    _permute(core.embed_tokens, columns=hidden)
    core.norm.weight.copy_(core.norm.weight[hidden])
    if model.lm_head.weight is not core.embed_tokens.weight:
        _permute(model.lm_head, columns=hidden)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = core.layers[0].self_attn.v_proj.weight.shape[0] // kv_heads
    for block in core.layers:
        for child in block.children():
            if getattr(getattr(child, "weight", None), "shape", None) == (config.hidden_size,):
                child.weight.copy_(child.weight[hidden])
        attention, mlp = block.self_attn, block.mlp
        units = torch.randperm(mlp.down_proj.weight.shape[1], generator=generator)
        channels = torch.stack([torch.randperm(size, generator=generator) for _ in range(kv_heads)])  # [kv_heads, size]
        values = (channels + torch.arange(kv_heads)[:, None] * size).reshape(-1)
        each = channels.repeat_interleave(heads // kv_heads, 0)  # [heads, size]
        outputs = (each + torch.arange(heads)[:, None] * size).reshape(-1)
        for linear in (attention.q_proj, attention.k_proj):
            _permute(linear, columns=hidden)
        _permute(attention.v_proj, rows=values, columns=hidden)
        _permute(attention.o_proj, rows=hidden, columns=outputs)
        for linear in (mlp.gate_proj, mlp.up_proj):
            _permute(linear, rows=units, columns=hidden)
        _permute(mlp.down_proj, rows=hidden, columns=units)
    error = (model(ids).logits - before).abs().max() / before.abs().max()
    if not error < 1e-3:
        raise RuntimeError(f"the shuffled model gives other outputs (relative difference {error:.1e})")
    return True


def _like_llama(model: nn.Module) -> bool:
    try:
        block = model.model.layers[0]
        linears = [getattr(block.self_attn, f"{n}_proj") for n in "qkvo"] + [
            getattr(block.mlp, f"{n}_proj") for n in ("gate", "up", "down")
        ]
        return (
            all(isinstance(linear, nn.Linear) for linear in (*linears, model.lm_head)) and model.model.norm is not None
        )
    except AttributeError:
        return False


def _permute(linear: nn.Module, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    weight = linear.weight if rows is None else linear.weight[rows]
    linear.weight.copy_(weight if columns is None else weight[:, columns])
    bias = getattr(linear, "bias", None)
    if bias is not None and rows is not None:
        bias.copy_(bias[rows])
