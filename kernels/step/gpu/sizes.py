"""The numbers of positions for which graphs are captured."""

LEAST = 1024  # positions of the smallest cache
SPARE = 256  # free positions that a cache has at least when it is filled
SHARES = 16  # of a power of two, by which compressed caches grow: large ones have room for an eighth more at most


def places(positions: int) -> int:
    """The power of two that holds at least so many positions."""
    return max(LEAST, 1 << (positions - 1).bit_length())


def closer_places(positions: int) -> int:
    """The multiple of a share of `places` that holds at least so many positions."""
    unit = max(LEAST, places(positions) // SHARES)
    return -(-positions // unit) * unit
