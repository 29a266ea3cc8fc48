"""Memory of tensors in pages of 2 MB on Linux, so that large reads need few address translations.

Decoding reads all weights for every token. With pages of 4 kB, a virtual machine, which translates every address twice,
reads them clearly more slowly (kernels/README.md has figures).
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a huge page
SMALLEST = 1 << 16  # bytes of the smallest tensor that is moved
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of glibc's mallopt
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1 and later: moves pages at once, independent of the system's settings


def in_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Ask Linux to move the memory of CPU tensors into huge pages; contents and addresses do not change.

    Other data in the same 2 MB page as a tensor moves with it. Tensors in files (`mmap`) and opaque ones are skipped.

    Returns:
        bytes now in huge pages; 0 if the system has no huge pages, or no memory for them.
    """
    if sys.platform != "linux":
        return 0
    pages = set()
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.is_mkldnn or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALLEST:
            start = storage.data_ptr()
            pages.update(range(start // PAGE, -(-(start + storage.nbytes()) // PAGE)))
    return PAGE * sum(_libc().madvise(number * PAGE, PAGE, COLLAPSE) == 0 for number in sorted(pages))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """While the context lasts, the C library keeps the memory that is freed, and then gives it back.

    Otherwise glibc returns large blocks to the system, which clears every page when it hands it out again: work that
    allocates the same blocks over and over, as training does, waits for that. Nothing changes with another C library,
    or where the environment sets its parameters.
    """
    kept = sys.platform == "linux" and hasattr(_libc(), "gnu_get_libc_version") and not _is_set()
    if kept:
        _libc().mallopt(TRIM_THRESHOLD, -1)
        _libc().mallopt(MMAP_MAX, 0)
    try:
        yield
    finally:
        if kept:
            _libc().mallopt(TRIM_THRESHOLD, 64 << 20)  # to which glibc raises it by itself
            _libc().mallopt(MMAP_MAX, 65536)
            give_memory_back()


def give_memory_back() -> None:
    """Let the C library give the memory that was freed back to the system.

    glibc keeps blocks of up to 32 MB, such as the matrices of experts: what a model's blocks took, one after the other,
    adds up to the size of the model. Nothing happens with another C library.
    """
    if sys.platform == "linux" and hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


def heap_in_huge_pages() -> int:
    """As `in_huge_pages`, for all that the C library holds at the moment in its main heap."""
    if sys.platform != "linux":
        return 0
    heap = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    moved = 0
    for start, end in ([int(place, 16) for place in one.split("-")] for one in heap):
        numbers = range(-(-start // PAGE), end // PAGE)
        moved += sum(_libc().madvise(number * PAGE, PAGE, COLLAPSE) == 0 for number in numbers)
    return PAGE * moved


def _is_set() -> bool:
    """Whether the environment sets parameters of glibc's memory."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(n.startswith("MALLOC_") for n in os.environ)
