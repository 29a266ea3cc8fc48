"""The modes in which a model runs: training, in which dropout is on, autocast, and inference mode."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and in the model's own dtype; the modes of the modules are restored afterwards.

    Modules that are replaced meanwhile go with their weights: nothing here holds them.
    """
    before = WeakSet(model.modules())
    training = WeakSet(module for module in model.modules() if module.training)
    whole = len(training) == len(before) > 0
    for module in training:
        module.training = False
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            for module in training:
                module.training = True
            for module in model.modules():
                if module not in before:  # it has replaced another
                    module.training = whole


def counting_writes() -> AbstractContextManager:
    """Not in inference mode, whose tensors do not tell that they were written to."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
