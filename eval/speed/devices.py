"""Devices by name, with the peaks of their makers' data sheets, for predictions about devices that are not at hand."""

import difflib

import torch

from kernels.harness import roofline
from kernels.harness.roofline import Ceilings

HERE = "here"
# Memory bandwidth in TB/s, and dense products in bfloat16 in TFLOP/s. No program reaches either: of an H100's, copies
# reach 73 %, reading alone 93 % and products 66 % (reports/published/gpu.md).
DATA_SHEETS = {
    "a100-40gb": (1.555, 312.0),
    "a100-80gb": (2.039, 312.0),
    "h100-pcie": (2.0, 756.0),
    "h100-sxm": (3.35, 989.0),
    "h200": (4.8, 989.0),
    "l4": (0.300, 121.0),
    "l40s": (0.864, 362.0),
    "mi300x": (5.3, 1307.0),
    "rtx-4090": (1.008, 165.0),
}


def ceilings_of(name: str) -> tuple[Ceilings, str]:
    """The ceilings of a device, and their origin.

    Args:
        name: "here", whose ceilings are measured in some seconds; or a name in DATA_SHEETS.

    Raises:
        ValueError: another name.
    """
    if name == HERE:
        return roofline.measure(torch.device("cuda" if torch.cuda.is_available() else "cpu")), "measured here"
    check_device_name(name)
    bandwidth, products = DATA_SHEETS[name]
    return Ceilings(bandwidth * 1e12, {"bfloat16": products * 1e12}), "its data sheet"


def check_device_name(name: str, parameter: str = "--device") -> None:
    """Raise ValueError, before anything is measured, if no device has this name."""
    known = [HERE, *DATA_SHEETS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? It" if near else "it"
        raise ValueError(f"`{parameter}` (={name!r}) is not known; {hint} can be {', '.join(known)}")
