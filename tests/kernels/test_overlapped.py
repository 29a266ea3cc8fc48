"""The product whose dequantisation runs under the product before it: carried out by an emulator of Gluon, since neither
a GPU nor Triton's interpreter is there to run it."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from kernels.harness import emulator
from kernels.harness.emulator import Descriptor, Pointer, emulated
from kernels.harness.hazards import overwritten_in_flight
from kernels.int_matmul import pack
from kernels.packed_matmul import hopper, launch
from kernels.packed_matmul.weight import PackedWeight
from kernels.support.declarations import relative_rms

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = Path(hopper.__file__).with_name("overlapped.py")


def weight(out, columns, group_size, symmetric):
    """A weight, and W in float64."""
    groups = columns // group_size
    codes = torch.randint(0, 16, (out, columns))
    scale = ((torch.rand(out, groups) - 0.3) * 0.1).bfloat16()
    zero = None if symmetric else torch.randint(0, 16, (out, groups))
    p = pack(codes, scale, zero, bits=4, group_size=group_size)
    shift = 8 if zero is None else zero.repeat_interleave(group_size, 1)
    W = (codes - shift).double() * scale.double().repeat_interleave(group_size, 1)
    return PackedWeight(p.codes, None, p.scale, p.zero, 4, group_size, (out, columns)), W


def product(monkeypatch, x, w, plan, late=False, change=("", "")):
    """What `hopper.matmul` returns, with the kernel on the emulator."""
    names, machine = emulated(KERNEL, late, change)

    def started(grid):
        def run(*arguments, num_warps, **constants):
            assert num_warps == constants["WARPS"]
            machine.launch(names.overlapped, grid, *map(carried, arguments), **constants)

        return run

    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: started(grid)})()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "kernels.packed_matmul.overlapped", SimpleNamespace(overlapped=kernel))
        patched.setattr(torch, "empty", lambda shape, **how: torch.full(shape, float("nan"), **how))
        y, splits = hopper.matmul(x, w, plan)
    return y.double().sum(0) if splits > 1 else y


def carried(argument):
    if isinstance(argument, torch.Tensor):
        return Pointer(argument)
    if hasattr(argument, "block_shape"):
        assert tuple(argument.strides) == (argument.base.shape[1], 1) == tuple(argument.base.stride())
        return Descriptor(argument.base, list(argument.block_shape))
    return argument


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "tokens, out, columns, group_size, symmetric, splits, dtype",
    [
        (20, 130, 640, 128, True, 1, BF16),
        (70, 100, 576, 64, False, 1, BF16),
        (33, 200, 1152, 1152, False, 2, BF16),
        (5, 128, 320, 320, True, 1, FP16),
        (300, 64, 256, 128, False, 1, FP16),
        (40, 129, 2112, 192, True, 3, BF16),
    ],
)
def test_agrees_with_float64(monkeypatch, tokens, out, columns, group_size, symmetric, splits, dtype, late):
    torch.manual_seed(0)
    w, W = weight(out, columns, group_size, symmetric)
    x = torch.randn(tokens, columns).to(dtype)
    assert hopper.fits(w, dtype)
    plan = {**hopper.plans(w, tokens)[0], "splits": splits}
    y = product(monkeypatch, x, w, plan, late)
    assert y.shape == (tokens, out) and relative_rms(y, x.double() @ W.t()) < (4e-3 if dtype == BF16 else 5e-4)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_weights_are_those_of_the_reference(monkeypatch, dtype):
    """Rounded once, as where W is dequantised for cuBLAS: one column of x picks one of W."""
    w, W = weight(128, 256, 64, False)
    x = torch.eye(256).to(dtype)[:32]
    y = product(monkeypatch, x, w, hopper.plans(w, 32)[0])
    assert torch.equal(y, W.t()[:32].to(dtype))


@pytest.mark.parametrize(
    "text, another",
    [
        ("lane * 0x1111", "lane * 0x1110"),  # the low codes of all lanes from one byte
        ("warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),  # a stage given back while a product reads it
        ("k = gl.program_id(2) * iterations * BLOCK_K", "k = gl.program_id(2) * iterations"),
        ("k + 2 * BLOCK_K, K, groups", "k + BLOCK_K, K, groups"),  # the scale of another tile
    ],
)
def test_a_mistake_is_found(monkeypatch, text, another):
    torch.manual_seed(0)
    w, W = weight(128, 2048, 64, True)
    x = torch.randn(32, 2048).bfloat16()
    plan = {**hopper.plans(w, 32)[0], "splits": 2, "stages": 4}
    error = relative_rms(product(monkeypatch, x, w, plan, False, (text, another)), x.double() @ W.t())
    assert not error < 0.02


def test_a_stage_that_is_not_given_back_is_found(monkeypatch):
    monkeypatch.setattr(emulator, "PATIENCE", 0.5)
    w, _ = weight(128, 1024, 128, True)
    plan = {**hopper.plans(w, 32)[0], "splits": 1, "stages": 4}
    with pytest.raises(RuntimeError, match="never completes"):
        product(monkeypatch, torch.randn(32, 1024).bfloat16(), w, plan, change=("pred=later", "pred=False"))


def test_a_tile_that_is_not_waited_for_is_found(monkeypatch):
    monkeypatch.setattr(emulator, "PATIENCE", 0.5)
    w, W = weight(128, 256, 128, True)
    x = torch.randn(32, 256).bfloat16()
    change = ("mbarrier.wait(full.index(stage), phase)", "pass")
    y = product(monkeypatch, x, w, {**hopper.plans(w, 32)[0], "splits": 1}, True, change)
    assert not relative_rms(y, x.double() @ W.t()) < 0.02


def test_overlapped_weights_and_when_tuning_tries_it():
    w, _ = weight(64, 256, 128, True)
    assert hopper.fits(w, BF16) and hopper.fits(w, FP16) and not hopper.takes(w), "on a CPU"
    for other in ({"bits": 3}, {"group_size": 32}, {"scale": w.scale.float()}, {"table": torch.zeros(16)}):
        assert not hopper.fits(w._replace(**other), BF16)
    assert hopper.fits(w._replace(scale=w.scale.half()), FP16) and not hopper.fits(w, torch.float32)
    assert not hopper.fits(w._replace(scale=w.scale.half()), BF16), "whose scales it would round"
    for out, tokens in itertools.product((1024, 4096, 14336), (17, 64, 256, 2048)):
        codes = torch.empty(out, 2048, dtype=torch.uint8, device="meta")
        large = PackedWeight(codes, None, None, None, 4, 128, (out, 4096))
        assert launch.heuristic(large, tokens)["kind"] != "overlapped", "not before it was measured"
        for plan in hopper.plans(large, tokens):
            assert plan.keys() == launch.heuristic(large, tokens).keys(), "or what was measured would not be taken"
            assert plan["block_m"] < 256 or plan["splits"] == 1, "which spills"
            assert plan["stages"] % hopper.UNROLLED == 0 and plan["block_m"] in hopper.TOKENS
            tile = plan["block_m"] * hopper.COLUMNS * 2 + hopper.ROWS * hopper.COLUMNS // 2
            assert plan["stages"] * tile < 232_448 - 4096
            per_split, splits = hopper.split(4096, plan["splits"])
            assert per_split % hopper.UNROLLED == 0 and (splits - 1) * per_split < 64 <= splits * per_split


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


ROOT = str(KERNEL.parents[2])
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
