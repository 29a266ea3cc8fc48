"""Eviction by small networks that are trained once per model: the policies, and what trains them."""
