"""Devices by name, with the peaks of their makers' data sheets, for predictions about devices that are not at hand."""

import difflib

import torch

from kernels.harness import roofline
from kernels.harness.roofline import Ceilings

HERE = "here"
# GB/s in one direction of the 16 lanes between host and device that data sheets name (and whose two directions they add
# up): PCI Express carries 16 GT/s a lane in generation 4 and 32 in generation 5, of which 128 bits in 130 are data.
PCIE_4, PCIE_5 = 31.5, 63.0
# Memory bandwidth in TB/s, dense products in bfloat16 in TFLOP/s, and the link to the host. No program reaches them: of
# an H100's, copies reach 73 %, reading alone 93 % and products 66 % (reports/published/gpu.md).
DATA_SHEETS = {
    "a100-40gb": (1.555, 312.0, PCIE_4),
    "a100-80gb": (2.039, 312.0, PCIE_4),
    "h100-pcie": (2.0, 756.0, PCIE_5),
    "h100-sxm": (3.35, 989.0, PCIE_5),
    "h200": (4.8, 989.0, PCIE_5),
    "l4": (0.300, 121.0, PCIE_4),
    "l40s": (0.864, 362.0, PCIE_4),
    "mi300x": (5.3, 1307.0, PCIE_5),
    "rtx-4090": (1.008, 165.0, PCIE_4),
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
    bandwidth, products, _ = DATA_SHEETS[name]
    return Ceilings(bandwidth * 1e12, {"bfloat16": products * 1e12}), "its data sheet"


def link_of(name: str) -> float | None:
    """Bytes per second in one direction between a device and the memory of its host, by its data sheet; None: "here",
    whose link is not measured."""
    return DATA_SHEETS[name][2] * 1e9 if name in DATA_SHEETS else None


def check_device_name(name: str, parameter: str = "--device") -> None:
    """Raise ValueError, before anything is measured, if no device has this name."""
    known = [HERE, *DATA_SHEETS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? It" if near else "it"
        raise ValueError(f"`{parameter}` (={name!r}) is not known; {hint} can be {', '.join(known)}")
