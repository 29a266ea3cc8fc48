"""The models that a compressed cache supports, and the layers of them that it does not change."""

from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING as LAYER_TYPES
from transformers.cache_utils import get_layer_types_and_kwargs

from compress.dropped import dropped_parts

KEEPING = ("full_attention", "hybrid")  # kinds of layers that keep all positions; a hybrid one has a state as well


def check_model(model: nn.Module) -> None:
    """Raise ValueError if a compressed cache does not support this model."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"`model` ({name}) is an encoder and a decoder; a decoder alone works")
    if not attends_by_interface(model):
        raise ValueError(
            f"`model` ({name}) does not use transformers' attention interface, which a compressed cache needs"
        )
    kinds = layer_kinds(model)
    if not set(KEEPING) & set(kinds):
        found = ", ".join(sorted(set(kinds)))
        raise ValueError(f"`model` ({name}) has no layer that keeps all positions (it has {found}): nothing to evict")
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise ValueError(
            f"`model` ({name}) has multi-head latent attention, whose keys are made from latent vectors of all heads: "
            "there are no keys and values of heads to evict or compress"
        )
    if unknown := sorted(set(kinds) - set(LAYER_TYPES)):
        raise ValueError(f"`model` ({name}) has layers of a kind that is not known here: {', '.join(unknown)}")


def layer_kinds(model: nn.Module) -> list[str]:
    """The kind of every layer, by transformers' names."""
    return list(get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0])


def attends_by_interface(model: nn.Module) -> bool:
    """Whether a model's attention calls transformers' attention interface.

    transformers reads it from the code of the class. Its flag `_supports_attention_backend`, which serves for classes
    whose code cannot be read, is not set for Qwen3.5, Jamba and others whose attention calls the interface.
    """
    by_code = getattr(model, "_can_set_attn_implementation", None)
    return by_code is None or by_code() or getattr(model, "_supports_attention_backend", False)


def keeping_layers(model: nn.Module) -> list[int]:
    """Numbers of the layers that keep all positions; those whose attention was dropped keep none."""
    gone = {part.layer_idx for part in dropped_parts(model).values()}
    return [i for i, kind in enumerate(layer_kinds(model)) if kind in KEEPING and i not in gone]


class PlainCache(DynamicCache):
    """transformers' own cache, for passes in which an attached model must not use a compressed one."""


def plain_cache(model: nn.Module) -> PlainCache:
    """An empty one."""
    return PlainCache(config=model.config.get_text_config(decoder=True))


def storing_layers(model: nn.Module) -> set[int]:
    """Numbers of the layers whose keys and values later layers read, too, which keep none of their own."""
    modes = getattr(model.config.get_text_config(decoder=True), "kv_sharing_modes", None) or ()
    return {number for number, mode in enumerate(modes) if mode == "store"} if "reuse" in modes else set()


def key_shapes(model: nn.Module) -> dict[int, tuple[int, int]]:
    """(kv heads, channels) of every layer that keeps all positions, by its number; in Gemma 4 they vary."""
    return {number: key_shape(model, number) for number in keeping_layers(model)}


def key_shape(model: nn.Module, number: int) -> tuple[int, int]:
    """(kv heads, channels) of one layer."""
    own = layer_config(model, number)
    heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    return heads, getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads


def layer_config(model: nn.Module, number: int) -> PreTrainedConfig:
    """The settings of one layer; those of the whole decoder unless its layers differ."""
    config = model.config.get_text_config(decoder=True)
    own = getattr(config, "per_layer_config", None)
    return config if own is None else own[number]


def attentions_of(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules, or other mixers of tokens, by the numbers of their layers."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():  # some blocks, which come before their parts, and MLPs have these attributes too
        number = getattr(module, "layer_idx", None)
        if not isinstance(number, int) or not hasattr(module, "config"):
            continue
        if hasattr(module, "is_causal") or not hasattr(found.get(number), "is_causal"):
            found[number] = module
    return found


def left_alone(model: nn.Module) -> dict[str, int]:
    """Kinds of layers whose cache is not compressed, with the number of layers of each kind."""
    kinds = layer_kinds(model)
    return {kind: kinds.count(kind) for kind in sorted(set(kinds) - set(KEEPING))}
