"""Projections, which choose the channels in which keys and values are kept. One file each."""
