"""One compression in several processes: the same codes as in one, and an error in one ends all."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from compress import METHODS, apply
from compress.linear import compressed_linears
from compress.recipe import parse_recipe
from compress.recover import learned
from compress.walk import capture
from compress.walk.offload import named_tensors, put_on_disk
from compress.walk.parallel.places import Place, places, rank_of
from compress.walk.parallel.ranks import ProcessLost, Ranks
from compress.walk.statistics import STATISTICS, Collector

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ("llama", "gptq(bits=3, group_size=16)", {}),
    ("gpt2", "gptq(bits=4, group_size=16, sequential=False)", {}),
    ("qwen2_moe", "gptq(bits=3, group_size=16)", {}),
    ("qwen3_moe", "smoothquant, int8", {}),
    ("llama", "awq(bits=3, group_size=16)", {}),
    ("opt", "sparsegpt(ratio=0.5), gptq(bits=4, group_size=16)", {}),
    ("llama", "layer_drop(count=1), wanda(ratio=0.5)", {}),
    ("llama", "width(ratio=0.5, multiple=1), wanda(ratio=0.5)", {}),
    ("mixtral", "expert_drop(ratio=0.25), gptq(bits=4, group_size=16)", {}),
    ("llama", "smoothquant(alpha=search), int8", {}),
    ("llama", "gptq(bits=3, group_size=16), low_rank(rank=4)", {}),
    ("mixtral", "awq(bits=3, group_size=16)", {"calibrate": "once"}),
    ("llama", "gptaq(bits=3, group_size=16), tune(steps=3)", {}),
    ("llama", "rtn(bits=3, group_size=16), distil(steps=3, minutes=5)", {}),
    ("llama", "wanda(ratio=0.5), distil(train=weights, steps=2, batch=3, minutes=5)", {}),
]
LIMIT = 240  # seconds after which a process says where it waits, and ends
SETUP = f"""
import faulthandler, os, sys, torch
faulthandler.dump_traceback_later({LIMIT}, exit=True)
torch.set_num_threads(1)
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from conftest import tiny_model
from compress import METHODS, apply
from compress.recipe import parse_recipe
from compress.recover import learned
from compress.walk import capture, parallel
capture.MICRO_BATCH_TOKENS = 64
learned.product_dtype = learned.training_dtype
"""
# every case in one process group, the first with weights on disk, then the ways in which it can fail
SCRIPT = (
    SETUP
    + """
import dataclasses, torch.distributed as dist
from compress.walk.offload import named_tensors, put_on_disk
from compress.weights.gptq import GPTQ
place = sys.argv[1]
dist.init_process_group("gloo")
rank, sent = dist.get_rank(), torch.load(place + "/cases.pt")
seen = []
for architecture, text, options in sent["cases"]:
    model = tiny_model(architecture)
    result = apply(parse_recipe(text), put_on_disk(model) if len(seen) == 0 else model, sent["batches"], **options)
    seen.append((dict(named_tensors(result.model)), {record.name: record.error for record in result.layers}))

