"""Policies: which cached positions stay. One file each."""
