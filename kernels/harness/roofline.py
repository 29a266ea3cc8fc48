"""The device and its measured ceilings: the rate at which it copies, and at which it multiplies matrices of each type.

A call takes at least its least bytes divided by the first, and its operations divided by the second: `least_seconds`.

From "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv:2402.13499): units are measured one by one,
each type of tensor core and memory by copying and by reading, in place of a data sheet's rates. From "The I/O
Complexity of Attention" (Saha and Ye, 2024, arXiv:2402.07443): what attention moves at least (`attention_bytes`).
"""

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kernels.harness.timing import settle, time_in_turns
from kernels.huge_pages import in_huge_pages
from kernels.linear.onednn import lay_out, lays_out, product
from kernels.support.declarations import Contest
from kernels.support.errors import kind_and_first_line


@dataclass(frozen=True)
class Ceilings:
    """The rates that one device reaches.

    bandwidth: bytes read plus bytes written, per second, of a copy (on a CPU: of a copy or a sum, the larger).
    read:      bytes per second of a sum, which writes nothing; None if only `bandwidth` was measured.
    rates:     operations per second (two for each multiply-add) of dense products with random operands, by type:
               "bfloat16", "float16", "float32" (never TF32), "int8", "float8".
    notes:     rates that could not be measured, and why.
    cache:     bytes of the largest cache before memory; None if the system does not say it.
    """

    bandwidth: float
    rates: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    read: float | None = None
    cache: int | None = None

    @property
    def memory(self) -> float:
        """Largest memory rate in bytes per second: reading alone may be faster than copying, which reverses the bus."""
        return max(self.bandwidth, self.read or 0.0)


def measure(device: torch.device, *, toy: bool = False) -> Ceilings:
    """Measure the ceilings of this device, in about two seconds; `toy` is quick, but too small for valid results."""
    read = None
    if device.type == "cuda":
        bandwidth, read = _cuda_bandwidth(device)
    else:
        bandwidth = _cpu_bandwidth(16 << 20 if toy else 512 << 20)
    products = _cuda_products(device) if device.type == "cuda" else _cpu_products(256 if toy else 2048)
    rates, notes = {}, []
    for name, (make, operations) in products.items():
        try:
            took = time_in_turns({name: make()}, 1, device, seconds=0.3)[name]
        except Exception as error:
            settle(device)
            took, note = None, kind_and_first_line(error)
        else:
            note = took.note
        if took is None or took.seconds is None:
            notes.append(f"no rate for {name}: {note}")
        else:
            rates[name] = operations / took.seconds
    return Ceilings(bandwidth, rates, tuple(notes), read, _largest_cache(device))


def read_bandwidth(device: torch.device, *, seconds: float = 0.2) -> float:
    """Bytes per second that this device reads from memory: a sum over much more data than the caches hold."""
    source = torch.ones(256 << 18, device=device)  # 256 MiB
    in_huge_pages([source])
    took = time_in_turns({"sum": lambda i: source.sum()}, 1, device, seconds=seconds)["sum"]
    assert took.seconds is not None, took.note
    return source.nbytes / took.seconds


def least_seconds(contest: Contest, ceilings: Ceilings) -> tuple[float, str]:
    """The least seconds of any implementation of the contest, and the limiting factor: "bytes", or the rate's name.

    If the contest's rate was not measured, only the bytes count.
    """
    tiled = attention_bytes(contest.pairs, contest.shape[-1], ceilings.cache) if contest.pairs and ceilings.cache else 0
    moving = max(contest.least_bytes, tiled) / ceilings.memory
    rate = ceilings.rates.get(contest.rate)
    computing = contest.flops / rate if rate else 0.0
    return (moving, "bytes") if moving >= computing else (computing, contest.rate)


def attention_bytes(pairs: int, channels: int, fast: int, size: int = 2) -> float:
    """Bytes that attention moves at least between memory and a faster memory, in any order of tiles.

    A fast memory of M numbers needs N² d² / M numbers for N queries and keys of d channels if M >= d², and N² d / √M
    below that (arXiv:2402.07443, without its constant factors, which are taken as 1; with half of M for queries and
    half for their sums, the best order of tiles known moves four times the first).

    Args:
        pairs: queries times the keys that each of them sees, over all heads: N², or half of it under a causal mask.
        channels: of a head.
        fast: bytes of the faster memory.
        size: bytes of a number.
    """
    M = fast / size
    return size * pairs * channels * (channels / M if channels**2 <= M else M**-0.5)


def _largest_cache(device: torch.device) -> int | None:
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=None)


