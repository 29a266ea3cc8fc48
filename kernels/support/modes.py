"""The modes in which a model runs: training, in which dropout is on, autocast, and inference mode."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and in the model's own dtype; the modes of the modules are restored afterwards."""
    training = [module for module in model.modules() if module.training]
    whole, before = len(training) > 0 and all(m.training for m in model.modules()), set(model.modules())
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
            for module in set(model.modules()) - before:  # what has replaced others
                module.training = whole


def counting_writes() -> AbstractContextManager:
    """Not in inference mode, whose tensors do not tell that they were written to."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
