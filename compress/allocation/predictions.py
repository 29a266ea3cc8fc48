"""The measured loss: KL divergence of the model's predictions if only some linears are stored in another form."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from compress.allocation.candidates import Solved
from compress.embedding import store_end
from compress.linear import replace, sharing_copy
from compress.walk.blocks import find_blocks
from compress.walk.capture import Tail, advance, block_calls, device_of, on_device

ROWS = 256  # tokens whose predictions are compared at once


class PredictionLoss:
    """KL(original || changed) in nats per token, on a few tokens that pass again through the blocks from the changed
    one on.

    arXiv:2308.10438 measures the squared error of the outputs instead, which weighs likely and unlikely tokens alike.
    Its assumption that the losses of different layers add up holds for small losses of either kind.
    """

    statistics: tuple[str, ...] = ()
    sample = 0

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        device: torch.device,
        expected: list[Tensor] | None = None,
    ) -> None:
        """
        Args:
            batches: the tokens on which predictions are compared, LongTensors [1, T].
            device: where blocks run, one at a time.
            expected: the original's logits [batch, T, vocabulary] of each micro-batch; None: those of this model.
        """
        _, self.blocks = find_blocks(model)
        self.model, self.device, self.home = model, device, device_of(self.blocks[0])
        self.probes = block_calls(model, self.blocks, batches)
        self.tail = Tail(model, self.blocks, batches)
        self.expected = self._predictions(0) if expected is None else expected

    def of(self, index: int, solved: Mapping[str, Solved]) -> float:
        with _in_place(self.model, solved):
            return self.now(index)

    def now(self, index: int) -> float:
        """The loss of the model as it is now, of which the blocks before block `index` are unchanged."""
        return divergence(self.expected, self._predictions(index))

    def of_end(self, name: str, solved: Solved) -> float:
        other = sharing_copy(self.model)
        store_end(other, name, solved.new.to(self.home))
        with solved.new.dense():
            found = [other(batch.to(self.home), use_cache=False).logits for batch in self.tail.batches]
        return divergence(self.expected, found)

    def leave(self, index: int) -> None:
        advance(self.blocks[index], self.probes, index, self.device)

    def _predictions(self, first: int) -> list[Tensor]:
        """Logits [batch, T, vocabulary] that the model gives from block `first` on, for each micro-batch."""
        passing = [copy.copy(probe) for probe in self.probes]
        for index in range(first, len(self.blocks)):
            with on_device(self.blocks[index], self.device):
                advance(self.blocks[index], passing, index, self.device)
        return [self.tail.logits(i, call.hidden.to(self.home)) for i, call in enumerate(passing)]


class ScaledLoss:
    """The measured loss of a layer's first choice, and losses of its other choices in proportion to output errors.

    The divergence is nearly quadratic in small errors, so that ||(W - Ŵ)X||² compares the choices of one layer, and a
    sample of its rows is enough. It does not compare layers, for which one measurement for each layer is made. With
    four choices this takes a quarter of the passes.
    """

    statistics: tuple[str, ...] = ("gram",)
    sample = 256

    def __init__(self, measured: PredictionLoss) -> None:
        self.measured = measured
        self._first = 0.0  # the loss of the layer's first choice
        self._errors: dict[str, Tensor] = {}  # and its errors, by linear [out]

    def of(self, index: int, solved: Mapping[str, Solved]) -> float:
        return self._scaled(solved, lambda: self.measured.of(index, solved))

    def of_end(self, name: str, solved: Solved) -> float:
        return self._scaled({name: solved}, lambda: self.measured.of_end(name, solved))

    def leave(self, index: int) -> None:
        self.measured.leave(index)

    def _scaled(self, solved: Mapping[str, Solved], measure: Callable[[], float]) -> float:
        if solved.keys() != self._errors.keys():
            self._first, self._errors = measure(), {name: _row_errors(one) for name, one in solved.items()}
        error = of_first = 0.0
        for name, one in solved.items():
            first = self._errors[name]
            error += len(first) * _row_errors(one).mean().item()
            of_first += len(first) * first[one.rows].mean().item()
        return self._first * error / max(of_first, 1e-30)


def _row_errors(one: Solved) -> Tensor:
    """||(W - Ŵ)X||² of each row [out], as a mean over the calibration tokens; ||W - Ŵ||² if there were no tokens."""
    D = one.W - one.new.dequantize()
    return ((D @ one.statistics.values["gram"]) * D if one.statistics.tokens else D.square()).sum(1)


@contextmanager
def _in_place(model: nn.Module, solved: Mapping[str, Solved]) -> Iterator[None]:
    """While the context lasts, the model has these linears, multiplied as dense weights."""
    before = {name: model.get_submodule(name) for name in solved}
    with ExitStack() as stack:
        for name, one in solved.items():
            stack.enter_context(one.new.dense())
            stack.callback(replace, model, name, before[name])
            replace(model, name, one.new)
        yield


def divergence(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """KL(expected || found) of logits [batch, T, vocabulary], mean over all tokens, in nats."""
    total, tokens = 0.0, 0
    for before, after in zip(expected, found, strict=True):
        for p, q in zip(before.flatten(0, 1).split(ROWS), after.flatten(0, 1).split(ROWS), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total += float((p.exp() * (p - q)).sum(-1).double().sum())
            tokens += len(p)
    return max(total / tokens, 0.0)
