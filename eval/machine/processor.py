"""The processor's name and kind, in a module of its own so that reading it does not import torch."""

import os
import platform

from kernels.processor import limits


def cpu_name() -> str:
    """The maker's name of the processor; on virtual machines often only the family's name."""
    return _told().get("model name") or platform.processor() or platform.machine()


def cpu_class() -> str:
    """Name, generation, number of cores, and the limits on instructions: processors of one class run at one speed."""
    told = _told()
    generation = f" {told['cpu family']}/{told['model']}" if {"cpu family", "model"} <= set(told) else ""
    return f"{cpu_name()}{generation} x {os.cpu_count()}" + "".join(
        f", {name}={value}" for name, value in limits().items()
    )


def _told() -> dict[str, str]:
    """Linux's description of the first core."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
