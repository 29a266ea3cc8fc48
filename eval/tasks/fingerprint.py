"""Hashes of everything that a model's answers depend on: weights, structure, settings, attachments and code."""

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_OWN_STATE = {*vars(nn.Module()), "config", "generation_config", "name_or_path", "warnings_issued", "forward"}
_NAMES = ("name_or_path", "_name_or_path", "transformers_version")  # of a configuration; they change no answer
_LIBRARIES = {"torch", "transformers", "accelerate", "builtins", "numpy"}  # their versions are recorded otherwise
_CODE = (".py", ".cpp", ".inc")


def model_sha256(model: nn.Module) -> str | None:
    """Hash of everything that can make two models answer differently; None if one part cannot be identified.

    That is: every tensor by name, dtype, shape and content, including buffers that are not saved; every module's class
    and plain settings (bits, thresholds, transforms); configurations of model and generation; hooks and replaced
    `forward`s with their objects, such as that of a compressed KV cache with its policies; and the source of the
    packages of all these, except torch and transformers. The model's name does not count. Functions and classes that a
    notebook defines, and functions inside functions, cannot be identified.
    """
    parts = [*model.named_modules(), *((f"hook {i}", hook) for i, hook in enumerate(attached(model)))]
    if not all(map(_is_identified, (one for _, one in parts))):
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model)):
        digest.update(f"{name} {_tensor(tensor)}\n".encode())
    for name, one in parts:
        own = {key: _described(value) for key, value in vars(one).items() if key not in _OWN_STATE}
        digest.update(json.dumps([name, _kind(one).__qualname__, own], sort_keys=True).encode())
    for about in ("config", "generation_config"):
        digest.update(json.dumps(_configuration(getattr(model, about, None)), sort_keys=True, default=str).encode())
    own_packages = {_kind(one).__module__.partition(".")[0] for _, one in parts} - _LIBRARIES
    for package in sorted(own_packages | ({"kernels"} if own_packages else set())):
        digest.update(f"{package} {package_sha256(package)}".encode())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's behaviour. Padding and truncation do not count: every call sets them again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = json.loads(backend.to_str()) if backend is not None else sorted(tokenizer.get_vocab().items())
    if isinstance(told, dict):
        told = {key: value for key, value in told.items() if key not in ("padding", "truncation")}
    more = [
        type(tokenizer).__qualname__,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        *(getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "model_max_length")),
    ]
    return hashlib.sha256(json.dumps([told, more], sort_keys=True, default=str).encode()).hexdigest()


def attached(model: nn.Module) -> Iterator[Any]:
    """The function of every hook and every replaced `forward`, or its object if it is a method of one that is no
    module; without those of torch and transformers."""
    for module in model.modules():
        functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for function in functions + ([vars(module)["forward"]] if "forward" in vars(module) else []):
            owner = getattr(function, "__self__", None)
            hook = function if owner is None or isinstance(owner, nn.Module) else owner
            if _kind(hook).__module__.partition(".")[0] not in _LIBRARIES:
                yield hook


def _kind(one: Any) -> Any:
    """A function itself, or the class of an object."""
    return one if isinstance(one, FunctionType | MethodType) else type(one)


def _is_identified(one: Any) -> bool:
    """Does a name in the source of a package, with plain settings, identify what this does?"""
    inside = isinstance(one, functools.partial) or getattr(one, "__closure__", None)
    return not inside and "<" not in _kind(one).__qualname__ and _kind(one).__module__ != "__main__"


@functools.cache
def package_sha256(package: str) -> str:
    """Hash of a package's source files, or of its name if it has none."""
    digest = hashlib.sha256(package.encode())
    found = sys.modules.get(package)
    where = [Path(folder) for folder in getattr(found, "__path__", [])] or [
        Path(getattr(found, "__file__", None) or "/nowhere")
    ]
    for path in sorted(path for one in where for path in (one.rglob("*") if one.is_dir() else [one])):
        if path.suffix in _CODE and path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    yield from saved.items()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in saved)


def _tensor(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()}"


def _configuration(config: Any) -> Any:
    if config is None:
        return None
    told = {key: value for key, value in config.to_dict().items() if key not in _NAMES}
    return [told, getattr(config, "_attn_implementation", None)]


def _described(value: Any) -> Any:
    """JSON that is the same in every process; objects that are no plain settings are described by their class."""
    if isinstance(value, _PLAIN) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return repr(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Mapping):
        return sorted([str(key), _described(inner)] for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_described(inner) for inner in value]
    return type(value).__qualname__
