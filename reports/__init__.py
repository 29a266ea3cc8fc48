"""Turns run records into HTML pages. Reads records and nothing else."""
