"""GGUF files as ordinary models: converted once, with channels permuted so that weights do not keep the file's own
grid, and kept in the user's cache folder."""

import hashlib
import importlib.util
import os
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.checkpoint.files import check_filled, check_sizes, reading
from compress.checkpoint.tied import settle_tying
from compress.walk.shards import WorkFolder
from kernels.files import sync
from kernels.source import code_sha256
from kernels.user_cache import cache_folder

# Sizes in a file's header, below the name of its architecture.
SIZES = ("embedding_length", "feed_forward_length", "vocab_size", "expert_count", "attention.head_count")
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
        header = GGUFReader(path)
        architecture = header.fields["general.architecture"].contents()
        sizes = {key.removeprefix(f"{architecture}."): field for key, field in header.fields.items()}
        names = {"block_count": "num_layers", **{key: f"num_{key}" for key in SIZES}}
        config = {names[key]: field.contents() for key, field in sizes.items() if key in names}
        if (
            lacking := {"block_count", "embedding_length"} - sizes.keys()
        ):  # transformers would take those of a large model
            raise ValueError(f"{str(path)!r} does not say its {min(lacking)}; download or copy it again")
        check_sizes(config, len(header.tensors), 8 * path.stat().st_size, f"{str(path)!r}")


def _convert(path: Path, target: Path) -> None:
    check_header(path)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "trust_remote_code": False}
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
