"""A model that keeps 16 bits and computes in 32 gives what the 16-bit weights give in float32, bit by bit, in 16-bit
room."""

import copy

import pytest
import torch
from torch import nn

from compress import METHODS, apply
from eval.machine.size import size
from eval.speed.layercast import layercast
from kernels.support.deploy import deployed


def padded(model, tokens):
    """Two prompts, one of them padded on the left."""
    ids = torch.cat(tokens(2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def resident(model):
    return size(model).resident_bytes


@torch.no_grad()
def test_every_architecture_computes_what_its_16_bit_weights_give_in_float32(any_model, tokens):
    wide, cast = deployed(any_model).float(), layercast(any_model)
    inputs = padded(any_model, tokens)
    y = cast(**inputs).logits
    assert y.dtype == torch.float32 and torch.equal(y, wide(**inputs).logits)
    assert not torch.equal(y, any_model(**inputs).logits), "the weights were rounded"
    more = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(cast.generate(**inputs, **more), wide.generate(**inputs, **more))


@torch.no_grad()
def test_weights_take_16_bit_room_before_and_after_a_pass(any_model, tokens):
    half, before = deployed(any_model), {name: p.clone() for name, p in any_model.named_parameters()}
    cast = layercast(any_model)
    for _ in range(2):
        assert size(cast).stored_bytes == size(half).stored_bytes < 0.55 * size(any_model).stored_bytes
        assert resident(cast) == resident(half)
        assert all(p.dtype == torch.bfloat16 for p in cast.parameters())
        cast(tokens(1)[0])
    tied = any_model.get_output_embeddings().weight is any_model.get_input_embeddings().weight
    assert (cast.get_output_embeddings().weight is cast.get_input_embeddings().weight) == tied
    assert all(torch.equal(p, before[name]) for name, p in any_model.named_parameters()), (
        "the model itself is left as it was"
    )


RECIPES = {
    "integers": [METHODS["rtn"](bits=4, group_size=32)],
    "integers for tiles": [METHODS["gptq"](bits=4, group_size=32, symmetric=False)],
    "a table, its scales quantised twice": [METHODS["nf4"](group_size=32, double_quant=True)],
    "8-bit activations": [METHODS["int8"]()],
    "floats in a bitmap": [METHODS["magnitude"](ratio=0.5)],
    "floats, two of four": [METHODS["magnitude"](ratio=0.5, pattern="2:4")],
}


@pytest.mark.in_turns(2)
@torch.no_grad()
@pytest.mark.parametrize(
    "architecture, recipe",
    [
        pytest.param(architecture, recipe, marks=[pytest.mark.slow] * ((turn + at) % 3 > 0))
        for turn, architecture in enumerate(("qwen2", "gpt2", "mixtral"))
        for at, recipe in enumerate(RECIPES)
    ],
)
def test_compressed_models(tiny, tokens, architecture, recipe):
    small = apply(RECIPES[recipe], tiny(architecture), tokens(4)).model
    wide, half, cast = deployed(small).float(), deployed(small), layercast(small)
    inputs = padded(small, tokens)
    assert torch.equal(cast(**inputs).logits, wide(**inputs).logits)
    again = copy.deepcopy(cast)
    assert torch.equal(again(**inputs).logits, wide(**inputs).logits), "a copy works on its own tensors"
    assert size(cast).stored_bytes == size(half).stored_bytes
    assert resident(cast) <= 1.1 * resident(half), "scales that float32 wants exact may be wider, weights may not"


def test_an_error_inside_leaves_the_weights_in_16_bits(tiny, tokens):
    cast = layercast(tiny("llama"))
    handle = cast.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cast(tokens(1)[0])
    with pytest.raises(RuntimeError):
        cast.lm_head(torch.ones(1, 3))
    handle.remove()
    assert all(p.dtype == torch.bfloat16 for p in cast.parameters())
    assert cast(tokens(1)[0]).logits.isfinite().all()


def test_float16_and_what_is_refused(tiny, tokens):
    model = tiny("llama")
    ids = tokens(1)[0]
    assert torch.equal(layercast(model, torch.float16)(ids).logits, deployed(model, torch.float16).float()(ids).logits)
    with pytest.raises(ValueError, match=r"`dtype` \(=torch.float32\) must be torch.bfloat16 or torch.float16"):
        layercast(model, torch.float32)
    with pytest.raises(ValueError, match="already"):
        layercast(layercast(model))


@torch.no_grad()
def test_embeddings_that_are_scaled_are_scaled_in_float32(tiny, tokens):
    """Gemma's factor is the root of the hidden size: 8 for the tiny model of the other tests, which no dtype rounds."""
    model = tiny("gemma3_text", hidden_size=96)
    ids = tokens(1)[0]
    assert torch.equal(layercast(model)(ids).logits, deployed(model).float()(ids).logits)


def test_one_module_at_a_time_is_held_in_float32(tiny, tokens):
    """While a linear runs, no other one is wide."""
    cast = layercast(tiny("llama"))
    wide = []

    def count(module, args, output):
        wide.append(sum(p.dtype == torch.float32 for p in cast.parameters()))

    for module in cast.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(count, prepend=True)
    cast(tokens(1)[0])
    assert len(wide) == 15 and set(wide) == {1}
