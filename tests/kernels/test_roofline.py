"""The roofline: least times follow from bytes and operations, and this machine's ceilings can be measured."""

import torch

from kernels.harness import roofline, timing
from kernels.support.declarations import Contest


def contest(least_bytes, flops, rate="bfloat16"):
    return Contest("a", "toy", (4, 4), 1, {}, 2, "ours", "torch", least_bytes, flops, rate)


def test_least_seconds_is_the_larger_of_two():
    ceilings = roofline.Ceilings(100.0, {"bfloat16": 1000.0})
    assert roofline.least_seconds(contest(200, 1000), ceilings) == (2.0, "bytes")
    assert roofline.least_seconds(contest(200, 9000), ceilings) == (9.0, "bfloat16")
    assert roofline.least_seconds(contest(200, 9000, rate="int4"), ceilings) == (2.0, "bytes")
    reading = roofline.Ceilings(100.0, read=200.0)
    assert roofline.least_seconds(contest(200, 0), reading) == (1.0, "bytes")


def test_a_gpu_is_read_and_copied(monkeypatch):
    """On a CPU in its place, with little memory: every element is read, and copied, once a call."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 22, 1 << 22))
    called = {}

    def took(calls, copies, device, *, seconds):
        called.update(calls)
        return {name: timing.Timing(t, t, t, 3, 1, "graph") for name, t in zip(calls, (4e-3, 2e-3, 1e-3), strict=True)}

    monkeypatch.setattr(roofline, "time_in_turns", took)
    copy, read = roofline._cuda_bandwidth(torch.device("cpu"))
    assert copy == 2 * (1 << 20) / 4e-3 and read == (1 << 20) / 1e-3
    assert called["copy"](0).numel() == 1 << 20 and called["product"](0).shape == (64,) and called["sum"](0).dim() == 0


def test_ceilings_of_this_processor_are_plausible():
    found = roofline.measure(torch.device("cpu"), toy=True)
    assert 1e8 < found.bandwidth < 1e13 and all(1e8 < rate < 1e16 for rate in found.rates.values())
    assert "bfloat16" in found.rates or found.notes
