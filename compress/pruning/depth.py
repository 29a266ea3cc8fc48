"""The work of every block of a model: what it adds to the residual stream, and what is lost without it.

Measured as in "Do Language Models Use Their Depth Efficiently?" (Csordás et al., 2025, arXiv:2505.13898): contributions
of attention and MLPs relative to the stream, the effect of a skipped block on later blocks and on the predictions, and
the logit lens.
"""

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.allocation.predictions import divergence
from compress.dropped import parts_of
from compress.pruning.layer_drop import check_residual, outputs_of, turned, without
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, Tail, block_calls, device_of, on_device, run_block
from eval.record.compression import DepthRow
from kernels.linear import fast_linear
from kernels.support.errors import first_line

TOKENS = 256  # of a window, the first ones


@dataclass(frozen=True)
class Depth:
    """The work of every block, for a notebook and for the record; no rows if it was not measured."""

    rows: list[DepthRow] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def found(self) -> list[DepthRow] | None:
        """The record's entry `depth`."""
        return self.rows or None


def check_depth(windows: int) -> None:
    """Raise ValueError unless this is a number of windows."""
    if type(windows) is not int or windows < 0:
        raise ValueError(
            f"`depth_windows` (={windows!r}) must be a number of calibration windows; 0: nothing is measured"
        )


@torch.no_grad()
def measure_depth(model: nn.Module, batches: Sequence[Tensor], windows: int = 2) -> Depth:
    """The work of every block, over the first tokens of some windows.

    Every block is run once for each block before it, so that the time grows with the square of their number. A model
    that does not run without one of its blocks has no rows, and a warning says why.

    Args:
        batches: LongTensors [1, T].
    """
    check_depth(windows)
    if not windows:
        return Depth()
    try:
        return Depth(_rows(model, [batch[:, :TOKENS] for batch in batches[:windows]]))
    except Exception as error:  # what blocks give one another is known to their authors alone
        why = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"the work of the blocks of {type(model).__name__} could not be measured ({why})", stacklevel=2)
        return Depth()


def _rows(model: nn.Module, text: Sequence[Tensor]) -> list[DepthRow]:
    prefix, blocks = find_blocks(model)
    calls, tail, device = block_calls(model, blocks, text), Tail(model, blocks, text), device_of(model)
    rows, streams = [], [[call.hidden.float() for call in calls]]
    with fast_linear():
        own = [copy.copy(call) for call in calls]
        for index, block in enumerate(tqdm(blocks, desc="contributions of blocks", unit="block")):
            rows.append(_contributions(block, own, index, device, f"{prefix}.{index}"))
            streams.append([call.hidden.float() for call in own])
        whole = _logits(tail, [call.hidden for call in own])
        for index in tqdm(range(len(blocks)), desc="models without a block", unit="block"):
            read = _logits(tail, [stream.to(model.dtype) for stream in streams[index + 1]])
            skipped = [copy.copy(call) for call in calls]
            for call, stream in zip(skipped, streams[index], strict=True):
                call.hidden = stream.to(model.dtype)
            later = _changes(blocks, skipped, index + 1, streams, device)
            same = [(a.argmax(-1) == b.argmax(-1)).float() for a, b in zip(whole, read, strict=True)]
            rows[index] |= {
                "later": max(later, default=None),
                "output": divergence(whole, _logits(tail, [call.hidden for call in skipped])),
                "lens": divergence(whole, read),
                "lens_agreement": _mean(same),
            }
    return [DepthRow(block=index, **row) for index, row in enumerate(rows)]


def _logits(tail: Tail, hidden: Sequence[Tensor]) -> list[Tensor]:
    """[batch, T, vocabulary] that the end of the model makes of each micro-batch."""
    return [tail.logits(i, one) for i, one in enumerate(hidden)]


def _contributions(
    block: nn.Module, calls: Sequence[Call], index: int, device: torch.device, name: str
) -> dict[str, float | None]:
    """What the parts of a block add to the stream, None for a part that cannot be told apart; the calls pass through
    the block."""
    befores, middles, afters = [], [], []
    with on_device(block, device):
        there = [kind for kind in ("attention", "mlp") if parts_of(block)[kind]]
        outputs = outputs_of(block, calls[0], index, device)
        try:
            check_residual(block, calls[0], index, device, outputs, there, name)
        except ValueError:  # it does not only add what its parts give
            there = []
        for call in calls:
            befores.append(call.hidden)
            if len(there) == 2:
                with without(block, ["mlp"], outputs):
                    middles.append(run_block(block, copy.copy(call), index, device))
            call.hidden = run_block(block, call, index, device)
            afters.append(call.hidden)
    row: dict[str, float | None] = dict.fromkeys(("attention", "attention_cosine", "mlp", "mlp_cosine"))
    spans = {"attention": (befores, middles), "mlp": (middles, afters)}
    if len(there) == 1:
        spans = {there[0]: (befores, afters)}
    for kind in there:
        sizes, cosines = zip(*(_added(*both) for both in zip(*spans[kind], strict=True)), strict=True)
        row |= {kind: _mean(sizes), f"{kind}_cosine": _mean(cosines)}
    tokens = sum(before[..., 0].numel() for before in befores)
    return row | {"turned": sum(turned(*both) for both in zip(befores, afters, strict=True)) / tokens}


def _added(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """||after - before|| / ||before|| and the cosine of both, for every token whose stream has a length."""
    added, stream = after.float() - before.float(), before.float()
    return _share(added, stream), nn.functional.cosine_similarity(added, stream, dim=-1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """||part|| / ||whole|| of vectors [..., hidden], without those whose whole is 0, as the embedding of padding is."""
    part, whole = part.norm(dim=-1), whole.norm(dim=-1)
    return part[whole > 0] / whole[whole > 0]


def _changes(
    blocks: nn.ModuleList, calls: Sequence[Call], first: int, streams: Sequence[Sequence[Tensor]], device: torch.device
) -> list[float]:
    """For every block from `first` on, ||change|| / ||contribution|| of what it adds to the stream, mean over tokens.

    calls: with the stream before block `first`, which they pass through.
    """
    changes = []
    for index in range(first, len(blocks)):
        shares = []
        with on_device(blocks[index], device):
            for i, call in enumerate(calls):
                before = call.hidden.float()
                call.hidden = run_block(blocks[index], call, index, device)
                added = streams[index + 1][i] - streams[index][i]
                shares.append(_share(call.hidden.float() - before - added, added))
        changes.append(_mean(shares) or 0.0)
    return changes


def _mean(values: Iterable[Tensor]) -> float | None:
    """The mean over the tokens of all micro-batches; None if there are none."""
    every = torch.cat([value.flatten() for value in values])
    return every.double().mean().item() if len(every) else None
