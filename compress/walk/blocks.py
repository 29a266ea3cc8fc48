"""Where a model's blocks are, which of their linears a method takes, and why every other weight stays as it is."""

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import nn

from compress.linear import is_linear, shape_of


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's blocks: the outermost ModuleList that holds the most parameters."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise ValueError(
            f"`model` ({type(model).__name__}) has no list of blocks: only decoders of blocks can be walked"
        )
    return max(
        lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()) + sum(b.numel() for b in pair[1].buffers())
    )


def targets(model: nn.Module, skip: str = "") -> dict[str, tuple[int, int]]:
    """Name and shape (out, in) of every linear inside the blocks, but for those that `skip` names and routers."""
    prefix, _ = find_blocks(model)
    linears = ((name, module) for name, module in model.named_modules() if is_linear(module))
    return {
        name: shape_of(module) for name, module in linears if not _reason_to_keep(model, prefix, name, module, skip)
    }


def kept_weights(model: nn.Module, skips: Sequence[str]) -> list[dict[str, Any]]:
    """Every parameter that no method took: {name, shape, bytes, reason}.

    Args:
        skips: the knob `skip` of each method of the recipe that stores weights.
    """
    prefix, _ = find_blocks(model)
    kept = []
    for name, parameter in model.named_parameters():
        owner_name = name.rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        reasons = (_reason_to_keep(model, prefix, owner_name, owner, skip) for skip in skips)
        reason = next(filter(None, reasons), "no method of the recipe takes it")
        kept.append({"name": name, "shape": list(parameter.shape), "bytes": parameter.nbytes, "reason": reason})
    return kept


def is_named(name: str, patterns: str) -> bool:
    """Does one of the comma-separated patterns (* and ?) match this name?"""
    return any(fnmatch.fnmatch(name, pattern.strip()) for pattern in patterns.split(",") if pattern.strip())


def _reason_to_keep(model: nn.Module, prefix: str, name: str, module: nn.Module, skip: str) -> str:
    if not is_linear(module):
        return f"not a linear ({type(module).__name__})"
    if not name.startswith(prefix + "."):
        return "outside the blocks"
    if is_named(name, skip):
        return f"named by skip ({skip})"
    return "routes tokens to experts" if _routes(model, name, shape_of(module)[0]) else ""


def _routes(model: nn.Module, name: str, out: int) -> bool:
    """Is this linear a router, or the gate of a shared expert? Those sit beside experts and give one number for
    each."""
    config = model.config.get_text_config()
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if out not in {1, *(getattr(config, key, None) for key in keys)}:
        return False
    parent = name.rpartition(".")[0]
    return any(hasattr(model.get_submodule(p), "experts") for p in (parent, parent.rpartition(".")[0]))
