"""The abilities of a GPU: its compute capability, its multiprocessors, and the shared memory available to a block.

The Triton kernels were written for sm_90. Before an op calls a kernel, it checks here whether this GPU meets the
kernel's requirements, so that an error names the GPU and the requirement, and no launch fails. On a CPU, that is in
Triton's interpreter, everything runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")
LEAST = (8, 0)  # products of bfloat16
FLOAT8 = (8, 9)  # float8_e4m3fn, which Triton calls fp8e4nv
MULTIPROCESSORS = 132  # of an H100 and an H200, for which kernels are compiled where there is no GPU


@dataclass(frozen=True)
class Gpu:
    """name; compute capability; bytes of shared memory that one block may have; number of multiprocessors."""

    name: str
    capability: tuple[int, int]
    shared: int
    multiprocessors: int = MULTIPROCESSORS

    def __str__(self) -> str:
        return f"{self.name} (compute capability {'.'.join(map(str, self.capability))})"


@torch.compiler.assume_constant_result
def gpu(index: int) -> Gpu:
    """The CUDA device of this number."""
    return _gpu(index)


@cache
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    capability, shared = (found.major, found.minor), found.shared_memory_per_block_optin
    return Gpu(found.name, capability, shared, found.multi_processor_count)


def too_old(device: torch.device, *, float8: bool = False) -> str | None:
    """Why Triton kernels (with `float8`: those for float8_e4m3fn) do not run on this device; None if they run."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return f"a GPU of ROCm {torch.version.hip}, and the Triton kernels are written for CUDA"
    found, needed = gpu(device.index or 0), FLOAT8 if float8 else LEAST
    if found.capability >= needed:
        return None
    return f"{found}, where Triton kernels {'with float8 ' if float8 else ''}need {'.'.join(map(str, needed))}"


def described(device: torch.device, *, float8: bool = False) -> str:
    """The device's name for error messages, with the GPU's capability if that is too old."""
    return " ".join(filter(None, (f"{device}:" if (why := too_old(device, float8=float8)) else str(device), why)))


def has_shared(device: torch.device, needed: int) -> bool:
    """Can a block use `needed` bytes of shared memory on this device?"""
    return device.type != "cuda" or gpu(device.index or 0).shared >= needed


def multiprocessors(device: torch.device | None) -> int:
    """The number of multiprocessors of a GPU; of an H100 for other devices, and for None."""
    return MULTIPROCESSORS if device is None or device.type != "cuda" else gpu(device.index or 0).multiprocessors


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """A function that launches Triton kernels, with the device of its first tensor made current: Triton launches on the
    current device, whatever the device of the tensors."""

    @wraps(launch)
    def guarded(x: torch.Tensor, *arguments, **more):
        device = x.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launch(x, *arguments, **more)
        with torch.cuda.device(device):
            return launch(x, *arguments, **more)

    return guarded
