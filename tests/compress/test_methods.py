"""One matrix over METHODS: what every method must do, whatever it is. What acts on caches has another, in
test_kv_cache.py."""

import copy
import dataclasses
import re

import pytest
import torch

from compress import METHODS, apply
from compress.formats import Dense
from compress.linear import CompressedLinear, compressed_linears, shape_of
from compress.method import STAGES
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.offload import named_tensors, put_on_disk
from tests.architectures import ALIKE, KINDS

# The knobs with which each method is tried on the tiny models; a new method adds its row here.
ROWS = {
    "rtn": {"bits": 4, "group_size": 16},
    "gptq": {"bits": 4, "group_size": 16, "min_tokens": 8},
    "gptaq": {"bits": 4, "group_size": 16, "min_tokens": 8},
    "awq": {"bits": 4, "group_size": 16},
    "nf4": {"group_size": 16},
    "bnb_nf4": {"blocksize": 32},
    "finequant": {},
    "svd": {"ratio": 0.2},
    "mixed": {"choices": "rtn(bits={4, 8}, group_size=16)", "tokens": 32},
    "magnitude": {"ratio": 0.2},
    "random": {"ratio": 0.005},
    "wanda": {"pattern": "3:4"},
    "sparsegpt": {"ratio": 0.2, "bits": 8, "group_size": 16, "min_tokens": 8},
    "layer_drop": {"target": "mlp", "count": 1},
    "layer_skip": {"speed": 1.4},
    "width": {"ratio": 0.25, "multiple": 1},
    "expert_drop": {"ratio": 0.25},
    "smoothquant": {"alpha": 0.6},
    "rotate": {},
    "flatquant": {"steps": 2},
    "gather": {},
    "activations": {"bits": 8, "group_size": 16},
    "teal": {"ratio": 0.05},
    "int8": {"activations": "tensor"},
    "fp8": {"weights": "block"},
    "llm_int8": {"threshold": 2.0},
    "bnb_int8": {},
    "squeezellm": {"largest": 0.02},
    "any_precision": {"bits": 4},
    "bitstack": {"rank": 4, "blocks": 6},
    "qtip": {"bits": 4, "states": 12, "min_tokens": 8},
    "qmoe": {"reach": 0.7, "min_tokens": 8},
    "low_rank": {"rank": 4},
    "outlier_entries": {"share": 0.01},
    "salient_signs": {"share": 0.2},
    "tune": {"steps": 4},
    "distil": {"steps": 4, "minutes": 0.0},
    "svdquant": {"rank": 4},
    "smooth_keys": {},
}
RTN = METHODS["rtn"](bits=4, group_size=16)
BEFORE = {"correct": [RTN], "tune": [RTN], "recover": [RTN]}  # by stage: what must be stored already
EXACT = {
    "svd": {"ratio": 0.0, "bits": 8},
    "finequant": {"alpha": 0.0},
    "mixed": {"choices": "rtn(bits=8, group_size=16)"},
    "llm_int8": {"threshold": 0.0, "most": 0.25},  # as many columns in 16 bits as there may be
}
WEIGHTS = [name for name, method in METHODS.items() if method.stage != "cache"]
COARSE = {"qmoe"}  # three values a row: far from the original in a tiny model
AS_IT_WAS = {
    "rotate",
    "flatquant",
    "gather",
    "activations",
    "teal",
}  # they keep what was stored before, or the weight itself
STORING = [name for name, method in METHODS.items() if issubclass(method, LayerwiseMethod)]


def recipe_of(name, **knobs):
    """The shortest recipe in which a method can act, with the knobs of its row and these."""
    method = METHODS[name](**ROWS[name] | knobs)
    return [*BEFORE.get(method.stage, []), method]


