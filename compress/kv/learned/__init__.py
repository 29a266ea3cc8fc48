"""Eviction by small networks that are trained once per model: the policies, and the reading of the networks."""
