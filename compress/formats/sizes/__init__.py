"""Weights of which as much is kept as there is room for: whole bits, or blocks."""
