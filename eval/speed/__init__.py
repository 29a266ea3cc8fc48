"""Measured speed: prefill and decode in turns, grids, caches behind long contexts, the cost model."""
