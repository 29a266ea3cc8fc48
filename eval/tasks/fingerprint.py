"""Hashes of everything that a model's answers depend on: weights, structure, settings, attachments and code."""

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_OWN_STATE = {
    *vars(nn.Module()),
    "config",
    "generation_config",
    "name_or_path",
    "warnings_issued",
}  # told otherwise, or no matter
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_NAMES = ("name_or_path", "_name_or_path", "transformers_version")  # of a configuration; they change no answer
_LIBRARIES = {
    "torch",
    "transformers",
    "accelerate",
    "builtins",
    "numpy",
}  # whose versions whoever keeps answers takes down
_CODE = (".py", ".cpp", ".inc")
_DEPTH = 3


def model_sha256(model: nn.Module) -> str:
    """Hash of everything that can make two models answer differently.

    That is: every tensor by name, dtype, shape and content, including buffers that are not saved; every module's class
    and plain settings (bits, thresholds, transforms); configurations of model and generation; hooks and replaced
    `forward`s with their bound objects, such as the policy of a compressed KV cache; and the source of the packages of
    all these classes, except torch and transformers. The model's name does not count.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model)):
        digest.update(f"{name} {_tensor(tensor)}\n".encode())
    packages: set[str] = set()
    for name, module in model.named_modules():
        packages.add(type(module).__module__)
        own = {key: _described(value, 0) for key, value in vars(module).items() if key not in _OWN_STATE}
        if type(module).__module__ == "__main__":  # defined in a notebook: no file has its source
            own["forward"] = _described(type(module).forward, 0)
        digest.update(json.dumps([name, type(module).__qualname__, own], sort_keys=True).encode())
    for place, function in attached(model):
        packages.add(_origin(function))
        digest.update(json.dumps([place, _described(function, 0)]).encode())
    for about in ("config", "generation_config"):
        digest.update(json.dumps(_configuration(getattr(model, about, None)), sort_keys=True, default=str).encode())
    own_packages = {package.partition(".")[0] for package in packages} - _LIBRARIES
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


def attached(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(place, function) of every hook and every replaced `forward`, except those of torch and transformers."""
    for name, module in model.named_modules():
        functions = [function for kind in _HOOKS for function in getattr(module, kind).values()]
        functions += [vars(module)["forward"]] if "forward" in vars(module) else []
        for function in functions:
            if _origin(function).partition(".")[0] not in _LIBRARIES:
                yield name, function


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


def _described(value: Any, depth: int) -> Any:
    """JSON that is the same in every process; deeply nested objects, and mere references, are described by their
    class."""
    kind = type(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, functools.partial):
        return ["partial", _described(value.func, depth), _described([value.args, value.keywords], depth)]
    if isinstance(value, MethodType):
        return [value.__qualname__, _described(value.__self__, depth)]
    if isinstance(value, FunctionType):
        closed = inspect.getclosurevars(value).nonlocals if value.__closure__ else {}
        constants = [repr(constant) for constant in value.__code__.co_consts if isinstance(constant, _PLAIN)]
        code = [value.__qualname__, value.__code__.co_code.hex(), constants, list(value.__code__.co_names)]
        return [value.__module__, code, _described([value.__defaults__, closed], depth + 1)]
    if (
        isinstance(value, nn.Module | ModuleType | type)
        or depth > _DEPTH
        or kind.__module__ in ("weakref", "torch.utils.hooks")
    ):
        return getattr(value, "__qualname__", kind.__qualname__)
    if isinstance(value, Mapping):
        return sorted(
            ([str(key), _described(inner, depth + 1)] for key, inner in value.items()), key=lambda item: item[0]
        )
    if isinstance(value, list | tuple | set | frozenset):
        items = [_described(inner, depth + 1) for inner in value]
        return sorted(items, key=json.dumps) if isinstance(value, set | frozenset) else items
    own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    return [kind.__qualname__, _described({**getattr(value, "__dict__", {}), **own}, depth + 1)]


def _origin(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(function, functools.partial):
        return _origin(function.func)
    if owner is not None and not isinstance(owner, nn.Module):
        return type(owner).__module__
    return getattr(function, "__module__", None) or type(function).__module__
