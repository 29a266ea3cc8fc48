"""The run record: its shape, how it is read and written. This package imports nothing heavy."""
