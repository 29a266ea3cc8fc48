"""The walk: it reproduces the model's own passes, finds shared inputs by looking, and survives being killed."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from compress import METHODS, apply
from compress.apply import apply_each
from compress.linear import CompressedLinear, is_linear, replace, sharing_copy
from compress.recipe import parse_recipe
from compress.walk import capture, walk
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import block_calls, micro_batches, run_block
from compress.walk.experts import SplitExperts, is_fused_experts, split_experts
from compress.walk.groups import input_groups
from compress.walk.original import lockstep
from compress.walk.resume import BlockStore
from kernels.clock import clock

DEVICE = torch.device("cpu")


def test_blocks_run_alone_give_what_the_model_gives(any_model, tokens):
    """Masks, positions and whatever else an architecture passes are caught as it makes them."""
    batches = tokens(3, 20) + tokens(2, 9, seed=2)
    _, blocks = find_blocks(any_model)
    calls = block_calls(any_model, blocks, batches)
    assert len(calls) == 2 and all(len(c.arguments) == len(blocks) for c in calls)
    stacked = micro_batches(batches)
    expected = []
    handle = blocks[-1].register_forward_hook(
        lambda m, a, out: expected.append(out[0] if isinstance(out, tuple) else out)
    )
    for batch in stacked:
        any_model(batch, use_cache=False)
    handle.remove()
    for call, output in zip(calls, expected, strict=True):
        for i, block in enumerate(blocks):
            call.hidden = run_block(block, call, i, DEVICE)
        assert torch.allclose(call.hidden, output, atol=1e-4 * output.abs().max().item())


def test_shared_inputs_are_found_by_looking(tiny, tokens):
    def groups(architecture):
        model = tiny(architecture)
        split_experts(model)
        prefix, blocks = find_blocks(model)
        linears = {n: m for n, m in model.named_modules() if n.startswith(f"{prefix}.0.") and is_linear(m)}
        found, once = input_groups(blocks[0], linears, block_calls(model, blocks, tokens()), 0, DEVICE)
        return [{name.split(".", 3)[-1].rpartition(".")[2] for name in group} for group in found], once

    assert groups("llama") == (
        [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
        True,
    )
    assert groups("phi3") == ([{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}], True)
    assert groups("opt")[0] == [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}]
    neox, _ = groups("gpt_neox")
    assert {"query_key_value"} in neox and {"dense_4h_to_h"} in neox
    experts, _ = groups("mixtral")
    assert len(experts) == 2 + 2 * 4, "q/k/v, o, and every expert's two linears by themselves"


def test_statistics_see_every_token_once(tiny, tokens):
    batches = tokens(5, 11)
    result = apply([METHODS["gptq"](group_size=16, min_tokens=1)], tiny("llama"), batches)
    assert {r.tokens for r in result.layers} == {55}
    result = apply([METHODS["gptq"](group_size=16, min_tokens=1)], tiny("mixtral"), batches)
    per_block = [r.tokens for r in result.layers if "experts.down_proj" in r.name and ".layers.0." in r.name]
    assert sum(per_block) == 55 * 2, "each token goes to two experts"


def test_in_sequence_each_linear_sees_what_the_ones_before_it_give(any_model, tokens, monkeypatch):
    """Against the plain way: whole passes over the model, one for each linear, with all before it replaced."""
    seen = {}
    batches = tokens(4, 600, seed=3) if any_model.config.max_position_embeddings > 600 else tokens(4, 100, seed=3)
    split_experts(any_model)
    plain = copy.deepcopy(any_model)
    walk_solve = walk.solve_linear

    def noted(name, linear, original, statistics, *others, **how):
        seen[name] = statistics.values["gram"].clone(), statistics.tokens
        return walk_solve(name, linear, original, statistics, *others, **how)

    monkeypatch.setattr(walk, "solve_linear", noted)
    monkeypatch.setattr(capture, "MICRO_BATCH_TOKENS", 200)
    apply([METHODS["rtn"](bits=3, group_size=16)], any_model, batches)
    for name, (H, tokens_seen) in seen.items():  # in the order in which they were solved
        inputs = []
        handle = plain.get_submodule(name).register_forward_pre_hook(
            lambda m, args, into=inputs: into.append(args[0].flatten(0, -2))
        )
        for batch in batches:
            plain(batch, use_cache=False)
        handle.remove()
        X = torch.cat(inputs) if inputs else torch.zeros(0, len(H))
        assert len(X) == tokens_seen, name
        expected = 2 / max(len(X), 1) * X.T @ X
        assert torch.allclose(H, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()), name
        replace(plain, name, any_model.get_submodule(name))
    assert not any(isinstance(m, lockstep._Gate) for m in any_model.modules())


def test_beside_one_another_all_see_the_original_ones(tiny, tokens):
    a, b = (
        apply([METHODS["gptq"](bits=2, group_size=16, min_tokens=8, sequential=sequential)], tiny("llama"), tokens())
        for sequential in (True, False)
    )
    first, second = ({r.name: r.error for r in result.layers} for result in (a, b))
    assert first["model.layers.0.self_attn.q_proj"] == pytest.approx(
        second["model.layers.0.self_attn.q_proj"], rel=1e-6
    )
    assert first["model.layers.0.mlp.down_proj"] != pytest.approx(second["model.layers.0.mlp.down_proj"], rel=1e-5)


def test_linears_that_run_twice_are_solved_beside_one_another(tiny, tokens):
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)) + mlp.down_proj(mlp.up_proj(x))
    result = apply([METHODS["gptq"](group_size=16, min_tokens=8)], model, tokens(5, 11))
    for r in result.layers:
        assert any("more than once" in note for note in r.notes) == (".layers.0." in r.name)
        assert r.tokens == (2 if "layers.0.mlp.down_proj" in r.name or "layers.0.mlp.up_proj" in r.name else 1) * 55


def test_another_order_in_another_pass_is_refused(tiny, tokens):
    model = tiny("llama")
    mlp, passes = model.model.layers[0].mlp, []

    def forward(x):
        passes.append(1)
        up_first = len(passes) > 3
        y = mlp.up_proj(x * 1) if up_first else None
        gate = mlp.act_fn(mlp.gate_proj(x * 1))
        return mlp.down_proj(gate * (y if up_first else mlp.up_proj(x * 1)))

    mlp.forward = forward
    batches = tokens(2, 20) + tokens(2, 12) + tokens(2, 15)
    with pytest.raises(RuntimeError, match="another order in another pass; `sequential=False`"):
        apply([METHODS["gptq"](group_size=16, min_tokens=8)], model, batches)
    assert not any(isinstance(m, lockstep._Gate | CompressedLinear) for m in model.modules()), "the model is as it was"


def test_later_blocks_see_compressed_earlier_ones(tiny, tokens):
    """With the first block left alone, the second block's errors are other ones."""
    batches = tokens()
    whole = apply([METHODS["gptq"](bits=2, group_size=16, min_tokens=8)], tiny("llama"), batches)
    second = apply([METHODS["gptq"](bits=2, group_size=16, min_tokens=8, skip="*layers.0.*")], tiny("llama"), batches)
    errors = {r.name: r.error for r in whole.layers}
    assert all(errors[r.name] != r.error for r in second.layers)


