"""Grids of speed: batches write what plain passes write, and every number is arithmetic on times."""

import copy
import itertools
import json

import pytest
import torch

from eval.record.reading import plain
from eval.record.reading import row as typed_as
from eval.record.speed import SpeedGrid
from eval.speed import attention, speed
from eval.speed.speed import contestants, measure_speed
from eval.speed.speed_grid import check_speed_grid, measure_speed_grid


def greedy(model, prompts, count):
    for _ in range(count):
        prompts = torch.cat([prompts, model(prompts).logits[:, -1:].argmax(-1)], 1)
    return prompts[:, -count:]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "architecture, own",
    [
        pytest.param(architecture, own, marks=[pytest.mark.slow] * ((turn + own) % 2))
        for turn, architecture in enumerate(("llama", "gpt2", "mixtral", "gemma3_text"))
        for own in (True, False)
    ],
)
def test_batches_that_are_timed_write_what_plain_passes_write(tiny, monkeypatch, architecture, own):
    monkeypatch.setattr(attention, "faster_than_torch", lambda *_: own)
    model, written = tiny(architecture), []
    honest = speed._round

    def listening(variant, *arguments):
        step, tokens = variant.step, []
        variant.step = lambda *inputs: tokens.append(step(*inputs)) or tokens[-1]
        found = honest(variant, *arguments)
        variant.step = step
        written.append(torch.cat(tokens, 1))
        return found

    monkeypatch.setattr(speed, "_round", listening)
    one = contestants({"baseline": model}, compiled=False)
    one["baseline"].make = lambda m: (attention.fast_attention(copy.deepcopy(m)),) * 2  # float32: no ties in 16 bits
    found = measure_speed(one, prompt_tokens=12, new_tokens=6, rounds=1, batch=3)["baseline"]
    prompts = (torch.arange(36) * 7919 % 96).view(3, 12)
    assert len(prompts.unique(dim=0)) == 3 and torch.equal(written[-1], greedy(model, prompts, 7))
    assert found.settings.batch == 3
    assert found.decode_tokens_per_s == pytest.approx(3 / one["baseline"].written_s[0])
    assert found.step_tokens_per_s == pytest.approx(3 / one["baseline"].token_s[0])
    assert found.prefill_tokens_per_s == pytest.approx(36 / one["baseline"].ttft_s[0])


# The grid


def test_every_cell_holds_every_model_against_the_baseline(tiny, timed):
    models, asked = timed
    grid = measure_speed_grid(models(tiny, "baseline", "fast"), batches=(1, 4), prompts=(8, 16), new_tokens=3, rounds=2)
    rows = {(row.model, row.batch, row.prompt_tokens): row for row in grid.rows}
    assert len(rows) == len(grid.rows) == 8
    for (name, batch, prompt), row in rows.items():
        slow = 2.0 if name == "baseline" else 1.0
        assert row.decode_tokens_per_s == pytest.approx(batch * 50 / slow), "all rows of the batch together"
        assert row.prefill_tokens_per_s == pytest.approx(1000 / slow)
        assert row.time_to_first_token_s == pytest.approx(slow * batch * prompt / 1000)
        assert row.decode_quartiles == pytest.approx([row.decode_tokens_per_s] * 2) and row.execution == "eager"
        assert (row.decode_ratio, row.prefill_ratio) == ((None, None) if name == "baseline" else pytest.approx((2, 2)))
    rounds = [call for call in asked if call[1:] == (4, 16)][-10::2]
    assert [name for name, *_ in rounds] == ["baseline", "fast", "baseline", "baseline", "fast"], (
        "in turns, each time the step and then `generate`; the baseline once more in the first round"
    )
    assert grid.spread == {"prefill": 0.0, "step": 0.0, "decode": 0.0}, "this clock has no noise"
    assert grid.metrics["fast"]["decode_tokens_per_s_b4_p16"] == pytest.approx(200)
    assert typed_as(SpeedGrid, json.loads(json.dumps(plain(grid.found())))) == grid and grid.settings.rounds == 2
    assert "batch 4, prompt 16" in grid._repr_html_() and "(2.00×)" in grid._repr_html_()


def test_models_that_memory_does_not_hold_meet_the_baseline_in_groups(tiny, timed, monkeypatch):
    models, _ = timed
    free = itertools.count(100, -1)
    monkeypatch.setattr(speed, "_free_bytes", lambda variant: next(free))
    monkeypatch.setattr(speed, "ROOM", 1e9)  # two are as many as there is room for
    three = models(tiny, "baseline", "fast", "slow")
    grid = measure_speed_grid(three, batches=(1,), prompts=(8,), new_tokens=2, rounds=2)
    assert [row.model for row in grid.rows] == ["baseline", "fast", "slow"] and grid.settings.groups == 2
    assert [row.decode_ratio for row in grid.rows] == [None, pytest.approx(2), pytest.approx(0.25)]


def compiler(variant, *_):
    """Stands for the compiler, and takes no time: a step runs as it is, but that of a model that refuses."""
    if getattr(variant.source, "refuses", False):
        raise RuntimeError("no graph")
    variant.step.kernels, variant.step.how = {}, lambda dense: "compiled"
    return variant.step


@pytest.mark.filterwarnings("ignore:the model does not compile")
def test_all_models_of_a_cell_are_executed_in_the_same_way(tiny, monkeypatch):
    monkeypatch.setattr(speed, "fast_decoder", compiler)
    good, bad = tiny("llama", num_hidden_layers=1), tiny("llama", num_hidden_layers=1)
    how = {"batches": (1, 2), "prompts": (8,), "new_tokens": 2, "rounds": 1, "compiled": True}
    assert {row.execution for row in measure_speed_grid({"baseline": good, "b": bad}, **how).rows} == {"compiled"}
    bad.refuses = True
    rows = measure_speed_grid({"baseline": good, "b": bad}, **how).rows
    assert len(rows) == 4 and {row.execution for row in rows} == {"eager (does not compile: no graph): b"}


@pytest.mark.slow
def test_compiled_cells_say_so(tiny):
    model = tiny("llama", num_hidden_layers=1)
    grid = measure_speed_grid({"baseline": model}, batches=(1, 3), prompts=(8,), new_tokens=2, rounds=1, compiled=True)
    assert not any(row.execution.startswith("eager") for row in grid.rows)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batches": ()}, r"`batches` \(=\[\]\) must be positive integers, at least one"),
        ({"batches": (1, 1)}, r"`batches` \(=\[1, 1\]\) .* each once"),
        ({"prompts": (0,)}, r"`prompts` \(=\[0\]\)"),
        ({"prompts": (8, 120)}, r"`prompts` \(up to 120\) \+ `new_tokens` \(=16\) must be at most 128"),
        ({"new_tokens": 0}, r"`new_tokens` \(=0\)"),
        ({"rounds": True}, r"`rounds` \(=True\)"),
    ],
)
def test_grids_that_cannot_be_measured(tiny, change, message):
    good = {"batches": (1, 2), "prompts": (8,), "new_tokens": 16, "rounds": 1}
    model = tiny("llama")
    check_speed_grid(model, **good)
    with pytest.raises(ValueError, match=message):
        check_speed_grid(model, **good | change)
    with pytest.raises(ValueError, match=message):
        measure_speed_grid({"baseline": model}, **good | change)


def test_the_baseline_comes_first(tiny):
    with pytest.raises(ValueError, match=r"`models` \(=\['a'\]\) must begin with 'baseline'"):
        measure_speed_grid({"a": tiny("llama")})