def _cuda_bandwidth(device: torch.device) -> tuple[float, float | None]:
    """Bandwidth of a copy, and of reading alone: the faster of a sum and of a product with a vector."""
    size = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 4) // 16384 * 16384
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = source.view(torch.int16).view(-1, 8192).view(torch.bfloat16)
    vector = torch.zeros(8192, dtype=torch.bfloat16, device=device)
    calls = {
        "copy": lambda i: target.copy_(source),
        "sum": lambda i: source.view(torch.int32).sum(dtype=torch.int32),
        "product": lambda i: matrix @ vector,
    }
    took = time_in_turns(calls, 1, device, seconds=0.5)
    copy, reading = took["copy"], [took[name].seconds for name in ("sum", "product") if took[name].seconds]
    assert copy.seconds is not None, copy.note
    return 2 * size / copy.seconds, size / min(reading) if reading else None


def _cpu_bandwidth(size: int) -> float:
    """The larger of the rates of a copy and a sum: in a copy, a processor may also read the target before writing it,
    which is not counted."""
    source = torch.rand(size // 4)
    target = torch.empty_like(source)
    took = time_in_turns({"copy": lambda i: target.copy_(source), "sum": lambda i: source.sum()}, 1, "cpu", seconds=1)
    assert took["copy"].seconds and took["sum"].seconds
    return max(2 * size / took["copy"].seconds, size / took["sum"].seconds)


def _cuda_products(device: torch.device) -> dict[str, tuple[Callable[[], Callable[[int], object]], int]]:
    """Type -> (function that makes the call, its operations). The inner dimension of both operands is contiguous."""

    def dense(dtype: torch.dtype, n: int) -> Callable[[int], object]:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        assert dtype != torch.float32 or not torch.backends.cuda.matmul.allow_tf32
        return lambda i: a @ b.t()

    def int8() -> Callable[[int], object]:
        a, b = (torch.randint(-127, 128, (8192, 8192), dtype=torch.int8, device=device) for _ in range(2))
        return lambda i: torch._int_mm(a, b.t())

    def float8() -> Callable[[int], object]:
        a, b = (torch.randn(8192, 8192, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda i: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {
        "bfloat16": (lambda: dense(torch.bfloat16, 8192), 2 * 8192**3),
        "float16": (lambda: dense(torch.float16, 8192), 2 * 8192**3),
        "float32": (lambda: dense(torch.float32, 4096), 2 * 4096**3),
        "int8": (int8, 2 * 8192**3),
        "float8": (float8, 2 * 8192**3),
    }


def _cpu_products(n: int) -> dict[str, tuple[Callable[[], Callable[[int], object]], int]]:
    """The same for oneDNN with the weight laid out beforehand: torch's own products are slower on many processors."""
    tokens = max(n // 2, 64)

    def dense(dtype: torch.dtype) -> Callable[[int], object]:
        x, W = torch.randn(tokens, n).to(dtype), torch.randn(n, n).to(dtype)
        if not lays_out(dtype):
            return lambda i: x @ W.t()
        packed = lay_out(W, tokens)
        return lambda i: product(x, packed)

    def int8() -> Callable[[int], object]:
        x = torch.randint(0, 256, (tokens, n), dtype=torch.uint8)
        W = torch.randint(-127, 128, (n, n), dtype=torch.int8)  # [in, out]
        packed = torch.ops.onednn.qlinear_prepack(W, [tokens, n])
        scale, zero = torch.ones(n), torch.zeros(n, dtype=torch.int64)
        rest = (scale, zero, None, 1.0, 0, torch.float32, "none", [], "")
        return lambda i: torch.ops.onednn.qlinear_pointwise(x, 1.0, 0, packed, *rest)

    operations = 2 * tokens * n * n
    return {
        "bfloat16": (lambda: dense(torch.bfloat16), operations),
        "float32": (lambda: dense(torch.float32), operations),
        "int8": (int8, operations),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """The device and software of the measurement; the fields are listed in kernels/harness/validate.py."""
    given = os.environ.get("WORKBENCH_COMMIT")  # where the checkout was copied without its history
    commit = given or _said("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": _gpu(device) if device.type == "cuda" else None,
        "commit": commit,
        "dirty": bool(_said("git", "-C", str(Path(__file__).parent), "status", "--porcelain"))
        if commit and not given
        else None,
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "sms": found.multi_processor_count,
        "l2_bytes": getattr(found, "L2_cache_size", 0),
        "memory_bytes": found.total_memory,
        "shared_memory_bytes": getattr(found, "shared_memory_per_block_optin", 0),
        "driver": (
            _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
        ).splitlines()[0],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
