"""The shapes on which `prompt_attention` is timed."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.linear.onednn import emulates
from kernels.prompt_attention import prompt_attention
from kernels.support.declarations import Contest, TimedSizes

SHAPES = ((9, 3, 64, 512), (9, 3, 64, 2048), (4, 1, 256, 512), (32, 8, 64, 512))  # heads, kv heads, channels, tokens
TOLERANCE = {"rows": 0.02}  # it rounds its scores


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    """Contests for CPUs only: GPUs use torch's own attention."""
    for shape in ((4, 2, 16, 40),) if toy else SHAPES:
        yield _contest(*shape, device)


def _contest(heads: int, kv_heads: int, channels: int, tokens: int, device: torch.device) -> Contest:
    shapes = [(1, h, tokens, channels) for h in (heads, kv_heads, kv_heads)]
    pairs = heads * tokens * (tokens + 1) // 2
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    how = {"is_causal": True, "enable_gqa": True}

    def expected(_: object) -> Tensor:
        return scaled_dot_product_attention(q.double(), k.double(), v.double(), **how).transpose(1, 2)

    contestants = {
        "auto": lambda i: prompt_attention(q, k, v),
        "rows": lambda i: prompt_attention(q, k, v, impl="rows"),
        "torch": lambda i: scaled_dot_product_attention(q, k, v, **how).transpose(1, 2),
    }
    return Contest(
        op="prompt_attention",
        detail=f"{heads} heads, {kv_heads} kv heads",
        shape=(heads, kv_heads, channels),
        tokens=tokens,
        contestants=contestants,
        copies=1,
        ours="auto",
        baseline="torch",
        least_bytes=4 * tokens * channels * (heads + kv_heads),
        flops=4 * pairs * channels,
        pairs=pairs,
        rate="float32" if emulates(torch.bfloat16) else "bfloat16",
        expected=dict.fromkeys(contestants, expected),
        tolerance={name: TOLERANCE.get(name, 0.01) for name in contestants},
    )
