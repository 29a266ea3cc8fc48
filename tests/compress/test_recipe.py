"""Recipes: read from text, settled before any work, and measured from their first step to their last."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from compress import METHODS, apply
from compress.apply import apply_each
from compress.checkpoint.fits import check_save_format
from compress.formats import Dense
from compress.kv import attach, attached
from compress.linear import sharing_copy, weight_of
from compress.method import Method, knob, settle
from compress.plan import plan
from compress.recipe import methods_of, parse_recipe, parse_recipes, parse_variants, trained_by
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.statistics import Absmax, Rows
from tests.architectures import tiny_model


def test_a_recipe_as_text():
    one, two = parse_recipe("rtn(bits=8, group_size=-1, scale='search'), gptq")
    assert one == METHODS["rtn"](bits=8, group_size=-1, scale="search") and two == METHODS["gptq"]()
    assert parse_recipe(str(one)) == parse_recipe("rtn(bits=8, group_size=-1, scale=search)") == [one], "quoted or not"
    shared = [METHODS["snapkv"](allocation="global"), METHODS["kv_int"]()]
    assert parse_recipe("snapkv(allocation=global), kv_int") == shared, "Python's parser knows `global` as a keyword"
    assert [v.methods for v in parse_variants("snapkv(allocation={uniform, global}), kv_int")[1]][1] == shared
    for path in ("a,in,b", 'from "a, is, b"'):
        assert parse_recipe(f"kvzap(path={path!r}, allocation=global)") == [
            METHODS["kvzap"](path=path, allocation="global")
        ]
    several = parse_recipes("rtn(bits=3); small: rtn(bits=2), gptq ;")
    assert list(several) == ["rtn(bits=3)", "small"] and several["small"] == [METHODS["rtn"](bits=2), METHODS["gptq"]()]
    assert parse_recipes(" ") == {}


def test_values_in_braces_stand_for_a_recipe_each():
    recipes = parse_recipes("rtn(bits={3, 4}), int8; coarse: gptq(bits={2, 3}, scale={search, absmax})")
    assert list(recipes) == [
        "rtn(bits=3), int8", "rtn(bits=4), int8",
        "coarse, 2, search", "coarse, 2, absmax", "coarse, 3, search", "coarse, 3, absmax",
    ]  # fmt: skip
    assert recipes["rtn(bits=3), int8"] == [METHODS["rtn"](bits=3), METHODS["int8"]()]
    assert recipes["coarse, 3, absmax"] == [METHODS["gptq"](bits=3, scale="absmax")]
    line, variants = parse_variants("wanda(ratio={0.3, 0.5, 0.3}), gptq(bits=4)")
    assert line == "wanda(ratio={}), gptq(bits=4)" and [v.values for v in variants] == [("0.3",), ("0.5",)]
    for text, message in (
        ("wanda(ratio={0.3, 0.5})", "several values in braces"),
        ("wanda(ratio={})", "`ratio` of wanda .*braces hold values"),
        ("wanda{0.5}", "must name methods with their knobs"),
        ("gptq(damp={" + ", ".join(f"{i / 1e4}" for i in range(2000)) + "})", "stands for 2000 recipes; at most 1000"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_recipe(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name methods"),
        ("gptq(", "must name methods"),
        ("gtpq", "gtpq is not a method; did you mean gptq?"),
        ("'gptq'", "'gptq' is not a method"),
        ("gptq(4)", "knobs of gptq are given by name: .*bits"),
        ("gptq(bit=4)", "`bit` is not a knob of gptq; did you mean `bits`?"),
        ("gptq(bits=four)", r"`bits` \(='four'\) of gptq must be int"),
        ("gptq(bits=2 + 2)", r"`bits` \(=2 \+ 2\) of gptq must be a literal"),
        ("gptq(bits=7)", r"`bits` \(=7\) of gptq must be one of 1, 2, 3, 4"),
        ("gptq(**{'bits': 4})", "`None` is not a knob"),
    ],
)
def test_text_that_is_no_recipe(text, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: METHODS["gptqq"],
            r"^METHODS\['gptqq'\]: gptqq is not a method; did you mean gptq\? There are rtn, gptq,",
        ),
        (lambda: METHODS[4], r"^METHODS\[4\]: 4 is not a method; there are rtn,"),
        (
            lambda: METHODS["gptq"](bitz=4),
            "^`bitz` is not a knob of gptq; did you mean `bits`\\? It has .*bits, group_size,",
        ),
        (lambda: METHODS["gptq"](4), "^knobs of gptq are given by name: .*bits,"),
        (lambda: METHODS["rtn"](zzz=4), "^`zzz` is not a knob of rtn; it has .*bits,"),
    ],
)
def test_a_misspelt_method_or_knob(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, KeyError) == message.startswith("^METHODS"), "a dictionary's own error is one, too"
    assert METHODS.get("gptqq") is None and "gptqq" not in METHODS


FORMS = ("rtn(bits=4, group_size=16)", METHODS["rtn"](bits=4, group_size=16), ["rtn(bits=4, group_size=16)"])


@pytest.mark.parametrize("form", FORMS)
def test_a_recipe_is_a_recipe_in_every_form(form):
    """A text, a method and a list of either are the same recipe to every function that takes one."""
    (method,) = methods_of(form)
    assert method == METHODS["rtn"](bits=4, group_size=16)
    result = apply(form, model := tiny_model("llama"))
    assert result.recipe == [method] and result.layers and result.model is model
    (found,) = apply_each({"one": form}, model := tiny_model("llama")).values()
    assert found.recipe == [method]
    assert plan(form, model, []).usage.predicted_peak > 0
    check_save_format("gguf", form, model)


@pytest.mark.parametrize("form", ["knorm(budget=4)", METHODS["knorm"](budget=4), [METHODS["knorm"](budget=4)]])
def test_a_method_of_the_cache_in_every_form(form):
    model = tiny_model("llama")
    with attached(model, form) as attachment:
        assert attachment.policy == METHODS["knorm"](budget=4)
    assert attach(model, form).policy == METHODS["knorm"](budget=4)
    with pytest.raises(ValueError, match=r"^`methods`: rtn\(.*\) is not a method of the cache; `apply` takes it"):
        attach(tiny_model("llama"), "rtn")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            None,
            r"`recipe` \(=None\) must be a method, such as METHODS\['gptq'\]\(bits=4\), a list of methods, or a text",
        ),
        (4, r"`recipe` \(=4\) must be a method"),
        ({"rtn": 4}, r"`recipe` \(=\{'rtn': 4\}\) must be a method"),
        (METHODS["gptq"], r"a class has no knobs yet: METHODS\['gptq'\]\(\) has"),
        ([METHODS["gptq"]], r"a class has no knobs yet: METHODS\['gptq'\]\(\) has"),
        ("gptqq", "gptqq is not a method; did you mean gptq"),
        ([4], r"`recipe` holds 4, which is not a method"),
        ([], r"`recipe` \(=\[\]\) must hold at least one method"),
    ],
)
def test_arguments_that_are_no_recipe_are_refused(form, message):
    for call in (apply, lambda form, model: apply_each({"one": form}, model)):
        with pytest.raises(ValueError, match=message):
            call(form, tiny_model("llama"))


def test_two_recipes_of_one_name():
    with pytest.raises(ValueError, match="holds 'rtn' twice; put a name before one, such as: another: rtn"):
        parse_recipes("rtn; rtn")


@dataclass(frozen=True, kw_only=True)
class Halved(LayerwiseMethod):
    """Stands for a method that acts on what another stored: it halves the weight that it meets."""

    name: ClassVar[str] = "halved"
    stage: ClassVar[str] = "quantize_activations"
    source: ClassVar[str] = "this test"
    statistics: ClassVar[tuple[str, ...]] = ("rows",)

    after: str = knob("", "the method before it")

    def within(self, before, after):
        if after:
            raise ValueError("`halved` must be the last")
        return replace(self, after=before[-1].name if before else "")

    def solve(self, W, statistics):
        self.met.append([part.name for part in statistics.stored])
        return [Dense(W / 2)]

    met: ClassVar[list] = []


def test_errors_are_measured_from_the_first_step_to_the_last(tiny, tokens):
    """Whatever the steps in between stored, the record's error is that against the weights that the first one met."""
    model = tiny("llama")
    Halved.met.clear()
    result = apply([METHODS["rtn"](bits=2, group_size=16), Halved()], model, tokens())
    assert result.recipe[1].after == "rtn" and Halved.met[0] == ["int_group"]
    assert len(result.layers) == 14 and {r.format for r in result.layers} == {"dense"}
    original = tiny("llama")
    name = "model.layers.0.self_attn.q_proj"
    record = next(r for r in result.layers if r.name == name)
    seen = []
    original.get_submodule(name).register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, 1)))
    for batch in tokens():
        original(batch)
    X, W = torch.cat(seen), weight_of(original.get_submodule(name))
    expected = ((X @ (W - weight_of(model.get_submodule(name))).t()).square().sum() / (X @ W.t()).square().sum()).item()
    assert record.error == pytest.approx(expected, rel=1e-3)
    assert record.error > 0.2, "halving alone is an error of a quarter"


