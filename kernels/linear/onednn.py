"""oneDNN's dense product on a CPU, with a plain weight or one that was laid out once. Needs only torch."""

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

MANY = 8  # smallest number of tokens for which 16-bit weights are worth a cast to float32
SLAB = 1 << 20  # weights that are cast at a time, 4 MB, so that a large head is never in memory in float32 as a whole


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def emulates(dtype: torch.dtype) -> bool:
    """Does this processor lack the instructions for products in this 16-bit dtype? Known for x86 only.

    oneDNN and torch then convert their operands again and again, and products of many tokens take several times as
    long as those in float32.
    """
    if not _is_x86():
        return False
    if dtype == torch.bfloat16:
        return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] Wᵀ + bias of 16-bit tensors, computed in float32 and rounded once; weight: [out, in]."""
    wide, y = x.float(), x.new_empty(*x.shape[:-1], weight.shape[0])
    multiply = product if faster_than_torch() else F.linear
    for start in range(0, len(weight), rows := max(1, SLAB // weight.shape[1])):
        some = slice(start, start + rows)
        y[..., some] = multiply(wide, weight[some].float(), None if bias is None else bias[some].float())
    return y


@cache
def faster_than_torch() -> bool:
    """Is oneDNN's product in float32 faster than torch's? On x86 that is MKL's, which does not use AVX-512 on every
    processor that has it. With AVX2 alone MKL was faster on a Zen 3."""
    return not _is_x86() or "AVX512" in torch.backends.cpu.get_cpu_capability()


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
    """x [..., in] Wᵀ + bias [out]; weight: [out, in], or the result of `lay_out`."""
    bias = None if bias is None else bias.contiguous()  # oneDNN reads it without its strides
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
