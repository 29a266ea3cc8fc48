"""Numbers of bytes as users write them."""

import re

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip


def bytes_of(size: int | str | None, parameter: str = "max_memory") -> int | None:
    """A number of bytes, or a text such as "6GB", "512 MiB" or "1e9"; None and blank texts for no limit.

    Args:
        parameter: that gives the size, for the error.

    Raises:
        ValueError: the size has none of these forms.
    """
    if size is None or not str(size).strip():
        return None
    match = re.fullmatch(r"\s*(\d*\.?\d+(?:e\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    count = float(match[1]) * UNITS.get(match[2].lower(), 0) if match else 0.0
    if isinstance(size, bool) or not 1 <= count < float("inf"):
        raise ValueError(f"`{parameter}` (={size!r}) must be a number of bytes, or a text such as '6GB' or '512MiB'")
    return round(count)
