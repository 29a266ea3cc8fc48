"""The capture of a CUDA graph that owns the memory that it uses."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what the block launches on the current GPU. After an error, random numbers can be drawn again.

    torch keeps one workspace of cuBLAS for each stream, and captures all graphs on one stream. All graphs would write
    to the workspace in the memory of the first one. This memory is freed while others still use it: after torch.compile
    has captured graphs of its own, and in newer versions of torch when any graph is destroyed (pytorch/pytorch#193402).
    Therefore torch forgets its workspaces before and after the block, so that each graph gets one in its own pool.

    Args:
        graph: an empty graph.
        pool: memory of graphs that never run at the same time, of `torch.cuda.graph_pool_handle`; None: its own.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            yield
    except Exception:
        _forget_capture()
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_collection() -> Iterator[None]:
    """While the block runs, Python collects no garbage: a graph that it destroyed would end the capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _forget_capture() -> None:
    """Reset torch's generator after a failed capture: it would otherwise stay in capture mode, in which no random
    number can be drawn."""
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
