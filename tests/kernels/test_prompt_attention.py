"""Causal attention of a prompt against float64, over shapes, strides and what is refused."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import native
from kernels.prompt_attention import prompt_attention
from kernels.registry import recording

WAYS = ["reference", "rows", "cpu"]


def made(batch, heads, kv_heads, tokens, channels, of_values, dtype=torch.bfloat16):
    """Queries, keys and values as projections leave them, and values that are a part of a longer cache."""
    shapes = ((tokens, heads, channels), (tokens, kv_heads, channels), (tokens + 3, kv_heads, of_values))
    q, k, v = (torch.randn(batch, *shape).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v[:, :, :tokens]


def expected(q, k, v, scale, window=0):
    at, place = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None], torch.arange(k.shape[2])
    how = {"attn_mask": (place <= at) & (place > at - (window or k.shape[2])), "scale": scale, "enable_gqa": True}
    return scaled_dot_product_attention(q.double(), k.double(), v.double(), **how).transpose(1, 2)


def skip_without_kernel(impl):
    if impl == "cpu" and not native.prompt_attention_runs():
        pytest.skip("no C++ kernels, or neither AVX2 nor NEON")


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 2, 1),
        (2, 6, 2, 63, 18, 33),
        (2, 9, 3, 300, 64, 64),
        (1, 4, 4, 128, 16, 24),
        (1, 4, 1, 700, 256, 256),
        (1, 2, 1, 1100, 80, 48),
    ],
)
def test_prompt_attention_agrees_with_float64(impl, shape):
    """With one to three blocks of keys, tiles that are not full, widths that fill no vector, and heads that share."""
    skip_without_kernel(impl)
    q, k, v = made(*shape)
    with recording() as ran:
        y = prompt_attention(q, k, v, scale=0.3, impl=impl)
    right = expected(q, k, v, 0.3)
    assert y.dtype == q.dtype and y.shape == right.shape and y.is_contiguous()
    assert (y - right).norm() <= 1e-2 * right.norm()
    assert ran == {"prompt_attention": {"cpu native" if impl == "cpu" else impl}}


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize(
    "shape, past, window",
    [
        ((1, 2, 1, 1, 16, 8), 40, 0),
        ((2, 4, 2, 70, 18, 24), 33, 0),
        ((1, 3, 1, 300, 64, 64), 700, 0),
        ((2, 4, 2, 150, 16, 33), 0, 1),
        ((1, 2, 1, 700, 32, 32), 0, 100),
        ((1, 2, 2, 600, 32, 16), 515, 512),
        ((1, 2, 1, 90, 32, 32), 7, 500),
    ],
)
def test_earlier_tokens_and_windows(impl, dtype, most, shape, past, window):
    """Whole blocks of keys lie before a window, or at its edge, or none does."""
    skip_without_kernel(impl)
    batch, heads, kv_heads, tokens, channels, of_values = shape
    q, k, v = made(batch, heads, kv_heads, past + tokens, channels, of_values, dtype)
    q = q[:, :, past:] * 3
    right = expected(q, k, v, 0.3, window)
    y = prompt_attention(q, k, v, scale=0.3, window=window, impl=impl)
    assert y.shape == right.shape and (y - right).norm() <= (3 if impl == "rows" else 1) * most * right.norm()
    if window and past >= window:
        k[:, :, : past + 1 - window] = torch.nan
        assert torch.equal(prompt_attention(q, k, v, scale=0.3, window=window, impl=impl), y), "no token sees them"


@pytest.mark.parametrize("impl", ["reference", "rows", "auto"])  # auto: C++ for float16
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_other_dtypes(impl, dtype, most):
    q, k, v = made(2, 4, 2, 140, 16, 24, dtype)
    right = expected(q, k, v, 16**-0.5)
    assert (prompt_attention(q, k, v, impl=impl) - right).norm() <= most * right.norm()


@pytest.mark.parametrize("impl", WAYS)
def test_large_scores_and_what_is_not_a_number(impl):
    """A token sees no later one, whatever that holds; exponentials neither overflow nor lose the largest score."""
    skip_without_kernel(impl)
    q, k, v = made(1, 2, 1, 600, 32, 32)
    q = q * 60
    right = expected(q, k, v, 1.0)
    most = 0.1 if impl == "rows" else 1e-2  # whose scores have 8 bits, too
    assert (prompt_attention(q, k, v, scale=1.0, impl=impl) - right).norm() <= most * right.norm()
    broken = k.clone()
    broken[0, 0, 550] = torch.nan
    y = prompt_attention(q, broken, v, scale=1.0, impl=impl)
    seen = 549 if impl == "rows" else 550  # oneDNN's products with AMX read behind the end of a row, into the next one
    assert torch.equal(y[:, :seen], prompt_attention(q, k, v, scale=1.0, impl=impl)[:, :seen])
    assert y[:, 550:].isnan().all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_above_zero(scale):
    q, k, v = made(1, 2, 1, 70, 32, 32)
    assert (prompt_attention(q, k, v, scale=scale) - expected(q, k, v, scale)).abs().max() < 0.05


def test_nothing_to_attend_to():
    q, k, v = made(2, 4, 2, 0, 16, 8)
    assert prompt_attention(q, k, v).shape == (2, 0, 4, 8)


def test_tensors_of_wrong_shapes_are_refused():
    q, k, v = made(1, 4, 2, 5, 16, 8)
    for wrong, message in [
        ((q[0], k, v), "four dimensions"),
        ((q, k[:, :, :4], v), "must be \\[1, kv heads, 5 or more, 16\\] and alike"),
        ((q[:, :3], k, v), "divide the 3 heads"),
        ((q, k.float(), v), "must be all float32, bfloat16 or float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            prompt_attention(*wrong)
    with pytest.raises(ValueError, match="`impl` \\(='flash'\\) must be one of"):
        prompt_attention(q, k, v, impl="flash")
    with pytest.raises(ValueError, match="`window` \\(=-1\\) must be a number of places, or 0 for all"):
        prompt_attention(q, k, v, window=-1)
    with pytest.raises(ValueError, match="'rows' works"):
        prompt_attention(q.float(), k.float(), v.float(), impl="cpu")


@pytest.mark.parametrize("impl", WAYS)
def test_prompt_attention_passes_opcheck(impl):
    skip_without_kernel(impl)
    q, k, v = made(2, 4, 2, 70, 16, 24)
    if impl == "cpu":
        torch.library.opcheck(torch.ops.workbench.prompt_attention_native, (q, k, v, 0.25, 0))
    else:
        torch.library.opcheck(torch.ops.workbench.prompt_attention, (q, k, v, 0.25, 0, impl))
