"""The product whose dequantisation runs under the product before it: its weights, plans and compilation. Its results
are compared with float64 where there is a Hopper GPU (`kernels.int_matmul.cases`)."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from kernels.harness.hazards import overwritten_in_flight
from kernels.packed_matmul import hopper, launch
from kernels.packed_matmul.weight import PackedWeight
from kernels.tuning import trying

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROOT = str(Path(hopper.__file__).parents[2])


def test_overlapped_weights_and_when_tuning_tries_it():
    codes, scale = torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 2, dtype=BF16)
    w = PackedWeight(codes, None, scale, None, 4, 128, (64, 256))
    assert hopper.fits(w, BF16) and hopper.fits(w, FP16) and not hopper.takes(w, BF16), "on a CPU"
    for other in ({"bits": 3}, {"group_size": 32}, {"scale": w.scale.float()}, {"table": torch.zeros(16)}):
        assert not hopper.fits(w._replace(**other), BF16)
    assert hopper.fits(w._replace(scale=w.scale.half()), FP16) and not hopper.fits(w, torch.float32)
    assert not hopper.fits(w._replace(scale=w.scale.half()), BF16), "whose scales it would round"
    with hopper.left_out():
        assert not hopper.fits(w, BF16)
        with hopper.left_out(False):
            assert hopper.fits(w, BF16)
    for out, tokens in itertools.product((1024, 4096, 14336), (17, 64, 256, 2048)):
        codes = torch.empty(out, 2048, dtype=torch.uint8, device="meta")
        large = PackedWeight(codes, None, None, None, 4, 128, (out, 4096))
        assert launch.heuristic(large, tokens)["kind"] != "overlapped", "not on other GPUs"
        for plan in hopper.plans(large, tokens):
            assert plan.keys() == launch.heuristic(large, tokens).keys(), "or what was measured would not be taken"
            assert plan["block_m"] < 256 or plan["splits"] == 1, "which spills"
            assert plan["stages"] % hopper.UNROLLED == 0 and plan["block_m"] in hopper.TOKENS
            tile = plan["block_m"] * hopper.COLUMNS * 2 + hopper.ROWS * hopper.COLUMNS // 2
            assert plan["stages"] * tile < 232_448 - 4096
            per_split, splits = hopper.split(4096, plan["splits"])
            assert per_split % hopper.UNROLLED == 0 and (splits - 1) * per_split < 64 <= splits * per_split


def of_rows(out, scales):
    codes = torch.empty(out, 2048, dtype=torch.uint8, device="meta")
    return PackedWeight(codes, None, torch.empty(out, 32, dtype=scales, device="meta"), None, 4, 128, (out, 4096))


def test_on_hopper_it_is_chosen_where_it_was_measured(monkeypatch):
    monkeypatch.setattr(hopper, "runs", lambda device: True)
    large = of_rows(14336, BF16)
    kinds = {tokens: launch.heuristic(large, tokens)["kind"] for tokens in (16, 32, 33, 64, 65, 256)}
    assert [tokens for tokens, kind in kinds.items() if kind == "overlapped"] == [33, 64]


def test_activations_that_it_does_not_take_keep_their_splits(monkeypatch):
    """Scales in float16 with tokens in bfloat16, also where a plan was measured with tokens in float16."""
    monkeypatch.setattr(hopper, "runs", lambda device: True)
    w = of_rows(4096, FP16)
    plan = launch.heuristic(w, 64, FP16)
    assert plan["kind"] == "overlapped" == launch.candidates(w, 64, FP16)[0]["kind"]
    other = launch.heuristic(w, 64, BF16)
    assert (other["kind"], other["splits"]) == ("large_batch", 8)
    assert "overlapped" not in {candidate["kind"] for candidate in launch.candidates(w, 64, BF16)}
    with trying("int_matmul", "measured", plan):
        chosen = {dtype: launch.chosen(w, 64, dtype, "int_matmul", "measured") for dtype in (FP16, BF16, FP32)}
    assert chosen == {FP16: plan, BF16: other, FP32: launch.DEQUANTISE}


def test_registers_written_in_flight_are_found_in_machine_code():
    loop = """
.L_x_17:
        /*0010*/                   LDS.128 R{target}, [R7+UR8+0x8000] ;
        /*0020*/                   HMUL2.BF16_V2 R72, R72, R88.H0_H0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R72, gdesc[UR52], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{first} ;
        /*0050*/                   HMUL2.BF16_V2 R56, R56, R88.H0_H0 ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR4], R24, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{second} ;
        /*0080*/               @P1 BRA `(.L_x_17) ;
"""
    assert overwritten_in_flight(loop.format(target=12, first=1, second=1)) == []
    assert overwritten_in_flight(loop.format(target=53, first=1, second=1)) == ["R56"], "the last of four that it loads"
    assert overwritten_in_flight(loop.format(target=12, first=2, second=2)) == ["R56", "R72"]


@pytest.mark.slow
def test_the_compiler_takes_what_a_call_passes(tmp_path):
    """Triton's own way from a call to machine code, with a driver that only says which GPU it would be."""
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["12", "12"], "warps: eight and four, of which one copies"


WARM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


driver.set_active(Driver())
from kernels.packed_matmul import hopper, overlapped
from kernels.packed_matmul.weight import PackedWeight

kernel = overlapped.overlapped


class Warm:
    def __getitem__(self, grid):
        return lambda *given, **how: print(kernel.warmup(*given, grid=grid, **how).metadata.num_warps)


overlapped.overlapped = Warm()
for tokens, out, group_size, symmetric in ((64, 14336, 128, True), (33, 4096, 512, False)):
    groups, shape = 512 // group_size, (out, 512)
    zero = None if symmetric else torch.zeros(out, -(-groups // 8) * 4, dtype=torch.uint8)
    codes, scale = torch.zeros(out, 256, dtype=torch.uint8), torch.zeros(out, groups, dtype=torch.bfloat16)
    w = PackedWeight(codes, None, scale, zero, 4, group_size, shape)
    hopper.matmul(torch.zeros(tokens, 512, dtype=torch.bfloat16), w, hopper.plans(w, tokens)[0])
"""
