"""Launch configurations: what is tried wins over what was measured, which wins over the heuristic; files are merged."""

import json

import pytest
import torch

from kernels import tuning
from kernels.capability import Gpu
from kernels.harness import trial
from kernels.harness.timing import Timing
from kernels.support.declarations import Contest

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SLOW, FAST, WRONG, RAISES = {"block": 1}, {"block": 2}, {"block": 3}, {"block": 4}
KEY = "w4 m1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(tuning, "gpu", lambda: "a-gpu")
    tuning._measured.cache_clear()
    yield tmp_path / "tuned"
    tuning._measured.cache_clear()


def test_tried_over_measured_over_heuristic(folder):
    assert tuning.configuration("op", KEY, SLOW) == SLOW
    path = tuning.save("op", KEY, FAST)
    assert path == folder / "a-gpu.json"
    assert tuning.configuration("op", KEY, SLOW) == FAST
    assert tuning.configuration("op", "w4 m16", SLOW) == SLOW and tuning.configuration("other", KEY, SLOW) == SLOW
    with tuning.trying("op", KEY, WRONG):
        assert tuning.configuration("op", KEY, SLOW) == WRONG
        with tuning.trying("op", KEY, None):
            assert tuning.configuration("op", KEY, SLOW) == SLOW, "None asks for the heuristic"
        assert tuning.configuration("op", KEY, SLOW) == WRONG
    assert tuning.configuration("op", KEY, SLOW) == FAST


def test_files_are_merged_and_keys_taken_out(folder):
    tuning.save("b", "2", FAST)
    tuning.save("b", "1", SLOW)
    tuning.save("a", "1", SLOW)
    path = tuning.save("b", "1", FAST)
    assert json.loads(path.read_text()) == {"a": {"1": SLOW}, "b": {"1": FAST, "2": FAST}}
    assert path.read_text().splitlines()[2] == '  "1": {"block": 1}', "a key to a line"
    tuning.save("b", "1", None)
    tuning.save("a", "1", None)
    assert json.loads(path.read_text()) == {"b": {"2": FAST}}
    assert [p.name for p in folder.iterdir()] == ["a-gpu.json"], "nothing temporary is left"


def test_a_file_older_than_the_kernel_is_not_used(folder):
    tuning.save("op", KEY, {"block": 2, "gone": 1})
    assert tuning.configuration("op", KEY, SLOW) == SLOW
    tuning.save("op", KEY, FAST)
    assert tuning.configuration("op", KEY, {"block": 1, "new": 1}) == {"block": 1, "new": 1}


def contest(candidates, in_place=False):
    x, total = torch.arange(8.0), torch.zeros(8)

    def ours(i):
        block = tuning.configuration("op", KEY, SLOW)["block"]
        for _ in range(200 if block == 1 else 1):
            y = x * 2
        if block == RAISES["block"]:
            raise RuntimeError("out of shared memory")
        y = y + 1 if block == WRONG["block"] else y
        return total.add_(y) if in_place else y

    return Contest("op", "W4", (8,), 1, {"ours": ours}, 1, "ours", "none", 64, 8, tune_key=KEY, candidates=candidates)


def test_warming_calls_everything_once_in_all_shares(monkeypatch, tmp_path):
    called = []

    def call(n):
        return lambda i: called.append((n, tuning.configuration("op", KEY, SLOW)["block"]))

    def made(device, toy, asked):
        for n in range(3):
            calls = {"ours": call(n), "none": lambda i: 1 / 0}
            more = {"tune_key": KEY, "candidates": [FAST, WRONG]}
            yield Contest("op", "W4", (8,), 1, calls, 1, "ours", "none", 64, 8, **more)

    monkeypatch.setattr(trial, "import_module", lambda name: type("cases", (), {"contests": staticmethod(made)}))
    log = trial.Log(lambda line: None, "warm", float("inf"))
    for share in range(2):
        trial.warm(log, ["op"], CPU, True, (share, 2), True)
    assert sorted(called) == [(n, block) for n in range(3) for block in (1, 2, 3)]


@pytest.mark.parametrize("in_place", [False, True])
def test_the_fastest_sound_candidate_is_written_down(folder, tmp_path, in_place):
    lines = []
    log = trial.Log(lines.append, "contests", float("inf"))
    unread = {**FAST, "new": 1}
    tuned = trial.tune_contest(contest([WRONG, RAISES, FAST, unread], in_place), log, CPU, tmp_path)
    assert tuned == FAST
    assert json.loads((tmp_path / "a-gpu.json").read_text()) == {"op": {KEY: FAST}}
    (line,) = lines
    assert line["kind"] == "tuned" and line["configuration"] == FAST and set(line["seconds"]) == {"heuristic", "2"}
    assert "differs from the heuristic" in line["rejected"]["0"] and "shared memory" in line["rejected"]["1"]
    assert "reads the fields ['block']" in line["rejected"]["3"], "or it would be written and never used"


def test_the_heuristic_stays_where_nothing_is_faster(folder, tmp_path):
    lines = []
    log = trial.Log(lines.append, "contests", float("inf"))
    tuning.save("op", KEY, FAST, tmp_path)
    assert trial.tune_contest(contest([WRONG]), log, CPU, tmp_path) is None
    assert json.loads((tmp_path / "a-gpu.json").read_text()) == {}


