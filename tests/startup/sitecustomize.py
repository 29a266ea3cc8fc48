"""Imported by every Python that a test starts: importing torch and transformers makes half a million objects that stay,
and the collector looks at them again and again unless it is told to come rarely. And where a test says that workers may
be forked (`FORKED_WORKERS`), a process that is to be one becomes the caller of a fork; see `tests/warm.py`."""

import gc
import os
import sys

gc.set_threshold(50_000, 20, 100)
sys.modules["rfc3987_syntax"] = None  # two seconds of a grammar that no notebook's schema asks for

WORKER = ["-m", "notebooks.batch.worker"]
if sys.orig_argv[1:3] == WORKER and (address := os.environ.get("FORKED_WORKERS")):
    warm = os.path.join(os.path.dirname(os.path.dirname(__file__)), "warm.py")
    os.execv(sys.executable, [sys.executable, "-I", "-S", warm, "run", address, WORKER[1], *sys.orig_argv[3:]])
