"""Storages, which define the form in which kept positions are stored. One file each."""
