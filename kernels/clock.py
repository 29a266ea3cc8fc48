"""Time on a device: a GPU computes after its calls have returned, so that a clock must wait for it."""

import time

import torch


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> float:
    """Seconds on the clock when all work that was given to this device is done; differences of two are durations."""
    wait(device)
    return time.perf_counter()