def test_experts_that_the_first_pass_did_not_reach_are_solved_in_their_place(tiny, tokens):
    """A shared expert runs before the routed ones; a short first batch reaches few of those."""
    model = tiny("qwen2_moe", num_experts=8)
    batches = [torch.zeros(1, 1, dtype=torch.long), *tokens(4, 60)]
    result = apply([METHODS["gptq"](group_size=16, min_tokens=1)], model, batches)
    for block in (0, 1):
        for kind in ("gate_up_proj", "down_proj"):
            own = [r.tokens for r in result.layers if f"layers.{block}.mlp.experts.{kind}." in r.name]
            assert len(own) == 8 and sum(own) == 241 * 2
    assert any("shared_expert.down_proj" in r.name for r in result.layers)
    kept = {k["name"]: k["reason"] for k in result.kept}
    assert kept["model.layers.0.mlp.shared_expert_gate.weight"] == "routes tokens to experts"


def test_split_experts_change_nothing(tiny, tokens):
    for architecture in ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"):
        model, ids = tiny(architecture), tokens(1, 30)[0]
        before = model(ids).logits
        parameters = sum(p.numel() for p in model.parameters())
        assert any(is_fused_experts(m) for m in model.modules())
        assert split_experts(model) == 2 and not any(is_fused_experts(m) for m in model.modules())
        assert any(isinstance(m, SplitExperts) for m in model.modules())
        assert torch.allclose(model(ids).logits, before, atol=1e-5)
        assert sum(p.numel() for p in model.parameters()) == parameters


