"""The rule of noise, and the load of the machine while something is timed."""

import math
import multiprocessing
import random
import statistics
import time
from types import SimpleNamespace

import psutil
import pytest

from eval.machine.load import LoadMeter
from eval.record.noise import Load, counts, difference, disturbed, faster_by, speed_ends, spread
from eval.record.rows import typed


@pytest.mark.parametrize("rounds", [1, 3, 5, 12])
def test_chance_alone_exceeds_the_spread_about_once_in_twenty_times(rounds):
    """Three timings of one model per turn: two are the pair, and the third is compared with the first as if it were
    another model."""
    chance, exceeded, trials = random.Random(0), 0, 1500
    for _ in range(trials):
        turns = [[chance.lognormvariate(0.0, 0.03) for _ in range(3)] for _ in range(rounds)]
        limit = spread([first / again for first, again, _ in turns], rounds)
        ratio = statistics.median(t[2] for t in turns) / statistics.median(t[0] for t in turns)
        exceeded += max(ratio, 1 / ratio) > 1 + limit
    assert 0.02 < exceeded / trials < 0.09


def test_a_spread_needs_a_pair():
    assert spread([], 5) is None and spread([0.0, float("nan")], 5) is None
    assert spread([1.0, 1.0], 5) == 0.0 and spread([1.02] * 5, 5) == pytest.approx(spread([1 / 1.02] * 5, 5))
    assert spread([1e300], 1) > 1e100, "no overflow"


def test_a_difference_counts_if_its_interval_excludes_0():
    assert counts(0.1, 0.3) and counts(-0.3, -0.1) and not counts(-0.1, 0.3) and not counts(0.0, 0.3)
    assert counts(*difference(0.2, 0.1)) and not counts(*difference(0.19, 0.1))
    assert counts(*difference(0.001)) and not counts(*difference(0.0)), "a number without an error is exact"


@pytest.mark.parametrize("error", [True, False])
@pytest.mark.parametrize("metric", ["perplexity_t", "kl_t", "acc_t", "stored_bytes", "decode_tokens_per_s"])
def test_a_metric_that_one_model_lost_is_no_noise(metric, error):
    def record(before: float, after: float):
        error_of = {f"{metric}_stderr": 0.1} if error else {}
        scores = {"baseline": {metric: before} | error_of, "compressed": {metric: after} | error_of}
        paired = {"compressed": {"nll_t": after - before, "nll_t_stderr": math.nan}}
        return typed({"scores": scores, "difference": paired})

    assert record(1.0, math.nan).counts(metric) and record(math.nan, 1.0).counts(metric)
    assert not record(math.nan, math.nan).counts(metric)


def test_a_speed_counts_beyond_the_spread_of_one_model_timed_twice():
    def told(fast: float, slow: float, **how) -> bool:
        return counts(*faster_by(speed_ends(fast, (fast - 1, fast + 1), **how), speed_ends(slow, (95, 105), **how)))

    assert told(111, 100, spread=0.1) and not told(109, 100, spread=0.1), "whatever the quartiles are"
    assert told(107, 100) and not told(105, 100), "earlier records: the quartiles"
    assert not told(1000, 100, rounds=1) and told(1000, 100, rounds=1, spread=0.5), "one round has no quartiles"
    assert not told(1000, 100, spread=0.1, load=Load(others=0.2)), "a disturbed timing tells nothing"
    assert not counts(*faster_by(None, (1.0, 2.0))) and not counts(*faster_by((1.0, 2.0), None))


def test_what_disturbed_a_timing_is_said():
    assert disturbed(None) == disturbed(Load()) == disturbed(Load(others=0.06, stolen=0.03)) == ""
    assert disturbed(Load(others=0.25)) == "other processes took 25 % of the processor while it was timed"
    assert disturbed(Load(others=0.08, stolen=0.05)).startswith("other processes took 8 % and other virtual machines")


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_load_is_that_of_other_processes():
    """Shares of the cores' time: this process's own work does not count."""
    other = multiprocessing.get_context("spawn").Process(target=_spin, args=(60.0,), daemon=True)
    other.start()
    before = psutil.cpu_count()
    try:
        while psutil.Process(other.pid).cpu_times().user < 0.3:
            time.sleep(0.05)
        with LoadMeter() as meter:
            time.sleep(0.7)
    finally:
        other.kill()
    assert meter.load.others > 0.2 / before and meter.load.seconds == pytest.approx(0.7, abs=0.4)
    assert LoadMeter().load == Load(), "nothing was timed"


def test_a_block_that_is_too_short_for_the_clock_of_the_system_tells_no_share(monkeypatch):
    """One hundredth of a second of another process in a millisecond is no load of 500 %."""
    states = iter([[SimpleNamespace(user=1.0, system=0.0)], [SimpleNamespace(user=1.01, system=0.0)]])
    monkeypatch.setattr("eval.machine.load._cores", lambda: [0])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(states))
    with LoadMeter() as meter:
        pass
    assert meter.load.others is None and meter.load.stolen is None and not disturbed(meter.load)


def test_the_shares_of_load_are_counted_from_the_times_of_the_system(monkeypatch):
    """Two cores for ten seconds, of which this process used six, others four, and another machine one."""
    states = iter(
        [
            [SimpleNamespace(user=100.0, system=5.0, steal=1.0), SimpleNamespace(user=50.0, system=5.0, steal=0.0)],
            [SimpleNamespace(user=106.0, system=6.0, steal=1.0), SimpleNamespace(user=52.0, system=6.0, steal=1.0)],
        ]
    )
    monkeypatch.setattr("eval.machine.load._cores", lambda: [0, 1])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(states))
    for clock, (begin, end) in {"perf_counter": (20.0, 30.0), "process_time": (3.0, 9.0)}.items():
        ticks = iter((begin, end))
        monkeypatch.setattr(time, clock, lambda ticks=ticks: next(ticks))
    monkeypatch.setattr(
        psutil, "cpu_freq", lambda percpu: [SimpleNamespace(current=2000.0), SimpleNamespace(current=2600.0)]
    )
    with LoadMeter() as meter:
        pass
    assert meter.load == Load(others=0.2, stolen=0.05, mhz_low=2000.0, mhz_high=2600.0, seconds=10.0)
