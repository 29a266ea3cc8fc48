"""The predicted cost of a token: counted by hand, by torch, and against the bytes of checkpoints."""

import copy
import itertools
import json
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compress import METHODS, apply
from compress.kv.attach import attach
from compress.walk.experts import split_experts
from eval.machine.size import size
from eval.record.reading import plain, row
from eval.record.serving import Combination, fastest, largest
from eval.record.speed import Cost, CostCeilings, CostRow, GridRow, Speed, TimingSettings
from eval.speed.cost import combine, cost_model, predict, speed_rows
from eval.speed.work import CacheLayer, Experts, Work, cache_bytes_per_token, stored_bytes, work
from kernels.harness.roofline import Ceilings
from kernels.support.deploy import deployed
from notebooks.study.costs import outline, plain_weights

CEILINGS = Ceilings(1000.0, {"bfloat16": 4000.0, "float32": 2000.0})


def test_a_tiny_llama_by_hand(tiny):
    """Hidden 64, MLP 96, 2 blocks, 4 heads of 16 with 2 of keys, 96 words; float32."""
    block = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    found = work(tiny("llama"))
    assert found.macs == 2 * block + 96 * 64
    assert found.bytes_once == 4 * (2 * block + 96 * 64 + 5 * 64), "five norms" and found.bytes_a_row == 4 * 64
    assert found.cache_bytes(10, 3) == 3 * 10 * 2 * (2 * 2 * 16) * 4, "blocks, keys and values, heads, channels"
    assert found.flops(10, 3) == 2 * 3 * (2 * block + 96 * 64 + 10 * 2 * 4 * (16 + 16))
    assert not found.experts and found.dtype == "float32"
    half = work(deployed(tiny("llama")))
    assert half.weight_bytes(2) == found.weight_bytes(2) / 2 and half.dtype == "bfloat16"
    assert work(tiny("llama", tie_word_embeddings=True)).bytes_once == found.bytes_once, (
        "a tied head is read as a matrix"
    )


