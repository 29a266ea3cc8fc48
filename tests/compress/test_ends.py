"""The token embedding and the head as targets: stored once where tied, looked up and multiplied from the same codes."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint.on_disk import load_compressed_on_disk
from compress.embedding import CompressedEmbedding, find_ends, store_end
from compress.linear import CompressedLinear, compressed_linears, parameter_count, replace, sharing_copy
from compress.method import settle
from compress.recipe import parse_recipe
from compress.walk.blocks import find_blocks
from compress.walk.ends.inputs import head_statistics, token_weights
from eval.machine import size as sizes
from eval.speed.regional import find_layers
from eval.speed.work import work

BOTH = "gptq(bits=4, group_size=16, min_tokens=8), rtn(bits=6, group_size=32, where=embedding)"


@pytest.mark.parametrize(
    "architecture", ["gpt2", "gemma3_text", *(pytest.param(a, marks=pytest.mark.slow) for a in ("llama", "opt", "phi"))]
)
def test_any_model_runs_with_both_ends_stored(architecture, tiny, tokens, tmp_path):
    """Close to the original, counted once, cast, copied, generated with, saved and loaded."""
    model, ids = tiny(architecture), tokens(1, 17)[0]
    before, parameters = model(ids).logits, parameter_count(model)
    ends = find_ends(model)
    result = apply(parse_recipe(BOTH), model, tokens())
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, CompressedEmbedding) and isinstance(head, CompressedLinear) and find_ends(model) == ends
    assert (table.parts[0] is head.parts[0]) == ends.tied
    assert ((model(ids).logits - before).norm() / before.norm()).item() < 0.3
    assert parameter_count(model) == sizes.parameter_count(model) == parameters
    rows = [r for r in result.layers if r.name in ends]
    assert [r.name for r in rows] == ([ends.head] if ends.tied else [ends.embedding, ends.head])
    assert all(r.bits_per_weight == 6.5 and 0 < r.error < 1e-3 and r.tokens for r in rows)
    assert not any(k["name"].startswith((f"{ends.embedding}.", f"{ends.head}.weight")) for k in result.kept)
    positions = 4 * 64 if architecture in ("gpt2", "opt") else 0  # looked up, too, in float32
    assert work(model).bytes_a_row == pytest.approx(64 * 6.5 / 8 + positions)

    model.tie_weights()  # what transformers does here and there must leave them alone
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert (half.get_input_embeddings().parts[0] is half.get_output_embeddings().parts[0]) == ends.tied
    assert (half(ids).logits.float() - model(ids).logits).norm() / before.norm() < 0.05
    assert half.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 20)
    assert torch.equal(sharing_copy(model)(ids).logits, model(ids).logits)

    save_compressed(result, tmp_path / "saved")
    again = load_compressed(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert sizes.size(again) == sizes.size(model)
    stored = [name for name in load_file(tmp_path / "saved" / "model.safetensors") if name.endswith("parts.0.codes")]
    outside = [name for name in stored if name.startswith((ends.embedding, ends.head))]
    assert len(outside) == (1 if ends.tied else 2), "a tied weight is stored once"
    with pytest.raises(ValueError, match="weights='memory' works"):
        load_compressed_on_disk(tmp_path / "saved")


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_alone_leave_the_blocks(tiny, tokens, tied):
    model = tiny("llama", tie_word_embeddings=tied)
    blocks = {name: p for name, p in model.named_parameters() if ".layers." in name}
    apply([METHODS["rtn"](bits=8, group_size=16, where="embedding", scale="search")], model)
    assert all(model.get_parameter(name) is p for name, p in blocks.items())
    W = model.get_input_embeddings().dequantize()
    ids = torch.tensor([[3, 95, 3, 0]])
    assert torch.equal(model.get_input_embeddings()(ids), W[ids])


def test_the_head_is_solved_on_what_the_compressed_blocks_give(tiny, tokens):
    """Its Gram matrix is that of the final norm's output, without weight on the windows' first tokens."""
    model, batches = tiny("llama"), tokens()
    apply(parse_recipe("gptq(bits=3, group_size=16, min_tokens=8)"), model, batches)
    found = head_statistics(model, batches, ("gram", "starts", "absmax"), device=torch.device("cpu"))
    x = torch.cat([model.model(batch).last_hidden_state[0] for batch in batches]).double()
    torch.testing.assert_close(found.values["gram"].double(), 2 * x.T @ x / len(x), rtol=1e-4, atol=1e-4)
    assert found.tokens == len(x) and not len(found.values["starts"])

    again, all_at_once = tiny("llama"), "gptq(bits=3, group_size=16, min_tokens=8, where=all)"
    one = apply(parse_recipe(all_at_once), again, batches)
    two = apply(parse_recipe("gptq(bits=3, group_size=16, min_tokens=8, where=embedding)"), model, batches)
    assert [r.error for r in one.layers[-2:]] == pytest.approx([r.error for r in two.layers], rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_are_found_beside_a_stored_embedding_that_is_larger(tiny, tied):
    model = tiny("llama", vocab_size=4096, tie_word_embeddings=tied)
    stored = apply([METHODS["rtn"](bits=8, group_size=32, where="embedding")], model).model
    assert find_blocks(stored)[1] is stored.model.layers is find_layers(stored)
    apply([METHODS["rtn"](bits=4, group_size=32), METHODS["activations"](bits=8)], stored)
    linears = compressed_linears(stored.model)
    assert len(linears) == 14 and all(linear.transform is not None for linear in linears.values())


def test_rare_tokens_count_once():
    counts = token_weights([torch.tensor([[1, 1, 4]])], 6)
    assert counts.tolist() == [1, 3, 1, 1, 2, 1]


def test_calibrated_once_and_resumed(tiny, tokens, tmp_path):
    recipe, batches = parse_recipe("gptq(bits=4, group_size=16, min_tokens=8, where=all)"), tokens()
    one = apply(recipe, tiny("llama"), batches, calibrate="once")
    assert len(one.layers) == 16 and one.model.get_output_embeddings().bits_per_weight == 5
    first = apply(recipe, tiny("llama"), batches, work_path=tmp_path)
    again = apply(recipe, tiny("llama"), batches, work_path=tmp_path)
    assert all("interrupted" in r.notes[-1] for r in again.layers)
    for a, b in zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_compressed_embedding_is_looked_up_when_it_is_compressed_again(tiny, tokens):
    model = tiny("gpt2")
    apply([METHODS["rtn"](bits=8, group_size=16, where="embedding")], model)
    other = apply([METHODS["rtn"](bits=4, group_size=16, where="embedding")], tiny("gpt2")).model
    head = copy.deepcopy(other.get_output_embeddings())
    replace(model, "lm_head", head)
    assert model.get_input_embeddings().parts[0] is head.parts[0]
    store_end(model, "lm_head", copy.deepcopy(other.get_output_embeddings()))
    assert torch.equal(model(tokens()[0]).logits, other(tokens()[0]).logits)


def test_one_method_for_each_place():
    settle(parse_recipe(BOTH))
    settle(parse_recipe("awq, gptq(bits=4), rtn(bits=8, where=embedding)"))
    with pytest.raises(ValueError, match=r"store the same weights \(embedding\).*one for each place \(`where`\)"):
        settle(parse_recipe("gptq(bits=4, where=all), rtn(bits=8, where=embedding)"))
    with pytest.raises(ValueError, match="store the same weights"):
        settle(parse_recipe("gptq(bits=4), rtn(bits=8, where=embedding), nf4"))
    with pytest.raises(ValueError, match=r"`where` \(='all'\) of awq"):
        settle(parse_recipe("awq(where=all), gptq(bits=4)"))


def test_methods_without_row_lookup_refuse_the_embedding(tiny, tokens):
    for text in ("int8(where=all)", "wanda(where=embedding)"):
        with pytest.raises(ValueError, match=r"`where`.* looked up row by row"):
            apply(parse_recipe(text), tiny("llama"), tokens())
    skipped = apply(parse_recipe("rtn(group_size=16, where=embedding, skip='model.embed_tokens')"), tiny("llama"))
    assert [r.name for r in skipped.layers] == ["lm_head"]
    with pytest.raises(ValueError, match="leaves no linear"):
        apply(parse_recipe("rtn(group_size=16, where=embedding, skip='*wte')"), tiny("gpt2"))
