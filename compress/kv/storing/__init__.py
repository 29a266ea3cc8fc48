"""Storing: how the positions that stay are stored. One file each."""
