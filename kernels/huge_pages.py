"""Memory of tensors in pages of 2 MB on Linux, so that large reads need few address translations.

Decoding reads all weights for every token. With pages of 4 kB, a virtual machine, which translates every address twice,
reads them clearly more slowly (kernels/README.md has figures).
"""

import ctypes
import sys
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a huge page
SMALLEST = 1 << 16  # bytes of the smallest tensor that is moved
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
