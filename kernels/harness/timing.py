"""Times of one call, contestants in turns: replays of CUDA graphs between events, or the clock on a CPU.

Every sample is one walk (or several) over all copies of the operands, so that no cache holds them. On CUDA the walk is
captured as a graph, which excludes Python and launches from the figure; if that fails, it is a loop between events, and
`how` says so. A time includes the gap between two nodes of the graph. A GPU is kept busy for WARMING seconds before the
first sample, so that it has the clock rates of a loaded GPU, which are recorded.
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.support.capture import capturing
from kernels.support.errors import kind_and_first_line

SAMPLE = 2e-3  # seconds that a sample should last, so that the cost of its start and end is negligible
WARMING = 0.3  # seconds of work on a GPU before its samples
LONG = 20e-3  # seconds; a sample this long needs no replay before it to hide its own launch
CALLS = 4096  # largest number of calls in one graph
ROUNDS = (3, 15)


@dataclass(frozen=True)
class Timing:
    """One contestant's times.

    seconds:  median of one call; None if it could not be timed; `note` gives the reason.
    low, high: quartiles.
    rounds, calls: samples taken, and calls in each.
    how:      "graph" (CUDA graph replay), "loop" (CUDA events around calls from Python) or "clock" (CPU).
    eager:    on CUDA, seconds of one call from Python, launches included: a single sample, to show their cost.
    clocks:   MHz of the multiprocessors after the first round and after the last; empty if unknown.
    """

    seconds: float | None
    low: float | None
    high: float | None
    rounds: int
    calls: int
    how: str
    note: str = ""
    eager: float | None = None
    clocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Timer:
    sample: Callable[[], float]  # seconds that `calls` calls took
    calls: int
    guess: float  # seconds that a sample may take in total
    how: str
    note: str = ""
    eager: float | None = None


def time_in_turns(
    contestants: dict[str, Callable[[int], object]],
    copies: int,
    device: torch.device | str = "cpu",
    *,
    seconds: float = 1.0,
    rounds: int | None = None,
    alike: tuple[str, ...] = (),
    graph: bool = True,
) -> dict[str, Timing]:
    """Time every contestant, one sample of each in every round.

    Args:
        contestants: name -> call with the index of the operands to use, below `copies`.
        copies: sets of operands to rotate through.
        seconds: time for all rounds together; at least 3 rounds run (1 if a round takes more than three times as long).
        rounds: number of rounds to run instead.
        graph: on CUDA, replay graphs where they can be captured; False: launch every call.
        alike: contestants whose ratio matters: unless all of these are captured, no contestant is timed by graph.

    Raises:
        RuntimeError: the device no longer answers. An error of one contestant is noted in its Timing instead.
    """
    device = torch.device(device)
    prepare = _clock if device.type == "cpu" else _graph if graph else _loop
    timers, failed = _prepared(contestants, copies, device, prepare)
    if prepare is _graph and any(timers[name].how != "graph" for name in alike if name in timers):
        timers, failed = _prepared(contestants, copies, device, _loop)
    if rounds is None:
        once = sum(timer.guess for timer in timers.values()) or 1.0
        rounds = min(max(int(seconds / once), ROUNDS[0] if once <= 3 * seconds else 1), ROUNDS[1])
    if device.type == "cuda":
        _warm_up(list(timers.values()))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    clocks = []
    for number in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.sample() / timer.calls)
        if number in (0, rounds - 1):
            clocks.append(sm_clock(device))
    known = tuple(clock for clock in clocks if clock is not None)
    took = {name: replace(_timing(samples[name], timer), clocks=known) for name, timer in timers.items()}
    return {name: took.get(name) or failed[name] for name in contestants}


def _warm_up(timers: list[_Timer]) -> None:
    """Run all contestants in turns until the device has worked for WARMING seconds."""
    worked, until = 0.0, time.perf_counter() + 10 * WARMING  # independent of the events' times
    while timers and worked < WARMING and time.perf_counter() < until:
        worked += sum(timer.sample() for timer in timers)


def settle(device: torch.device) -> None:
    """Wait until the device is idle; raises if an earlier call broke it (on CUDA no process recovers from that)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        assert torch.ones(1, device=device).add_(1).item() == 2


def _prepared(
    contestants: dict[str, Callable[[int], object]], copies: int, device: torch.device, prepare: Callable[..., _Timer]
) -> tuple[dict[str, _Timer], dict[str, Timing]]:
    timers, failed = {}, {}
    for name, call in contestants.items():
        try:
            timers[name] = prepare(call, copies)
        except Exception as error:  # a baseline that does not support this shape must not stop the others
            settle(device)
            failed[name] = Timing(None, None, None, 0, 0, "", kind_and_first_line(error))
    return timers, failed


def _timing(samples: list[float], timer: _Timer) -> Timing:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return Timing(statistics.median(samples), low, high, len(samples), timer.calls, timer.how, timer.note, timer.eager)


def _walks(once: float, copies: int) -> int:
    """The number of walks over all copies in a sample, if one walk takes `once` seconds."""
    return max(1, min(int(SAMPLE / max(once, 1e-9)) + 1, CALLS // copies))


def _walk(call: Callable[[int], object], copies: int, walks: int) -> None:
    for _ in range(walks):
        for i in range(copies):
            call(i)


def _clock(call: Callable[[int], object], copies: int) -> _Timer:
    def took(walks: int) -> float:
        start = time.perf_counter()
        _walk(call, copies, walks)
        return time.perf_counter() - start

    call(0)  # may compile something
    once = took(1)
    walks = _walks(once, copies)
    return _Timer(lambda: took(walks), walks * copies, walks * once, "clock")


def _between_events(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3  # milliseconds


def _loop(call: Callable[[int], object], copies: int, note: str = "") -> _Timer:
    _between_events(lambda: _walk(call, copies, 1))  # warms up
    once = _between_events(lambda: _walk(call, copies, 1))
    walks = _walks(once, copies)

    def sample() -> float:
        return _between_events(lambda: _walk(call, copies, walks))

    return _Timer(sample, walks * copies, walks * once, "loop", note, once / copies)


def _graph(call: Callable[[int], object], copies: int) -> _Timer:
    loop = _loop(call, copies)  # raises what the call raises
    try:
        graph, guess = _captured(call, copies, 1)
        walks = _walks(guess, copies)  # from the graph's own time: the loop's may be the time of its launches
        if walks > 1:
            graph, guess = _captured(call, copies, walks)
    except Exception as error:
        return _loop(call, copies, f"no graph: {kind_and_first_line(error)}")
    calls = walks * copies
    if guess >= LONG:
        return _Timer(lambda: _between_events(graph.replay), calls, guess, "graph", eager=loop.eager)

    def sample() -> float:
        graph.replay()  # keeps the GPU busy while the next one is launched, which then starts without a gap
        return _between_events(graph.replay)

    return _Timer(sample, calls, 2 * guess, "graph", eager=loop.eager)


def _captured(call: Callable[[int], object], copies: int, walks: int) -> tuple[torch.cuda.CUDAGraph, float]:
    """A graph of `walks` walks over the copies, and the seconds that it takes."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        _walk(call, copies, walks)
    graph.replay()
    torch.cuda.synchronize()
    return graph, _between_events(graph.replay)


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
