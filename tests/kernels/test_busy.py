"""On a busy machine a run's threads do not spin for long, and whoever starts Python without that is told once."""

import sys
import warnings

import psutil
import pytest
import torch

from kernels.support import busy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of other systems reads other variables")


@pytest.fixture
def load(monkeypatch):
    """Set how busy the machine seems."""
    for name in (*busy.POLICIES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    busy.warn_if_busy.cache_clear()
    yield lambda percent: monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    busy.warn_if_busy.cache_clear()


def test_only_a_busy_machine_is_told_of(load, monkeypatch):
    load(5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        busy.warn_if_busy()
        assert busy.environment_for_others() == {}
    busy.warn_if_busy.cache_clear()
    load(93.0)
    with pytest.warns(UserWarning, match="93% of this machine busy.*GOMP_SPINCOUNT=1000"):
        busy.warn_if_busy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        busy.warn_if_busy()  # once
    assert busy.environment_for_others() == busy.SPIN


@pytest.mark.parametrize("name", busy.POLICIES)
def test_a_policy_that_is_set_stays(load, monkeypatch, name):
    load(93.0)
    monkeypatch.setenv(name, "passive")
    assert busy.environment_for_others() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        busy.warn_if_busy()


def test_one_thread_waits_for_no_other(load, monkeypatch):
    load(93.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert busy.environment_for_others() == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        busy.warn_if_busy()
