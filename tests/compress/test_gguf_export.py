"""GGUF: our codes in its blocks against the decoders of the package `gguf`, models against transformers' reader."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML

from compress.checkpoint.gguf_types import encode, grid_of, rounding
from compress.formats import IntGroup


def ints(bits: int, symmetric: bool, group_size: int = 32, dtype: str = "float16", scale: float = 0.01) -> IntGroup:
    codes = torch.randint(0, 1 << bits, (8, 128), dtype=torch.uint8)
    scales = scale * (0.5 + torch.rand(8, 128 // group_size))
    zero = None if symmetric else torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8)
    return IntGroup.from_codes(codes, scales, zero, bits=bits, group_size=group_size, scale_dtype=dtype)


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [
        (2, True, GGML.Q4_0), (3, True, GGML.Q4_0), (4, True, GGML.Q4_0), (5, True, GGML.Q5_0), (6, True, GGML.Q8_0),
        (8, True, GGML.Q8_0), (3, False, GGML.Q4_0), (4, False, GGML.Q4_1), (5, False, GGML.Q5_1),
        (6, False, GGML.Q8_0), (8, False, GGML.F16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("group_size", [32, 64])
def test_codes_go_into_the_smallest_type_that_holds_them(bits, symmetric, kind, group_size):
    part = ints(bits, symmetric, group_size)
    W = part.dequantize()
    stored = encode(W, grid_of([part]))
    assert stored.kind == kind
    decoded = gguf.dequantize(stored.data, stored.kind)
    if symmetric or kind in (GGML.Q4_0, GGML.Q8_0):
        np.testing.assert_array_equal(decoded, W.numpy())
    assert rounding(W, decoded, 128 if kind == GGML.F16 else 32) == stored.rounding <= 2**-10
