"""The roofline: least times follow from bytes and operations, and this machine's ceilings can be measured."""

import json
import re
from pathlib import Path

import pytest
import torch

from kernels.harness import roofline, timing, traffic
from kernels.support.declarations import Contest

ROOT = Path(__file__).resolve().parents[2]


def contest(least_bytes, flops, rate="bfloat16", pairs=0):
    return Contest("a", "toy", (4, 4), 1, {}, 2, "ours", "torch", least_bytes, flops, rate, pairs)


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


def test_attention_moves_more_the_less_its_fast_memory_holds():
    """N² d² / M numbers, and N² d / √M below d², which meet there; and only then when the operands take less."""
    few, many = (roofline.attention_bytes(10**6, 64, fast) for fast in (2 * 4096, 2 * 16384))
    assert few == 2 * 10**6 and many == few / 4
    assert roofline.attention_bytes(10**6, 64, 2 * 1024) == 2 * few
    ceilings = roofline.Ceilings(100.0, cache=2 * 64)
    assert roofline.least_seconds(contest(200, 0, pairs=10**3), ceilings) == (2 * 10**3 * 16 / 64 / 100, "bytes")
    assert roofline.least_seconds(contest(2000, 0, pairs=10**3), ceilings) == (20.0, "bytes")
    assert roofline.least_seconds(contest(200, 0, pairs=10**3), roofline.Ceilings(100.0)) == (2.0, "bytes")


def test_tiles_whose_traffic_is_counted_are_those_of_the_kernels():
    native = {path.name: path.read_text() for path in (ROOT / "kernels" / "native").glob("*") if path.is_file()}

    def constants(*files):
        text = "".join(native[f"prompt_attention{file}"] for file in files)
        return {name: int(number) for name, number in re.findall(r"\b([A-Z_]+) = (\d+)[,;]", text)}

    common = constants(".cpp")
    for form, file in (("pairs", "_pairs.inc"), ("float32", "_floats.inc")):
        tiles, found = traffic.FORMS[form], common | constants(file)
        sizes = (found["ROWS"] * found["TILES"], found["KEYS"], found["ROWS"], 4 // found["OF_WORD"])
        assert (tiles.queries, tiles.keys, tiles.rows, tiles.number) == sizes
    tiles, found = traffic.FORMS["AMX"], constants("_tiles.inc")
    assert (tiles.queries, tiles.keys) == (found["GROUP"] * found["GROUPS"], found["TILE_KEYS"])
    assert tiles.rows == found["GROUP"] and f"SPAN = {traffic.SPAN};" in native["kv_decode.cpp"]


@pytest.mark.parametrize("form", traffic.FORMS)
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_tiles_of_prompts_move_at_most_32_times_the_least(form, channels):
    """With the fast memory that they need, an L2 cache, at any length; and once what fits there as a whole."""
    found = [traffic.prompt(form, tokens, channels) for tokens in (512, 2048, 8192)]
    assert all(1 <= one.moved / one.least <= 32 for one in found) and found[-1].moved > 10 * found[-1].least
    tiles, fast = traffic.FORMS[form], found[0].fast
    assert 2 * fast / tiles.number / (tiles.queries * channels) <= 32, "where keys and values are all that counts"
    whole = traffic.prompt(form, 2048, channels, 16 << 20)
    assert whole.moved == whole.least == 2048 * channels * (4 + 2 * tiles.number)
    with pytest.raises(ValueError, match=r"`fast` \(=1024\) must be at least"):
        traffic.prompt(form, 2048, channels, 1024)


def test_each_item_reads_the_keys_that_it_sees():
    """Nearly all of them: the last ones of an item may still lie there for the next. One block stays there."""
    read = sum(range(96, 8193, 96)) + 8192  # by the whole items, and by the last one
    moved = traffic.prompt("pairs", 8192, 64).moved - 4 * 8192 * 64
    assert 0.95 < moved / (4 * 64 * read) <= 1
    assert traffic.prompt("pairs", 512, 64).moved == 8 * 512 * 64


@pytest.mark.parametrize("form, record", [
    ("float32", "papers/prompt-attention-amd-epyc-zen3-2026-11-30.jsonl"),
    ("pairs", "recipe-smollm2-135m-amd-epyc-zen4-2-cores-2026-11-26.json"),
])  # fmt: skip
def test_products_take_longer_than_the_traffic_of_their_tiles(form, record):
    """By the rates of published records, with keys and values in memory and not even in a shared cache."""
    found = json.loads((ROOT / "reports" / "published" / record).read_text())
    rates = found["cost"]["ceilings"] if "cost" in found else found
    memory = rates.get("read_bytes_per_s") or rates["bandwidth"]
    products = rates.get("flops_per_s") or rates["rates"]["float32"]
    one = traffic.prompt(form, 8192, 64)
    assert one.moved / memory < 0.25 * one.operations / products


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_decoding_reads_the_cache_once(rows):
    """For all queries of a kv head, so that only the sums of spans are more than the least."""
    assert 1 < traffic.decode(rows, 8192, 128).moved / traffic.decode(rows, 8192, 128).least < 1.07
    assert traffic.decode(rows, 200, 128).moved == traffic.decode(rows, 200, 128).least


def test_the_published_traffic_is_that_of_these_tiles():
    """Of some of its cases; `python -m kernels.harness.traffic` writes all of them again."""
    (file,) = (ROOT / "reports" / "published" / "papers").glob("attention-traffic-*.jsonl")
    published = file.read_text().splitlines()
    some = [traffic.prompt(form, 16384, 64) for form in traffic.FORMS] + [traffic.decode(4, 8192, 128)]
    assert all(one.line() in published for one in some)
