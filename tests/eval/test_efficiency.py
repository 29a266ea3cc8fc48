"""The six metrics of efficiency, and the counters of energy on machines that are made up."""

import gc
import itertools
import json
import sys
import types

import pytest
import torch

from eval.machine import energy
from eval.machine.energy import NotMeasurable, Nvml, Rapl, energy_counter, gpu_use
from eval.machine.size import size
from eval.record.reading import plain, row
from eval.record.speed import Measure
from eval.speed import efficiency
from eval.speed.efficiency import METRICS, Watch, check_efficiency, measure_efficiency
from eval.speed.work import work
from kernels.harness.roofline import Ceilings
from kernels.support.deploy import deployed


@pytest.fixture
def powercap(tmp_path):
    """A machine with two processors, the memory of one counted by itself, and counters that hold what others count,
    too."""

    def counter(name, about, microjoules, most=1000):
        folder = tmp_path / name
        folder.mkdir()
        for file, value in (("name", about), ("energy_uj", microjoules), ("max_energy_range_uj", most)):
            (folder / file).write_text(f"{value}\n")

    counter("intel-rapl:0", "package-0", 100)
    counter("intel-rapl:0:0", "core", 50)
    counter("intel-rapl:0:1", "dram", 10)
    counter("intel-rapl:1", "package-1", 900)
    counter("intel-rapl:2", "psys", 5000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def spend(root, **to):
    for name, microjoules in to.items():
        (root / name.replace("_", ":").replace("rapl", "intel-rapl") / "energy_uj").write_text(str(microjoules))


def test_rapl_adds_packages_and_memory_and_goes_over_the_top(powercap):
    counter = energy_counter(torch.device("cpu"), powercap)
    assert isinstance(counter, Rapl) and counter.joules() == 0
    spend(powercap, rapl_0=400, rapl_0_0=350, rapl_0_1=30, rapl_1=950, rapl_2=9000)
    assert counter.joules() == pytest.approx((300 + 20 + 50) / 1e6), (
        "neither the cores of a package nor the whole platform again"
    )
    spend(powercap, rapl_1=50)
    assert counter.joules() == pytest.approx((300 + 20 + 50 + 100) / 1e6), "from 950 over 1000 to 50"
    spend(powercap, rapl_1=40)
    assert counter.joules() == pytest.approx((300 + 20 + 50 + 100 + 990) / 1e6), "and again"
    assert "dram, package-0, package-1" in counter.covers


def test_machines_that_do_not_tell_say_why(powercap, tmp_path, monkeypatch):
    with pytest.raises(NotMeasurable, match="no RAPL counter"):
        Rapl(tmp_path / "nowhere")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("many\n")
    with pytest.raises(NotMeasurable, match="cannot be read"):
        Rapl(powercap)

    def refuse(path):
        if path.name == "energy_uj":
            raise PermissionError(path)
        return path.read_text().strip()

    monkeypatch.setattr(energy, "_read", refuse)  # whoever runs the tests may be root, who may read everything
    with pytest.raises(NotMeasurable, match="energy_uj may be read by root alone"):
        Rapl(powercap)
    with pytest.raises(NotMeasurable, match="type meta"):
        energy_counter(torch.device("meta"))


def test_gpus_by_nvml(monkeypatch):
    class NVMLError(Exception):
        pass

    def none_such(_):
        raise NVMLError("Not Supported")

    millijoules = itertools.count(5000, 2500)
    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"GPU-ab": next(millijoules)}[handle],
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=73),
    )
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab"))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    counter = energy_counter(gpu)
    assert isinstance(counter, Nvml) and [counter.joules(), counter.joules()] == [2.5, 5.0], (
        "millijoules since it was made"
    )
    assert gpu_use(gpu)() == 0.73
    fake.nvmlDeviceGetTotalEnergyConsumption = fake.nvmlDeviceGetUtilizationRates = none_such
    for ask in (energy_counter, gpu_use):
        with pytest.raises(NotMeasurable, match="Not Supported"):
            ask(gpu)
    fake.nvmlDeviceGetHandleByUUID = none_such
    with pytest.raises(NotMeasurable, match="does not know this GPU"):
        energy_counter(gpu)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotMeasurable, match="nvidia-ml-py"):
        energy_counter(gpu)


# The six metrics


class Meter:
    """Ten joules pass between any two looks."""

    covers = "a meter"

    def __init__(self, *_):
        self.looks = 0

    def joules(self):
        self.looks += 1
        return 10.0 * self.looks


