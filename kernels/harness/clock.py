"""The clock of a GPU's multiprocessors, without which two runs cannot be compared."""

import subprocess

import torch


def sm_clock(device: torch.device) -> int | None:
    """MHz now, from pynvml where it is installed, else from nvidia-smi; None where neither says it, or on a CPU."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # not installed, or whatever its library raises: nvidia-smi may still know
        return _from_nvidia_smi(device)


def _from_nvidia_smi(device: torch.device) -> int | None:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # its numbers need not be torch's
    command = ["nvidia-smi", "-i", uuid, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return int(done.stdout.strip()) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
