"""The state of the progress bars of a run, in a file of its folder, from which a batch run's log reads it."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

BARS = ".progress"  # in the run's folder, while it works
EVERY_S = 2.0


class Bars(threading.Thread):
    """Writes the newest bar of this process into `folder` every two seconds, until `end`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._place, self._over = folder / BARS, threading.Event()

    def run(self) -> None:
        before = None
        while not self._over.wait(EVERY_S):
            now = youngest_bar()
            with contextlib.suppress(OSError):  # a full disk or a moved folder must not end the thread
                if now is None:
                    self._place.unlink(missing_ok=True)
                elif now != before:
                    part = self._place.with_suffix(".part")
                    part.write_text(json.dumps(now), encoding="utf-8")
                    part.replace(self._place)
            before = now

    def end(self) -> None:
        """Stop, and remove the file."""
        self._over.set()
        if self.is_alive():
            self.join()
        self._place.unlink(missing_ok=True)


def youngest_bar() -> dict[str, Any] | None:
    """The newest bar with a known end: the thing that it counts, and the remaining seconds (or None)."""
    with contextlib.suppress(RuntimeError, AttributeError):  # a bar is being made or has just ended
        bars = [bar for bar in list(getattr(tqdm, "_instances", ())) if bar.total and not bar.disable]
        if bars:
            bar = max(bars, key=lambda one: one.start_t)
            spent, done = bar.format_dict["elapsed"], bar.n - bar.initial
            left = round(spent / done * (bar.total - bar.n)) if done > 0 else None
            return {"what": bar.desc.strip(": "), "done": bar.n, "total": bar.total, "unit": bar.unit, "left_s": left}
    return None
