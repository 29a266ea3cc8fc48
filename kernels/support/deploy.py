"""Copies of a model in the dtype in which it is deployed."""

import copy

import torch
from torch import nn


def deployed(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A copy of the model in this dtype, without dropout; see `cast`."""
    return cast(copy.deepcopy(model), dtype).eval()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model in place, as `from_pretrained(dtype=...)` would have loaded it.

    A plain `.to(dtype)` also rounds the rotary frequencies, which are computed and never stored: in 16 bits they give
    clearly wrong rotation angles at distant positions.
    """
    plain = (m for m in model.modules() if type(m)._apply is nn.Module._apply)  # other modules handle their own buffers
    computed = [(m, name, m._buffers[name]) for m in plain for name in m._non_persistent_buffers_set]
    model.to(dtype)
    for module, name, buffer in computed:
        module._buffers[name] = buffer
    return model