def test_six_metrics_of_every_model(tiny, timed, monkeypatch):
    models, asked = timed
    monkeypatch.setattr(efficiency, "energy_counter", Meter)
    both = models(tiny, "baseline", "fast")
    both["fast"].lm_head = torch.nn.Linear(64, 200)
    found = measure_efficiency(
        both, prompt_tokens=8, new_tokens=4, rounds=3, seconds=1e-9, ceilings=Ceilings(1.0, {"bfloat16": 1e9})
    )
    assert all(tuple(of) == METRICS for of in found.models.values())
    base, fast = found.models["baseline"], found.models["fast"]
    assert base["latency"].value == pytest.approx(2 * 8 / 1000 + 4 * 2 / 100) and fast[
        "latency"
    ].value == pytest.approx(0.048)
    assert base["throughput"].value == pytest.approx(50) and fast["throughput"].value == pytest.approx(100)
    assert base["energy"].value == pytest.approx(3 * 10 / (3 * 4)), "three answers of four tokens, ten joules each"
    assert base["energy"].unit == "J/token" and "a meter" in base["energy"].note
    stored = {name: size(deployed(model)).stored_bytes for name, model in both.items()}
    assert (
        base["compression_rate"].value == 1
        and fast["compression_rate"].value == stored["baseline"] / stored["fast"] < 1
    )
    assert size(deployed(both["baseline"])).resident_bytes <= base["memory_use"].value < 1 << 30
    rate = work(deployed(both["baseline"])).flops(10, 1) / 0.02 / 1e9
    assert base["compute_use"].value > 0 and f"decoding does {rate:.2%} of" in base["compute_use"].note
    assert [name for name, *_ in asked[-6:]] == ["baseline", "fast"] * 3, "in turns"
    assert set(found.metrics["fast"]) == {
        "memory_use_bytes",
        "compute_use_share",
        "latency_s",
        "throughput_tokens_per_s",
        "energy_j_per_token",
        "compression_rate",
    }
    assert row(dict[str, dict[str, Measure]], json.loads(json.dumps(plain(found.found())))) == found.found()


def test_unmeasurable_metrics_are_none_with_a_reason(tiny, tmp_path):
    found = measure_efficiency(
        {"baseline": tiny("llama")}, prompt_tokens=4, new_tokens=2, rounds=1, seconds=0.01, powercap=tmp_path
    )
    one = found.models["baseline"]["energy"]
    assert one.value is None and one.note.startswith("not measurable here: no RAPL counter")
    assert "energy_j_per_token" not in found.metrics["baseline"]
    assert "not measurable here" in found._repr_html_() and found.models["baseline"]["throughput"].value > 0


def test_energy_is_read_where_the_machine_shows_it(tiny, powercap, monkeypatch):
    class Burning(Rapl):
        def joules(self):
            spent = int((powercap / "intel-rapl:0" / "energy_uj").read_text())
            spend(powercap, rapl_0=(spent + 300) % 1000)
            return super().joules()

    monkeypatch.setattr(energy, "Rapl", Burning)
    quick = {"prompt_tokens": 4, "new_tokens": 2, "rounds": 5, "seconds": 1e-9}
    found = measure_efficiency({"baseline": tiny("llama")}, **quick, powercap=powercap).models["baseline"]["energy"]
    assert found.value == pytest.approx(5 * 300e-6 / (5 * 2)), "through a counter that went over the top"


def test_the_watch_sees_memory_come_and_go(monkeypatch):
    levels = itertools.chain([100, 900], itertools.repeat(400))
    monkeypatch.setattr(efficiency, "held_bytes", lambda device: next(levels))
    monkeypatch.setattr(efficiency, "EVERY_S", 0.001)
    with Watch(torch.device("cpu"), 100, use=lambda: 0.5) as watch:
        while len(watch.memory) < 5:
            sum(range(1000))
    assert watch.memory[:3] == [0, 800, 300] and set(watch.use) == {0.5} and watch.wall_s > 0
    with Watch(torch.device("cpu"), 0) as silent:
        pass
    assert silent.use == []


def test_bytes_held_are_those_of_the_process():
    gc.collect()
    before = efficiency.held_bytes(torch.device("cpu"))
    more = torch.ones(512 << 20, dtype=torch.uint8)
    # What earlier tests left may be freed in between: a few megabytes either way.
    assert 400 << 20 < efficiency.held_bytes(torch.device("cpu")) - before < 620 << 20 and more[-1] == 1


def test_efficiency_that_cannot_be_measured(tiny):
    model = tiny("llama")
    check_efficiency(model, prompt_tokens=8, new_tokens=8)
    for change, message in (
        ({"prompt_tokens": 0}, r"`prompt_tokens` \(=0\)"),
        ({"rounds": 0}, r"`rounds` \(=0\)"),
        ({"seconds": 0}, r"`seconds` \(=0\)"),
        ({"prompt_tokens": 128}, r"`prompt_tokens` \(=128\) \+ `new_tokens` \(=8\) must be at most 128"),
    ):
        with pytest.raises(ValueError, match=message):
            check_efficiency(model, **{"prompt_tokens": 8, "new_tokens": 8} | change)


def test_measures_without_a_value_show_as_such():
    assert (
        efficiency._shown(Measure(None, "J")) == "not measurable here"
        and efficiency._shown(Measure(2.5, "J")) == "2.5 J"
    )


def test_the_baseline_comes_first(tiny):
    with pytest.raises(ValueError, match=r"`models` \(=\['a'\]\) must begin with 'baseline'"):
        measure_efficiency({"a": tiny("llama")})
