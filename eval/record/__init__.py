"""The run record: its shape, reading and writing. This package imports no large libraries."""
