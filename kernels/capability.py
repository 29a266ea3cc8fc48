"""The abilities of a GPU: its compute capability, and the shared memory available to a block of threads.

The Triton kernels were written for sm_90. Before an op calls a kernel, it checks here whether this GPU meets the
kernel's requirements, so that an error names the GPU and the requirement, and no launch fails. On a CPU, that is in
Triton's interpreter, everything runs.
"""

from dataclasses import dataclass

import torch

LEAST = (8, 0)  # products of bfloat16
FLOAT8 = (8, 9)  # float8_e4m3fn, which Triton calls fp8e4nv


@dataclass(frozen=True)
class Gpu:
    """name; compute capability; bytes of shared memory that one block may have."""

    name: str
    capability: tuple[int, int]
    shared: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {'.'.join(map(str, self.capability))})"


@torch.compiler.assume_constant_result
def gpu(index: int) -> Gpu:
    """The CUDA device of this number."""
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, (found.major, found.minor), found.shared_memory_per_block_optin)


def too_old(device: torch.device, *, float8: bool = False) -> str | None:
    """Why Triton kernels (with `float8`: those for float8_e4m3fn) do not run on this device; None if they run."""
    if device.type != "cuda":
        return None
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
