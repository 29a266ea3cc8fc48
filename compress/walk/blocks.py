"""Finds a model's blocks, the linears that a method compresses, and the reason why every other weight stays as it
is."""

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import nn

from compress.embedding import CompressedEmbedding, find_ends
from compress.linear import CompressedLinear, is_linear, shape_of
from compress.walk.experts import cannot_be_split, expert_count, is_fused_experts, split_shapes

NARROW = 256  # columns; matrices with fewer, and less than an eighth of the residual stream, are not compressed


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's blocks: the outermost ModuleList that holds the most parameters.

    The parts of stored weights are lists, too; those of an embedding may hold more numbers than packed blocks.
    """
    lists: list[tuple[str, nn.ModuleList]] = []
    inside = "\n"  # the latest list or stored weight, in which no list is the outermost one
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, CompressedLinear | CompressedEmbedding):
            inside = f"{name}."
        elif isinstance(module, nn.ModuleList) and len(module) > 0:
            lists.append((name, module))
            inside = f"{name}."
    if len(lists) == 1:
        return lists[0]
    if not lists:
        raise ValueError(
            f"`model` ({type(model).__name__}) has no list of blocks: only decoders of blocks can be walked"
        )
    return max(
        lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()) + sum(b.numel() for b in pair[1].buffers())
    )


def targets(model: nn.Module, skip: str = "", where: str = "blocks") -> dict[str, tuple[int, int]]:
    """Name and shape (out, in) of every weight that a method takes, without routers and the weights in `skip`.

    Experts that are fused in one parameter count as the linears that they are split into; nothing is split here.

    Args:
        where: "blocks" for the linears inside them, "embedding" for the token embedding and the head (tied ones are one
            weight, under the head's name), "all" for both.
    """
    ends = {} if where == "blocks" else end_targets(model, skip)
    return ends if where == "embedding" else {**_inside(model, skip), **ends}


def end_targets(model: nn.Module, skip: str = "") -> dict[str, tuple[int, int]]:
    """Name and shape of the token embedding and of the head, of the head alone where they are tied."""
    ends = find_ends(model)
    names = [ends.head] if ends.tied else [ends.embedding, *([ends.head] if ends.head else [])]
    if ends.tied and is_named(ends.embedding, skip):
        return {}
    return {name: shape_of(model.get_submodule(name)) for name in names if not is_named(name, skip)}


def _inside(model: nn.Module, skip: str) -> dict[str, tuple[int, int]]:
    prefix, blocks = find_blocks(model)
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if is_linear(module):
            shapes[name] = shape_of(module)
        elif is_fused_experts(module):
            shapes |= {f"{name}.{expert}": shape for expert, shape in split_shapes(module).items()}
    left = _left_by_all(model, prefix, blocks)
    return {name: shape for name, shape in shapes.items() if not _reason_to_keep(name, prefix, skip, left)}


def check_experts(model: nn.Module, skip: str, method: str) -> None:
    """Raise ValueError if some experts' weights cannot be compressed, unless `skip` names them."""
    prefix, blocks = find_blocks(model)
    for name, module in blocks.named_modules(prefix=prefix):
        if cannot_be_split(module) and not is_named(name, skip):
            raise ValueError(
                f"`skip` (={skip!r}) of {method}: {name} ({type(module).__name__}) holds several matrices, such "
                "as those of experts, in one parameter that cannot be split into linears; "
                f"skip='*.{name.rpartition('.')[2]}' would leave them as "
                "they are"
            )


def check_skip(model: nn.Module, skip: str, method: str) -> None:
    """Raise ValueError if a pattern of `skip` names no weight of the model, inside the blocks or outside them."""
    names: list[str] = []
    for name, module in model.named_modules():
        if is_linear(module) or isinstance(module, nn.Embedding | CompressedEmbedding) or cannot_be_split(module):
            names.append(name)
        elif is_fused_experts(module):
            names += [f"{name}.{expert}" for expert in split_shapes(module)]
    for pattern in filter(None, (part.strip() for part in skip.split(","))):
        if fnmatch.filter(names, pattern):
            continue
        inside = list(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names))
        near = [
            *(wider for wider in (f"{pattern}.*", f"*.{pattern}") if fnmatch.filter(names, wider)),
            *difflib.get_close_matches(pattern, [*inside, *names], n=3, cutoff=0.5),
        ] or inside
        raise ValueError(
            f"`skip` (={skip!r}) of {method}: no linear of this model is named {pattern!r}; near it: "
            f"{', '.join(near[:8])}"
        )


