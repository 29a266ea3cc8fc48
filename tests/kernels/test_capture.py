"""Captures of CUDA graphs, with stand-ins for torch.cuda and for cuBLAS's workspaces."""

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernels.support import capture
from kernels.support.capture import capturing


class Workspaces:
    """Keeps one workspace for the stream of all captures, as torch does: in the pool of the graph whose capture first
    needed it."""

    def __init__(self, monkeypatch, fails=False):
        self.pool = self.held = None
        self.forgotten = 0

        @contextmanager
        def graph(g, pool=None):
            self.pool = pool or g
            try:
                yield
            finally:
                self.pool = None
            if fails:
                raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)
        monkeypatch.setattr(capture, "_forget_capture", lambda: setattr(self, "forgotten", self.forgotten + 1))

    def clear(self):
        self.held = None

    def product(self):
        """A product outside captures needs another workspace."""
        self.held = self.held or self.pool
        return self.held


def test_each_graph_has_a_workspace_in_its_own_pool(monkeypatch):
    cublas = Workspaces(monkeypatch)
    cublas.held = "a graph of others"
    graphs: list[tuple[Any, Any]] = [("first", None), ("second", None), ("third", "shared")]
    for own, pool in graphs:
        with capturing(own, pool):
            assert cublas.product() == (pool or own)
        assert cublas.held is None, "nothing that is captured later gets it"


@pytest.mark.parametrize("fails", ["outside", "inside"])
def test_a_failed_capture_leaves_nothing_behind(monkeypatch, fails):
    cublas = Workspaces(monkeypatch, fails == "outside")
    graph: Any = "graph"
    with pytest.raises(RuntimeError, match="operation not permitted|out of memory"), capturing(graph):
        assert cublas.product() == graph and not gc.isenabled()
        if fails == "inside":
            raise RuntimeError("out of memory")
    assert cublas.held is None and cublas.forgotten == 1 and gc.isenabled()
