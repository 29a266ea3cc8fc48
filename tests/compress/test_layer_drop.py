"""What is dropped is gone from the function, from the cache and from the disk, and nothing else is."""

import copy
from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from compress import METHODS, apply, held_out, load_compressed, save_compressed
from compress.checkpoint.fits import check_save_format
from compress.dropped import Dropped, dropped_parts, parts_of
from compress.inputs.calibration import calibration
from compress.linear import CompressedLinear
from compress.pruning.layer_drop import importance
from compress.recipe import parse_recipe
from compress.walk.blocks import find_blocks
from compress.walk.capture import block_calls
from eval.speed.speed import measure_speed, standard_variants
from eval.text.divergence import compare_on_text

DROP = METHODS["layer_drop"]


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def test_importance_is_the_papers(tiny, tokens):
    """1 - cos of the residual stream around each part, taken from hooks inside the blocks."""
    model = tiny("llama", num_hidden_layers=3)
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(name, tensor):
        seen.setdefault(name, []).append(tensor.reshape(-1, tensor.shape[-1]))

    for i, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda _, args, kwargs, i=i: keep(f"x{i}", args[0]), with_kwargs=True)
        block.post_attention_layernorm.register_forward_pre_hook(lambda _, args, i=i: keep(f"m{i}", args[0]))
        block.register_forward_hook(lambda _, args, out, i=i: keep(f"y{i}", out))
    for batch in tokens():
        model(batch)
    x, m, y = ([torch.cat(seen[f"{k}{i}"]) for i in range(3)] for k in "xmy")
    for block in model.model.layers:
        (
            block._forward_hooks.clear(),
            block._forward_pre_hooks.clear(),
            block.post_attention_layernorm._forward_pre_hooks.clear(),
        )
    blocks = find_blocks(model)[1]
    found = importance(blocks, block_calls(model, blocks, tokens()), torch.device("cpu"))
    expected = {"attention": (x, m), "mlp": (m, y), "block": (x, y)}
    for record in found:
        a, b = expected[record.kind]
        assert record.importance == pytest.approx(1 - cosine(a[record.block], b[record.block]).mean().item(), rel=1e-4)
    influence = importance(blocks, block_calls(model, blocks, tokens()), torch.device("cpu"), metric="block_influence")
    by_block = {r.block: r.importance for r in found if r.kind == "block"}
    assert all(r.importance == pytest.approx(by_block[r.block], rel=1e-5) for r in influence)


def sharpened(model):
    """A model whose predictions are not nearly uniform, so that parts differ in what is lost without them."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model


@torch.no_grad()
def lost(whole, small, ids) -> float:
    """KL(whole || small) over all tokens of ids [B, T], in nats per token."""
    p, q = (model(ids, use_cache=False).logits.float().log_softmax(-1) for model in (whole, small))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize("target", ["attention", "block", pytest.param("mlp", marks=pytest.mark.slow)])
def test_output_losses_are_those_of_models_without_the_part(one_of_each_kind, tokens, target):
    """Measured by dropping one part after another, each from the whole model, and running what is left as a whole."""
    whole = sharpened(one_of_each_kind)
    found = apply([DROP(target=target, count=1, metric="output")], copy.deepcopy(whole), tokens()).drops
    assert len(found) == len(find_blocks(whole)[1]) and {drop.metric for drop in found} == {"output"}
    for drop in found:
        small = apply([DROP(target=target, layers=str(drop.block))], copy.deepcopy(whole), tokens()).model
        assert drop.importance == pytest.approx(lost(whole, small, torch.cat(tokens())), rel=1e-3)
    assert min(found, key=lambda drop: drop.importance).order == 1


def test_the_dropped_layers_have_the_least_sum_of_output_losses(tiny, tokens):
    """Of all sets of three attention layers or MLPs; and only the named number of tokens is compared."""
    whole = sharpened(tiny("llama", num_hidden_layers=4))
    found = apply([DROP(target="joint", count=3, metric="output", tokens=20)], copy.deepcopy(whole), tokens()).drops
    sums = {names: sum(drop.importance for drop in names) for names in combinations(found, 3)}
    assert len(sums) == 56 and sum(sums.values()) / 56 > 1.1 * min(sums.values())
    assert set(min(sums, key=sums.get)) == {drop for drop in found if drop.order}
    first = torch.cat(tokens())[:1, :20]
    gone = next(drop for drop in found if drop.kind == "mlp")
    small = apply([DROP(target="mlp", layers=str(gone.block))], copy.deepcopy(whole), tokens()).model
    assert gone.importance == pytest.approx(lost(whole, small, first), rel=1e-3)


def test_iterative_output_losses_are_from_the_whole_model(tiny, tokens):
    """The loss of the second layer is that of both together, and the last one's that of the model that is left."""
    whole = sharpened(tiny("llama", num_hidden_layers=4))
    for target in ("attention", "block"):
        result = apply([DROP(target=target, count=2, metric="output", iterative=True)], copy.deepcopy(whole), tokens())
        second = next(drop for drop in result.drops if drop.order == 2)
        assert second.importance == pytest.approx(lost(whole, result.model, torch.cat(tokens())), rel=1e-3)


