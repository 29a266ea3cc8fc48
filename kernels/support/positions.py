"""How long a text a model can read."""

from torch import nn

UNLIMITED = 1 << 30


def positions(model: nn.Module) -> int:
    """The number of positions of a model, according to its configuration; `UNLIMITED` if it names none."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or UNLIMITED
