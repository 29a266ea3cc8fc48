"""`linear`: y = x Wᵀ + bias with dense weights, at the full speed of the processor. See README.md."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from kernels import native
from kernels.linear.onednn import MANY, emulates, faster_than_torch, in_float32, product
from kernels.linear.rows import products, rows_fit
from kernels.registry import ran

_torch_linear = F.linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Dense product.

    Args:
        x: [..., in], any floating dtype.
        weight: [out, in], same dtype.
        bias: [out] or None.
        impl: "reference" (torch's own), "cpu" (oneDNN in full float32; no gradients) or "auto": oneDNN where it is
            faster than torch. Where the processor has no instructions for 16-bit products, "auto" computes those of
            up to 8 tokens by the C++ kernel of `rows`, if it is there, and others in float32. It leaves to torch all
            that oneDNN does not compute, or not as torch does.

    Returns:
        [..., out]

    Raises:
        ValueError: an implementation that does not exist, or does not support these tensors.
    """
    if impl not in ("auto", "reference", "cpu"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference' or 'cpu'")
    if impl == "cpu" and not _onednn_takes(x, weight, bias):
        given = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in (x, weight, bias) if t is not None)
        raise ValueError(f"`impl` (='cpu') needs float32 CPU tensors that fit, without gradients, not {given}")
    if impl == "auto" and torch.compiler.is_compiling():  # which has its own products, and cannot trace these questions
        impl = "reference"
    if impl == "auto" and _emulated(x, weight, bias) and rows_fit(weight, x.numel() // x.shape[-1]):
        ran("linear", f"cpu {native.rows_isa(x.dtype, weight.shape[1])}")
        return products(x, [weight.contiguous()], [None if bias is None else bias.contiguous()])[0]
    if impl == "auto" and better_in_float32(x, weight, bias):
        ran("linear", "cpu float32")
        return in_float32(x.contiguous(), weight.contiguous(), bias)
    if impl == "auto" and (x.dtype != torch.float32 or not faster_than_torch() or not _onednn_takes(x, weight, bias)):
        impl = "reference"
    if impl == "reference":
        ran("linear", "reference")
        return _torch_linear(x, weight, bias)
    ran("linear", "cpu")
    return product(x.contiguous(), weight.contiguous(), bias)


def better_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Are these 16-bit tensors of many tokens on a processor that only emulates their products?"""
    return _emulated(x, weight, bias) and x.numel() >= MANY * x.shape[-1]


def _emulated(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Are these 16-bit tensors, whose products this processor only emulates, of a kind that is computed otherwise?"""
    sixteen = x.dtype in (torch.bfloat16, torch.float16)
    return sixteen and emulates(x.dtype) and _onednn_takes(x, weight, bias, x.dtype)


def _onednn_takes(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """oneDNN's product checks neither the bias nor devices, and knows no derivatives."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        not torch.compiler.is_compiling()  # the compiler has its own products, and cannot trace `is_available`
        and all(t.device.type == "cpu" and t.dtype == dtype for t in tensors)
        and x.numel() > 0
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
    )


class _FastLinear(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        of_torch = func is _torch_linear and not types  # of others: tensors of classes that compute it by themselves
        if of_torch and not torch.compiler.is_compiling():
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` with the names that torch gives the tensors."""
    return linear(input, weight, bias)


@contextmanager
def fast_linear() -> Iterator[None]:
    """While the block runs, every `F.linear` (hence every `nn.Linear`) goes through `linear`.

    Same float32 arithmetic; two to three times faster if torch's own float32 product does not use AVX-512 where the
    processor has it. Products in 16 bits that the processor only emulates are computed in float32, or by a C++ kernel,
    several times faster (`reports/published/decode-cpu-zen3.md`).
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