@pytest.mark.parametrize("recipe", ["snapkv(budget=0.5)", "kv_int(bits=4)", "quest(budget=0.5, page=2, full_layers=0)"])
def test_a_cache_that_a_method_compresses_counts_as_the_one_that_is_timed(tiny, recipe):
    """Every model is timed with a static cache in 16 bits, so that what is attached changes no prediction."""
    model = tiny("llama")
    plain, half = work(model), work(deployed(model))
    attach(model, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain.cache_bytes(10, 3) > 0 and work(model) == plain and work(deployed(model)) == half


@torch.no_grad()
def test_operations_are_those_that_torch_counts(any_model):
    any_model.set_attn_implementation("eager")
    any_model.config._experts_implementation = "eager"
    found = work(any_model)
    for batch in (1, 3):
        ids = torch.randint(96, (batch, 20))
        cache = any_model(ids[:, :-1], use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counted:
            any_model(ids[:, -1:], past_key_values=cache, use_cache=True)
        assert found.flops(20, batch) == counted.get_total_flops()


def counted_by_torch(model, batch: int = 2, tokens: int = 20) -> tuple[float, float]:
    """Operations of a step behind `tokens` - 1 ones as torch counts them, and the bytes that a sequence keeps then."""
    ids = torch.randint(96, (batch, tokens))
    output = model(ids[:, :-1], use_cache=True)
    name = next(name for name in ("past_key_values", "cache_params") if output.get(name) is not None)
    held = [value for layer in output[name].layers for value in vars(layer).values()]
    held += [value for values in held if isinstance(values, dict) for value in values.values()]
    kept = sum(t.nbytes for t in held if isinstance(t, Tensor) and t.is_floating_point()) / batch
    with FlopCounterMode(display=False) as counted:
        model(ids[:, -1:], use_cache=True, **{name: output[name]})
    return counted.get_total_flops(), kept


# Beside the usual ones: caches that layers share; experts in one matrix, and experts without weights; layers that run
# twice; states of linear attention and of state spaces; convolutions; short ones beside a cache; experts that all use.
UNUSUAL = {"gemma4_text": 0.0, "gemma3n_text": 0.03, "dbrx": 0.0, "ernie4_5_moe": 0.0, "hrm_text": 0.0, "zaya": 0.01,
           "qwen3_next": 0.03, "lfm2": 0.01, "mamba2": 0.03, "jamba": 0.03, "falcon_h1": 0.01, "inkling_text": 0.03,
           "qwen2_moe": 0.0, "zamba2": 0.02}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("architecture", UNUSUAL)
def test_unusual_layers_are_counted(architecture, tiny):
    """Operations within what elementwise ones make, bytes exactly; windows keep one position less than a step sees."""
    model = tiny(architecture, num_hidden_layers=4)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    found, (operations, kept) = work(model), counted_by_torch(model)
    assert found.flops(20, 2) == pytest.approx(operations, rel=UNUSUAL[architecture] or 1e-9)
    windows = sum(layer.bytes for layer in found.cache if layer.window)
    assert found.kept_bytes(19) == kept + windows
    assert found.cache_bytes(20, 3) >= 3 * found.kept_bytes(20), "shared caches are read by several layers"


@torch.no_grad()
def test_latent_attention_multiplies_the_latents(tiny):
    """By hand; the model's own code, which makes all keys and values anew in every step, does more."""
    model = tiny("deepseek_v3", num_hidden_layers=2)
    config, found = model.config, work(model)
    latent, rotated, heads = config.kv_lora_rank, config.qk_rope_head_dim, config.num_attention_heads
    assert [layer.bytes for layer in found.cache] == 2 * [4 * (latent + rotated)]
    assert [layer.macs for layer in found.cache] == 2 * [heads * (2 * latent + rotated)]
    assert [layer.prompt_macs for layer in found.cache] == 2 * [
        heads * (config.qk_nope_head_dim + rotated + config.v_head_dim)
    ]
    operations, kept = counted_by_torch(model)
    assert found.kept_bytes(19) == kept and found.flops(20, 2) < operations


@torch.no_grad()
def test_an_indexer_limits_what_a_query_attends_to(tiny):
    """All positions are kept, and their index keys are read."""
    model = tiny("deepseek_v32", num_hidden_layers=2)
    config, found = model.config, work(model)
    latents, index = found.cache[:2]
    assert index.bytes == 4 * config.index_head_dim and index.macs == config.index_n_heads * config.index_head_dim
    many = config.index_topk + 50
    assert latents.attended(many) == config.index_topk and latents.positions(many) == index.attended(many) == many
    assert found.cache_bytes(many, 1) == 2 * (latents.bytes * config.index_topk + index.bytes * many)
    assert found.kept_bytes(many) == 2 * (latents.bytes + index.bytes) * many
    assert found.kept_bytes(19) == counted_by_torch(model)[1]
    assert cache_bytes_per_token(config) == found.kept_bytes(1) / 2, "in 16 bits instead of 32"


@torch.no_grad()
def test_modules_that_no_step_runs_are_not_counted(tiny):
    """As the tower for images of a model that reads text; a module that its parent reads without calling it is."""
    model = tiny("llama")
    plain = work(model)
    model.tower = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 2), torch.nn.ModuleList([torch.nn.Linear(64, 64)]))
    found = work(model)
    assert (found.bytes_once, found.macs) == (plain.bytes_once, plain.macs) and found.repeats["tower.0"] == 0


@torch.no_grad()
def test_experts_without_weights_take_no_part(tiny):
    model = tiny("longcat_flash", num_hidden_layers=2)
    one = work(model).experts[0]
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    assert one.count == experts.num_routed_experts + experts.zero_expert_num
    with_weights = [p[: experts.num_routed_experts] for p in experts.parameters()]
    assert one.bytes == sum(p.nbytes for p in with_weights) == 4 * one.macs


@pytest.mark.parametrize(
    "architecture, why",
    [("deepseek_v4", "its own DeepseekV4"), ("minimax", "its own MiniMaxCache"), ("rwkv", "is no cache of")],
)
def test_what_cannot_be_counted_is_refused(architecture, why, tiny):
    with pytest.raises(ValueError, match=why):
        work(tiny(architecture))


def test_windows_cap_what_is_read(tiny):
    found = work(tiny("gemma3_text"))
    assert [layer.window for layer in found.cache] == [8, None]
    assert found.cache_bytes(100, 1) == (8 + 100) * 2 * 2 * 16 * 4 and found.cache_bytes(5, 1) == 2 * 5 * 2 * 2 * 16 * 4


