"""Peak memory and disk of a compression: predicted, refused where they are too much, measured."""

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from compress import METHODS, apply, memory
from compress.memory import predicted
from compress.method import settle
from compress.recipe import parse_recipe
from compress.walk.offload import named_tensors, put_on_disk
from compress.walk.window import in_window
from kernels.support import units
from kernels.support.units import bytes_of, memory_limit

GPTQ = "gptq(bits=3, group_size=16, min_tokens=8)"


def test_sizes_are_read_as_people_write_them():
    assert bytes_of("6GB") == 6 * 10**9 and bytes_of("1.5 GiB") == 3 << 29 and bytes_of("512 mib") == 1 << 29
    assert bytes_of(1000) == 1000 and bytes_of(None) is None and bytes_of("") is None
    assert bytes_of("1e6") == bytes_of("1MB") == 10**6 and bytes_of(".5kB") == 500 and bytes_of(" ") is None
    with pytest.raises(ValueError, match="`memory` .*'much'"):
        bytes_of("much", "memory")
    for wrong in ("much", "0", "0.5", "-1GB", "6 apples", "1.2.3", "1e999", True):
        with pytest.raises(ValueError, match="`max_memory` .* must be a number of bytes, or a text such as '6GB'"):
            bytes_of(wrong)


def test_a_limit_above_the_memory_of_the_machine_is_refused(tiny, tokens, monkeypatch):
    monkeypatch.setattr(units.psutil, "virtual_memory", lambda: SimpleNamespace(total=23 * 10**9))
    assert memory_limit("23GB") == 23 * 10**9 and memory_limit("") is None and memory_limit("1GB", "--memory") == 10**9
    for limit, shown in (("500GB", "'500GB'"), (23 * 10**9 + 1, "23000000001")):
        said = rf"`max_memory` \(={shown}\) is more than the memory of this machine; it must be at most 23.0 GB"
        with pytest.raises(ValueError, match=said):
            apply(parse_recipe("rtn(group_size=16)"), tiny("llama"), tokens(), max_memory=limit)
        with pytest.raises(ValueError, match=said), in_window(put_on_disk(tiny("llama")), limit):
            pass
    properties = SimpleNamespace(total_memory=8 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with pytest.raises(ValueError, match="more than the memory of cuda:0; it must be at most 8.0 GB"):
        memory_limit("9GB", device=torch.device("cuda:0"))


def test_a_container_has_the_memory_of_its_limit(monkeypatch):
    given = iter(("1000000\n", "max\n"))
    monkeypatch.setattr(units.Path, "read_text", lambda _: next(given))
    assert units.memory_of() == 10**6 and units.memory_of() == units.psutil.virtual_memory().total


@pytest.fixture
def steady(monkeypatch):
    """The process takes the same memory in every prediction."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=10**9))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)


def test_the_prediction_follows_what_is_asked(tiny, tokens, steady):
    model = tiny("llama")
    few, many = tokens(4, 100), tokens(400, 100)

    def added(recipe: str, batches, of=model) -> int:
        return predicted(parse_recipe(recipe), of, batches).predicted_peak

    assert added(GPTQ, few) < added(GPTQ, many)
    assert added(GPTQ.replace(")", ", sequential=False)"), many) < added(GPTQ, many)
    assert added("rotate", few) < added("rotate(steps=1)", few)
    assert added("flatquant", few) < added("flatquant(steps=1)", few)
    assert added("rotate(steps=1)", few) == added("rotate(steps=9)", few) < added("rotate(steps=1)", tokens(4, 200))
    on_disk = put_on_disk(tiny("llama"))
    bits = [predicted(parse_recipe(f"rtn(bits={b}, group_size=16)"), on_disk, ()).predicted_disk for b in (2, 4, 8)]
    assert bits == sorted(bits) and bits[0] < bits[2]
    assert predicted(parse_recipe("rtn(group_size=16)"), model, ()).predicted_disk == 0
    assert predicted(parse_recipe("smoothquant"), on_disk, few).predicted_disk > bits[2]


def test_the_prediction_follows_what_drops_leave(tiny, tokens, steady, monkeypatch):
    """Training of plain weights holds six copies of what is left; what is cut is in memory beside what is left of it."""
    monkeypatch.setattr(memory, "product_dtype", lambda model: torch.float32)
    model, text = tiny("llama", hidden_size=256, intermediate_size=4096), tokens(4, 24)

    def added(recipe: str) -> int:
        return predicted(settle(parse_recipe(recipe)), model, text).predicted_peak

    mlps = sum(p.nbytes for name, p in model.named_parameters() if ".mlp." in name)
    trained = [added(f"width(ratio={ratio}), distil(train=weights, minutes=0)") for ratio in (0.25, 0.5, 0.75)]
    for less, more in itertools.pairwise(trained):
        gone = (less - more) / (0.25 * mlps)  # the weights themselves, six copies, and some activations
        assert 7 <= gone <= 7.5, gone
    assert added("width(ratio=0.25)") - added("width(ratio=0.5)") == pytest.approx(0.25 * mlps, rel=0.05)
    dropped, all_of_it = added("layer_drop(count=1), distil(train=weights, minutes=0)"), added("layer_drop(count=1)")
    attention = sum(p.nbytes for name, p in model.named_parameters() if ".0.self_attn." in name and p.dim() == 2)
    assert dropped - all_of_it == pytest.approx(6 * (mlps + attention), rel=0.1)
    assert {p.device.type for p in model.parameters()} == {"cpu"} and model.config.intermediate_size == 4096


def test_training_that_would_not_fit_is_refused_with_gradient_checkpointing(tiny, tokens, steady, monkeypatch):
    model, text, recipe = tiny("llama"), tokens(4, 512), "rtn(group_size=16), distil(minutes=0)"
    by_blocks = recipe.replace("minutes=0", "minutes=0, gradient_checkpointing=True")
    less = predicted(settle(parse_recipe(by_blocks)), model, text).predicted_peak
    with pytest.raises(ValueError, match=r"what would fit: .*gradient_checkpointing=True of distil"):
        predicted(settle(parse_recipe(recipe)), model, text, less + 1000)
    assert predicted(settle(parse_recipe(by_blocks)), model, text, less + 1000).predicted_peak == less


def test_a_compression_over_the_limit_is_refused_with_alternatives_that_fit(tiny, tokens):
    model, batches = tiny("llama"), tokens(500, 100)
    most, least = (predicted(parse_recipe(r), model, batches).predicted_peak for r in (GPTQ, "rtn(group_size=16)"))
    with pytest.raises(ValueError, match=r"`max_memory` \(=0.00 GB\): this compression needs .*; nothing less fits"):
        apply(parse_recipe(GPTQ), model, batches, max_memory=1000)
    assert not any(module.__class__.__name__ == "CompressedLinear" for module in model.modules())
    usage = apply(parse_recipe("rtn(group_size=16)"), model, max_memory=most + (1 << 30)).usage
    assert usage.max_memory == most + (1 << 30) and usage.activations == "memory" and usage.peak > 0 and least > 0


def test_activations_go_to_disk_where_they_would_not_fit(tiny, tokens, monkeypatch):
    peaks = {"memory": 2000, "disk": 1000}
    monkeypatch.setattr(memory._Case, "peak", lambda case: peaks[case.activations])
    recipe = parse_recipe(GPTQ)
    fits, tight = (apply(recipe, put_on_disk(tiny("llama")), tokens(), max_memory=m) for m in (2000, 1500))
    assert (fits.usage.activations, tight.usage.activations) == ("memory", "disk")
    same = zip(named_tensors(fits.model), named_tensors(tight.model), strict=True)
    assert all(a == b and torch.equal(s, t) for (a, s), (b, t) in same)
    with pytest.raises(ValueError, match="max_memory"):
        apply(recipe, put_on_disk(tiny("llama")), tokens(), max_memory=500)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "recipe", ["rtn(group_size=16)", pytest.param(GPTQ, marks=pytest.mark.slow), "smoothquant", f"wanda, {GPTQ}"]
)
def test_disk_is_predicted_within_what_blocks_round(recipe, tiny, tokens):
    """A file has a header, and a tiny block hardly more; the prediction never says too little."""
    usage = apply(
        parse_recipe(recipe), put_on_disk(tiny("llama", hidden_size=256, intermediate_size=512)), tokens()
    ).usage
    assert usage.disk == pytest.approx(usage.predicted_disk, rel=0.15, abs=20_000)


MEASURE = """
import json, sys
import torch
from compress import apply, calibration, load_model
from compress.recipe import parse_recipe

model, tokenizer = load_model("smollm2-135m", weights=sys.argv[2])
batches = calibration(tokenizer, corpus="c4", samples=32, seqlen=512)
usage = apply(parse_recipe(sys.argv[1]), model, batches).usage
print(json.dumps([usage.peak, usage.predicted_peak, usage.disk, usage.predicted_disk]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["memory", "disk"])
@pytest.mark.parametrize(
    "recipe",
    [
        "gptq",
        "smoothquant, int8",
        "rotate(steps=2)",
        "flatquant(steps=2)",
        "width(ratio=0.33), distil(train=weights, steps=3, minutes=0)",
        "rtn, distil(train=scales, steps=3, minutes=0, gradient_checkpointing=True)",
    ],
)
def test_the_embedded_model_takes_what_was_predicted(recipe, weights, data):
    command = [sys.executable, "-c", MEASURE, recipe, weights]
    why = {"rotate": "has its weights on disk, where rotate cannot fold", "width": "width needs the model in memory"}
    why["rtn, distil"] = "distil keeps gradients for the whole model in memory"
    if (cannot := recipe.partition("(")[0]) in why and weights == "disk":
        refused = subprocess.run(command, text=True, capture_output=True)
        assert refused.returncode and why[cannot] in refused.stderr
        return
    told = subprocess.check_output(command, text=True).splitlines()[-1]
    peak, predicted, disk, predicted_disk = json.loads(told)
    assert abs(peak / predicted - 1) <= 0.15
    assert weights == "memory" or abs(disk / predicted_disk - 1) <= 0.15


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if hasattr(method, "working_set")])
def test_every_method_says_what_it_holds(name):
    per_weight, per_gram = METHODS[name]().working_set
    assert per_weight >= 1 and per_gram >= 0
