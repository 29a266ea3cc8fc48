"""What a model takes when it is stored: what is shared out, and what stays."""

from collections.abc import Sequence

from torch import nn

from compress.linear import compressed_linears

HALF = 2  # bytes of a float as models are deployed


def bytes_beside(model: nn.Module, names: Sequence[str]) -> int:
    """Stored bytes of all but the weights of these linears: parameters in 16 bits, compressed linears as they are."""
    shared = {f"{name}.weight" for name in names}
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in shared)
    stored = [one for name, one in compressed_linears(model).items() if name not in names]
    return HALF * count + round(sum(one.bits_per_weight * one.in_features * one.out_features / 8 for one in stored))


def megabytes(size: float) -> str:
    """A number of bytes for readers."""
    return f"{size / 1e6:.2f} MB"
