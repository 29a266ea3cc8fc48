"""GPUs that lack something: refused by name, with what works, before anything is launched."""

import ast
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import (
    capability,
    gram,
    int_matmul,
    interpreter,
    kv_decode,
    trellis_matmul,
    w4a8_matmul,
    w8a8_matmul,
)
from kernels.capability import Gpu
from kernels.hadamard.plan import LARGEST_TILE, plan, shared_of
from kernels.w8a8_matmul.cases import kinds

GPUS = {
    "T4": Gpu("Tesla T4", (7, 5), 65_536, 40),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 166_912, 108),
    "4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 101_376, 128),
    "H200": Gpu("NVIDIA H200", (9, 0), 232_448, 132),
}


class Device(str):
    """As much of a CUDA device as the dispatch looks at."""

    type, index = "cuda", 0


class Tensor:
    """A tensor that lies on it; everything else is that of a tensor on the meta device."""

    is_cuda, device = True, Device("cuda:0")

    def __init__(self, *shape, dtype=torch.bfloat16):
        self.meta = torch.empty(*shape, dtype=dtype, device="meta")

    def __getattr__(self, name):
        return getattr(self.meta, name)


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    monkeypatch.setattr(interpreter, "_INSTALLED", True)
    monkeypatch.setattr(capability, "gpu", lambda index: GPUS[request.param])
    return request.param


def w8(dtype):
    return w8a8_matmul.W8("rows", Tensor(32, 64, dtype=dtype), Tensor(32, dtype=torch.float32), (32, 64))


def test_float8_goes_where_it_is_and_int8_everywhere_else(gpu):
    x, choose = Tensor(2, 64), w8a8_matmul._implementation
    able = gpu in ("4090", "H200")
    assert choose(x, w8(torch.float8_e4m3fn), "auto") == ("triton" if able else "reference")
    assert choose(x, w8(torch.int8), "auto") == ("reference" if gpu == "T4" else "triton")
    assert kinds(Device("cuda:0")) == ((torch.int8, torch.float8_e4m3fn) if able else (torch.int8,))
    if able:
        assert choose(x, w8(torch.float8_e4m3fn), "triton") == "triton"
        return
    with pytest.raises(ValueError, match="'reference' works, or int8") as error:
        choose(x, w8(torch.float8_e4m3fn), "triton")
    assert GPUS[gpu].name in str(error.value) and "float8 need 8.9" in str(error.value)


def test_caches_in_float8_are_read_where_it_is(gpu):
    k, able = torch.randn(1, 2, 64, 16), gpu in ("4090", "H200")
    q, cache, choose = Tensor(1, 2, 1, 16), kv_decode.quantize_kv_float8(k, k, 32), kv_decode._implementation
    assert choose(q, cache, "auto") == ("triton" if able else "reference")
    assert choose(q, kv_decode.quantize_kv(k, k, 8, 32), "auto") == ("reference" if gpu == "T4" else "triton")
    if able:
        assert choose(q, cache, "triton") == "triton"
        return
    with pytest.raises(ValueError, match="need 8|needs a GPU") as error:
        choose(q, cache, "triton")
    assert GPUS[gpu].name in str(error.value)
    assert gpu == "T4" or "'reference' works, or a cache of integers in 8 bits" in str(error.value)


def test_gpus_that_are_too_old_are_named(gpu):
    """By every op whose choice can be asked without a tensor on a GPU."""
    x = Tensor(4, 64)
    asked = {
        "gram": lambda impl: gram._implementation(x, impl),
        "w4a8": lambda impl: w4a8_matmul._implementation(
            x, int_matmul.Packed("rows", None, None, None, 4, 64, (32, 64)), None, impl
        ),
        "trellis": lambda impl: trellis_matmul._which(impl, x.device, x.dtype),
    }
    for name, choose in asked.items():
        if gpu != "T4":
            assert choose("auto") == choose("triton") == "triton", name
            continue
        assert choose("auto") == "reference", name
        with pytest.raises(ValueError, match=r"Tesla T4 \(compute capability 7.5\), where Triton kernels need 8.0"):
            choose("triton")


