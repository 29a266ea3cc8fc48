"""Statistics of the inputs of a model's head, and the number of look-ups of each token in its embedding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from compress.embedding import find_ends
from compress.linear import shape_of
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, Stop, Tail, advance, block_calls, device_of, on_device
from compress.walk.statistics import Collector, LayerStatistics
from compress.walk.walk import dense_weights
from kernels.linear import fast_linear

ERROR_TOKENS = 8192  # calibration tokens on which errors are measured if nothing else needs the head's statistics


def head_statistics(
    model: nn.Module,
    batches: Sequence[Tensor],
    needs: Sequence[str],
    *,
    device: torch.device,
    reached: Sequence[Sequence[Call]] = (),
) -> LayerStatistics:
    """Statistics of the input of the head over the calibration tokens: the output of the model's final norm.

    The first tokens of the windows are not kept apart ("starts" is empty): nothing attends to the outputs of a head.

    Args:
        needs: names in compress.walk.statistics.STATISTICS.
        reached: a list whose one element is the micro-batches of this process with the outputs of the last block;
            empty: they are run through all blocks here.
    """
    name = find_ends(model).head
    head = model.get_submodule(name)
    collector = Collector(name, needs, shape_of(head)[1], device)
    if batches:
        _, blocks = find_blocks(model)
        calls = reached[0] if reached else _run(model, blocks, batches, device)
        tail = Tail(model, blocks, batches)
        for call in calls:
            for x in _inputs_of(head, tail, call):
                collector.update(x.reshape(-1, x.shape[-1]).to(device), call.place)
    return collector.result()


def lookup_statistics(columns: int, tokens: int, needs: Sequence[str], device: torch.device) -> LayerStatistics:
    """Statistics of a weight that is looked up, not multiplied: all of its columns count alike.

    They are the statistics of the unit vectors, whose Gram matrix is the identity, up to a factor.
    """
    collector = Collector("the embedding", needs, columns, device)
    collector.update(torch.eye(columns, device=device))
    statistics = collector.result()
    statistics.tokens = tokens
    return statistics


def token_weights(batches: Sequence[Tensor], vocabulary: int) -> Tensor:
    """The weight of each token's row, [vocabulary] float32: the token's count in the calibration plus one, so that
    tokens which are not in the calibration count, too."""
    counts = torch.ones(vocabulary)
    for batch in batches:
        counts += torch.bincount(batch.reshape(-1), minlength=vocabulary)
    return counts


def first_tokens(batches: Sequence[Tensor], most: int) -> list[Tensor]:
    """The first batches, up to `most` tokens, and at least one batch."""
    taken, tokens = [], 0
    for batch in batches:
        if taken and tokens + batch.numel() > most:
            break
        taken.append(batch)
        tokens += batch.numel()
    return taken


def _run(model: nn.Module, blocks: nn.ModuleList, batches: Sequence[Tensor], device: torch.device) -> list[Call]:
    """The micro-batches of this process with the outputs of the last block."""
    calls = block_calls(model, blocks, batches, divided=True)
    for index, block in enumerate(blocks):
        with on_device(block, device), dense_weights(block), fast_linear():
            advance(block, calls, index, device)
    return calls


def _inputs_of(head: nn.Module, tail: Tail, call: Call) -> Iterator[Tensor]:
    """The input of the head for a micro-batch, [batch, T, in]; the head itself does not run."""
    seen: list[Tensor] = []
    with _stopped_at(head, seen), suppress(Stop), fast_linear():
        tail.logits(call.place.number, call.hidden.to(device_of(tail.model)))
    yield from seen


@contextmanager
def _stopped_at(head: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    def stop(_, args: tuple) -> None:
        seen.append(args[0])
        raise Stop

    handle = head.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()
