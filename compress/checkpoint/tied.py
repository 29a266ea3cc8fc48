"""Whether a model's head shares the weight of its embedding: decided by the weights that were loaded, not by what the
config says, in which the two may disagree."""

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from compress.embedding import CompressedEmbedding, find_ends
from compress.linear import CompressedLinear

KEY = "tie_word_embeddings"


def set_tied(config: PreTrainedConfig, tied: bool) -> None:
    """Say in a config, and in that of its decoder, whether head and embedding are one weight."""
    for one in (config, config.get_text_config()):
        if hasattr(one, KEY):
            setattr(one, KEY, tied)


def settle_tying(model: nn.Module) -> None:
    """Make a model's config say what its weights are."""
    if find_ends(model).head is not None:
        set_tied(model.config, find_ends(model).tied)


def true_config(model: nn.Module) -> PreTrainedConfig:
    """A copy of a model's config that says what its weights are."""
    config = copy.deepcopy(model.config)
    ends = find_ends(model)
    if ends.head is not None:
        set_tied(config, ends.tied)
    return config


def tie_by_content(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Tie a model's weights after it got these tensors, unless head and embedding have values of their own there."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    own = [tensors.get(names.get(id(module), "")) for module in (table, head)]
    stored = [isinstance(module, CompressedLinear | CompressedEmbedding) for module in (table, head)]
    if differ(*own) or stored == [False, True]:
        set_tied(model.config, False)
    model.tie_weights()


def differ(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both tensors are there, with different values."""
    return a is not None and b is not None and not (a.shape == b.shape and torch.equal(a, b))


def stored_once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict, each shared tensor once, under its first name; every name of it where the model's class ties
    nothing, so that its readers look for all."""
    ties, seen = bool(getattr(model, "_tied_weights_keys", None)) or _has_stored_ends(model), set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else name
        if key not in seen or not ties:
            seen.add(key)
            yield name, tensor


def _has_stored_ends(model: nn.Module) -> bool:
    return any(isinstance(module, CompressedEmbedding) for module in model.modules())
