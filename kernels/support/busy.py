"""How threads should wait for one another on a machine where other processes are busy.

By default OpenMP's threads spin for milliseconds at the end of every parallel loop. If another process uses one of the
cores, the threads on the other cores spin until it is free, at every loop: two GPTQ runs side by side on two cores took
more than 200 seconds each instead of 30, and 65 with SPIN (AMD EPYC, 2026-11-25, a private script). On an idle machine
SPIN costs GPTQ nothing, but decoding operation by operation a sixth of its speed, so it is not the default.
"""

import os
import sys
import warnings
from functools import cache

import psutil

SPIN = {"GOMP_SPINCOUNT": "1000"}  # a few microseconds; OpenMP reads it when torch is loaded
POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
BUSY = 0.4  # share of the machine's cores


def environment_for_others() -> dict[str, str]:
    """Variables for a process that is started now: `SPIN` if other processes are busy, unless a policy is set."""
    return SPIN if _matters() and _busy() > BUSY else {}


@cache
def warn_if_busy() -> None:
    """Warn once if other processes are busy and this one's threads spin while they wait; the warning names a remedy."""
    import torch  # imported here because code that only starts processes does not need it

    if _matters() and torch.get_num_threads() > 1 and (busy := _busy()) > BUSY:
        setting = " ".join(f"{name}={value}" for name, value in SPIN.items())
        warnings.warn(
            f"other processes keep {busy:.0%} of this machine busy, which makes threads that wait for one another "
            f"several times slower; set {setting} in the environment before Python starts, or run one thing at a time",
            stacklevel=3,
        )


def _matters() -> bool:
    alone = os.environ.get("OMP_NUM_THREADS") == "1"  # one thread waits for no other
    return sys.platform == "linux" and not alone and not any(name in os.environ for name in POLICIES)


def _busy() -> float:
    """The share of the cores in use while this thread is idle: the least of several samples within a second, because a
    run that has just ended takes a while to exit."""
    least = 1.0
    for _ in range(5):
        least = min(least, psutil.cpu_percent(interval=0.2) / 100)
        if least <= BUSY:
            break
    return least
