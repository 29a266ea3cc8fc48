"""Policies, which choose the cached positions that stay. One file each."""
