"""Scaling of keys before RoPE, so that no pair of channels is larger than the others (FireQ, Baek et al., 2025,
arXiv:2505.20839)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.kv.smoothing.key_links import KeyLink, key_link
from compress.linear import is_linear, weight_of
from compress.method import Method, knob
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, advance, block_calls, on_device, run_block
from compress.walk.context import Context
from compress.walk.folds.checks import binned, difference, logits_of, moved_logits, show_largest, summary, tolerance
from compress.walk.folds.links import made_up_batch
from compress.walk.parallel.ranks import progress_bar
from eval.record.compression import Channels, FoldRecord
from kernels.clock import clock

LARGEST = 1e4  # the largest factor, and the inverse of the smallest
CHECKED = 128  # tokens of the first batch on which each fold is checked


@dataclass(frozen=True, kw_only=True)
class SmoothKeys(Method):
    """Scales all pairs of channels that RoPE rotates together to one magnitude in the keys, and back in the queries.

    The factors are folded into the linears of keys and queries (or into norms behind these), so that the model
    computes the same and takes no more time. All channels of a key can then share a scale: `kv_int(keys="token",
    symmetric=True)`. With alpha=0.5 it is SmoothAttention of QServe (arXiv:2405.04532, section 4.2). With `leave` the
    largest pairs are left to the storage, which scales single channels after RoPE, because one factor for a pair does
    not help if one of its channels is far larger than the other.
    """

    name: ClassVar[str] = "smooth_keys"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "arXiv:2505.20839; with alpha=0.5 arXiv:2405.04532, section 4.2"
    needs_calibration: ClassVar[bool] = True

    alpha: float = knob(
        1.0,
        "how far the largest magnitudes of pairs are brought together: 1, to one magnitude (FireQ); 0.5, by half of "
        "their distance on a logarithmic scale (QServe)",
        range=(0.0, 1.0),
        describes=True,
    )

    leave: int = knob(
        0, "pairs of each head, the largest, that are left as they are for a scaling after RoPE", range=(0, 128)
    )

    def own_passes(self) -> str:
        return "the ranges of keys"

    def check(self, model: nn.Module) -> None:
        self.links_of(model)

    def links_of(self, model: nn.Module) -> list[KeyLink | str]:
        """For each block the link along which its keys can be scaled, or the reason why they cannot.

        Raises:
            ValueError: no block has keys that can be scaled.
        """
        _, blocks = find_blocks(model)
        call = block_calls(model, blocks, [made_up_batch(model)])[0]
        device = call.hidden.device
        found = [key_link(model, block, call, index, device) for index, block in enumerate(blocks)]
        if all(isinstance(one, str) for one in found):
            raise ValueError(f"`model` has no block whose keys {self.name} could scale; the first one, say: {found[0]}")
        return found

    @torch.no_grad()
    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[FoldRecord]:
        """Scale block by block; one pass over each gives the ranges of its keys and the inputs of the next.

        Raises:
            RuntimeError: a fold changed the output of a block, or of the model.
        """
        device = context.device
        links, before = self.links_of(model), logits_of(model)
        prefix, blocks = find_blocks(model)
        calls = block_calls(model, blocks, batches)
        calls += block_calls(model, blocks, [batches[0][:, :CHECKED]])  # a short one, on which folds are checked
        records = []
        for index in progress_bar(range(len(blocks)), desc=self.name, unit="block"):
            with on_device(blocks[index], device):
                record = self._block(blocks[index], links[index], f"{prefix}.{index}.", calls, index, device)
            records += [] if record is None else [record]
        why = "a module that was scaled is used elsewhere, too; load the model again"
        if problem := moved_logits(model, before, blocks[0], self.name, why):
            raise RuntimeError(problem)
        return show_largest(records)

    def _block(
        self, block: nn.Module, link: KeyLink | str, own: str, calls: list[Call], index: int, device: torch.device
    ) -> FoldRecord | None:
        """Measure, scale and check one block, and make its outputs the inputs of the next one."""
        start, check = clock(device), copy.copy(calls[-1])
        if isinstance(link, str):
            advance(block, calls, index, device)
            return None
        ranges: list[Tensor] = []
        module = block.get_submodule(link.keys)
        handle = module.register_forward_hook(lambda _, __, given: ranges.append(link.largest(given)))
        try:
            advance(block, calls, index, device)
        finally:
            handle.remove()
        x = torch.stack(ranges).amax(0)  # [key_heads, D]
        s = key_factors(x, self.alpha, link.pairs, self.leave)
        rows = row_norms(block.get_submodule(link.queries))
        link.scale(block, s)
        moved = difference(run_block(block, check, index, device), calls[-1].hidden.to(device))
        if not moved <= tolerance(block):
            raise RuntimeError(
                f"{self.name}: with {own}{link.keys} scaled and {own}{link.queries} undoing it, the output of block "
                f"{index} differs by {moved:.1e} (at most {tolerance(block):.0e}); load the model again"
            )
        now = row_norms(block.get_submodule(link.queries))
        magnitudes = {"x_before": x.flatten(), "x_after": (x * s).flatten(), "w_before": rows, "w_after": now}
        return FoldRecord(
            name=own + link.keys,
            kind="keys",
            consumers=(own + link.queries,),
            alpha=self.alpha,
            **{key: summary(values) for key, values in magnitudes.items()},
            error_before=None,
            error_after=None,
            difference=moved,
            seconds=clock(device) - start,
            channels=Channels(**{key: binned(values) for key, values in magnitudes.items()}),
        )


def key_factors(x: Tensor, alpha: float, pairs: Tensor, leave: int = 0) -> Tensor:
    """s = (m / x)^alpha, with m the geometric mean of a head, so that the head's keys stay as large as they were.

    Args:
        x: [heads, D], the largest length that the pair of each channel reaches.
        pairs: [D], the number of each channel's pair, which is that of its first channel.
        leave: the number of largest pairs of each head whose factor is 1, and which do not count in m.

    Returns:
        [heads, D], float32, one factor for both channels of a pair; 1 where x is 0, and never beyond 1e-4 to 1e4.
    """
    firsts = pairs.unique().to(x.device)
    left = firsts[x[:, firsts].topk(min(leave, len(firsts)), -1).indices]  # [heads, leave]
    scaled = (x > 0) & ~(pairs.to(x.device)[:, None] == left[:, None]).any(-1)
    logs = x.float().clamp_min(1e-30).log()
    middle = torch.where(scaled, logs, 0).sum(-1, keepdim=True) / scaled.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(scaled, (alpha * (middle - logs)).exp().clamp(1 / LARGEST, LARGEST), 1.0)


def row_norms(module: nn.Module) -> Tensor:
    """The size of the weight for each output channel of a linear or a norm, [out]."""
    return weight_of(module).norm(dim=1) if is_linear(module) else module.weight.float().abs()
