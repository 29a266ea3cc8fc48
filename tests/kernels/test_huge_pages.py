"""Memory of tensors in huge pages: contents stay, and what cannot be moved is left alone."""

import os
import sys

import pytest
import torch

from kernels import huge_pages
from kernels.huge_pages import PAGE, freed_memory_kept, heap_in_huge_pages, in_huge_pages


def test_contents_and_addresses_stay():
    whole = torch.arange(3 << 20)  # 24 MB
    part, address = whole[1 << 20 :], whole.data_ptr()
    found = in_huge_pages([part, whole, whole])
    assert found % PAGE == 0 and found <= whole.nbytes + 2 * PAGE, "each page is counted once"
    assert whole.data_ptr() == address and torch.equal(whole, torch.arange(3 << 20))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_linux_says_that_they_are_huge():
    x = torch.ones(64 << 20, dtype=torch.uint8)
    if in_huge_pages([x]) < x.nbytes:
        pytest.skip("this system gives no huge pages, or has too little free memory for them")
    here, huge = False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and ":" not in first:
                start, end = (int(n, 16) for n in first.split("-"))
                here = start < x.data_ptr() + x.nbytes and end > x.data_ptr()
            elif here and first == "AnonHugePages:":
                huge += int(line.split()[1]) << 10
    assert huge >= x.nbytes - 2 * PAGE


def test_tensors_without_memory_of_their_own_are_not_moved(monkeypatch):
    asked = []

    class Libc:
        def madvise(self, address, length, advice):
            asked.append(address)
            return -1

    monkeypatch.setattr(huge_pages, "_libc", Libc)
    small, opaque, nowhere = torch.ones(8), torch.ones(512, 512).to_mkldnn(), torch.empty(1 << 24, device="meta")
    sparse = torch.ones(64, 64).to_sparse()
    assert in_huge_pages([small, opaque, nowhere, sparse]) == 0 and not asked
    assert in_huge_pages([torch.ones(4 << 20)]) == 0 and len(asked) >= 8, "a system that refuses is no error"
    monkeypatch.setattr(sys, "platform", "darwin")
    asked.clear()
    assert in_huge_pages([torch.ones(4 << 20)]) == 0 and not asked


class Glibc:
    """Writes down what glibc is asked for."""

    def __init__(self):
        self.asked = []

    def gnu_get_libc_version(self):
        return b"2.36"

    def __getattr__(self, name):
        return lambda *given: self.asked.append((name, *given)) or 0


def test_freed_memory_is_kept_and_given_back(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    libc = Glibc()
    monkeypatch.setattr(huge_pages, "_libc", lambda: libc)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(KeyError), freed_memory_kept():
        inside = list(libc.asked)
        raise KeyError
    assert inside == [("mallopt", -1, -1), ("mallopt", -4, 0)]
    assert libc.asked[2:] == [("mallopt", -1, 64 << 20), ("mallopt", -4, 65536), ("malloc_trim", 0)]
    libc.asked.clear()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    with freed_memory_kept():
        assert not libc.asked, "what the user has set stays"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_heap_keeps_its_contents():
    kept = [torch.full((1 << 10,), i) for i in range(2000)]
    assert heap_in_huge_pages() % PAGE == 0
    assert all((tensor == i).all() for i, tensor in enumerate(kept))
