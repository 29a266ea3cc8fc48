"""Predictions of a model whose weights lie on disk: block by block over all windows at once, so each is read once."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.walk.blocks import find_blocks
from compress.walk.capture import Tail, advance, block_calls, device_of, on_device
from compress.walk.offload import is_offloaded
from kernels.linear import fast_linear


class Streamed:
    """A model, in the form that `eval.text` takes, whose weights are not all in memory at once.

    Gives the same logits as the model itself, window by window, in the time of one pass for all windows.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: on disk or in memory. Its blocks run one at a time; the activations between them stay in memory."""
        self.model, self.device = model, device_of(model)
        self.dtype = str(model.dtype).removeprefix("torch.")

    @torch.no_grad()
    def logits(self, batches: Sequence[Tensor], last: Sequence[int]) -> Iterator[Tensor]:
        """For each batch [1, T], in order, the logits [n, vocabulary] of its last n positions, n as `last` says."""
        _, blocks = find_blocks(self.model)
        calls = block_calls(self.model, blocks, batches, stacked=False)
        for index, block in enumerate(tqdm(blocks, desc="predictions", unit="block")):
            with on_device(block, self.device), fast_linear():
                advance(block, calls, index, self.device)
        tail = Tail(self.model, blocks, batches, stacked=False)
        head = self.model.get_output_embeddings()
        with on_device(head, self.device) if head is not None else nullcontext():
            for i, call in enumerate(calls):
                with fast_linear():
                    logits = tail.logits(i, call.hidden, last=last[i])
                yield logits[0, -last[i] :]


def scorable(model: nn.Module) -> nn.Module | Streamed:
    """The form of a model that measures of text take: itself, or `Streamed` if its weights lie on disk."""
    return Streamed(model) if is_offloaded(model) else model