def test_reference_errors_are_those_of_the_outputs(tiny, tokens):
    """The recorded error of the first linear is ||(W - Ŵ)X||² / ||WX||² on what really flows into it."""
    model, batches, seen = tiny("llama"), tokens(), []
    q = model.model.layers[0].self_attn.q_proj
    W = q.weight.clone()
    handle = q.register_forward_pre_hook(lambda m, args: seen.append(args[0].reshape(-1, 64)))
    for batch in batches:
        model(batch)
    handle.remove()
    result = apply([METHODS["rtn"](bits=3, group_size=16)], model, batches)
    X = torch.cat(seen).double()
    D = (W - model.model.layers[0].self_attn.q_proj.dequantize()).double()
    expected = (X @ D.T).square().sum() / (X @ W.double().T).square().sum()
    assert result.layers[0].error == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.slow
def test_killed_runs_go_on_where_they_were(tiny, tokens, tmp_path, monkeypatch):
    recipe, batches = [METHODS["gptq"](bits=3, group_size=16, min_tokens=8)], tokens()
    expected = apply(recipe, tiny("llama", num_hidden_layers=4), batches)
    solve, solved = METHODS["gptq"].solve, []

    def dies_in_block_two(self, W, statistics):
        solved.append(1)
        if len(solved) == 2 * 7 + 3:
            raise KeyboardInterrupt
        return solve(self, W, statistics)

    monkeypatch.setattr(METHODS["gptq"], "solve", dies_in_block_two)
    with pytest.raises(KeyboardInterrupt):
        apply(recipe, tiny("llama", num_hidden_layers=4), batches, work_path=tmp_path)
    assert len(list(tmp_path.glob("*/block_*.safetensors"))) == 2 and not list(tmp_path.glob("*/*.part"))
    solved.clear()
    monkeypatch.setattr(METHODS["gptq"], "solve", lambda self, W, s: solved.append(1) or solve(self, W, s))
    result = apply(recipe, tiny("llama", num_hidden_layers=4), batches, work_path=tmp_path)
    assert len(solved) == 2 * 7, "finished blocks are not solved again"
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor), name
    assert [(r.name, r.error) for r in result.layers] == [(r.name, r.error) for r in expected.layers]
    apply(
        [METHODS["gptq"](bits=4, group_size=16, min_tokens=8)],
        tiny("llama", num_hidden_layers=4),
        batches,
        work_path=tmp_path,
    )
    assert len(solved) == 2 * 7 + 4 * 7, "another recipe takes nothing from it"


def test_bad_batches_are_refused_before_any_work(tiny, tokens):
    model, recipe = tiny("llama"), [METHODS["gptq"](group_size=16)]
    for batches, message in (
        ([], "`batches` is empty, and gptq needs calibration"),
        ([torch.zeros(1, 8)], r"`batches\[0\]` must be a LongTensor"),
        ([torch.zeros(2, 8, dtype=torch.long)], r"`batches\[0\]` must be a LongTensor \[1, T\]"),
        ([torch.zeros(1, 0, dtype=torch.long)], r"`batches\[0\]` must hold token ids"),
        ([tokens(1)[0], torch.full((1, 8), 96)], r"`batches\[1\]` must hold token ids between 0 and 95"),
        (["text"], r"`batches\[0\]` must be a LongTensor \[1, T\], not str"),
    ):
        with pytest.raises(ValueError, match=message):
            apply(recipe, model, batches)
    model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="its weight model.layers.1.mlp.up_proj.weight holds NaN"):
        apply(recipe, model, tokens())
    assert not any(isinstance(m, CompressedLinear) for m in model.modules())


