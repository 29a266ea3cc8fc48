"""Shared code of the formats of other libraries: schemes, codes in words, configurations, and the reading of their
folders."""