def test_methods_in_an_impossible_order_are_refused_before_any_work(tiny, tokens):
    model = tiny("llama")
    with pytest.raises(ValueError, match="`halved` must be the last"):
        apply([Halved(), METHODS["rtn"]()], model, tokens())
    with pytest.raises(ValueError, match="must come before"):
        settle([METHODS["rtn"](), _Early()])


@dataclass(frozen=True, kw_only=True)
class _Early(Method):
    name: ClassVar[str] = "early"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "this test"


def test_several_recipes_each_on_a_copy(tiny, tokens):
    model = tiny("llama")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    results = apply_each(
        parse_recipes("rtn(bits=4, group_size=16); coarse: rtn(bits=2, group_size=16)"), model, tokens()
    )
    assert list(results) == ["rtn(bits=4, group_size=16)", "coarse"]
    assert results["coarse"].bits_per_weight < results["rtn(bits=4, group_size=16)"].bits_per_weight
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with pytest.raises(ValueError, match="`group_size`"):
        apply_each(parse_recipes("rtn(bits=4, group_size=16); rtn(group_size=7)"), model, tokens())


G = "group_size=16, min_tokens=8"
BEGIN_ALIKE = (
    f"trained: gptq(bits=3, {G}), rtn(bits=8, group_size=16, where=embedding), distil(train=weights, steps=3, minutes=0);"
    f"as it is: gptq(bits=3, {G}), rtn(bits=8, group_size=16, where=embedding);"
    f"scales: gptq(bits=3, {G}), rtn(bits=8, group_size=16, where=embedding), distil(steps=3, minutes=0);"
    f"alone: gptq(bits=3, {G}); kept: gptq(bits=3, {G}), snapkv(budget=0.5); corrected: gptq(bits=3, {G}), low_rank(rank=2)",
    "eight: rotate, rtn(bits=4, group_size=16), activations(bits=8); four: rotate, rtn(bits=4, group_size=16), "
    f"activations(bits=4); GPTQ: rotate, gptq(bits=4, {G}); smooth: smoothquant, int8; smooth, static: smoothquant, "
    "int8(activations=tensor)",
    f"pruned: layer_drop(target=mlp, count=1), wanda(ratio=0.5), gptq(bits=4, {G}); quantised: layer_drop(target=mlp, count=1), "
    f"gptq(bits=4, {G}); two: layer_drop(target=mlp, count=1), layer_drop(target=attention, count=1); zeros: "
    "layer_drop(target=mlp, count=1), wanda(ratio=0.5), distil(train=weights, steps=2, minutes=0)",
    "dropped: expert_drop(ratio=0.25); four: expert_drop(ratio=0.25), rtn(bits=4, group_size=16); "
    f"GPTQ: expert_drop(ratio=0.25), gptq(bits=4, {G})",
)


