"""Rotations of a model's activations: folded into its weights, or applied while it runs."""
