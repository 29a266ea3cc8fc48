"""The decoder that GPUs are timed with computes what a Llama model computes, step after step; its bytes are counted."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.decoder import TOY, Decoder, Layer, Weights, random_weights, rounded_weights
from kernels.int_matmul.reference import dequantize

STEPS = 5


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOY.vocabulary,
        hidden_size=TOY.hidden,
        intermediate_size=TOY.inner,
        num_hidden_layers=TOY.layers,
        num_attention_heads=TOY.heads,
        num_key_value_heads=TOY.kv_heads,
        head_dim=TOY.channels,
        rms_norm_eps=TOY.eps,
        rope_parameters={"rope_type": "default", "rope_theta": TOY.theta},
    )
    model = LlamaForCausalLM(config).eval()
    for p in model.parameters():
        p.data.normal_(std=1.0 if p.dim() == 1 else 0.1)
    return model


def weights_of(model: LlamaForCausalLM) -> Weights:
    def layer(block) -> Layer:
        a, m = block.self_attn, block.mlp
        return Layer(
            block.input_layernorm.weight,
            torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
            a.o_proj.weight,
            block.post_attention_layernorm.weight,
            torch.cat([m.gate_proj.weight, m.up_proj.weight]),
            m.down_proj.weight,
        )

    inner = model.model
    return Weights(inner.embed_tokens.weight, tuple(map(layer, inner.layers)), inner.norm.weight, model.lm_head.weight)


@torch.no_grad()
def test_steps_are_those_of_a_llama_model(llama):
    first = torch.tensor([3, 50])
    decoder = Decoder(TOY, weights_of(llama), batch=2, positions=STEPS)
    decoder.token.copy_(first)
    written = first[:, None]
    for _ in range(STEPS):
        expected = llama(written).logits[:, -1]
        torch.testing.assert_close(decoder.step(), expected, rtol=1e-4, atol=1e-4)
        written = torch.cat([written, expected.argmax(-1, keepdim=True)], 1)
        assert decoder.token.equal(written[:, -1])
    assert decoder.length.unique().item() == STEPS


@torch.no_grad()
def test_rounded_weights_are_near_and_small():
    dense = random_weights(TOY, torch.float32, torch.device("cpu"))
    for bits, least, most in ((8, 0.0, 0.01), (4, 0.03, 0.12)):
        small = rounded_weights(dense, bits, 32)
        W, near = dense.layers[1].gate_up, dequantize(small.layers[1].gate_up)
        assert least < (near - W).norm() / W.norm() < most
        assert small.layers[0].before is dense.layers[0].before
    outside = 4 * TOY.vocabulary * TOY.hidden
    held = sum(t.numel() * 4 for one in dense.layers for t in vars(one).values()) + 4 * TOY.hidden + outside
    assert dense.read == held and small.read < held / 5, "a step reads the head, and one row of the embedding"


def test_an_implementation_that_does_not_run_here_is_refused():
    weights = random_weights(TOY, torch.float32, torch.device("cpu"))
    for impl, words in (("cuda", "must be one of"), ("triton", "needs triton on CUDA")):
        with pytest.raises(ValueError, match=words):
            Decoder(TOY, weights, batch=1, positions=2, impl=impl)