def test_a_key_is_tuned_once_and_its_contests_use_it(folder, tmp_path, monkeypatch):
    used = []

    def made(device, toy, asked):
        for _ in range(2):
            c = contest([FAST])
            yield c
            used.append(c)

    monkeypatch.setattr(trial, "import_module", lambda name: type("cases", (), {"contests": staticmethod(made)}))
    lines = []
    log = trial.Log(lines.append, "contests", float("inf"))
    trial.contests(log, ["op"], CPU, True, 0, None, tmp_path, tune=True)
    assert [line["kind"] for line in lines].count("tuned") == 1 and len(used) == 2
    rows = [line for line in lines if line["kind"] == "contest"]
    assert [row["configuration"] for row in rows] == [FAST, FAST]
    assert tuning.configuration("op", KEY, SLOW) == SLOW, "on a CPU nothing is written where kernels look"


CLEAR = {"ours": (9.9, 10.0, 10.1), "fast": (7.9, 8.0, 8.1)}  # quartiles and medians


@pytest.mark.parametrize(
    "times, more",
    [
        (CLEAR, {}),
        ({**CLEAR, "fast": (7.9, 8.0, 9.95)}, {"reason": "the quartiles overlap"}),
        ({**CLEAR, "fast": (10.9, 11.0, 11.1)}, {"reason": "it is slower"}),
        ({"ours": (9.99, 10.0, 10.01), "fast": (9.96, 9.97, 9.98)}, {"reason": "by less than a hundredth"}),
        (CLEAR, {"reason": "one round says nothing of noise", "rounds": 1}),
        (CLEAR, {"reason": "it is not timed alike", "how": "loop"}),
        (CLEAR, {"reason": "its output is wrong", "output": torch.ones(8)}),
        (CLEAR, {"reason": "nobody knows its right output", "expected": ("ours",)}),
    ],
)
def test_a_configuration_that_wins_a_contest_is_read_afterwards(folder, tmp_path, monkeypatch, times, more):
    """In a run that does not tune, on a GPU, with times that are given: only if the win is more than noise."""
    x = torch.arange(8.0)

    def made(device, toy, asked):
        for _ in range(2):
            calls = {"ours": lambda i: x * 2, "fast": lambda i: more.get("output", x * 2), "rival": lambda i: x * 2}
            expected = dict.fromkeys(more.get("expected", ("ours", "fast")), lambda found: x.double() * 2)
            which = {"tune_key": KEY, "configurations": {"fast": FAST}, "expected": expected}
            yield Contest("op", "W4", (8,), 1, calls, 1, "ours", "rival", 64, 8, **which)

    def timed(calls, *_, **__):
        given = {"rival": (1.0, 1.0, 1.0), **times}
        how = {"fast": more.get("how", "graph")}
        return {
            name: Timing(
                given[name][1], given[name][0], given[name][2], more.get("rounds", 5), 1, how.get(name, "graph")
            )
            for name in calls
        }

    monkeypatch.setattr(trial, "import_module", lambda name: type("cases", (), {"contests": staticmethod(made)}))
    monkeypatch.setattr(trial, "time_in_turns", timed)
    monkeypatch.setattr(trial, "settle", lambda device: None)
    lines = []
    trial.contests(trial.Log(lines.append, "contests", float("inf")), ["op"], GPU, False, 0, None, tmp_path / "out")
    rows = [line for line in lines if line["kind"] == "contest"]
    assert [row["status"] for row in rows] == ["timed", "timed"]
    if "reason" in more:
        assert tuning.configuration("op", KEY, SLOW) == SLOW and not folder.exists()
        assert not [line for line in lines if line["kind"] == "tuned"]
        return
    assert tuning.configuration("op", KEY, SLOW) == FAST
    for written in (folder, tmp_path / "out"):
        assert json.loads((written / "a-gpu.json").read_text()) == {"op": {KEY: FAST}}
    first = next(line for line in lines if line["kind"] == "tuned")
    assert (first["op"], first["key"], first["configuration"]) == ("op", KEY, FAST)
    assert [row["configuration"] for row in rows] == [None, FAST], "contests after it use it"


def test_a_winner_that_cannot_be_written_leaves_the_row(folder, monkeypatch, capsys):
    def refuses(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(tuning, "save", refuses)
    trial._keep(contest([FAST]), FAST, trial.Log(lambda line: None, "contests", float("inf")), GPU, None)
    assert f"op {KEY}: no call will use what was found: PermissionError: read-only" in capsys.readouterr().out


def test_kernels_start_early_only_where_that_is_wanted_and_can_be(monkeypatch):
    device = torch.device("cuda", 0)
    for capability, options in (
        ((9, 0), {"EARLY": True, "launch_pdl": True}), ((8, 9), {"EARLY": False}),
    ):  # fmt: skip
        monkeypatch.setattr(tuning.capability, "gpu", lambda _, found=capability: Gpu("a GPU", found, 0))
        assert tuning.launch_options(device) == {"EARLY": False}
        with tuning.early_launches(True):
            assert tuning.launch_options(device) == options and tuning.launch_options(CPU) == {"EARLY": True}
            with tuning.early_launches(False):
                assert tuning.launch_options(device) == {"EARLY": False}
        assert tuning.launch_options(CPU) == {"EARLY": False}
