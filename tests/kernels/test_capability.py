"""GPUs that lack something: refused by name, with what would do, before anything is launched."""

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
    "T4": Gpu("Tesla T4", (7, 5), 65_536),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 166_912),
    "4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 101_376),
    "H200": Gpu("NVIDIA H200", (9, 0), 232_448),
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
    with pytest.raises(ValueError, match="'reference' would do, or int8") as error:
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
    assert gpu == "T4" or "'reference' would do, or a cache of integers in 8 bits" in str(error.value)


def test_what_is_too_old_is_named(gpu):
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
