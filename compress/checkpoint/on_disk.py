"""Checkpoints of models whose weights lie on disk: written, loaded and verified block by block."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.checksums import CHECKSUMS, check_files
from compress.checkpoint.files import CONFIG, check_filled, reading, take_generation_config, weight_files
from compress.checkpoint.load import (
    COMPUTED,
    dtype_of,
    empty_model,
    put_computed,
    put_linear,
    read_layout,
    remember_origin,
)
from compress.checkpoint.shards import SHARD_BYTES, write_shards
from compress.kv.attach import attach
from compress.kv.policy import cache_method
from compress.linear import CompressedLinear
from compress.result import refuse_save_pretrained
from compress.walk.blocks import find_blocks
from compress.walk.capture import Tail, advance, block_calls, device_of, on_device
from compress.walk.offload import AwayLinear, offload, offloaded_parts
from compress.walk.shards import OnDisk, TensorFile, WorkFolder
from kernels.linear import fast_linear


def tensors_of(folder: Path) -> dict[str, OnDisk]:
    """Every tensor of the safetensors files of a folder, by its name there.

    Raises:
        ValueError: as in `weight_files`.
    """
    where = weight_files(folder)
    found = {file: TensorFile(folder / file).tensors for file in set(where.values())}
    return {name: found[file][name] for name, file in where.items()}


def load_compressed_on_disk(
    folder: Path, dtype: torch.dtype | None = None, *, home: str = "cpu", offload_path: str | Path = ""
) -> nn.Module:
    """As `load_compressed`, with the weights left in their files; see `compress.inputs.on_disk.load_on_disk`.

    Args:
        dtype: the dtype to which the model is cast; None: the saved one.

    Raises:
        ValueError: as in `load_compressed`.
    """
    with reading(folder):
        model = _load_on_disk(folder, dtype, home, offload_path)
    refuse_save_pretrained(model)
    return model


def _load_on_disk(folder: Path, dtype: torch.dtype | None, home: str, offload_path: str | Path) -> nn.Module:
    if (folder / CHECKSUMS).is_file():
        check_files(folder)
    layout, tensors = read_layout(folder), tensors_of(folder)
    if layout["embeddings"]:
        raise ValueError(
            f"`weights` (='disk'): {next(iter(layout['embeddings']))} of {folder} is stored compressed, outside the "
            "blocks: weights='memory' works"
        )
    if layout["stream"]:
        raise ValueError(
            f"`weights` (='disk'): the residual stream of {folder} is rotated, outside the blocks: weights='memory' "
            "works"
        )
    model = empty_model(folder, layout)
    model.tie_weights()
    saved = dtype_of(layout)
    computed = {name.removeprefix(COMPUTED): t.read() for name, t in tensors.items() if name.startswith(COMPUTED)}
    put_computed(model, computed)
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith(COMPUTED)}
    for name, owner, key, parameter in _parameters(model):
        if name in state and parameter.dtype != state[name].dtype:  # as saved; the config's class may not know it
            setattr(owner, key, nn.Parameter(parameter.to(state[name].dtype), requires_grad=False))
    model.tie_weights()
    if dtype is not None and dtype != saved:
        model.to(dtype)
    for name, spec in layout["linears"].items():
        put_linear(model, name, AwayLinear(spec, saved, dtype))
    _check_stored(model, layout["linears"], state, saved)
    first = {id(p): state[name] for name, p in model.named_parameters(remove_duplicate=False) if name in state}
    tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in first}
    check_filled(model, [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in tied])
    take_generation_config(model, folder)
    offload(model, tied | state, home=home, folder=WorkFolder(offload_path))
    model.name_or_path = str(folder)
    remember_origin(model, folder)
    model.eval().requires_grad_(False)
    if caches := [cache_method(one["method"], one["knobs"]) for one in layout["caches"]]:
        attach(model, caches)
    return model


def _check_stored(
    model: nn.Module, linears: Mapping[str, dict[str, Any]], stored: Mapping[str, OnDisk], dtype: torch.dtype
) -> None:
    """Check every stored weight when the folder is loaded, and not when a pass reads its block.

    Each compressed linear is made once, and let go.

    Args:
        linears: their descriptions by name.
        stored: the tensors of the folder by name.
        dtype: the saved dtype of the activations.

    Raises:
        ValueError: a compressed linear cannot be made from its tensors, the model has no place for a tensor, or a
            tensor has another shape.
    """
    own: dict[str, dict[str, OnDisk]] = {name: {} for name in linears}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unused = []
    for name, tensor in stored.items():
        owner = next((name[:at] for at, letter in enumerate(name) if letter == "." and name[:at] in own), None)
        if owner is not None:
            own[owner][name.removeprefix(f"{owner}.")] = tensor
        elif name not in shapes:
            unused.append(name)
        elif shapes[name] != tensor.shape:
            raise ValueError(f"{name} has the shape {tensor.shape} in its file and {shapes[name]} by {CONFIG}")
    check_filled(model, (), unused)
    for name, spec in linears.items():
        CompressedLinear.from_tensors(spec, {key: tensor.read() for key, tensor in own[name].items()}, dtype)


def write_offloaded(model: nn.Module, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of a model on disk, with one tensor in memory at a time. The file that a compression wrote for
    a block becomes a file of the checkpoint."""
    finished: dict[Path, list[str]] = {}
    rest: dict[str, Tensor | OnDisk] = {}
    seen: set[tuple[Path, int]] = set()
    for part, offloaded in offloaded_parts(model).items():
        offloaded.settle()
        own = {f"{part}.{name}" if part else name: tensor for name, tensor in offloaded.where.items()}
        if offloaded.file_of_its_own(part):
            finished[next(iter(own.values())).source.path] = list(own)
        else:
            rest |= {name: tensor for name, tensor in own.items() if tensor.place not in seen}
            seen |= {tensor.place for tensor in own.values()}
    stored = model.state_dict()
    rest |= {
        COMPUTED + name: buffer
        for name, buffer in model.named_buffers()
        if name not in stored and buffer.is_floating_point()
    }
    write_shards(rest.items(), folder, shard_bytes=shard_bytes, finished=finished)