def kept_weights(model: nn.Module, skips: Sequence[str]) -> list[dict[str, Any]]:
    """Every parameter that no method took: {name, shape, bytes, reason}.

    Args:
        skips: the knob `skip` of each method of the recipe that stores weights.
    """
    prefix, blocks = find_blocks(model)
    left = _left_by_all(model, prefix, blocks)
    kept = []
    for name, parameter in model.named_parameters():
        owner_name = name.rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        if is_linear(owner):
            reasons = (_reason_to_keep(owner_name, prefix, skip, left) for skip in skips)
            reason = next(filter(None, reasons), "no method of the recipe takes it")
        else:
            reason = f"not a linear ({type(owner).__name__})" if skips else "no method of the recipe takes it"
        kept.append({"name": name, "shape": list(parameter.shape), "bytes": parameter.nbytes, "reason": reason})
    return kept


def is_named(name: str, patterns: str) -> bool:
    """Whether one of the comma-separated patterns (* and ?) matches this name."""
    return any(fnmatch.fnmatch(name, pattern.strip()) for pattern in patterns.split(",") if pattern.strip())


def _reason_to_keep(name: str, prefix: str, skip: str, left: dict[str, str]) -> str:
    """Why no method takes this linear; empty if one does. left: linears that no method takes, with the reason."""
    if not name.startswith(prefix + "."):
        return "outside the blocks"
    if is_named(name, skip):
        return f"named by skip ({skip})"
    return left.get(name, "")


def shared_linears(model: nn.Module) -> dict[str, str]:
    """Names of the linears inside the blocks whose weight another one has, too, with the name of that one."""
    prefix, blocks = find_blocks(model)
    owners: dict[int, list[str]] = {}
    for name, module in blocks.named_modules(prefix=prefix, remove_duplicate=False):
        if is_linear(module):
            owners.setdefault(id(module if isinstance(module, CompressedLinear) else module.weight), []).append(name)
    several = [names for names in owners.values() if len(names) > 1]
    return {name: next(one for one in names if one != name) for names in several for name in names}


def _left_by_all(model: nn.Module, prefix: str, blocks: nn.ModuleList) -> dict[str, str]:
    """Linears inside the blocks that no method takes, by name, with the reason.

    Matrices with few columns (the rank of Mamba's time steps, the streams of Gemma 3n) give scales and gates: they hold
    few weights, many outputs depend on each, and no useful group of columns divides them.
    """
    stream = model.get_input_embeddings().embedding_dim
    left: dict[str, str] = {}
    for name, module in blocks.named_modules(prefix=prefix, remove_duplicate=False):
        columns = shape_of(module)[1] if is_linear(module) else NARROW
        if columns < NARROW and columns * 8 <= stream:
            left[name] = f"narrow: it has {columns} columns, and the residual stream has {stream}"
    for name, other in shared_linears(model).items():
        left[name] = f"{other} has the same weight, which is stored once"
    return left | dict.fromkeys(_routers(prefix, blocks), "routes tokens to experts")


def _routers(prefix: str, blocks: nn.ModuleList) -> set[str]:
    """Names of the linears that route tokens to experts, or gate a shared expert.

    They lie beside the experts, in the same part of the block, and give one number for each of them, or a single one.
    """
    routers: set[str] = set()
    for index, block in enumerate(blocks):
        experts = {name: count for name, module in block.named_modules() if name and (count := expert_count(module))}
        for name, count in experts.items():
            part = name.rpartition(".")[0]
            for inner, module in block.get_submodule(part).named_modules(prefix=part) if part else ():
                inside = any(inner.startswith(f"{other}.") for other in experts)
                if is_linear(module) and not inside and shape_of(module)[0] in (1, count):
                    routers.add(f"{prefix}.{index}.{inner}")
    return routers
