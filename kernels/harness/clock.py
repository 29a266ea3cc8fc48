"""The clock of a GPU's multiprocessors, without which two runs cannot be compared."""

import subprocess

import torch


def sm_clock(device: torch.device) -> int | None:
    """The current clock in MHz, from pynvml if installed, else from nvidia-smi; None if both fail, or on a CPU."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # not installed, or any error of its library: nvidia-smi may still work
        return _from_nvidia_smi(device)


def _from_nvidia_smi(device: torch.device) -> int | None:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # its device numbers may differ from torch's
    command = ["nvidia-smi", "-i", uuid, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return int(done.stdout.strip()) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