def test_experts_that_a_batch_is_expected_to_reach():
    pairs = list(itertools.combinations(range(4), 2))
    for batch in (1, 2, 3):
        reached = [len(set().union(*rows)) / 4 for rows in itertools.product(pairs, repeat=batch)]
        assert Experts(1.0, 1.0, 4, 2).reached(batch) == pytest.approx(sum(reached) / len(reached))
    assert Experts(1.0, 1.0, 4, 4).reached(1) == 1


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_count_by_how_many_are_active(tiny, architecture):
    model = tiny(architecture)
    every = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    found = work(model)
    share = 2 / model.config.num_local_experts if architecture != "qwen2_moe" else 2 / 4
    assert sum(e.bytes for e in found.experts) == every and len(found.experts) == 2
    whole = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert found.weight_bytes(1) == pytest.approx(whole - every + share * every + 64 * 4)
    split = copy.deepcopy(model)
    split_experts(split)
    assert work(split).weight_bytes(3) == pytest.approx(found.weight_bytes(3)), "the same experts as linears"
    assert work(split).flops(9, 3) == pytest.approx(found.flops(9, 3))


@pytest.mark.parametrize(
    "recipe",
    [
        [METHODS["rtn"](bits=4, group_size=32)],
        [METHODS["nf4"](group_size=32)],
        [METHODS["magnitude"](ratio=0.5)],
    ],
    ids=["integers", "table", "bitmap"],
)
def test_compressed_weights_count_as_they_are_stored(tiny, tokens, recipe):
    model = tiny("qwen2")
    small = deployed(apply(recipe, copy.deepcopy(model), tokens(2)).model)
    table = small.get_input_embeddings().weight
    found = work(small)
    assert found.weight_bytes(1) == size(small).stored_bytes - table.nbytes + table[0].nbytes
    assert found.flops(9, 1) == work(model).flops(9, 1), "as many products as before"


def test_compressed_experts(tiny, tokens):
    model = tiny("mixtral")
    small = deployed(apply([METHODS["rtn"](bits=4, group_size=32)], copy.deepcopy(model), tokens(2)).model)
    found, table = work(small), small.get_input_embeddings().weight
    routed = sum(e.bytes for e in found.experts)
    assert found.bytes_once + routed == size(small).stored_bytes - table.nbytes
    assert routed < 0.4 * sum(e.bytes for e in work(deployed(model)).experts) and found.flops(9, 2) == work(
        model
    ).flops(9, 2)


