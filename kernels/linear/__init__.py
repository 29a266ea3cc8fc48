"""`linear`: y = x Wᵀ + bias with dense weights, at the full speed of the processor. See README.md."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.linear.onednn import MANY, emulates, in_float32, product
from kernels.registry import ran

_torch_linear = F.linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Dense product.

    Args:
        x: [..., in], any floating dtype.
        weight: [out, in], same dtype.
        bias: [out] or None.
        impl: "reference" (torch's own), "cpu" (oneDNN in full float32; no gradients) or "auto". "auto" also computes
            16-bit products of many tokens in float32, where the processor has no instructions for them.

    Returns:
        [..., out]

    Raises:
        ValueError: an implementation that does not exist, or does not support these tensors.
    """
    if impl not in ("auto", "reference", "cpu"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference' or 'cpu'")
    if impl == "cpu" and not _onednn_takes(x, weight):
        raise ValueError(f"`impl` (='cpu') needs float32 CPU tensors without gradients, not {x.dtype} on {x.device}")
    if impl == "auto" and better_in_float32(x, weight):
        ran("linear", "cpu float32")
        return in_float32(x.contiguous(), weight.contiguous(), bias)
    if impl == "reference" or not _onednn_takes(x, weight):
        ran("linear", "reference")
        return _torch_linear(x, weight, bias)
    ran("linear", "cpu")
    return product(x.contiguous(), weight.contiguous(), bias)


def better_in_float32(x: Tensor, weight: Tensor) -> bool:
    """Are these 16-bit tensors of many tokens on a processor that only emulates their products?"""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() >= MANY * x.shape[-1]
        and _onednn_takes(x, weight, x.dtype)
        and emulates(x.dtype)
    )


def _onednn_takes(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return (
        not torch.compiler.is_compiling()  # the compiler has its own products, and cannot trace `is_available`
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == dtype
        and x.numel() > 0
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and torch.backends.mkldnn.is_available()
    )


class _FastLinear(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is _torch_linear and not torch.compiler.is_compiling():
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def fast_linear() -> Iterator[None]:
    """While the block runs, every `F.linear` (hence every `nn.Linear`) goes through `linear`.

    Same float32 arithmetic; two to three times faster if torch's own float32 product does not use AVX-512.
    """
    with _FastLinear():
        yield


@contextmanager
def plain_torch() -> Iterator[None]:
    """While the block runs, a surrounding `fast_linear` has no effect.

    `fast_linear` costs some microseconds per call of torch, and a solver makes thousands of small calls.
    """
    with torch._C.DisableTorchFunction():
        yield


@contextmanager
def without_tf32() -> Iterator[None]:
    """While the block runs, float32 products on a GPU are computed in full float32."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
