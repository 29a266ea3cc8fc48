"""Projecting: in which channels keys and values are kept. One file each."""
