"""Shared code of the pages: figures, tables, names of metrics, writing of files."""
