"""What a method may ask the walk to collect from the inputs of a linear. One class each, listed in STATISTICS."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.gram import gram, symmetric


class Statistic(Protocol):
    """Fed with every input of a linear, micro-batch by micro-batch; `result` is what the method reads."""

    def __init__(self, columns: int, device: torch.device) -> None: ...
    def update(self, x: Tensor) -> None:
        """x: [tokens, in]."""

    def result(self) -> Tensor: ...


class Gram:
    """H [in, in] = (2/n) Σ x xᵀ in float32: the Hessian of the layer's squared output error (GPTQ, equation 1)."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.sum = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        gram(x, self.sum)
        self.tokens += x.shape[0]

    def result(self) -> Tensor:
        return symmetric(self.sum).mul_(2 / max(self.tokens, 1))


STATISTICS: dict[str, type[Statistic]] = {"gram": Gram}


class LayerStatistics:
    """What one linear's inputs gave. Linears that read the same tensor share all but the notes.

    Attributes:
        tokens: how many rows of input were seen.
        values: result by name in STATISTICS.
        shared: a place for what is costly to derive from `values` (a Cholesky factor, say), keyed by whoever derives it.
        notes: what the method has to say about this layer; goes into the record.
    """

    def __init__(self, tokens: int, values: dict[str, Tensor], shared: dict | None = None) -> None:
        self.tokens = tokens
        self.values = values
        self.shared = {} if shared is None else shared
        self.notes: list[str] = []

    def for_another(self) -> "LayerStatistics":
        """The same statistics for a linear that reads the same input."""
        return LayerStatistics(self.tokens, self.values, self.shared)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Collector:
    """Feeds several statistics with the inputs of one linear."""

    def __init__(self, needs: Sequence[str], columns: int, device: torch.device) -> None:
        self.statistics = {need: STATISTICS[need](columns, device) for need in needs}
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        """x: [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        self.tokens += rows.shape[0]
        for statistic in self.statistics.values():
            statistic.update(rows)

    def result(self) -> LayerStatistics:
        return LayerStatistics(self.tokens, {need: statistic.result() for need, statistic in self.statistics.items()})
