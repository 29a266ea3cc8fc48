"""The statistics that the walk can collect from the inputs of a linear for a method. One class each, listed in
STATISTICS."""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from compress.formats import Format
from compress.walk.finite import check_activations, check_statistics
from compress.walk.parallel.places import Place
from compress.walk.parallel.ranks import current
from kernels.gram import gram, mirror_


class Statistic(Protocol):
    """Fed with every input of a linear in one slice of the calibration, micro-batch by micro-batch.

    `start`: number of tokens in earlier slices. `merge` adds a later slice; `result` is the value that methods read.
    """

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None: ...
    def update(self, x: Tensor) -> None:
        """x: [tokens, in]."""

    def merge(self, later: Self) -> None: ...
    def result(self) -> Tensor: ...


class Gram:
    """H [in, in] = (2/n) Σ x xᵀ in float32: the Hessian of the layer's squared output error (GPTQ, equation 1)."""

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.sum = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        gram(x, self.sum)
        self.tokens += x.shape[0]

    def merge(self, later: "Gram") -> None:
        self.sum += later.sum
        self.tokens += later.tokens

    def result(self) -> Tensor:
        """Call this only once: the result is made in the memory of the sum."""
        return mirror_(self.sum).mul_(2 / max(self.tokens, 1))


class Cross:
    """C [in, in] = (2/n) Σ (x̃ - x) xᵀ in float32, with x̃ the input of the linear in the uncompressed model.

    Tokens with an unknown x̃ count as tokens without a difference; if it is known for no token, C is [0, in].
    """

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.sum = torch.zeros(0, columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def update(self, x: Tensor, original: Tensor | None) -> None:
        rows = x.reshape(-1, x.shape[-1])
        self.tokens += rows.shape[0]
        if original is not None:
            difference = original.reshape(rows.shape).float() - rows.float()
            self._room().addmm_(difference.t(), rows.float())

    def merge(self, later: "Cross") -> None:
        self.tokens += later.tokens
        if len(later.sum):
            self._room().add_(later.sum)

    def result(self) -> Tensor:
        return self.sum.mul_(2 / max(self.tokens, 1))

    def _room(self) -> Tensor:
        if not len(self.sum):
            self.sum = self.sum.new_zeros(self.sum.shape[1], self.sum.shape[1])
        return self.sum


class CrossStarts:
    """(x̃ - x) of the first token of every calibration window, [windows, in] float32, beside `Starts`.

    It has no rows, [0, in], if the original is known for no window; see `Cross`.
    """

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.rows = [torch.zeros(0, columns, dtype=torch.float32, device=device)]
        self.known = False

    def update(self, x: Tensor, original: Tensor | None) -> None:
        if x.dim() == 3:
            first = x[:, 0].float()
            self.rows.append(torch.zeros_like(first) if original is None else original[:, 0].float() - first)
            self.known |= original is not None

    def merge(self, later: "CrossStarts") -> None:
        self.rows += later.rows
        self.known |= later.known

    def result(self) -> Tensor:
        return torch.cat(self.rows) if self.known else self.rows[0]


class Absmax:
    """The largest magnitude of each input channel, [in] float32."""

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)

    def update(self, x: Tensor) -> None:
        if x.shape[0]:
            self.largest = torch.maximum(self.largest, x.abs().amax(0).float())

    def merge(self, later: "Absmax") -> None:
        self.largest = torch.maximum(self.largest, later.largest)

    def result(self) -> Tensor:
        return self.largest


