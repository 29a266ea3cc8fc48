"""What else used the processor while something was timed."""

import time

import psutil

from eval.record.noise import Load

LEAST_SECONDS = 0.5  # the system counts the time of cores in hundredths of a second: shorter blocks tell no share


class LoadMeter:
    """Counts the time of the cores of this process that others used; each `with` block adds to it.

    The cores are those on which this process may run. `look` samples their clock, and takes less than a millisecond.
    """

    def __init__(self) -> None:
        self._cores = _cores()
        self._others = self._stolen = self._available = self._seconds = 0.0
        self._mhz: list[float] = []

    def __enter__(self) -> "LoadMeter":
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, own, busy, stolen = (after - before for after, before in zip(self._now(), self._start, strict=True))
        self._seconds += seconds
        self._available += seconds * len(self._cores)
        self._others += max(0.0, busy - own)
        self._stolen += stolen
        self.look()

    def look(self) -> None:
        """Sample the clock of the cores."""
        try:
            clocks = psutil.cpu_freq(percpu=True) or []
        except (OSError, RuntimeError, NotImplementedError, AttributeError):  # systems that do not show it
            return
        self._mhz += [clocks[i].current for i in self._cores if i < len(clocks) and clocks[i].current]

    @property
    def load(self) -> Load:
        """The load of all blocks together; shares are not known where they were too short."""
        if not self._available:
            return Load()
        known = self._seconds >= LEAST_SECONDS
        shares = (round(x / self._available, 4) if known else None for x in (self._others, self._stolen))
        clocks = (min(self._mhz), max(self._mhz)) if self._mhz else (None, None)
        return Load(*shares, *clocks, seconds=round(self._seconds, 2))

    def _now(self) -> tuple[float, float, float, float]:
        """Elapsed seconds; seconds of the cores used by this process, by all processes, and by other machines."""
        times = psutil.cpu_times(percpu=True)
        of_cores = [times[i] for i in self._cores if i < len(times)]
        busy = sum(
            getattr(one, kind, 0.0)
            for one in of_cores
            for kind in ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
        )
        stolen = sum(getattr(one, "steal", 0.0) for one in of_cores)
        return time.perf_counter(), time.process_time(), busy, stolen


def _cores() -> list[int]:
    """The numbers of the cores on which this process may run."""
    try:
        return psutil.Process().cpu_affinity()
    except (AttributeError, OSError):  # macOS shows none
        return list(range(psutil.cpu_count() or 1))
