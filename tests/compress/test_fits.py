"""What a recipe stores is known before any work, and a format that cannot hold it is refused then."""

import copy

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint import save
from compress.checkpoint.fits import check_save_format, linears_to_be
from compress.checkpoint.save import export_checkpoint
from compress.checkpoint.save_format import CheckpointInfo
from compress.checkpoint.workbench import Workbench
from compress.linear import compressed_linears
from compress.method import settle
from compress.recipe import parse_recipe

COMPOSED = [
    "magnitude(ratio=0.5), rtn(bits=3, group_size=16, symmetric=False)",
    "magnitude(ratio=0.2), rtn(bits=4, group_size=16)",
    "wanda(pattern='2:4'), gptq(bits=4, group_size=16, min_tokens=8, skip='*.o_proj')",
    "random(ratio=0.5), nf4(group_size=16)",
    "sparsegpt(bits=4, pattern='2:4', group_size=16, min_tokens=8)",
    "smoothquant, gptq(bits=8, group_size=-1, min_tokens=8), int8",
    "awq, rtn(bits=2, group_size=32)",
    "rtn(bits=8, group_size=-1, skip='*.down_proj'), int8(skip='*.q_proj')",
    "rtn(bits=3, group_size=16, skip='*.down_proj'), low_rank(rank=4, skip='*.o_proj')",
    "magnitude(ratio=0.5), rtn(bits=3, group_size=16), outlier_entries(share=0.02)",
]


def check_prediction(recipe, model, batches):
    meta = copy.deepcopy(model).to("meta")
    settled = settle(recipe)
    for method in settled:
        method.outline(meta)
    expected, _ = linears_to_be(settled, meta)
    result = apply(recipe, model, batches)
    assert {name: linear.spec() for name, linear in compressed_linears(result.model).items()} == expected


@pytest.mark.parametrize(
    "recipe", [*COMPOSED[::2], *(pytest.param(one, marks=pytest.mark.slow) for one in COMPOSED[1::2])]
)
def test_recipes_store_what_they_say(recipe, tiny, tokens):
    check_prediction(parse_recipe(recipe), tiny("llama"), tokens())


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_oss", "qwen2_moe", "opt"])
def test_biases_and_experts_are_seen(architecture, tiny):
    check_prediction([METHODS["rtn"](group_size=16)], tiny(architecture), [])


class FourBits(Workbench):
    """Holds int_group of 4 bits, and no model without all its parts."""

    name = "four-bits"

    def problem(self, linear):
        part = linear["parts"][0]
        return "" if part.get("bits") == 4 and part["format"] == "int_group" else f"{part['format']} is not for 4 bits"

    def problem_of_model(self, model, linears):
        gone = any(type(module).__name__ == "Dropped" for module in model.modules())
        return "`save_format` (='four-bits') cannot leave out a part of a block" if gone else ""


def test_a_format_that_cannot_hold_a_recipe_is_refused_with_one_that_can(tiny, monkeypatch):
    monkeypatch.setitem(save.SAVE_FORMATS, "four-bits", FourBits())
    with torch.device("meta"):
        model = tiny("llama")
    check_save_format("four-bits", parse_recipe("rtn(group_size=16)"), model)
    said = (
        r"'four-bits'\) cannot hold model.layers.0.self_attn.q_proj, as int8 stores it: eight_bit.*'workbench'.* works"
    )
    with pytest.raises(ValueError, match=said):
        check_save_format("four-bits", parse_recipe("int8"), model)
    with pytest.raises(ValueError, match=r"magnitude\(ratio=0.5\), rtn\(.*bitmap.*'workbench'.* works"):
        check_save_format("four-bits", parse_recipe("magnitude, rtn(bits=4, group_size=16)"), model)
    with pytest.raises(ValueError, match="cannot leave out a part of a block; 'workbench'.* works"):
        check_save_format("four-bits", parse_recipe("layer_drop(count=1), rtn(group_size=16)"), model)
    with pytest.raises(ValueError, match=r"`save_format` \(='zip'\) must be one of workbench"):
        check_save_format("zip", parse_recipe("rtn"), model)
    assert not compressed_linears(model) and all(len(list(block.children())) == 4 for block in model.model.layers)


def test_an_exported_checkpoint_is_the_same_model_with_the_same_story(tiny, tokens, tmp_path):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    source = save_compressed(result, tmp_path / "one")
    target = export_checkpoint(source, tmp_path / "two", "workbench")
    ids = tokens(1)[0]
    assert torch.equal(load_compressed(target)(ids).logits, result.model(ids).logits)
    assert CheckpointInfo.read(target) == CheckpointInfo.read(source)
    with pytest.raises(ValueError, match="does not say how the model was made"):
        CheckpointInfo.read(tmp_path)
