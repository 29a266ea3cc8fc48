"""Replacement for a dropped part of a block: it adds nothing to the residual stream, and the numbers of the cache's
layers stay the same."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig

from compress.linear import is_linear, replace
from compress.smaller import NUMBERS, plain, without_blocks
from compress.walk.blocks import find_blocks
from compress.walk.capture import device_of


class Dropped(nn.Module):
    """Gives zeros of its input's shape, or, as `identity`, its input.

    Args:
        outputs: the number of values that the part returned as a tuple, whose first value is its output; 0: the output
            alone, not in a tuple.
        layer_idx: the number under which the part kept keys and values, or states, in a cache, None if it kept none. A
            single number per position is kept there in place of keys and values, so that every layer of a cache still
            has the number of positions; states are marked as filled, which models read.
        identity: for a linear before the one that makes the output.
    """

    def __init__(self, outputs: int = 0, layer_idx: int | None = None, identity: bool = False) -> None:
        super().__init__()
        self.outputs, self.layer_idx, self.identity = outputs, layer_idx, identity
        self.adds_nothing = not identity  # `kernels.step.recognition.recognise.ADDS_NOTHING`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.layer_idx is not None:
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
            if cache is not None:
                self._pass_over(cache, hidden)
        output = hidden if self.identity else torch.zeros_like(hidden)
        return output if not self.outputs else (output, *[None] * (self.outputs - 1))

    def _pass_over(self, cache: Cache, hidden: Tensor) -> None:
        """Count the tokens of `hidden` [batch, T, hidden] in this part's layer of the cache."""
        layers = getattr(cache, "layers", ())
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        states = getattr(layer, "has_previous_state", None)
        if states is not None:
            layer.has_previous_state = dict.fromkeys(states, True)
        if layer is not None and not hasattr(layer, "get_seq_length"):  # it holds states alone, or nothing
            return
        least = hidden[:, None, :, :1]  # [batch, 1, T, 1]; caches treat tensors of width 0 as empty
        if hasattr(cache, "pass_over"):
            cache.pass_over(self.layer_idx, least)
        else:
            cache.update(least, least, self.layer_idx)

    def spec(self) -> dict[str, Any]:
        """The description of this module, as JSON, from which it can be made again."""
        return {"outputs": self.outputs, "layer_idx": self.layer_idx, "identity": self.identity}


def parts_of(block: nn.Module) -> dict[str, list[str]]:
    """Names of the children of a block that are its "attention" (they mix tokens, and are numbered because they keep
    keys, values or states) and its "mlp" (the rest with matrices).

    Norms belong to neither. An MLP may be a chain of linears that are the block's own children (OPT).
    """
    found: dict[str, list[str]] = {"attention": [], "mlp": []}
    for name, child in block.named_children():
        if isinstance(child, Dropped) or not (
            any(map(is_linear, child.modules())) or any(p.dim() > 1 for p in _tensors(child))
        ):
            continue
        found["attention" if number_of(child) is not None else "mlp"].append(name)
    return found


def number_of(part: nn.Module) -> int | None:
    """The number under which a part of a block keeps something in a cache; None if it keeps nothing."""
    numbers = (getattr(module, key, None) for module in part.modules() for key in NUMBERS)
    return next((number for number in numbers if isinstance(number, int)), None)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def drop_part(block: nn.Module, kind: str, outputs: dict[str, int]) -> None:
    """Drop a block's "attention" or "mlp".

    Args:
        outputs: by child, the number of values that it returns as a tuple (0: no tuple), as `outputs_of` found.
    """
    names = parts_of(block)[kind]
    chain = len(names) > 1 and all(is_linear(block.get_submodule(name)) for name in names)
    numbers: set[int | None] = {None}
    for name in names:
        number = number_of(block.get_submodule(name))  # two mixers of a block share a layer of the cache
        own = None if number in numbers else number
        numbers.add(number)
        replace(block, name, Dropped(outputs.get(name, 0), own, chain and name != names[-1]))


def drop_block(model: nn.Module, index: int) -> None:
    """Remove a block: the later ones move up, in the model, in its cache and in its config, which then describes the
    remaining model.

    Raises:
        ValueError: no config of the model's class describes it; the model is not changed.
    """
    config, (_, blocks) = model.config.get_text_config(), find_blocks(model)
    settings = without_blocks(model, {index})
    del blocks[index]
    for block in list(blocks)[index:]:
        for module in block.modules():
            for key in NUMBERS:
                if isinstance(number := getattr(module, key, None), int):
                    setattr(module, key, number - 1)
    for key, value in settings.items():
        setattr(config, key, value)


@contextmanager
def undone_if_refused(model: nn.Module) -> Iterator[None]:
    """If the `with` block ends in an error, the model gets back the modules, numbers and settings that it had."""
    of_root = plain(model)
    children = [(module, dict(module._modules)) for module in model.modules()]
    numbers = [(m, key, vars(m)[key]) for m, _ in children for key in NUMBERS if key in vars(m)]
    config = model.config.get_text_config()
    settings = copy.deepcopy(vars(config))
    try:
        yield
    except BaseException:
        for module, own in children:
            module._modules.clear()
            module._modules.update(own)
        for module, key, number in numbers:
            setattr(module, key, number)
        vars(model).update(of_root)
        vars(config).clear()
        vars(config).update(settings)
        raise


@torch.no_grad()
def decoding_error(model: nn.Module, ids: Tensor) -> float:
    """||y - y'|| / ||y|| of a token's logits y, from all tokens at once and y' from the cache, for two copies of
    ids [1, T] in a batch."""
    ids = ids.to(device_of(model)).expand(2, -1)
    settings = GenerationConfig(
        min_new_tokens=2,
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    cached = made.logits[1].float()  # [2, vocabulary]
    whole = model(made.sequences[:, :-1], use_cache=False).logits[:, -1].float()
    return ((cached - whole).norm() / whole.norm()).item()


def dropped_parts(model: nn.Module) -> dict[str, Dropped]:
    """The dropped parts inside blocks, by name in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Dropped)}
