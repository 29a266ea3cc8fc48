"""Checks, timings and compilations of every kernel."""
