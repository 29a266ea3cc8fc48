"""Records which implementation of each kernel op ran, so that no fallback is silent.

Every op's public function calls `ran(op, implementation)`. Code that needs these records runs inside `recording()`.
A call is recorded when Python runs, so a compiled graph records it once, while it is traced.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_listeners: list[dict[str, set[str]]] = []


@torch.compiler.assume_constant_result
def ran(op: str, implementation: str) -> None:
    """Record that `implementation` of `op` ran (or was traced)."""
    for listener in _listeners:
        listener.setdefault(op, set()).add(implementation)


@contextmanager
def recording() -> Iterator[dict[str, set[str]]]:
    """Collect `{op: {implementations that ran}}` while the block runs; nests."""
    seen: dict[str, set[str]] = {}
    _listeners.append(seen)
    try:
        yield seen
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not seen]