def test_tiles_that_do_not_fit_are_not_taken(gpu):
    device = Device("cuda:0")
    from kernels.gram.triton import SQUARE, WIDE, heuristic
    from kernels.hadamard.triton import fits

    large = gpu in ("A100", "H200")
    assert heuristic(torch.bfloat16, 14336, device) == (WIDE if large else SQUARE)
    assert capability.has_shared(device, shared_of(plan(28672))) == large
    assert capability.has_shared(device, shared_of(plan(14336))) == (gpu != "T4")
    assert (fits(28672, device), fits(14336, device), fits(11008, device)) == (large, gpu != "T4", False)
    assert max(shared_of(plan(n)) for n in (8192, 14336, 28672, 32768)) == 4 * LARGEST_TILE + 3072


def test_gpus_of_rocm_are_refused(gpu, monkeypatch):
    """They call themselves CUDA devices."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43483")
    x = Tensor(4, 64)
    assert gram._implementation(x, "auto") == "reference"
    with pytest.raises(ValueError, match=r"a GPU of ROCm 6\.4\.43483, and the Triton kernels are written for CUDA"):
        gram._implementation(x, "triton")


def test_work_is_divided_by_the_multiprocessors_of_the_device(gpu):
    from kernels.hadamard import spread
    from kernels.packed_matmul.launch import heuristic
    from kernels.packed_matmul.weight import PackedWeight
    from kernels.trellis_matmul import triton as trellis
    from kernels.w4a8_matmul import triton as w4a8
    from kernels.w8a8_matmul import triton as w8a8

    device, count = Device("cuda:0"), GPUS[gpu].multiprocessors
    assert capability.multiprocessors(device) == count
    assert capability.multiprocessors(torch.device("cpu")) == capability.MULTIPROCESSORS

    def weight(out):
        codes = Tensor(out, 2048, dtype=torch.uint8)
        return PackedWeight(codes, Tensor(out, 32), None, None, 4, 128, (out, 4096))

    full = 2 * 32 * count  # rows with which 32 rows a program give two programs to every multiprocessor
    assert (heuristic(weight(full), 1)["block_n"], heuristic(weight(full - 32), 1)["block_n"]) == (32, 16)
    split = w8a8.settings(16, 64, 1 << 20, torch.int8, False, device)[1]["split"]
    assert split == -(-2 * count // -(-64 // w8a8.FEW["columns"]))
    packed = SimpleNamespace(codes=Tensor(1, 1), shape=(count * w4a8.WIDE["rows"], 4096), group_size=128)
    assert w4a8.settings(packed, w4a8.WIDE["tokens"]) == w4a8.WIDE
    walk = SimpleNamespace(codes=Tensor(4, 1, 1), shape=(64, 1 << 20), length=16)
    assert trellis.heuristic(walk, 1)["parts"] == count
    assert spread.few(1, 14336, device) and not spread.few(2 * count + 1, 14336, device)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(str(device)) or nullcontext())
    launch = capability.on_its_device(lambda x, more: more)
    devices = ("cpu", "cuda:0", "cuda:1")
    assert [launch(SimpleNamespace(device=torch.device(name)), name) for name in devices] == list(devices)
    assert entered == ["cuda:1"], "it costs time where the device is current already"


def test_every_launch_is_reached_through_a_guard():
    """A module that launches a Triton kernel guards functions, or is called by one that does."""
    for path in (Path(capability.__file__).parent).rglob("*.py"):
        if path.parent.name == "harness" or path.name == "cases.py":
            continue
        tree = ast.parse(path.read_text())
        launches = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _launches(n)]
        guarded = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _guarded(n)]
        behind = {"spread.py": "triton.py", "hopper.py": "launch.py"}.get(path.name)
        guarded = guarded or behind and "@on_its_device" in (path.parent / behind).read_text()
        assert not launches or guarded, f"{path} launches on whatever device is current"


def _launches(call: ast.Call) -> bool:
    """kernel[grid](..., num_warps or constants in capitals)"""
    names = [keyword.arg or "" for keyword in call.keywords]
    return isinstance(call.func, ast.Subscript) and any(name == "num_warps" or name.isupper() for name in names)


def _guarded(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "on_its_device" for one in function.decorator_list)