def test_predictions_are_the_longer_of_two(tiny):
    found = work(tiny("llama"))

    def at(ceilings: Ceilings, context: int = 10, batch: int = 1) -> CostRow:
        return predict("", found, context=context, batch=batch, ceilings=ceilings)

    one = at(Ceilings(1000.0, {"float32": 1e9}))
    assert one.bound == "memory" and one.predicted_s == pytest.approx((one.weight_bytes + one.cache_bytes) / 1000)
    other = at(Ceilings(1e9, {"float32": 1000.0, "bfloat16": 1.0}))
    assert other.bound == "compute" and other.predicted_s == pytest.approx(one.flops / 1000)
    assert at(Ceilings(1000.0, {})).bound == "memory", "no rate: bytes alone"
    longer, more = at(CEILINGS, context=100), at(CEILINGS, batch=8)
    assert longer.cache_bytes == 10 * one.cache_bytes and longer.weight_bytes == one.weight_bytes
    assert more.weight_bytes - one.weight_bytes == 7 * 64 * 4 and more.flops == 8 * one.flops, (
        "weights are read once a batch"
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral"])
def test_weights_count_once(architecture, tiny):
    for tied in (True, False):
        model = tiny(architecture, tie_word_embeddings=tied)
        with torch.device("meta"):
            outline = type(model)(model.config)
        wanted = sum(p.nbytes for p in model.parameters())  # without repetition
        assert stored_bytes(model) == stored_bytes(outline) == wanted == size(model).stored_bytes


STEP = Work(400.0, 0.0, 200.0, (), (CacheLayer(2.0, 3.0, None, 0),), "bfloat16")  # 20 bytes a sequence of 10 tokens


def in_memory(memory: int, batch: int | None = None, work: Work = STEP, **rooms: int) -> Combination:
    about = {"weight_bytes": 500, "prompt_room": 60, "step_room": 5} | rooms
    return combine("", "", work, **about, memory=memory, context=10, batch=batch, ceilings=CEILINGS)


def test_sequences_that_fit_by_hand():
    assert [in_memory(memory).sequences for memory in (500, 579, 580, 599, 600, 640)] == [0, 0, 1, 1, 2, 4]
    found = in_memory(1000, prompt_room=0)
    assert found.sequences == found.batch == (1000 - 500) // (20 + 5) and found.room == 20 * 5
    assert found.cache_bytes == 20 and found.least == 500 + 20 + 5 and in_memory(600).least == 580
    assert in_memory(600).room == 60


def test_speeds_are_those_of_a_step_of_the_batch():
    one, four = in_memory(640, batch=1), in_memory(640)
    assert one.tokens_per_s == one.alone == four.alone == 1 / ((400 + 20) / 1000) and one.bound == "memory"
    assert four.tokens_per_s == pytest.approx(4 / ((400 + 80) / 1000)) and four.sequences == one.sequences == 4
    many = in_memory(3000)
    assert many.bound == "compute" and many.tokens_per_s == pytest.approx(4000 / (2 * (200 + 30)))
    beyond = in_memory(640, batch=5)
    assert (beyond.batch, beyond.tokens_per_s, beyond.fits, beyond.sequences) == (0, 0, False, 4)


def test_the_most_sequences_and_the_most_tokens():
    slower = Work(400.0, 0.0, 400.0, (), (CacheLayer(1.0, 30.0, None, 0),), "bfloat16")
    found = [in_memory(100), in_memory(3000), in_memory(3000, work=slower)]
    assert largest(found) is found[2] and fastest(found) is found[1]
    assert largest(found[:1]) is fastest(found[:1]) is None


def test_predictions_meet_measurements(tiny):
    models = {"baseline": tiny("llama"), "small": tiny("llama", num_hidden_layers=1)}
    measured = Speed(
        50.0,
        (1, 1),
        1.0,
        (1, 1),
        0.1,
        "bfloat16",
        "compiled",
        {},
        TimingSettings(prompt_tokens=16, new_tokens=8, rounds=1, batch=1, groups=1),
    )
    grid = GridRow("small", batch=4, prompt_tokens=8, new_tokens=3, decode_tokens_per_s=80.0, execution="eager")
    standard = speed_rows({"baseline": measured, "float32": measured})
    cost = cost_model(models, [*standard, grid], CEILINGS, "given")
    assert cost.ceilings == CostCeilings(1000.0, 4000.0, "given")
    shown = [(row.model, row.batch, row.context, row.measured_s, row.execution) for row in cost.rows]
    assert shown == [("baseline", 1, 20, 1 / 50, "compiled"), ("small", 4, 10, 4 / 80, "eager")]
    assert "float32" not in cost.metrics
    half = predict("", work(deployed(models["baseline"])), context=20, ceilings=CEILINGS)
    assert cost.rows[0].predicted_s == half.predicted_s and cost.rows[0].weight_bytes == half.weight_bytes
    assert cost.metrics["baseline"] == {
        "predicted_decode_tokens_per_s": pytest.approx(1 / half.predicted_s),
        "share_of_predicted_speed": pytest.approx(half.predicted_s * 50),
    }
    assert row(Cost, json.loads(json.dumps(plain(cost.found())))) == cost and "<table>" in cost._repr_html_()


def test_positions_that_a_prompt_attends_to():
    """Ten queries: all positions up to their own, at most 4 of a window, at most 3 that are chosen."""
    whole, window, chosen = CacheLayer(1, 1, None), CacheLayer(1, 1, 4), CacheLayer(1, 1, None, chosen=3)
    assert [layer.attended_by(10) for layer in (whole, window, chosen)] == [55, 34, 27]


def test_work_of_nothing_but_weights():
    assert Work(10.0, 2.0, 3.0, (Experts(8.0, 4.0, 4, 2),), (), "bfloat16").weight_bytes(2) == 10 + 4 + 8 * 0.75


def test_published_sizes_of_caches():
    """Of "Insights into DeepSeek-V3" (arXiv:2505.09343, table 1): 70.272, 327.680 and 516.096 kB a token."""
    outlines = [outline(name) for name in ("deepseek-v3", "qwen2.5-72b", "llama-405b")]
    assert [cache_bytes_per_token(model.config) for model in outlines] == [70_272, 327_680, 516_096]
    assert [round(sum(p.numel() for p in model.parameters()) / 1e9) for model in outlines] == [671, 73, 406]
    found = plain_weights("deepseek-v3", outlines[0]).work
    assert sum(layer.bytes for layer in found.cache) == 70_272 and 72e9 < found.weight_bytes(1) < 75e9, "37B a token"


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2", "gemma4_unified_text"])
def test_a_token_of_the_cache_is_what_the_model_keeps(tiny, architecture):
    """By the configuration, and by the model in float32."""
    model = tiny(architecture, layers=4)
    grows = sum(layer.bytes for layer in work(model).cache if layer.window is None)
    assert 2 * cache_bytes_per_token(model.config) == grows
