"""Numbers of bytes as users write them, and as limits of a machine's memory."""

import re
from contextlib import suppress
from pathlib import Path

import psutil

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip


def bytes_of(size: int | str | None, parameter: str = "max_memory") -> int | None:
    """A number of bytes, or a text such as "6GB", "512 MiB" or "1e9"; None and blank texts for no limit.

    Args:
        parameter: that gives the size, for the error.

    Raises:
        ValueError: the size has none of these forms.
    """
    if size is None or not str(size).strip():
        return None
    match = re.fullmatch(r"\s*(\d*\.?\d+(?:e\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    count = float(match[1]) * UNITS.get(match[2].lower(), 0) if match else 0.0
    if isinstance(size, bool) or not 1 <= count < float("inf"):
        raise ValueError(f"`{parameter}` (={size!r}) must be a number of bytes, or a text such as '6GB' or '512MiB'")
    return round(count)


def memory_limit(size: int | str | None, parameter: str = "max_memory", device: object = "cpu") -> int | None:
    """`bytes_of` a limit for the memory of a device, by default that of this machine.

    Raises:
        ValueError: the size is no number of bytes, or the device has less memory.
    """
    limit = bytes_of(size, parameter)
    if limit is not None and limit > (most := memory_of(device)):
        whose = device if str(device).startswith("cuda") else "this machine"
        raise ValueError(
            f"`{parameter}` (={size!r}) is more than the memory of {whose}; it must be at most {most / 1e9:.1f} GB"
        )
    return limit


def memory_of(device: object = "cpu") -> int:
    """Bytes of memory of a GPU of NVIDIA; of this machine, or the container that this process is in, for others."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    most = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no container, or one without a limit
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most
