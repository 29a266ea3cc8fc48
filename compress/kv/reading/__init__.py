"""Sparse reading: all positions stay, and a query reads some of them. One file each, beside shared code."""
