"""Imported by every Python that a test starts: importing torch and transformers makes half a million objects that stay,
and the collector looks at them again and again unless it is told to come rarely."""

import gc

gc.set_threshold(50_000, 20, 100)
