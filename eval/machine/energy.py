"""Counters of energy and of utilisation: RAPL on processors, NVML on GPUs, or the reason why there is none."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

POWERCAP = Path("/sys/class/powercap")  # where Linux shows RAPL, of Intel and AMD processors


class NotMeasurable(Exception):
    """This machine cannot measure the quantity; the message gives the reason."""


class EnergyCounter(Protocol):
    """Counts the joules of a device; `covers` describes which parts are counted."""

    covers: str

    def joules(self) -> float: ...


class Rapl:
    """Energy of all processor packages, and of the memory if it has its own counter, since this object was made.

    RAPL's counters go back to 0 at `max_energy_range_uj` (after minutes under full load): `joules` must be called at
    least that often.

    Args:
        root: the folder with `intel-rapl:*`; each holds `name`, `energy_uj` and `max_energy_range_uj`.

    Raises:
        NotMeasurable: no such counter, or none that this user may read.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        found = {
            path: _read(path / "name") for path in sorted(root.glob("intel-rapl:*")) if (path / "energy_uj").exists()
        }
        # "psys" includes the packages, and a package its "core" and "uncore": adding them would count twice
        wanted = {path: name for path, name in found.items() if name.startswith("package") or name == "dram"}
        if not any(name.startswith("package") for name in wanted.values()):
            raise NotMeasurable(
                f"no RAPL counter of a processor package in {root} (a virtual machine or container often has none)"
            )
        self._last, self._range, self._microjoules = {}, {}, 0
        for path in wanted:
            try:
                self._last[path] = int(_read(path / "energy_uj"))
                self._range[path] = int(_read(path / "max_energy_range_uj"))
            except PermissionError:
                raise NotMeasurable(f"RAPL is there, but {path / 'energy_uj'} may be read by root alone") from None
            except (OSError, ValueError) as error:
                raise NotMeasurable(f"RAPL is there, but {path} cannot be read: {error}") from None
        self.covers = f"processor {', '.join(sorted(set(wanted.values())))} (RAPL), with all that ran on it"

    def joules(self) -> float:
        for path, before in self._last.items():
            now = int(_read(path / "energy_uj"))
            self._microjoules += now - before if now >= before else now - before + self._range[path]
            self._last[path] = now
        return self._microjoules / 1e6


class Nvml:
    """Energy of one NVIDIA GPU, since this object was made.

    Args:
        device: a CUDA device of this process; found by its UUID, as NVML also numbers devices that torch may not see.

    Raises:
        NotMeasurable: no `pynvml` (package nvidia-ml-py), or a GPU or driver that does not count energy.
    """

    covers = "the GPU's board (NVML)"

    def __init__(self, device: torch.device) -> None:
        self._nvml, self._handle = nvml_handle(device)
        try:
            self._start = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError as error:
            raise NotMeasurable(f"this GPU does not count its energy: {error}") from None

    def joules(self) -> float:
        return (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._start) / 1e3


def nvml_handle(device: torch.device) -> tuple[ModuleType, Any]:
    """NVML's module and its handle of a CUDA device.

    Raises:
        NotMeasurable: no `pynvml`, or one that does not know the device.
    """
    try:
        import pynvml
    except ImportError:
        raise NotMeasurable("the package nvidia-ml-py (pynvml) is not installed") from None
    try:
        pynvml.nvmlInit()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError as error:
        raise NotMeasurable(f"NVML does not know this GPU: {error}") from None


def gpu_use(device: torch.device) -> Callable[[], float]:
    """A function that gives the share of about the last sixth of a second in which a kernel ran on a GPU.

    Raises:
        NotMeasurable: no NVML, or a GPU that does not report it.
    """
    nvml, handle = nvml_handle(device)
    try:
        nvml.nvmlDeviceGetUtilizationRates(handle)
    except nvml.NVMLError as error:
        raise NotMeasurable(f"this GPU does not tell how busy it is: {error}") from None
    return lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100


def energy_counter(device: torch.device, powercap: Path = POWERCAP) -> EnergyCounter:
    """The energy counter of this device.

    Raises:
        NotMeasurable: there is none.
    """
    if device.type == "cuda":
        return Nvml(device)
    if device.type == "cpu":
        return Rapl(powercap)
    raise NotMeasurable(f"no counter of energy is known for a device of type {device.type}")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
