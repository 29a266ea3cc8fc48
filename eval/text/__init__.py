"""Perplexity of a text, and divergence of predictions from those of the baseline."""
