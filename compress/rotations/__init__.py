"""Rotations of what flows through a model: folded into its weights, or applied while it runs."""