def in_turns(names, every, first):
    """Of these methods one of so many, beginning with the one of this number; `make test-all` takes all."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (i % every != first)) for i, n in enumerate(names)]


def test_every_method_has_a_row():
    assert set(ROWS) == set(WEIGHTS)


@pytest.mark.parametrize("name", METHODS)
def test_knobs_describe_themselves(name):
    method = METHODS[name]()
    assert method.name == name and method.source and type(method).__doc__
    assert method.stage in [stage.rstrip("*") for stage in STAGES]
    for field in method.knobs().values():
        assert field.metadata["help"], f"{name}.{field.name} has no help"
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.name = "other"


# Each method meets one of these kinds here, in turn; `make test-all` takes every method on every architecture.
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
REFUSED = {
    "smooth_keys": {"gpt2", "phi3", "gpt_neox"},
    "width": EXPERTS,
    "expert_drop": {*sum(KINDS, ()), *ALIKE} - EXPERTS,
}  # one linear gives queries and keys there


def on_architectures():
    for turn, name in enumerate(WEIGHTS):
        kind = KINDS[turn % len(KINDS)]
        for architecture in (*sum(KINDS, ()), *ALIKE):
            marks = [] if architecture == kind[turn % len(kind)] else [pytest.mark.slow]
            yield pytest.param(name, architecture, marks=marks, id=f"{architecture}-{name}")


@pytest.mark.parametrize("name, architecture", on_architectures())
def test_every_architecture(name, architecture, tiny, tokens):
    """Compressed in place, finite, close to the original, every weight accounted for."""
    ids, model = tokens(1, 17)[0], tiny(architecture)
    before = model(ids).logits
    parameters = sum(p.numel() for p in model.parameters())
    if architecture in REFUSED.get(name, ()):
        with pytest.raises(ValueError, match=f"`(model|target)`.*{name}"):
            apply(recipe_of(name), model, tokens())
        return
    result = apply(recipe_of(name), model, tokens())
    after = result.model(ids).logits
    assert result.model is model
    gone = sum(drop.parameters for drop in result.drops)
    assert ((after - before).norm() / before.norm()).item() < (1.5 if gone or name in COARSE else 0.5), (
        "a layer of two is much"
    )
    linears = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    assert len(linears) == len(result.layers) and bool(linears) == (
        name in (*STORING, *AS_IT_WAS) or METHODS[name]().stage in BEFORE
    )
    assert result.layers or result.folds or gone
    biases = sum(m.bias.numel() for m in linears if m.bias is not None)
    kept = sum(torch.Size(k["shape"]).numel() for k in result.kept)
    assert kept + biases + sum(r.shape[0] * r.shape[1] for r in result.layers) == parameters - gone
    assert all(k["reason"] for k in result.kept)
    assert result._repr_html_() and str(result)


# Whatever differs from run to run differs in test_weights_on_disk_give_the_same_bits, too, which takes all but these.
NOT_ON_DISK = ("rotate", "distil", "width", "expert_drop")  # which refuse weights on disk
ARCHITECTURE = {"expert_drop": "mixtral"}  # on which a method is tried alone, if not llama
TWICE = [pytest.param(name, marks=[pytest.mark.slow] * (name not in NOT_ON_DISK)) for name in WEIGHTS]


@pytest.mark.parametrize("name", TWICE)
def test_two_runs_give_the_same(name, tiny, tokens):
    one, two = (apply(recipe_of(name), tiny(ARCHITECTURE.get(name, "llama")), tokens()) for _ in range(2))
    for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", in_turns(WEIGHTS, 3, 0))
def test_stored_formats_are_predicted(name, tiny, tokens):
    *before, method = recipe_of(name, **EXACT.get(name, {}))
    model = apply([*before, method], tiny(ARCHITECTURE.get(name, "llama")), tokens()).model
    for linear in compressed_linears(model).values():
        shape = linear.out_features, linear.in_features
        dense = [Dense.spec_of(shape)] if name in AS_IT_WAS else []
        assert linear.spec()["parts"] == [
            *dense,
            *(part for one in (*before, method) for part in one.stores(shape) or []),
        ]
    assert (method.stores((64, 64)) is None) == (name not in STORING or name in AS_IT_WAS)


@pytest.mark.parametrize("name", in_turns(STORING, 3, 1))
def test_skip_leaves_linears_alone_and_says_why(name, tiny, tokens):
    *before, method = recipe_of(name, skip="*.down_proj, *.0.self_attn.*")
    before = [dataclasses.replace(one, skip=method.skip) for one in before]
    result = apply([*before, method], tiny("llama"), tokens())
    assert not any("down_proj" in r.name or ".0.self_attn" in r.name for r in result.layers)
    assert len([k for k in result.kept if k["reason"].startswith("named by skip")]) == 6
    with pytest.raises(ValueError, match="`skip`"):
        apply(recipe_of(name, skip="*"), tiny("llama"), tokens())


@pytest.mark.parametrize("name", [n for n in WEIGHTS if "group_size" in METHODS[n].knobs()])
def test_group_sizes_that_divide_nothing(name, tiny, tokens):
    model = tiny("llama")
    with pytest.raises(
        ValueError, match=r"`group_size` \(=48\) must divide in_features \(=64\).*divisors near it: 16, 32, 64"
    ):
        apply([METHODS[name](**{**ROWS[name], "group_size": 48})], model, tokens())
    assert not any(isinstance(m, CompressedLinear) for m in model.modules()), "no work was done"
    result = apply([METHODS[name](**{**ROWS[name], "group_size": -1})], model, tokens())
    linears = compressed_linears(result.model).values()
    assert all(getattr(m.transform or m.parts[0], "group_size", None) in (-1, shape_of(m)[1]) for m in linears)


@pytest.mark.parametrize("name", in_turns([name for name in WEIGHTS if name not in NOT_ON_DISK], 3, 2))
def test_weights_on_disk_give_the_same_bits(name, tiny, tokens):
    model, ids = tiny("llama"), tokens(1, 17)[0]
    recipe = recipe_of(name)
    on_disk = apply(recipe, put_on_disk(copy.deepcopy(model)), tokens())
    in_memory = apply(recipe, model, tokens())
    assert in_memory.identity == on_disk.identity
    stored = dict(named_tensors(on_disk.model))
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, stored[key]) for key, tensor in model.state_dict().items())
    assert [(r.name, r.error, r.notes) for r in on_disk.layers] == [
        (r.name, r.error, r.notes) for r in in_memory.layers
    ]
    assert torch.equal(on_disk.model(ids).logits, model(ids).logits)
    assert all(p.is_meta for p in on_disk.model.parameters()), "nothing stays in memory"


@pytest.mark.parametrize("pattern, near", [
    ("*.down_prj", r"\*\.down_proj"), ("model.layers.0", r"model\.layers\.0\.\*"), ("q_proj", r"\*\.q_proj"),
])  # fmt: skip
def test_patterns_of_skip_that_name_nothing_are_refused(pattern, near, tiny):
    for skip in (pattern, f"*.up_proj, {pattern}"):
        with pytest.raises(ValueError, match=rf"`skip` .* is named '{re.escape(pattern)}'; near it: .*{near}"):
            apply([METHODS["rtn"](group_size=16, skip=skip)], tiny("llama"))
    apply([METHODS["rtn"](group_size=16, skip="lm_head, model.embed_tokens")], tiny("llama"))  # outside the blocks
