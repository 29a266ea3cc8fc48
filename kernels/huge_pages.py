"""Memory of tensors in pages of 2 MB on Linux, so that a processor that reads much of it looks up few addresses.

Decoding reads all weights for every token. On pages of 4 kB a virtual machine, which translates every address twice,
reads them clearly more slowly (kernels/README.md has figures).
"""

import ctypes
import sys
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a huge page
SMALLEST = 1 << 16  # bytes of a tensor that is worth it
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1 and later: at once, whatever the system does by itself


def in_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Ask Linux to move the memory of CPU tensors into huge pages; their contents and addresses stay what they are.

    What lies beside a tensor in a page of 2 MB moves with it. Tensors in files (`mmap`) and opaque ones are left alone.

    Returns:
        bytes of the huge pages that there are now; 0 where the system has none, or no memory for them.
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
