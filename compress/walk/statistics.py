"""What a method may ask the walk to collect from the inputs of a linear. One class each, listed in STATISTICS."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from compress.formats import Format
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


class Absmax:
    """The largest magnitude of each input channel, [in] float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)

    def update(self, x: Tensor) -> None:
        if x.shape[0]:
            self.largest = torch.maximum(self.largest, x.abs().amax(0).float())

    def result(self) -> Tensor:
        return self.largest


class Absmean:
    """The mean magnitude of each input channel, [in] float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.sum = torch.zeros(columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        self.sum += x.abs().sum(0, dtype=torch.float32)
        self.tokens += x.shape[0]

    def result(self) -> Tensor:
        return self.sum / max(self.tokens, 1)


class Starts:
    """The inputs of the first token of every calibration window, [windows, in] float32.

    Models attend to it from everywhere (an attention sink, arXiv:2309.17453), so its errors reach every later token.
    Linears that do not see whole windows, as routed experts do, have none.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.rows = [torch.zeros(0, columns, dtype=torch.float32, device=device)]

    def update(self, x: Tensor) -> None:
        """x: [windows, tokens, in]; anything else has no known first token."""
        if x.dim() == 3:
            self.rows.append(x[:, 0].float())

    def result(self) -> Tensor:
        return torch.cat(self.rows)


class Rows:
    """A sample of at most `most` inputs [n, in] in float32, spread over all that came by.

    Tokens are taken by their `_levels`, not at even distances: those would meet the same few places of every window.
    """

    most = 512

    def __init__(self, columns: int, device: torch.device) -> None:
        self.kept = torch.zeros(0, columns, dtype=torch.float32, device=device)
        self.levels = torch.zeros(0, dtype=torch.int32)
        self.level, self.seen = 0, 0

    def update(self, x: Tensor) -> None:
        levels = _levels(self.seen, x.shape[0])
        self.seen += x.shape[0]
        new = levels >= self.level
        self.kept = torch.cat([self.kept, x[new.to(x.device)].float()])
        self.levels = torch.cat([self.levels, levels[new]])
        while len(self.kept) > self.most:
            self.level += 1
            stay = self.levels >= self.level
            self.kept, self.levels = self.kept[stay.to(self.kept.device)], self.levels[stay]

    def result(self) -> Tensor:
        return self.kept


class AbsmaxRest:
    """The largest magnitude of each input channel over the tokens that are not among those of `Rows`, [in] float32; 0
    if all are.

    What is chosen by these tokens can be tried on those.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.largest = torch.zeros(33, columns, dtype=torch.float32, device=device)  # of the tokens of each level
        self.tokens = torch.zeros(33, dtype=torch.long)
        self.seen = 0

    def update(self, x: Tensor) -> None:
        levels = _levels(self.seen, x.shape[0])
        self.seen += x.shape[0]
        self.tokens += torch.bincount(levels, minlength=33)
        for level in levels.unique().tolist():
            top = x[(levels == level).to(x.device)].abs().amax(0).float()
            self.largest[level] = torch.maximum(self.largest[level], top)

    def result(self) -> Tensor:
        level = 0
        while self.tokens[level:].sum() > Rows.most:
            level += 1
        return self.largest[:level].amax(0) if level else self.largest.new_zeros(self.largest.shape[1])


def _levels(start: int, count: int) -> Tensor:
    """Of the tokens start, start + 1, ...: [count] int32, at least k for one token in 2^k, spread as evenly as
    multiples of the golden ratio are."""
    hashed = (torch.arange(start, start + count) * 2654435769) % 2**32
    return 32 - torch.frexp(hashed.double()).exponent


STATISTICS: dict[str, type[Statistic]] = {
    "gram": Gram, "starts": Starts, "absmax": Absmax, "absmean": Absmean, "rows": Rows, "absmax_rest": AbsmaxRest,
}  # fmt: skip


def divided(name: str, value: Tensor, s: Tensor) -> Tensor:
    """What a statistic would be, had every input x [in] been divided by s [in], positive, before it was collected."""
    return value / torch.outer(s, s) if name == "gram" else value / s


class LayerStatistics:
    """What one linear's inputs gave. Linears that read the same tensor share all but the notes.

    Attributes:
        tokens: how many rows of input were seen.
        values: result by name in STATISTICS.
        shared: a place for what is costly to derive from `values` (a Cholesky factor, say), keyed by whoever derives
            it.
        name: of the linear in the model.
        dtype: of the model's activations, in which stored floats are kept.
        stored: the parts that an earlier method of the recipe stored for this linear; empty if none did.
        keep: [out, in] bool, False for weights that an earlier method set to 0, which the walk keeps at 0; None if none
            did.
        notes: what the method has to say about this layer; goes into the record.
    """

    def __init__(self, tokens: int, values: dict[str, Tensor], shared: dict | None = None) -> None:
        self.tokens = tokens
        self.values = values
        self.shared = {} if shared is None else shared
        self.name = ""
        self.dtype = torch.float32
        self.stored: list[Format] = []
        self.keep: Tensor | None = None
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
        self.columns = columns
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        """x: [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        self.tokens += rows.shape[0]
        for statistic in self.statistics.values():
            statistic.update(x if isinstance(statistic, Starts) else rows)

    def result(self) -> LayerStatistics:
        return LayerStatistics(self.tokens, {need: statistic.result() for need, statistic in self.statistics.items()})
