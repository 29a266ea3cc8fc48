"""Starts the other processes of one compression on this machine; each of them makes the same call as this one."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compress.walk.parallel.ranks import TIMEOUT
from compress.walk.shards import WorkFolder

PROCESSES = "WORKBENCH_PROCESSES"  # environment variable: processes per compression, unless a call sets their number
MOST = 64
_ARGUMENTS, _MEETING, _HERE = "arguments.pt", "meeting", "here-{}"


def process_count(processes: int | None, *, worth_it: bool = True) -> int:
    """The number of processes: that of the call, else of the process group, else of the environment variable.

    Args:
        worth_it: whether the environment variable counts; False for a call with little to do.

    Raises:
        ValueError: the number is not positive; or there is a process group, and it is neither 1 nor the group's size.
    """
    grouped = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    where = "`processes`"
    if processes is None:
        text = "" if grouped or not worth_it else os.environ.get(PROCESSES, "")
        where, processes = f"${PROCESSES}", int(text) if text.isdecimal() else text or grouped or 1
    if type(processes) is not int or not 1 <= processes <= MOST:
        raise ValueError(f"{where} (={processes!r}) must be a whole number from 1 to {MOST}")
    if grouped and processes not in (1, grouped):
        raise ValueError(f"{where} (={processes}) must be 1 or {grouped}, the size of the process group that there is")
    if processes > 1 and not (dist.is_available() and dist.is_gloo_available()):
        raise ValueError(f"{where} (={processes}): this build of torch has no torch.distributed with gloo; 1 works")
    return processes


def check_devices(device: torch.device, count: int) -> None:
    """Raise ValueError if the processes are to compute on GPUs and there is no GPU for each."""
    if device.type != "cuda" or count == 1:
        return
    if device.index is not None:
        raise ValueError(f"`device` (='{device}') names one GPU, and {count} processes need one each: 'cuda' works")
    if count > torch.cuda.device_count():
        raise ValueError(
            f"`processes` (={count}): each needs a GPU, and there are {torch.cuda.device_count()} on this machine"
        )


def device_of_process(device: torch.device) -> torch.device:
    """The device of this process of the default process group: each process of a machine has its own GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def spawned(count: int, call: Callable, arguments: Mapping[str, Any]) -> Iterator[None]:
    """While the context lasts, this process is the first of a process group whose others do `call(**arguments)`.

    The arguments are sent through a temporary folder, so that no process changes the memory of another one.

    Args:
        call: a function that can be imported by its name.

    Raises:
        ValueError: the arguments cannot be sent to another process.
        RuntimeError: another process did not start.
    """
    work = WorkFolder()
    folder = work.path
    try:
        torch.save(
            {"call": call, "arguments": dict(arguments), "threads": torch.get_num_threads()}, folder / _ARGUMENTS
        )
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"`processes` (={count}): the model or the recipe cannot be sent to another process "
            f"({type(error).__name__}: {error}); start all processes with torchrun instead"
        ) from error
    others = [_start(rank, count, folder) for rank in range(1, count)]
    try:
        _await(others, folder)
        _meet(0, count, folder)
        try:
            yield
        finally:
            dist.destroy_process_group()
        for other in others:
            other.wait(60)
    finally:
        for other in others:
            other.kill()
            other.wait()


def _start(rank: int, count: int, folder: Path) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TQDM_DISABLE": "1",
        "LOCAL_RANK": str(rank),
    }
    command = [sys.executable, "-m", "compress.walk.parallel.spawn", str(rank), str(count), str(folder)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _await(others: list[subprocess.Popen], folder: Path) -> None:
    """Wait until every process has started, or one has ended."""
    for rank, other in enumerate(others, start=1):
        while not (folder / _HERE.format(rank)).exists():
            if other.poll() is not None:
                raise RuntimeError(f"process {rank} of the compression did not start: exit status {other.returncode}")
            time.sleep(0.05)


def _meet(rank: int, count: int, folder: Path) -> None:
    where = f"file://{folder / _MEETING}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=count, timeout=TIMEOUT)


def main() -> int:
    """`python -m compress.walk.parallel.spawn RANK COUNT FOLDER`"""
    rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    _end_with(os.getppid())
    sent = torch.load(folder / _ARGUMENTS, map_location="cpu", mmap=True, weights_only=False)
    torch.set_num_threads(sent["threads"])
    (folder / _HERE.format(rank)).touch()
    _meet(rank, count, folder)
    try:
        sent["call"](**sent["arguments"])
    except Exception as error:  # the first process raises this error, too
        print(f"process {rank} of {count}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even if it waits for something."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
