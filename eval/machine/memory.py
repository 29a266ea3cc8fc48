"""Peak memory of running a model, as measured."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from eval.machine.size import size


@dataclass
class Peak:
    """bytes: the largest amount allocated during the block, above the amount at its start."""

    bytes: int = 0


@contextmanager
def peak_above_start(device: torch.device, every_s: float = 0.001) -> Iterator[Peak]:
    """Measure the block: by CUDA's own counter on a GPU, else by the growth of the process's resident set."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    return_freed_memory()
    process = psutil.Process()
    before = process.memory_info().rss
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak.bytes = max(peak.bytes, process.memory_info().rss - before)
            time.sleep(every_s)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()


@torch.no_grad()
def peak_memory(model: nn.Module, *, prompt_tokens: int = 512, new_tokens: int = 8) -> int:
    """Peak bytes of a prefill and a few decode steps: the model's tensors and the memory added by running it."""
    device = next(model.parameters()).device
    ids = torch.arange(prompt_tokens)[None] % model.get_input_embeddings().num_embeddings
    with peak_above_start(device) as peak:
        model.generate(
            ids.to(device),
            attention_mask=torch.ones_like(ids).to(device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
    return size(model).resident_bytes + peak.bytes


def return_freed_memory() -> None:
    """Ask the C library to return freed pages to the system, so that growth is measured correctly."""
    with suppress(OSError, AttributeError):  # another C library: pages that were freed before hide some growth
        ctypes.CDLL("libc.so.6").malloc_trim(0)
