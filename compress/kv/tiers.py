"""The bytes of a cache by the memory that holds them."""

from typing import NamedTuple

from compress.kv.cache import CompressedCache
from compress.kv.reading.offload import OffloadedRows


class Tiers(NamedTuple):
    """The bytes of a cache in each place.

    Attributes:
        near: bytes in the memory that attention reads.
        far: bytes outside of this memory, in `OffloadedRows`.
        fetched: bytes that were fetched from outside so far.
    """

    near: int
    far: int
    fetched: int


def tiers(cache: CompressedCache) -> Tiers:
    """The bytes of a cache by place (`CompressedCache.nbytes` counts both), and the number that was fetched."""
    parts = [getattr(slab, "values", None) for layer in cache.filled for slab in layer.slabs]
    parts = [part for part in parts if isinstance(part, OffloadedRows)]
    far = sum(part.nbytes for part in parts)
    return Tiers(cache.nbytes - far, far, sum(part.fetched for part in parts))
