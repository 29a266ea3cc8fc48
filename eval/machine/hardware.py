"""The hardware that the numbers were measured on."""

import os
import platform
from typing import Any

import psutil
import torch

from eval.machine.processor import cpu_class, cpu_name


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and accelerators of this machine, as JSON."""
    return {
        "cpu": cpu_name(),
        "cpu_class": cpu_class(),  # generations of one name differ in speed
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
