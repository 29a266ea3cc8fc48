"""The classes of transformers that a config may name: decoders, and models of images and text whose decoder is
compressed while the rest stays as it is."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def auto_class(config: PreTrainedConfig) -> Any:
    """The class by which transformers loads the model that a config names, with all its weights.

    `AutoModelForCausalLM` would take the decoder alone of some models of images and text.
    """
    named = getattr(config, "architectures", None) or ()
    return AutoModelForImageTextToText if any(map(has_images, named)) else AutoModelForCausalLM


def has_images(architecture: str) -> bool:
    """Whether `AutoModelForImageTextToText` alone loads this class with all its weights."""
    return architecture in set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - _decoders()


def is_known(architecture: str) -> bool:
    """Whether this is the name of a class of decoders, or of models of images and text."""
    return architecture in _decoders() | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())


def has_decoder(config: PreTrainedConfig) -> bool:
    """Whether transformers has a causal language model, with images or without, for a config."""
    named = getattr(config, "architectures", None) or []
    if getattr(config, "is_encoder_decoder", False) or (named and not any(map(is_known, named))):
        return False
    if auto_class(config) is AutoModelForImageTextToText:
        return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _decoders() -> set[str]:
    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
