"""Processors for which oneDNN has no products of 16-bit numbers."""

import pytest
import torch

from compress import accelerate
from kernels import native
from kernels.linear import onednn
from kernels.linear.prepacked import PrepackedLinear, prepack


@pytest.fixture
def without_halves(monkeypatch):
    """What torch says where there is neither AVX-512 nor AVX-NE-CONVERT."""
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False)

    def refused(*_):
        raise RuntimeError("this processor has no such product")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refused)


def test_linears_stay_as_they_were(tiny, without_halves):
    assert (
        not onednn.lays_out(torch.bfloat16) and not onednn.lays_out(torch.float16) and not onednn.lays_out(torch.int8)
    )
    assert not any(isinstance(module, PrepackedLinear) for module in prepack(tiny("llama").bfloat16()).modules())


@torch.no_grad()
@pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no C++ kernels here"
)
def test_prompts_are_read_all_the_same(tiny, without_halves):
    model, ids = tiny("llama").bfloat16(), torch.arange(20)[None] * 31 % 96
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    accelerated = accelerate(model)
    assert torch.equal(accelerated.generate(ids, **how), expected)
    assert "own code" not in repr(accelerated.acceleration)
