"""int8 on a CPU with VNNI: oneDNN products of codes, between a quantising and a scaling pass."""

import torch
from torch import Tensor

from kernels.w8a8_matmul.layout import LARGEST, SMALLEST, W8

MIDDLE = 128  # oneDNN's fast product takes uint8 activations, so a code is stored as code + 128


def w8a8_matmul(x: Tensor, w: W8, x_scale: Tensor | None) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype; w int8 with a scale per output channel, in either layout."""
    codes, scale = quantize(x, x_scale)
    if w.layout == "prepacked":  # int32 sums without the 128s, times w.scale, in one pass
        zero = torch.zeros(w.shape[0], dtype=torch.int32)
        y = torch.ops.onednn.qlinear_pointwise(
            codes.view(torch.uint8).bitwise_xor_(MIDDLE),
            1.0,
            MIDDLE,
            w.codes,
            w.scale,
            zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
    else:
        y = torch._int_mm(codes, w.codes.t()).to(torch.float32).mul_(w.scale)
    return y.mul_(scale).to(x.dtype)


def quantize(x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """`quantize_rows` to int8, identical to the last bit, with the fewest passes possible in torch."""
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    if x_scale is None:
        largest, bounded = top.new_full((), LARGEST[torch.int8]), top.clamp_min(SMALLEST)
        step, v = torch.div(bounded, largest), x * torch.div(largest, bounded)
    else:
        step, v = (
            x_scale,
            (x * torch.div(x_scale.new_ones(()), x_scale)).clamp_(-LARGEST[torch.int8], LARGEST[torch.int8]),
        )
    return v.round_().to(torch.int8), step + (top - top)  # NaN where top is not finite
