"""Functions that notebooks call: parameters, measurements, curves, caches and the end of a run."""
