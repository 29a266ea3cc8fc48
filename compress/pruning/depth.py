"""The work of every block of a model: what it adds to the residual stream, and what is lost without it.

Measured as in "Do Language Models Use Their Depth Efficiently?" (Csordás et al., 2025, arXiv:2505.13898): contributions
of attention and MLPs relative to the stream, the effect of a skipped block on later blocks and on the predictions, and
the logit lens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.dropped import parts_of
from compress.pruning.layer_drop import outputs_of, without
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, Tail, block_calls, device_of, on_device, run_block
from eval.record.compression import DepthRow
from kernels.linear import fast_linear

TOKENS = 256  # of a window, the first ones
ROWS = 128  # positions whose predictions are compared at once


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

    Every block is run once for each block before it, so that the time grows with the square of their number.

    Args:
        batches: LongTensors [1, T].
    """
    check_depth(windows)
    if not windows:
        return Depth()
    _, blocks = find_blocks(model)
    text = [batch[:, :TOKENS] for batch in batches[:windows]]
    calls, tail, device = block_calls(model, blocks, text), Tail(model, blocks, text), device_of(model)
    rows, streams = [], [[call.hidden.float() for call in calls]]
    with fast_linear():
        own = [copy.copy(call) for call in calls]
        for index, block in enumerate(tqdm(blocks, desc="contributions of blocks", unit="block")):
            rows.append(_contributions(block, own, index, device))
            streams.append([call.hidden.float() for call in own])
        whole = [_predictions(tail, i, call) for i, call in enumerate(own)]
        for index in tqdm(range(len(blocks)), desc="models without a block", unit="block"):
            before, behind = streams[index], streams[index + 1]
            read = [_apart(whole[i], tail.logits(i, behind[i].to(model.dtype))) for i in range(len(calls))]
            skipped = [copy.copy(call) for call in calls]
            for call, stream in zip(skipped, before, strict=True):
                call.hidden = stream.to(model.dtype)
            later = _changes(blocks, skipped, index + 1, streams, device)
            lost = [_apart(whole[i], tail.logits(i, call.hidden)) for i, call in enumerate(skipped)]
            rows[index] |= {
                "later": max(later, default=None),
                "output": _mean(kl for kl, _ in lost),
                "lens": _mean(kl for kl, _ in read),
                "lens_agreement": _mean(same for _, same in read),
            }
    return Depth([DepthRow(block=index, **row) for index, row in enumerate(rows)])


def _contributions(block: nn.Module, calls: Sequence[Call], index: int, device: torch.device) -> dict[str, Any]:
    """What the parts of a block add to the stream; the calls pass through the block."""
    befores, middles, afters = [], [], []
    with on_device(block, device):
        there = [kind for kind in ("attention", "mlp") if parts_of(block)[kind]]
        outputs = outputs_of(block, calls[0], index, device)
        for call in calls:
            befores.append(call.hidden)
            if len(there) == 2:
                with without(block, ["mlp"], outputs):
                    middles.append(run_block(block, copy.copy(call), index, device))
            call.hidden = run_block(block, call, index, device)
            afters.append(call.hidden)
    row: dict[str, Any] = dict.fromkeys(("attention", "attention_cosine", "mlp", "mlp_cosine"))
    if middles:
        spans = {"attention": (befores, middles), "mlp": (middles, afters)}
    else:
        spans = {kind: (befores, afters) for kind in there}
    for kind, span in spans.items():
        sizes, cosines = zip(*(_added(*both) for both in zip(*span, strict=True)), strict=True)
        row |= {kind: _mean(sizes), f"{kind}_cosine": _mean(cosines)}
    both = zip(befores, afters, strict=True)
    turned = [1 - nn.functional.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in both]
    return row | {"turned": _mean(turned)}


def _added(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """||after - before|| / ||before|| and the cosine of both, for every token."""
    added, stream = after.float() - before.float(), before.float()
    size = added.norm(dim=-1) / stream.norm(dim=-1).clamp_min(1e-30)
    return size, nn.functional.cosine_similarity(added, stream, dim=-1)


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
                change = (call.hidden.float() - before - added).norm(dim=-1)
                shares.append(change / added.norm(dim=-1).clamp_min(1e-30))
        changes.append(_mean(shares))
    return changes


def _predictions(tail: Tail, i: int, call: Call) -> Tensor:
    """Log-probabilities [tokens, vocabulary] behind the last block."""
    return tail.logits(i, call.hidden).flatten(0, 1).float().log_softmax(-1)


def _apart(whole: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(whole | other) in nats, and whether both have the same likeliest token, for every token."""
    divergences, same = [], []
    for logp, other in zip(whole.split(ROWS), logits.flatten(0, 1).split(ROWS), strict=True):
        log_q = other.float().log_softmax(-1)
        divergences.append((logp.exp() * (logp - log_q)).sum(-1))
        same.append((logp.argmax(-1) == log_q.argmax(-1)).float())
    return torch.cat(divergences), torch.cat(same)


def _mean(values: Any) -> float:
    """The mean over the tokens of all micro-batches."""
    return torch.cat([value.flatten() for value in values]).double().mean().item()
