"""Replacement for a dropped part of a block: it adds nothing to the residual stream, and the numbers of the cache's
layers stay the same."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from compress.linear import is_linear, replace
from compress.walk.blocks import find_blocks


class Dropped(nn.Module):
    """Gives zeros of its input's shape, or, as `identity`, its input.

    Args:
        outputs: the number of values that the part returned as a tuple, whose first value is its output; 0: the output
            alone, not in a tuple.
        layer_idx: the number under which the part kept keys and values in a cache, None if it kept none. A single
            number per position is kept there, so that every layer of a cache still has the number of positions.
        identity: for a linear before the one that makes the output.
    """

    def __init__(self, outputs: int = 0, layer_idx: int | None = None, identity: bool = False) -> None:
        super().__init__()
        self.outputs, self.layer_idx, self.identity = outputs, layer_idx, identity

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.layer_idx is not None:
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
            if hasattr(cache, "pass_over"):
                cache.pass_over(self.layer_idx, hidden.shape[1])
            elif cache is not None:
                least = hidden[:, None, :, :1]  # [batch, 1, T, 1]; caches treat tensors of width 0 as empty
                cache.update(least, least, self.layer_idx)
        output = hidden if self.identity else torch.zeros_like(hidden)
        return output if not self.outputs else (output, *[None] * (self.outputs - 1))

    def spec(self) -> dict[str, Any]:
        """The description of this module, as JSON, from which it can be made again."""
        return {"outputs": self.outputs, "layer_idx": self.layer_idx, "identity": self.identity}


def parts_of(block: nn.Module) -> dict[str, list[str]]:
    """Names of the children of a block that are its "attention" (they keep keys and values) and its "mlp" (the rest
    with matrices).

    Norms belong to neither. An MLP may be a chain of linears that are the block's own children (OPT).
    """
    found: dict[str, list[str]] = {"attention": [], "mlp": []}
    for name, child in block.named_children():
        if isinstance(child, Dropped) or not (
            any(map(is_linear, child.modules())) or any(p.dim() > 1 for p in _tensors(child))
        ):
            continue
        found["attention" if any(hasattr(m, "layer_idx") for m in child.modules()) else "mlp"].append(name)
    return found


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def drop_part(block: nn.Module, kind: str, outputs: dict[str, int]) -> None:
    """Drop a block's "attention" or "mlp".

    Args:
        outputs: by child, the number of values that it returns as a tuple (0: no tuple), as `outputs_of` found.
    """
    names = parts_of(block)[kind]
    chain = len(names) > 1 and all(is_linear(block.get_submodule(name)) for name in names)
    for name in names:
        indices = [m.layer_idx for m in block.get_submodule(name).modules() if hasattr(m, "layer_idx")]
        replace(
            block, name, Dropped(outputs.get(name, 0), indices[0] if indices else None, chain and name != names[-1])
        )


def drop_block(model: nn.Module, index: int) -> None:
    """Remove a block: the later ones move up, in the model, in its cache and in its config, which then describes the
    remaining model."""
    _, blocks = find_blocks(model)
    count = len(blocks)
    del blocks[index]
    for block in list(blocks)[index:]:
        for module in block.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx -= 1
    config = model.config.get_text_config()
    for key in _lists_by_block(config):
        value = getattr(config, key)
        setattr(config, key, [*value[:index], *value[index + 1 :]])
    config.num_hidden_layers = count - 1


def _lists_by_block(config: PreTrainedConfig) -> list[str]:
    """Names of a config's lists with one entry per block, such as `layer_types`.

    They are the lists whose length in the config's class follows the number of blocks, also for deeper models. Any
    other list has this length by accident.
    """
    depth, key = config.num_hidden_layers, config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    try:
        deeper = {more: type(config)(**{key: more}) for more in (depth + 1, depth + 2)}
    except (TypeError, ValueError):  # a class that needs more than a depth makes no such lists itself
        return []

    def length(one: PreTrainedConfig, name: str) -> int:
        value = getattr(one, name, None)
        return len(value) if isinstance(value, list) else -1

    return [
        name
        for name in vars(config)
        if length(config, name) == depth and all(length(one, name) == more for more, one in deeper.items())
    ]


def dropped_parts(model: nn.Module) -> dict[str, Dropped]:
    """The dropped parts inside blocks, by name in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Dropped)}