def test_bad_recipes_are_refused_before_any_work(tiny, tokens):
    model = tiny("llama")
    for recipe, message in (
        ([], "`recipe`"),
        ([7], "7, which is not a method"),
        ([METHODS["rtn"](group_size=16), METHODS["gptq"](group_size=16)], "cannot follow"),
    ):
        with pytest.raises(ValueError, match=message):
            apply(recipe, model, tokens())
    with pytest.raises(ValueError, match="no list of blocks"):
        find_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"bits": 7}, r"`bits` \(=7\) of gptq must be one of 1, 2, 3, 4, 5, 6, 8"),
        ({"bits": "4"}, r"`bits` \(='4'\) of gptq must be int"),
        ({"bits": True}, r"`bits` \(=True\) of gptq must be int"),
        ({"damp": -0.1}, r"`damp` \(=-0.1\) of gptq must lie between 0 and 1"),
        ({"order": "best"}, r"`order` \(='best'\) of gptq must be one of group, activation, none"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError, match=message):
        METHODS["gptq"](**knobs)
    with pytest.raises(ValueError, match=r"`bitz` is not a knob of gptq; did you mean `bits`\?"):
        METHODS["gptq"](bitz=4)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_checks_change_nothing(tiny, architecture):
    """Fused experts are checked by the shapes that they would have, and stay fused."""
    model = tiny(architecture)
    names = dict(model.named_parameters()).keys()
    for recipe in ("awq(group_size=16)", "wanda", "smoothquant", "layer_drop(count=1)", "int8"):
        parse_recipe(recipe)[0].check(model)
    assert dict(model.named_parameters()).keys() == names
    shapes = targets(model)
    split_experts(model)
    assert targets(model) == shapes and any("experts.down_proj.3" in name for name in shapes)


def test_experts_that_cannot_be_split_are_refused_by_name(tiny):
    model = tiny("jetmoe", layers=1)
    with pytest.raises(ValueError, match=r"`skip` \(=''\) of rtn: .*input_linear \(JetMoeParallelExperts\) holds"):
        apply([METHODS["rtn"](group_size=16)], model)
    result = apply([METHODS["rtn"](group_size=16, skip="*put_linear")], model)
    routers = [k for k in result.kept if k["name"].endswith("router.layer.weight")]
    assert len(routers) == 2 and all(k["reason"] == "routes tokens to experts" for k in routers)
    assert [r.name.rpartition(".")[2] for r in result.layers] == ["kv_proj"]


def test_an_unreadable_finished_block_counts_as_absent(tmp_path):
    """As a power loss leaves it: cut short, or of the right length and empty."""
    store = BlockStore(tmp_path)
    store.put(0, {"w": torch.ones(4)}, {"about": 1})
    assert store.get(0)[1] == {"about": 1} and [path.name for path in tmp_path.iterdir()] == ["block_0000.safetensors"]
    file = next(tmp_path.iterdir())
    for damaged in (file.read_bytes()[:40], bytes(file.stat().st_size), b""):
        file.write_bytes(damaged)
        assert store.get(0) is None