@pytest.mark.parametrize(
    "kind, recipes, again, calibrate",
    [
        ("llama", BEGIN_ALIKE[0], 0, "sequential"),
        pytest.param("llama", BEGIN_ALIKE[0], 0, "once", marks=pytest.mark.slow),
        ("llama", BEGIN_ALIKE[1], 0, "sequential"),
        ("llama", BEGIN_ALIKE[2], 1, "sequential"),  # several drops are undone together: not shared in part
        ("llama", BEGIN_ALIKE[2], 1, "once"),
        ("qwen2_moe", BEGIN_ALIKE[3], 1, "sequential"),  # the first recipe alone splits no experts
    ],
)
def test_what_recipes_share_at_their_beginning_is_done_once(kind, recipes, again, calibrate, tiny, tokens, monkeypatch):
    """Each result is the one that its recipe gives alone, to the bit."""
    model, batches, asked = tiny(kind), tokens(), parse_recipes(recipes)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    alone = {name: apply(one, sharing_copy(model), batches, calibrate=calibrate) for name, one in asked.items()}
    applied = []
    for used in map(METHODS.__getitem__, {one.name for recipe in asked.values() for one in recipe}):

        def counted(self, *given, of=used.apply):
            applied.append(str(self))
            return of(self, *given)

        monkeypatch.setattr(used, "apply", counted)
    together = apply_each(asked, model, batches, calibrate=calibrate)
    beginnings = {tuple(map(str, one.recipe[: i + 1])) for one in together.values() for i in range(len(one.recipe))}
    assert len(applied) == len(beginnings) + again < sum(map(len, asked.values()))
    for name, expected in alone.items():
        found = together[name]
        states = found.model.state_dict(), expected.model.state_dict()
        assert states[0].keys() == states[1].keys() and all(
            torch.equal(states[0][k], states[1][k]) for k in states[0]
        ), name
        told = [[replace(one, seconds=0.0) for one in result.layers] for result in (found, expected)]
        assert told[0] == told[1] and found.drops == expected.drops and found.kept == expected.kept, name
        assert found.recipe == expected.recipe and found.seconds > 0, name
        if calibrate == "sequential":  # else the shared pass counts for the first recipe alone
            assert found.kernels == expected.kernels, name
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_rows_are_spread_over_all_that_came_by(monkeypatch):
    monkeypatch.setattr(Rows, "most", 16)
    found = []
    for pieces in ([1] * 100, [100], [7, 0, 50, 43]):
        rows, largest, at = Rows(1, torch.device("cpu")), Absmax(1, torch.device("cpu")), 0
        for n in pieces:
            x = torch.arange(at, at + n)[:, None].bfloat16() * -1.0
            rows.update(x)
            largest.update(x)
            at += n
        assert largest.result().tolist() == [99.0]
        found.append([-int(i) for i in rows.result()[:, 0]])
    assert found[0] == found[1] == found[2], "whatever the pieces"
    assert 4 <= len(found[0]) <= 16 and found[0] == sorted(set(found[0]))
    assert {i // 25 for i in found[0]} == {0, 1, 2, 3}, "from each quarter"


def test_a_training_comes_before_methods_of_the_cache():
    assert trained_by("gptq(bits=3)", "distil(minutes=2)") == "gptq(bits=3), distil(minutes=2)"
    recipe = "rtn(bits=4, skip='*.[1-9].*,*down*'), snapkv(budget=0.5), kv_int"
    found = parse_recipe(trained_by(recipe, "distil(minutes=2)"))
    assert [method.name for method in found] == ["rtn", "distil", "snapkv", "kv_int"]
    assert [m for m in found if m.name != "distil"] == parse_recipe(recipe) and settle(found)
