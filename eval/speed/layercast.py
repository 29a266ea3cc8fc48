"""LayerCast: weights stored in 16 bits, all computation in float32, for results that can be compared exactly.

16-bit results of the same model differ with the batch, the device and the number of threads, because sums are rounded
in another order, which can change an answer; in float32 the differences are so small that they rarely change one ("Give
Me FP32 or Give Me Death?", arXiv:2506.09501). With weights stored in 16 bits, the model is the deployed one, with its
use of memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.support.deploy import deployed

_NAMES = "_layercast_names"  # attribute of a module: names of its tensors that are cast while it runs
_HELD = "_layercast_held"  # attribute of a running module: (dict that holds the tensor, name, the 16-bit tensor)


def layercast(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A copy of a model that keeps its weights in 16 bits and computes in float32.

    Its outputs are bit by bit those of `deployed(model, dtype).float()`. A module's own tensors are cast when its
    forward begins, and freed when it ends, so that beside the 16-bit model there is at most one module's weight in
    float32 (all experts of a layer if they are one module). Embeddings are looked up first and then cast. Compressed
    weights stay as they are stored, and their products take float32 activations. Deviation: the paper casts only
    linears, and keeps all other tensors in float32.

    Args:
        model: any transformers decoder, compressed or not; not changed.
        dtype: the dtype of the stored weights, torch.bfloat16 or torch.float16.

    Raises:
        ValueError: another dtype, or a model that is already such a copy.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"`dtype` (={dtype}) must be torch.bfloat16 or torch.float16: weights are kept in 16 bits")
    if any(hasattr(module, _NAMES) for module in model.modules()):
        raise ValueError("`model` computes in float32 from 16-bit weights already; give the original model")
    model = deployed(model, dtype)
    inside: set[nn.Module] = set()  # modules inside those with a layout for their compute dtype
    for module in list(model.modules()):
        if module in inside:
            continue
        if type(module)._apply is not nn.Module._apply:
            inside |= set(module.modules())
            names = _in_float32(module, dtype)
        else:
            names = [name for name, tensor in _own(module).items() if tensor.dtype == dtype]
        if not names:
            continue
        setattr(module, _NAMES, tuple(names))
        if type(module) is nn.Embedding and module.max_norm is None:
            module.register_forward_hook(_cast_output)
        else:
            module.register_forward_pre_hook(_cast_up)
            module.register_forward_hook(_let_go, always_call=True)
    return model


def _own(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _in_float32(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Lay out a module for float32; returns the names of the tensors that this would widen, which keep their dtype."""
    tensors = lambda: {**dict(module.named_parameters()), **dict(module.named_buffers())}  # noqa: E731
    narrow = {name for name, tensor in tensors().items() if tensor.dtype == dtype}
    module.to(torch.float32)
    names = []
    for name, tensor in tensors().items():
        half = tensor.to(dtype)
        if name in narrow and tensor.dtype == torch.float32 and torch.equal(half.float(), tensor):
            owner, own = _place(module, name)
            owner[own] = nn.Parameter(half, requires_grad=False) if isinstance(tensor, nn.Parameter) else half
            names.append(name)
    return names


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a tensor of a module, and the tensor's name in it."""
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if own in owner._parameters else owner._buffers), own


# These functions use only the module passed to them, so that a deep copy of the model works on its own tensors.
def _cast_up(module: nn.Module, args: tuple) -> None:
    held = []
    for name in getattr(module, _NAMES):
        owner, own = _place(module, name)
        held.append((owner, own, owner[own]))
        owner[own] = owner[own].float()
    setattr(module, _HELD, held)


def _let_go(module: nn.Module, args: tuple, output: Any) -> None:
    for owner, own, tensor in module.__dict__.pop(_HELD, ()):
        owner[own] = tensor


def _cast_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output.float()