def failing(*arguments, **options):
    try:
        apply(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class Fails(GPTQ):
    count = 0
    def solve(self, W, statistics):
        Fails.count += 1
        if rank == 1 and Fails.count > 8:
            raise ValueError("`bits` of the second process will not do")
        return super().solve(W, statistics)

model, batches = tiny_model("llama", num_hidden_layers=4), sent["batches"]
errors = [failing([Fails(bits=3, group_size=16)], model, batches, work_path=place + "/work")]
errors.append(failing(parse_recipe("rtn(group_size=16)"), tiny_model("llama"), batches[rank:]))
errors.append(failing(parse_recipe("rtn(group_size=16)"), tiny_model("llama"), batches, processes=3))
errors.append(failing(parse_recipe(f"rtn(group_size={16 - 9 * rank})"), tiny_model("llama"), batches))
own = apply(parse_recipe("rtn(group_size=16)"), tiny_model("llama", seed=rank), batches, processes=1)
errors.append(own.layers[0].name)
torch.save((seen, errors), f"{place}/rank-{rank}.pt")
dist.destroy_process_group()
"""
)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(tokens, monkeypatch):
    """Windows of two lengths, in nine micro-batches."""
    monkeypatch.setattr(capture, "MICRO_BATCH_TOKENS", 64)
    monkeypatch.setattr(learned, "product_dtype", learned.training_dtype)
    return [*tokens(13, 24), *tokens(2, 40, seed=2)]


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def _close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (tensor - b[name]).norm() <= 1e-4 * tensor.norm()
        if tensor.is_floating_point()
        else torch.equal(tensor, b[name])
        for name, tensor in a.items()
    )


def _run_forked(start: list[str], folder: Path) -> None:
    """The script in two processes that meet at a store of this one."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    running = []
    for rank in ("0", "1"):
        environment = {**os.environ, **where, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        command = [*start, folder / "script.py", folder]
        running.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        said = [process.communicate(timeout=300)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0], "\n".join(said)[-3000:]
    finally:
        for process in running:
            process.kill()


@pytest.mark.parametrize(
    "cases",
    [pytest.param([CASES[0], CASES[3], CASES[-1]], id="few"), pytest.param(CASES, marks=pytest.mark.slow, id="all")],
)
def test_two_processes_give_the_codes_of_one_and_end_together(cases, batches, tiny, one_thread, tmp_path, request):
    """All cases in processes of torchrun; few in processes that are forked, and joined as torchrun's are."""
    torch.save({"cases": cases, "batches": batches}, tmp_path / "cases.pt")
    (tmp_path / "script.py").write_text(SCRIPT)
    if cases is CASES:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, tmp_path / "script.py", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        _run_forked(request.getfixturevalue("forked")[0], tmp_path)
    (first, first_errors), (second, second_errors) = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    for (architecture, text, options), there, also in zip(cases, first, second, strict=True):
        result = apply(parse_recipe(text), tiny(architecture), batches, **options)
        alike = _close if "distil" in text else _same  # gradients of one pass are rounded otherwise than those of two
        assert alike(dict(named_tensors(result.model)), there[0]) and _same(there[0], also[0]), text
        errors = {record.name: record.error for record in result.layers}
        assert errors == (pytest.approx(there[1], rel=1e-3) if "distil" in text else there[1]), text
        assert there[1] == also[1], text
    said = [
        "ValueError: `bits` of the second process will not do",
        "ValueError: `batches` of process",
        "ValueError: `processes` (=3) must be 1 or 2, the size of the process group",
        "ValueError: `group_size` (=7) must divide",
        "model.layers.0",
    ]
    for errors in (first_errors, second_errors):
        assert all(found.startswith(expected) for found, expected in zip(errors, said, strict=True)), errors
    # what two processes finished before one of them failed is taken over by one
    assert len(list((tmp_path / "work").glob("*/block_*.safetensors"))) == 2
    recipe, model = [METHODS["gptq"](bits=3, group_size=16)], tiny("llama", num_hidden_layers=4)
    again, whole = apply(recipe, model, batches, work_path=tmp_path / "work"), tiny("llama", num_hidden_layers=4)
    apply(recipe, whole, batches)
    assert _same(again.model.state_dict(), whole.state_dict())
    assert sum("interrupted" in " ".join(record.notes) for record in again.layers) == 14, "two blocks of seven linears"


@pytest.mark.slow
def test_processes_are_started_where_there_are_none(tokens, tiny, one_thread, tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text(
        textwrap.dedent("""
        import os
        from compress.weights.rtn import RTN

        class Leaves(RTN):
            def solve(self, W, statistics):
                if os.environ.get("LOCAL_RANK") == "1":
                    os._exit(3)
                return super().solve(W, statistics)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from leaving import Leaves

    batches = tokens(6, 1100)  # one window is one micro-batch, in the other process, too
    model, also = (tiny("llama", max_position_embeddings=1100) for _ in range(2))
    recipe = parse_recipe("gptq(bits=3, group_size=16)")
    apply(recipe, model, batches)
    monkeypatch.setenv("WORKBENCH_PROCESSES", "2")
    apply(recipe, also, batches)
    assert _same(model.state_dict(), also.state_dict())
    monkeypatch.delenv("WORKBENCH_PROCESSES")
    with pytest.raises(ProcessLost, match="process 0 of 2 has lost another one"):
        apply([Leaves(group_size=16)], tiny("llama"), tokens(), processes=2)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"processes": 0}, "`processes` .*=0.* from 1 to"),
        ({"processes": "two"}, "`processes` .*='two'"),
        ({"processes": 2, "device": "cuda:0"}, "names one GPU|is not available here"),
    ],
)
def test_a_number_of_processes_that_makes_no_sense(given, message, tiny, tokens):
    with pytest.raises(ValueError, match=message):
        apply([METHODS["rtn"](group_size=16)], tiny("llama"), tokens(), **given)


def test_models_and_classes_that_other_processes_cannot_load_are_refused(tiny, tokens, monkeypatch):
    method = METHODS["rtn"](group_size=16)
    with pytest.raises(ValueError, match="`processes` .*=2.* lie on disk.*torchrun"):
        apply([method], put_on_disk(tiny("llama")), tokens(), processes=2)
    monkeypatch.setattr(type(method), "__module__", "__main__")
    with pytest.raises(ValueError, match="`processes` .*=2.* is defined in a notebook"):
        apply([method], tiny("llama"), tokens(), processes=2)


def test_slices_are_the_same_whatever_the_number_of_processes():
    stacked = [torch.zeros(2, 10)] * 19 + [torch.zeros(1, 7)]
    found = places(stacked)
    assert [place.number for place in found] == list(range(20)) and [place.slice for place in found] == sorted(
        place.slice for place in found
    )
    for place in found:
        same = [other for other in found if other.slice == place.slice]
        assert place.size == len(same) and place.start == 20 * same[0].number
    for count in (1, 2, 3, 8, 11):
        owners = [rank_of(place, 8, count) for place in found]
        assert owners == sorted(owners) and max(owners) < count and len(set(owners)) == min(count, 8)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_statistics_of_slices_are_added_in_order(ranks):
    """By hand: every process's part by itself, and the parts added from left to right."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 50, 24, generator=generator) for _ in range(16)]
    whole = Collector("x", list(STATISTICS), 24, torch.device("cpu"))
    own = [Collector("x", list(STATISTICS), 24, torch.device("cpu")) for _ in range(ranks)]
    for x, place in zip(inputs, places([x[..., 0] for x in inputs]), strict=True):
        whole.update(x, place)
        own[rank_of(place, 8, ranks)].update(x, place)
    parts = [part for one in own for _, part in sorted(one._parts.items())]
    for part in parts[1:]:
        parts[0].added(part)
    expected = whole.result()
    assert expected.tokens == parts[0].tokens == 16 * 150
    X = torch.cat([x.flatten(0, 1) for x in inputs])
    torch.testing.assert_close(expected.values["gram"], 2 / len(X) * X.T @ X, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.values["absmean"], X.abs().mean(0))
    assert torch.equal(expected.values["absmax"], X.abs().amax(0)) and len(expected.values["rows"]) <= 512
    assert len(expected.values["starts"]) == 48
    for need, statistic in parts[0].statistics.items():
        assert torch.equal(statistic.result(), expected.values[need]), need
    picked = (X[:, None] == expected.values["rows"][None]).all(-1).any(1)
    assert torch.equal(expected.values["absmax_rest"], X[~picked].abs().amax(0)), "of tokens that are not in the sample"


def test_memory_of_a_collector_does_not_grow_with_the_number_of_slices():
    collector = Collector("x", ["gram"], 8, torch.device("cpu"))
    for place in places([torch.zeros(1, 4)] * 32):
        collector.update(torch.ones(1, 4, 8), place)
        assert len(collector._parts) <= 2, "the sum, and the slice under way"
    # a micro-batch that never comes by (an expert that it does not reach) keeps its slice open
    collector = Collector("x", ["gram"], 8, torch.device("cpu"))
    for place in places([torch.zeros(1, 4)] * 32):
        if place.number != 1:
            collector.update(torch.ones(1, 4, 8), place)
    assert len(collector._parts) == 8 and collector.result().tokens == 4 * 31
    collector = Collector("x", ["gram"], 8, torch.device("cpu"))
    collector.update(torch.ones(1, 4, 8), Place())
    assert collector.result().tokens == 4


def test_objects_arrive_with_their_tensors(tiny, tokens):
    result = apply([METHODS["gptq"](bits=3, group_size=16)], tiny("gpt2"), tokens())
    linear = next(iter(compressed_linears(result.model).values()))
    sent: list[torch.Tensor] = []
    Ranks()._send({"linear": linear, "none": torch.zeros(0), "number": 3}, lambda part: sent.append(part.clone()))
    again = Ranks()._received(lambda part: part.copy_(sent.pop(0)))
    x = torch.randn(5, linear.in_features)
    assert torch.equal(again["linear"](x), linear(x)) and again["number"] == 3 and again["none"].shape == (0,)
