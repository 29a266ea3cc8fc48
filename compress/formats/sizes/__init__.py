"""Weights that can be stored at several sizes: with fewer bits, or with fewer blocks."""
