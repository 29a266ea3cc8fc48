"""Executes notebooks: sweeps, runs, leases, processes and the command line."""