@pytest.mark.in_turns
@pytest.mark.parametrize("target", [pytest.param("attention", marks=pytest.mark.slow), "mlp", "block"])
def test_every_architecture(any_model, tokens, tmp_path, target):
    """The least important one goes; with a cache, in batches, padded or not, and saved and loaded, the model stays the
    same."""
    before = copy.deepcopy(any_model)
    parameters = sum(p.numel() for p in any_model.parameters())
    result = apply([DROP(target=target, count=1)], any_model, tokens())
    model = result.model
    gone = [drop for drop in result.drops if drop.order]
    assert len(gone) == 1 and gone[0].importance == min(drop.importance for drop in result.drops)
    assert sum(p.numel() for p in model.parameters()) == parameters - gone[0].parameters < parameters
    assert sum(weight["bytes"] for weight in result.kept) == 4 * sum(p.numel() for p in model.parameters())

    ids = torch.cat(tokens(2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model.generation_config.eos_token_id = None
    written = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(written, step_by_step(model, ids, mask, 5))
    if target != "block":
        prefix, blocks = find_blocks(model)
        there = parts_of(find_blocks(before)[1][gone[0].block])[target]
        assert all(isinstance(blocks[gone[0].block].get_submodule(name), Dropped) for name in there)
        assert gone[0].name.startswith(f"{prefix}.{gone[0].block}.")
    else:
        assert len(find_blocks(model)[1]) == 1 and model.config.num_hidden_layers == 1

    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert dropped_parts(again).keys() == dropped_parts(model).keys()


def step_by_step(model, ids, mask, new):
    """Greedy, without any cache."""
    for _ in range(new):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        takes = {"position_ids": positions} if "opt" not in model.config.model_type else {}
        logits = model(ids, attention_mask=mask, use_cache=False, **takes).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
    return ids


def test_without_both_a_block_is_the_identity(any_model, tokens):
    """So what was dropped was all of attention and MLP, and the norms around them."""
    blocks = find_blocks(any_model)[1]
    apply([DROP(target="attention", layers="1"), DROP(target="mlp", layers="1")], any_model, tokens())
    for call in block_calls(any_model, blocks, tokens()):
        out = blocks[1](call.hidden, *call.arguments[1][0], **call.arguments[1][1])
        assert torch.equal(out[0] if isinstance(out, tuple) else out, call.hidden)


def test_a_model_with_fewer_blocks_is_a_plain_one(tiny, tokens, tmp_path):
    """transformers loads it by itself, Gemma's kinds of attention included."""
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = tiny("gemma3_text", num_hidden_layers=4, layer_types=types)
    result = apply([DROP(target="block", layers="1, 2")], model, tokens())
    assert model.config.layer_types == ["sliding_attention", "sliding_attention"]
    assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1]
    path = save_compressed(result, tmp_path / "out")
    ids = tokens(1, 20)[0]
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(plain(ids).logits, model(ids).logits)
    assert torch.equal(*(m.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (plain, model)))


def test_caches_know_their_length_without_the_first_attention(tiny, tokens):
    model = tiny("llama", num_hidden_layers=3)
    apply([DROP(target="attention", layers="0, 2")], model, tokens())
    ids = tokens(1, 20)[0]
    expected = model(ids).logits
    for cache in (None, StaticCache(config=model.config, max_cache_len=32)):
        first = model(ids[:, :9], past_key_values=cache, use_cache=True)
        assert first.past_key_values.get_seq_length() == 9
        rest = model(ids[:, 9:], past_key_values=first.past_key_values, use_cache=True)
        torch.testing.assert_close(rest.logits, expected[:, 9:], rtol=1e-4, atol=1e-4)
        held = [layer.keys.nbytes for layer in first.past_key_values.layers]
        assert held[0] == held[2] == held[1] / (2 * 16), "one number a position, where there were two heads of 16"
    beams = model.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert beams.shape == (1, 26)


def test_one_shot_iterative_and_joint(tiny, tokens):
    model = tiny("llama", num_hidden_layers=4)
    first = apply([DROP(target="mlp", count=2)], copy.deepcopy(model), tokens())
    order = sorted(first.drops, key=lambda drop: drop.importance)
    assert [drop.order for drop in order] == [1, 2, None, None]
    again = apply([DROP(target="mlp", count=2, iterative=True)], copy.deepcopy(model), tokens())
    alone = apply([DROP(target="mlp", count=1)], copy.deepcopy(model), tokens())
    next_one = apply([DROP(target="mlp", count=1)], alone.model, tokens())
    expected = [next(d.block for d in r.drops if d.order) for r in (alone, next_one)]
    assert [d.block for d in sorted(again.drops, key=lambda d: d.order or 9) if d.order] == expected
    joint = apply([DROP(target="joint", count=5)], copy.deepcopy(model), tokens())
    assert len(joint.drops) == 8 and sum(d.order is not None for d in joint.drops) == 5
    blocks = apply([DROP(target="block", count=2, iterative=True)], copy.deepcopy(model), tokens())
    assert len(blocks.model.model.layers) == 2 and len({d.block for d in blocks.drops}) == len(blocks.drops) == 4


def test_composes_with_quantisation(tiny, tokens, tmp_path):
    model = tiny("llama", num_hidden_layers=3)
    recipe = parse_recipe(
        "layer_drop(target=attention, layers='1'), layer_drop(target=block, layers='2'), gptq(group_size=16)"
    )
    result = apply(recipe, model, tokens())
    assert len(result.layers) == 7 + 3 and "layer_drop" in str(result) and "1 of" not in str(result).split(":")[0]
    assert sum(isinstance(m, CompressedLinear) for m in model.modules()) == 10
    ids = tokens(1, 12)[0]
    assert torch.equal(load_compressed(save_compressed(result, tmp_path / "out"))(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="must come before"):
        apply(parse_recipe("rtn(group_size=16), layer_drop(count=1)"), tiny("llama"), tokens())


def test_bad_input_is_refused_before_any_work(tiny, tokens):
    model = tiny("llama", num_hidden_layers=3)
    for wrong, message in (
        (
            {"count": 3},
            r"`count` \(=3\) of layer_drop must leave some of the 3 attention layers of this model: at most 2",
        ),
        ({"target": "block", "count": 7}, r"`count` \(=7\).*3 block"),
        ({"target": "joint", "count": 6}, r"`count` \(=6\).*6 attention and mlp"),
        ({"layers": "0, 1, 2"}, r"`layers` \(='0, 1, 2'\).*at most 2"),
        ({"layers": "5"}, r"`layers` \(='5'\) of layer_drop: block 5 has no attention to drop; .* 0 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            apply([DROP(**wrong)], model, tokens())
    with pytest.raises(ValueError, match=r"`target` \(='block'\).*has 1 block layer to drop, and one must stay"):
        apply([DROP(target="block", count=1)], tiny("llama", num_hidden_layers=1), tokens())
    for wrong, message in (
        ({"count": 0}, "`count`"),
        ({"target": "head"}, "`target`"),
        ({"layers": "1, 1"}, "different numbers"),
        ({"layers": "one"}, "`layers`"),
        ({"layers": "1", "target": "joint"}, "`layers`.*`target`"),
    ):
        with pytest.raises(ValueError, match=message):
            DROP(**wrong)
    with pytest.raises(ValueError, match="`batches` is empty"):
        apply([DROP(count=1)], model)
    assert not dropped_parts(model)


def test_a_block_that_is_not_there_is_named(tiny, tokens):
    """By the plan; a look at the format before it says nothing."""
    check_save_format("workbench", [DROP(layers="99")], tiny("llama"))
    with pytest.raises(ValueError, match=r"`layers` \(='99'\) of layer_drop: block 99 has no attention"):
        apply([DROP(layers="99")], tiny("llama"), tokens())


def test_blocks_that_are_more_than_a_residual_are_refused(tiny, tokens):
    """OPT's largest-but-one kind puts its norms after the sum: without attention and MLP something is left."""
    model = tiny("opt", do_layer_norm_before=False)
    with pytest.raises(ValueError, match="is not the identity"):
        apply([DROP(target="attention", count=1)], model, tokens())
    assert len(find_blocks(apply([DROP(target="block", count=1)], model, tokens()).model)[1]) == 1


@pytest.mark.slow
def test_speed_of_a_model_without_some_attention(tiny, tokens):
    model = tiny("llama", num_hidden_layers=3)
    result = apply([DROP(target="attention", layers="0")], copy.deepcopy(model), tokens())
    speed = measure_speed(standard_variants(model, result.model), prompt_tokens=8, new_tokens=4, rounds=1)
    assert speed["compressed"].decode_tokens_per_s > 0
    assert speed["compressed"].execution.split(",")[0] == speed["baseline"].execution.split(",")[0]


@pytest.mark.slow
def test_attention_is_cheaper_than_mlps_on_a_real_model(real):
    """He et al., table 1: attention layers can go where MLPs cannot; and what the metric ranks last costs more."""
    model, tokenizer = real
    batches = calibration(tokenizer, samples=2, seqlen=256)
    ids = held_out(tokenizer)

    def cost(**knobs) -> float:
        small = apply([DROP(**knobs)], copy.deepcopy(model), batches).model
        return compare_on_text(model, {"small": small}, ids, window=256, limit=2)[1]["small"].kl

    attention, mlp = cost(target="attention", count=3), cost(target="mlp", count=3)
    assert attention < mlp
    last = sorted(apply([DROP(count=1)], copy.deepcopy(model), batches).drops, key=lambda drop: -drop.importance)[:3]
    assert cost(layers=", ".join(str(drop.block) for drop in last)) > 2 * attention


def test_only_lists_with_an_entry_per_block_lose_one(tiny, tokens):
    model = tiny("gemma3_text", eos_token_id=[1, 2])
    model.config.as_long_by_accident = [7, 8]
    apply([DROP(target="block", count=1)], model, tokens())
    assert len(model.config.layer_types) == 1
    assert model.config.eos_token_id == [1, 2] and model.config.as_long_by_accident == [7, 8]
