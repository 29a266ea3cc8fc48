"""Turns run records into HTML pages. Reads only records."""
