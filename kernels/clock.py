"""Time on a device: a GPU computes after its calls have returned, so that a clock must wait for it."""

import itertools
import time

import torch


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Moments of a device's work. On a GPU the host waits once, when it reads the times between them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, []

    def mark(self) -> None:
        """Mark the moment at which all work that was given to this device so far is done."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds from each moment to the next."""
        pairs = itertools.pairwise(self._marks)
        if self._device.type != "cuda":
            return [after - before for before, after in pairs]
        wait(self._device)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def clock(device: torch.device) -> float:
    """Seconds on the clock when all work that was given to this device is done; differences of two are durations."""
    wait(device)
    return time.perf_counter()
