"""oneDNN's dense product on a CPU, with a plain weight or one that was laid out once. Needs only torch."""

import torch
from torch import Tensor


def lays_out(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply by weights of this dtype on this processor? If not, `lay_out` ends with an error."""
    supported = {
        torch.float32: torch.backends.mkldnn.is_available,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return torch.backends.mkldnn.is_available() and dtype in supported and supported[dtype]()


def lay_out(weight: Tensor, tokens: int) -> Tensor:
    """The weight [out, in] in oneDNN's preferred order for products with about this many tokens; opaque."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), tokens)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] Wᵀ + bias; weight: [out, in], or the result of `lay_out`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
