"""A block with its original linears, as before the compression."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from compress.linear import replace
from compress.walk.capture import device_of


@contextmanager
def as_it_was(
    model: nn.Module, originals: Mapping[str, nn.Module], names: list[str], device: torch.device
) -> Iterator[None]:
    """While the context lasts, these linears of the model are the original ones, on this device."""
    now = {name: model.get_submodule(name) for name in names}
    homes = {}
    try:
        for name in names:
            linear = originals[name]
            homes[name] = linear, device_of(linear)
            replace(model, name, linear.to(device))
        yield
    finally:
        for name, linear in now.items():
            replace(model, name, linear)
        for linear, home in homes.values():
            linear.to(home)
