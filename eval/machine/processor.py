"""The processor's name and kind, in a module of its own so that reading it does not import torch."""

import hashlib
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


def instructions_sha256() -> str:
    """Hash of the processor's instruction set, and of the variables that let libraries use less of it."""
    told = _told()
    flags = sorted((told.get("flags") or told.get("Features") or "").split())
    return hashlib.sha256(repr([flags, limits(), os.environ.get("WORKBENCH_NATIVE")]).encode()).hexdigest()[:16]


def _told() -> dict[str, str]:
    """Linux's description of the first core."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