@torch.no_grad()
def compare_blocks(model: nn.Module, again: nn.Module) -> None:
    """Raise RuntimeError unless two models on disk give the same outputs, to the last bit, block by block.

    Every block gets the outputs of the block before it, for a few made-up tokens; the final norm and the head follow.
    """
    ids = (torch.arange(32) * 7919 % model.get_input_embeddings().num_embeddings)[None]
    sides = []
    for one in (model, again):
        _, blocks = find_blocks(one)
        sides.append((one, blocks, block_calls(one, blocks, [ids])))
    for index in range(len(sides[0][1])):
        for one, blocks, calls in sides:
            with on_device(blocks[index], device_of(one)), fast_linear():
                advance(blocks[index], calls, index, device_of(one))
        if not torch.equal(*(calls[0].hidden for _, _, calls in sides)):
            raise RuntimeError(
                f"block {index} of the saved model gives something else: {_first_difference(*sides, index)}"
            )
    logits = [Tail(one, blocks, [ids]).logits(0, calls[0].hidden) for one, blocks, calls in sides]
    if not torch.equal(*logits):
        raise RuntimeError("the saved model gives other logits: its final norm or its head differs")


def _first_difference(ours: tuple, theirs: tuple, index: int) -> str:
    here, there = (side[1][index]._offloaded.where for side in (ours, theirs))
    for name in here.keys() | there.keys():
        if name not in here or name not in there:
            return f"{name} is in one of them alone"
        if not torch.equal(here[name].read(), there[name].read()):
            return f"{name} differs"
    return "its tensors are the same"


def _parameters(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """(name, owner, attribute, parameter) of every parameter; a tied one is listed once for each of its users."""
    return [
        (f"{prefix}.{key}" if prefix else key, owner, key, parameter)
        for prefix, owner in model.named_modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None
    ]
