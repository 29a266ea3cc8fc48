"""One run record as one self-contained HTML page."""