class Absmean:
    """The mean magnitude of each input channel, [in] float32."""

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.sum = torch.zeros(columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        self.sum += x.abs().sum(0, dtype=torch.float32)
        self.tokens += x.shape[0]

    def merge(self, later: "Absmean") -> None:
        self.sum += later.sum
        self.tokens += later.tokens

    def result(self) -> Tensor:
        return self.sum / max(self.tokens, 1)


class Starts:
    """The inputs of the first token of every calibration window, [windows, in] float32.

    Models attend to it from everywhere (an attention sink, arXiv:2309.17453), so its errors reach every later token.
    Linears that do not see whole windows, as routed experts do, have none.
    """

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.rows = [torch.zeros(0, columns, dtype=torch.float32, device=device)]

    def update(self, x: Tensor) -> None:
        """x: [windows, tokens, in]; anything else has no known first token."""
        if x.dim() == 3:
            self.rows.append(x[:, 0].float())

    def merge(self, later: "Starts") -> None:
        self.rows += later.rows

    def result(self) -> Tensor:
        return torch.cat(self.rows)


class Rows:
    """A sample of at most `most` inputs [n, in] in float32, spread over all inputs.

    Tokens are taken by their `_levels`, not at even distances, which would hit the same few places of every window.
    """

    most = 512

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.kept = torch.zeros(0, columns, dtype=torch.float32, device=device)
        self.levels = torch.zeros(0, dtype=torch.int32)
        self.level, self.seen = 0, start

    def update(self, x: Tensor) -> None:
        levels = _levels(self.seen, x.shape[0])
        self.seen += x.shape[0]
        new = levels >= self.level
        self.kept = torch.cat([self.kept, x[new.to(x.device)].float()])
        self.levels = torch.cat([self.levels, levels[new]])
        self._thin()

    def merge(self, later: "Rows") -> None:
        self.level = max(self.level, later.level)
        self.kept, self.levels = torch.cat([self.kept, later.kept]), torch.cat([self.levels, later.levels])
        self._thin()

    def _thin(self) -> None:
        """Keep the tokens of this level and above; if they are too many, raise the level."""
        stay = self.levels >= self.level
        while stay.sum() > self.most:
            self.level += 1
            stay = self.levels >= self.level
        if not stay.all():
            self.kept, self.levels = self.kept[stay.to(self.kept.device)], self.levels[stay]

    def result(self) -> Tensor:
        return self.kept


class AbsmaxRest:
    """The largest magnitude of each input channel over the tokens that are not in `Rows`, [in] float32; 0 if all tokens
    are in `Rows`.

    A choice that is made by these tokens can be tested on the tokens in `Rows`.
    """

    def __init__(self, columns: int, device: torch.device, start: int = 0) -> None:
        self.largest = torch.zeros(33, columns, dtype=torch.float32, device=device)  # over the tokens of each level
        self.tokens = torch.zeros(33, dtype=torch.long)
        self.seen = start

    def update(self, x: Tensor) -> None:
        levels = _levels(self.seen, x.shape[0])
        self.seen += x.shape[0]
        self.tokens += torch.bincount(levels, minlength=33)
        for level in levels.unique().tolist():
            top = x[(levels == level).to(x.device)].abs().amax(0).float()
            self.largest[level] = torch.maximum(self.largest[level], top)

    def merge(self, later: "AbsmaxRest") -> None:
        self.largest = torch.maximum(self.largest, later.largest)
        self.tokens += later.tokens

    def result(self) -> Tensor:
        level = 0
        while self.tokens[level:].sum() > Rows.most:
            level += 1
        return self.largest[:level].amax(0) if level else self.largest.new_zeros(self.largest.shape[1])


def _levels(start: int, count: int) -> Tensor:
    """Levels of the tokens start, start + 1, ...: [count] int32; one token in 2^k has a level of at least k, and these
    tokens are spread as evenly as multiples of the golden ratio."""
    hashed = (torch.arange(start, start + count) * 2654435769) % 2**32
    return 32 - torch.frexp(hashed.double()).exponent


STATISTICS: dict[str, type[Statistic]] = {
    "gram": Gram, "starts": Starts, "cross": Cross, "cross_starts": CrossStarts, "absmax": Absmax, "absmean": Absmean,
    "rows": Rows, "absmax_rest": AbsmaxRest,
}  # fmt: skip
PAIRED = ("cross", "cross_starts")  # statistics that also need the inputs of the original linear


def divided(name: str, value: Tensor, s: Tensor) -> Tensor:
    """The value of a statistic for inputs x [in] that are all divided by s [in], which is positive."""
    return value / torch.outer(s, s) if name == "gram" else value / s


class LayerStatistics:
    """The statistics of one linear's inputs. Linears that read the same tensor share all but the notes.

    Attributes:
        tokens: the number of input rows.
        values: result by name in STATISTICS.
        shared: a place for results that are costly to derive from `values` (such as a Cholesky factor), keyed by the
            method that derives them.
        name: the name of the linear in the model.
        dtype: the dtype of the model's activations, in which stored floats are kept.
        stored: the parts that an earlier method of the recipe stored for this linear; empty if none did.
        ordered: an earlier method put the channels that the linear reads into another order.
        keep: [out, in] bool, False for weights that an earlier method set to 0, which the walk keeps at 0; None if none
            did.
        measured: what the method itself has measured of this linear before, see `compress.walk.context.Context`.
        notes: the method's notes about this layer, for the record.
    """

    def __init__(self, tokens: int, values: dict[str, Tensor], shared: dict | None = None) -> None:
        self.tokens = tokens
        self.values = values
        self.shared = {} if shared is None else shared
        self.name = ""
        self.dtype = torch.float32
        self.stored: list[Format] = []
        self.ordered = False
        self.keep: Tensor | None = None
        self.measured: dict[str, Any] = {}
        self.notes: list[str] = []

    def for_another(self) -> "LayerStatistics":
        """The same statistics for a linear that reads the same input."""
        return LayerStatistics(self.tokens, self.values, self.shared)

    def note(self, text: str) -> None:
        self.notes.append(text)


ALONE = Place()  # the place of inputs that belong to no calibration in slices


class Collector:
    """Feeds several statistics with the inputs of the linear `name`, slice by slice of the calibration.

    All statistics that methods read come from here, so that inputs which are not finite are refused here for all.

    The slices are added in their order, so that a sum is the same to the last bit for any number of processes. In one
    process a slice is added as soon as it is complete, so that memory holds one slice and the sum of the earlier ones.
    Of several processes, the first does the same, and the others hold the results of each of their slices.
    """

    def __init__(self, name: str, needs: Sequence[str], columns: int, device: torch.device) -> None:
        self.name, self.needs, self.columns, self.device = name, tuple(needs), columns, device
        self._parts: dict[int, _Part] = {}  # by slice; the sum of complete slices has the number of the last one
        self._added = -1  # the last slice that the sum holds

    def update(self, x: Tensor, place: Place = ALONE, original: Tensor | None = None) -> None:
        """Add the inputs of a micro-batch in this place.

        Args:
            x: [..., in].
            original: the same tokens' input in the uncompressed model, if it is known. Inputs that are not whole
                windows [windows, tokens, in] are not used: experts may get other tokens in the uncompressed model.

        Raises:
            NotFinite: an input is NaN or infinite; the message names the linear and the windows.
        """
        check_activations(x, f"the input of {self.name}", place)
        if original is not None and (x.dim() != 3 or original.shape != x.shape):
            original = None
        if place.slice not in self._parts:
            self._add_complete(place.slice)
            self._parts[place.slice] = _Part(self.needs, self.columns, self.device, place)
        self._parts[place.slice].update(x, place, original)

    def result(self) -> LayerStatistics:
        """The statistics over all slices of all processes; every process must call this."""
        parts = [self._parts.pop(number) for number in sorted(self._parts)]
        whole = current().chained(parts, _Part.added) or _Part(self.needs, self.columns, self.device, ALONE)
        del parts  # frees the parts that were added
        values = {need: one.result() for need, one in whole.statistics.items()}
        check_statistics(self.name, values)
        return LayerStatistics(whole.tokens, values)

    def _add_complete(self, before: int) -> None:
        """Add complete slices to the sum in their order, up to the first one that lacks a micro-batch."""
        while self._added + 1 < before and (part := self._parts.get(self._added + 1)) and part.complete:
            total = self._parts.pop(self._added, None)
            self._added += 1
            self._parts[self._added] = total.added(part) if total else part


class _Part:
    """The statistics of one slice of the calibration, or of all slices up to one."""

    def __init__(self, needs: Sequence[str], columns: int, device: torch.device, place: Place) -> None:
        self.statistics = {need: STATISTICS[need](columns, device, place.start) for need in needs}
        self.tokens, self.size = 0, place.size
        self.numbers: set[int] = set()  # numbers of the micro-batches so far

    @property
    def complete(self) -> bool:
        return len(self.numbers) == self.size

    def update(self, x: Tensor, place: Place, original: Tensor | None) -> None:
        rows = x.reshape(-1, x.shape[-1])
        self.numbers.add(place.number)
        self.tokens += rows.shape[0]
        for need, statistic in self.statistics.items():
            if need in PAIRED:
                statistic.update(x, original)
            else:
                statistic.update(x if isinstance(statistic, Starts) else rows)

    def added(self, later: "_Part") -> "_Part":
        """This part, with a later one added."""
        self.tokens += later.tokens
        for need, statistic in self.statistics.items():
            statistic.merge(later.statistics[need])
        return self
