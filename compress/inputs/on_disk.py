"""Models of a folder whose weights stay on disk: the map from the tensors of files to the weights of the model."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from compress.checkpoint.files import check_filled, take_generation_config
from compress.checkpoint.on_disk import tensors_of
from compress.checkpoint.tied import differ, set_tied, settle_tying
from compress.classes import auto_class
from compress.embedding import find_ends
from compress.walk.blocks import find_blocks
from compress.walk.capture import Stop
from compress.walk.offload import empty_weights, offload
from compress.walk.shards import OnDisk, StackedOnDisk, WorkFolder


def load_on_disk(folder: Path, dtype: torch.dtype, *, home: str, offload_path: str | Path = "") -> nn.Module:
    """A model that transformers saved, with its weights left in their files.

    Args:
        dtype: the dtype of weights in use.
        home: device on which a part lies while the model itself runs it.
        offload_path: folder for weights that a compression changes; "": the system's for temporary files.

    Raises:
        ValueError: the folder has no safetensors, a file is damaged, the model's files and its config do not have the
            same weights, transformers would convert the weights and not only their names, or the model's own code needs
            its embedding in memory.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        kind = quantised.get("quant_method") if isinstance(quantised, Mapping) else type(quantised).__name__
        raise ValueError(f"`weights` (='disk') cannot read quantised weights ({kind}): weights='memory' works")
    stored = tensors_of(folder)
    model = _empty(config, dtype)
    where = _weights(model, stored)
    ends = find_ends(model)
    own = [where[f"{name}.weight"] for name in (ends.embedding, ends.head) if name]
    if ends.tied and own[0].place != own[1].place and differ(own[0].read(), own[1].read()):
        set_tied(config, False)
        model = _empty(config, dtype)
        where = _weights(model, stored)
    if kept := _kept_in_float32(model, dtype):
        raise ValueError(
            f"`weights` (='disk') casts every weight, to {dtype} here, and {type(model).__name__} keeps {kept[0]} in "
            "float32; dtype='float32' works"
        )
    take_generation_config(model, folder)
    offload(model, where, home=home, folder=WorkFolder(offload_path))
    settle_tying(model)
    _check_look_up(model, home)
    return model


def _check_look_up(model: nn.Module, home: str) -> None:
    """Raise ValueError if the model cannot look tokens up in a table on disk; no block is loaded."""

    def stop(*_) -> None:
        raise Stop

    handle = find_blocks(model)[1][0].register_forward_pre_hook(stop, prepend=True)
    try:
        with suppress(Stop), torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=home), use_cache=False)
    finally:
        handle.remove()


def _empty(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    with empty_weights():
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    return model


def _weights(model: nn.Module, stored: Mapping[str, OnDisk]) -> dict[str, OnDisk]:
    """The tensors of a model's state by their names in it, renamed as `from_pretrained` renames them."""
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    found: dict[str, OnDisk] = {}
    unused: list[str] = []
    experts: dict[str, dict[int, dict[int, OnDisk]]] = {}  # by name in the model, expert, and number of the matrix
    for name, tensor in stored.items():
        own, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if own not in state and name in state:
            own, converted = name, None
        if converted is not None:
            if (place := _place(name, converted, converters)) is None:
                raise ValueError(
                    f"`weights` (='disk') cannot take {type(model).__name__}: transformers puts {name} and others "
                    f"together to {own} when it loads them; weights='memory' works"
                )
            experts.setdefault(own, {}).setdefault(place[0], {})[place[1]] = tensor
        elif own in state:
            found[own] = tensor
        else:
            unused.append(own)
    for own, by_expert in experts.items():
        every = [[matrices[i] for i in sorted(matrices)] for _, matrices in sorted(by_expert.items())]
        shapes = [[one.shape for one in matrices] for matrices in every]
        if sorted(by_expert) != [*range(len(every))] or any(one != shapes[0] for one in shapes):
            raise ValueError(f"the files lack some experts of {own}, or their shapes differ: {shapes[0]}, {shapes[-1]}")
        found[own] = StackedOnDisk.of(every)
    by_parameter = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name in found}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in found and id(parameter) in by_parameter:  # tied to one in `found`
            found[name] = found[by_parameter[id(parameter)]]
    _check_names(model, state, found, unused)
    return found


def _place(name: str, pattern: str, converters: Sequence[WeightConverter]) -> tuple[int, int] | None:
    """The expert of a tensor, and the number of its matrix there, if transformers stacks the matrices of experts, one
    above the other, and does nothing else; None: it does something else.

    Args:
        pattern: of the converter, which the tensor's name matches.
    """
    converter = next(one for one in converters if pattern in one.source_patterns)
    kinds = [(type(one), one.dim) for one in converter.operations if isinstance(one, MergeModulelist | Concatenate)]
    number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    stacked = kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    if number is None or not number.groups() or not stacked or len(kinds) != len(converter.operations):
        return None
    return int(number[1]), converter.source_patterns.index(pattern)


def _check_names(model: nn.Module, state: Mapping[str, Any], found: Mapping[str, OnDisk], unused: list[str]) -> None:
    lacking = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in found]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [name for name in unused if not any(re.search(pattern, name) for pattern in ignored)]
    check_filled(model, lacking, unused)
    for name, tensor in found.items():
        if tuple(state[name].shape) != tensor.shape:
            raise ValueError(
                f"{name} has the shape {tensor.shape} in its file and {tuple(state[name].shape)} by the config"
            )


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Parameters that from_pretrained leaves in float32 when it loads a model in this dtype."""
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else []
    patterns += list(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else []
    return [name for name, _ in model.named_parameters() if any(re.search(pattern, name) for pattern in patterns)]
