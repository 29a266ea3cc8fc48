"""A run that was killed, wherever and however often, ends with the very bits of a run that was not."""

import copy
import random
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from compress import METHODS, apply
from compress.recipe import parse_recipe
from compress.walk import capture, chain
from compress.walk.original import lockstep
from compress.walk.resume import BlockStore

RECIPES = {
    "in sequence": "gptq(bits=3, group_size=16, min_tokens=8)",
    "beside one another": "gptq(bits=3, group_size=16, min_tokens=8, sequential=False)",
    "smoothed": "smoothquant, gptq(bits=3, group_size=16, min_tokens=8)",
    "scaled, then clipped": "awq(bits=3, group_size=16)",
    "corrected": "rtn(bits=3, group_size=16), low_rank(rank=4)",
    "curves": "wanda(allocation=adaptive, curve_tokens=30)",
    "two streams, then trained": "gptaq(bits=3, group_size=16, min_tokens=8), tune(steps=2, norm_rate=0.001)",
}


class Killed(BaseException):
    """Takes the place of a kill: nothing in the workbench catches it."""


@pytest.fixture
def killer(monkeypatch):
    """kill_after(count): the run ends at its count-th step of these: a linear solved, a file begun, a file written."""
    left = [1 << 30]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    for method in ("gptq", "awq", "wanda", "low_rank"):
        monkeypatch.setattr(METHODS[method], "solve", counted(METHODS[method].solve))
    monkeypatch.setattr(METHODS["smoothquant"], "choose", counted(METHODS["smoothquant"].choose))
    monkeypatch.setattr(BlockStore, "put", counted(BlockStore.put))
    monkeypatch.setattr(chain, "save_file", counted(chain.save_file))
    monkeypatch.setattr(chain.Chain, "_forget_before", counted(chain.Chain._forget_before))
    monkeypatch.setattr(capture, "MICRO_BATCH_TOKENS", 72)
    return lambda count: left.__setitem__(0, count)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "architecture, recipe",
    [("llama", "two streams, then trained"), ("gpt2", "scaled, then clipped")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *(("llama", one) for one in RECIPES if one not in ("curves", "two streams, then trained")),
            *(("gpt2", recipe) for recipe in ("in sequence", "beside one another", "smoothed", "corrected")),
            *(("qwen2_moe", recipe) for recipe in ("in sequence", "beside one another", "smoothed")),
        )
    ],
)
def test_killed_anywhere_a_run_ends_with_the_same_bits(tiny, tokens, tmp_path, killer, architecture, recipe):
    blocks = {"n_layer": 3} if architecture == "gpt2" else {"num_hidden_layers": 3}
    blocks |= {"num_experts": 3} if architecture == "qwen2_moe" else {}
    methods, batches, steps = parse_recipe(RECIPES[recipe]), tokens(6, 24), random.Random(f"{architecture} {recipe}")
    expected = apply(methods, tiny(architecture, **blocks), batches)
    result, kills = None, 0
    while result is None:
        killer(steps.randint(2, 14) if kills < 4 else 1 << 30)
        try:
            result = apply(methods, tiny(architecture, **blocks), batches, work_path=tmp_path)
        except Killed:
            kills += 1
    assert kills > 1 and equal(result.model, expected.model)
    assert [(r.name, r.error, r.rtn_error) for r in result.layers] == [
        (r.name, r.error, r.rtn_error) for r in expected.layers
    ]
    assert [(f.name, f.alpha, f.error_after) for f in result.folds] == [
        (f.name, f.alpha, f.error_after) for f in expected.folds
    ]
    assert not list(tmp_path.rglob("after_*")) and not list(tmp_path.rglob("*.part")), "activations are not left behind"


@pytest.mark.slow
def test_a_process_that_ends_at_once_is_taken_up_with_the_same_bits(tiny, tokens, tmp_path):
    """No exception, no clean-up: the process is gone while its third block is being solved."""
    model, batches, recipe = tiny("gemma2", num_hidden_layers=3), tokens(4, 24), parse_recipe(RECIPES["in sequence"])
    torch.save((model, batches), tmp_path / "given.pt")
    code = (
        "import os, sys, torch\n"
        "from compress import METHODS, apply\n"
        "from compress.recipe import parse_recipe\n"
        "solve, solved, (folder, threads) = METHODS['gptq'].solve, [], sys.argv[1:]\n"
        "def dies(*arguments):\n"
        "    solved.append(1)\n"
        "    return os._exit(9) if len(solved) == 17 else solve(*arguments)\n"
        "METHODS['gptq'].solve = dies\n"
        "torch.set_num_threads(int(threads))\n"
        "model, batches = torch.load(f'{folder}/given.pt', weights_only=False)\n"
        f"apply(parse_recipe({RECIPES['in sequence']!r}), model, batches, work_path=f'{{folder}}/work')\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path, str(torch.get_num_threads())], timeout=300)
    assert run.returncode == 9
    expected, result = (
        apply(recipe, copy.deepcopy(model), batches),
        apply(recipe, model, batches, work_path=tmp_path / "work"),
    )
    assert sum("earlier" in str(layer.notes) for layer in result.layers) == 14, "two blocks were finished before"
    assert equal(result.model, expected.model)


def test_activations_that_cannot_be_read_cost_time_and_no_bits(tiny, tokens, tmp_path, killer):
    """A power loss may cut a file short: the blocks before it are solved again."""
    recipe = parse_recipe(RECIPES["in sequence"])
    expected = apply(recipe, tiny("llama", num_hidden_layers=3), tokens())
    killer(2 * 9 + 5)
    with pytest.raises(Killed):
        apply(recipe, tiny("llama", num_hidden_layers=3), tokens(), work_path=tmp_path)
    (kept,) = {path.parent for path in tmp_path.rglob("after_*/*")}
    assert sum(path.stat().st_size for path in kept.iterdir()) < 6 * 24 * 64 * 4 + 2000, "one block's outputs, once"
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    killer(1 << 30)
    result = apply(recipe, tiny("llama", num_hidden_layers=3), tokens(), work_path=tmp_path)
    assert equal(result.model, expected.model)


def test_another_way_of_multiplying_in_the_walk_is_no_matter(tiny, tokens, tmp_path, killer, monkeypatch):
    """What was passed on is taken as it is, and not computed again: it would differ here."""
    recipe = parse_recipe(RECIPES["in sequence"])
    killer(2 * 9 + 5)
    with pytest.raises(Killed):
        apply(recipe, tiny("llama", num_hidden_layers=3), tokens(), work_path=tmp_path)
    killer(1 << 30)
    ran = []
    monkeypatch.setattr(lockstep, "run_once", lambda *a: ran.append(a[2]) or capture.run_once(*a))
    apply(recipe, tiny("llama", num_hidden_layers=3), tokens(), work_path=tmp_path)
    assert set(ran) == {2}, "blocks 0 and 1 are finished, and are not run again"


def test_a_disk_without_room_for_the_activations_is_refused_before_any_work(tiny, tokens, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    model = tiny("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"`work_path` \(=.*activations between blocks take .* GB there.*`samples`"):
        apply(parse_recipe(RECIPES["in sequence"]), model, tokens(), work_path=tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