@pytest.mark.parametrize("architecture", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_stopping_at_a_wide_last_group_gives_the_same(tiny, tokens, monkeypatch, architecture):
    recipe, batches = [METHODS["gptq"](bits=3, group_size=16, min_tokens=8)], tokens()
    monkeypatch.setattr(capture, "MICRO_BATCH_TOKENS", 48)
    waited = apply(recipe, tiny(architecture), batches)
    monkeypatch.setattr(lockstep, "HELD_BYTES", 0)
    stopped = apply(recipe, tiny(architecture), batches)
    assert [r.error for r in waited.layers] == [r.error for r in stopped.layers]
    for a, b in zip(waited.model.state_dict().values(), stopped.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["gptq(group_size=16, min_tokens=8)", "smoothquant, int8", "layer_drop(count=1)"])
def test_copies_share_what_a_recipe_leaves_and_leave_the_model(tiny, tokens, recipe):
    model = tiny("opt")
    weights = copy.deepcopy(model.state_dict())
    result = apply(parse_recipe(recipe), sharing_copy(model), tokens())
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    own, others = (m.get_input_embeddings().weight for m in (model, result.model))
    assert own.data_ptr() == others.data_ptr()
    result.model.to(torch.bfloat16)
    assert model.dtype == torch.float32 and torch.equal(own, weights["model.decoder.embed_tokens.weight"])


PEAK = """
import resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from compress import METHODS, apply
from compress.apply import apply_each
from compress.walk.original import lockstep

lockstep.HELD_BYTES = int(sys.argv[1])
config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval().requires_grad_(False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
apply([METHODS["rtn"]()], model, [torch.randint(64, (1, 256)) for _ in range(128)])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_passes_that_stop_hold_no_wide_input():
    """The input of the last linears is 268 MB here: it is part of the peak only where the passes may wait with it."""
    run = [sys.executable, "-c", PEAK]
    stopped, waited = (int(subprocess.check_output([*run, str(held)], text=True)) / 1e3 for held in (0, 1 << 30))
    assert stopped < waited - 80  # the peak is then where they wait with the attention's output


def test_errors_by_half_of_the_products():
    """tr(D H Dᵀ) over several blocks of columns, of which the last is not full."""
    from compress.walk.walk import COLUMNS, quadratic

    D, x = torch.randn(7, COLUMNS * 2 + 99), torch.randn(300, COLUMNS * 2 + 99)
    assert quadratic(D, x.t() @ x) == pytest.approx((x @ D.t()).square().sum().item(), rel=1e-4)


def test_without_calibration_no_block_is_dequantised_to_be_run(tiny, monkeypatch):
    def refused(block):
        raise AssertionError("nothing flows through this block")

    monkeypatch.setattr(walk, "dense_weights", refused)
    result = apply(parse_recipe("rtn(bits=4, group_size=32)"), tiny("llama"))
    assert result.layers and isinstance(result.model.model.layers[0].mlp.up_proj, CompressedLinear)


UNUSUAL = 5  # a token that only one window holds


@pytest.mark.parametrize(
    "recipe, calibrate",
    [
        ("rtn(group_size=16)", "sequential"),
        ("wanda(ratio=0.5)", "sequential"),
        ("wanda(ratio=0.5, sequential=False)", "sequential"),
        ("wanda(ratio=0.5)", "once"),
        ("int8(activations='tensor')", "sequential"),
        ("smoothquant", "sequential"),
        ("gptaq(group_size=16)", "sequential"),
        ("rtn(group_size=16), low_rank(rank=4)", "sequential"),
        ("squeezellm", "sequential"),
        ("layer_drop(count=1, target='mlp')", "sequential"),
    ],
)
def test_an_activation_that_is_not_finite_is_named(recipe, calibrate, tiny, tokens):
    """The error names the method, the linear and the calibration window, whichever window it is."""
    model, batches = tiny("llama"), [batch.clamp(min=UNUSUAL + 1) for batch in tokens(8)]
    batches[5][0, 3] = UNUSUAL
    model.get_input_embeddings().weight[UNUSUAL] = 1e4
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda _, x, y: y.masked_fill(x[0].amax(-1, keepdim=True) > 5e3, float("nan")))
    methods = parse_recipe(recipe)
    step = "calibrate='once'" if calibrate == "once" else methods[0].name
    named = r"the input of (model\.layers\.1\.mlp\.gate_proj|mlp\.gate_proj of block 1)"
    with pytest.raises(ValueError, match=rf"{step}: {named} holds NaN or infinity for `batches\[5\]`"):
        apply(methods, model, batches, calibrate=calibrate)


@pytest.mark.parametrize("recipe", ["rtn(group_size=16)", "smoothquant", "wanda", "layer_drop(count=1, target=mlp)"])
@pytest.mark.parametrize("block", [0, 1])
def test_an_error_says_in_which_state_the_model_is(recipe, block, tiny, tokens):
    """As it was, or partly compressed: then nothing goes on from it, and nothing saves it."""
    model, batches = tiny("llama"), [batch.clamp(min=UNUSUAL + 1) for batch in tokens(8)]
    ids, before = tokens(1, seed=3)[0], {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(ids).logits
    batches[5][0, 3] = UNUSUAL
    model.get_input_embeddings().weight[UNUSUAL] = 1e4
    before["model.embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
    norm = model.model.layers[block].input_layernorm
    handle = norm.register_forward_hook(lambda _, x, y: y.masked_fill(x[0].amax(-1, keepdim=True) > 5e3, float("nan")))
    with pytest.raises(ValueError, match="the model in memory is") as error:
        apply(parse_recipe(recipe), model, batches)
    handle.remove()
    now = model.state_dict()
    if "as it was" in str(error.value):
        assert now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)
        assert torch.equal(model(ids).logits, logits)
        apply(parse_recipe("rtn(group_size=16)"), model)
        return
    assert block == 1 and "partly compressed: load it again" in str(error.value)
    with pytest.raises(ValueError, match=r"`model` is partly compressed: an earlier `apply` stopped \(NotFinite\)"):
        apply(parse_recipe(recipe), model, tokens())
    if any(isinstance(module, CompressedLinear) for module in model.modules()):
        with pytest.raises(ValueError, match="`save_pretrained` cannot write compressed weights"):
            model.save_pretrained("nowhere")


def test_any_error_says_in_which_state_the_model_is(tiny, tokens, monkeypatch):
    solve, calls = METHODS["rtn"].solve, iter([True] * 8)

    def stops(self, W, statistics):
        if not next(calls, False):
            raise KeyboardInterrupt
        return solve(self, W, statistics)

    monkeypatch.setattr(METHODS["rtn"], "solve", stops)
    model = tiny("llama")
    with pytest.raises(KeyboardInterrupt) as error:
        apply_each({"one": [METHODS["rtn"](group_size=16)]}, model, tokens())
    assert not hasattr(error.value, "__notes__") and not any(isinstance(m, CompressedLinear) for m in model.modules())
    with pytest.raises(KeyboardInterrupt) as error:
        apply([METHODS["rtn"](group_size=16)], model, tokens())
    assert error.value.__notes__ == ["After this error the model in memory is as it was."]
    calls = iter([True] * 8)
    with pytest.raises(KeyboardInterrupt) as error:
        apply([METHODS["rtn"](group_size=16)], model, tokens())
    assert "partly compressed: load it again before another try" in error.value.__notes__[0]
    with pytest.raises(ValueError, match=r"an earlier `apply` stopped \(KeyboardInterrupt\)"):
        apply_each({"one": [METHODS["rtn"](group_size=16)]}, model, tokens())


@pytest.mark.parametrize(
    "where, name", [("blocks", "model.layers.0.self_attn.q_proj"), ("embedding", "model.embed_tokens")]
)
def test_a_result_that_is_not_finite_is_refused(where, name, tiny, tokens, monkeypatch):
    solve = METHODS["rtn"].solve
    monkeypatch.setattr(METHODS["rtn"], "solve", lambda self, W, statistics: solve(self, W / 0, statistics))
    with pytest.raises(ValueError, match=f"rtn: the error of {name} is nan"):
        apply([METHODS["rtn"](group_size=16, where=where)], tiny("llama"), tokens())


def test_seconds_wait_for_the_device(tiny, monkeypatch):
    """A GPU computes after its calls have returned: the clock waits for it before and after a linear is solved."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    clock(torch.device("cuda", 0)), clock(DEVICE)
    assert waited == [torch.device("cuda", 0)]
    ticks = iter(range(0, 1000, 7))
    monkeypatch.setattr(walk, "clock", lambda device: next(ticks))
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    assert [layer.seconds for layer in result.layers] == [7.0] * 14
