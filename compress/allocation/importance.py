"""Cheap rules for the order in which blocks get more bits: importance scores instead of losses.

Source: arXiv:2406.17415 (layer-wise quantisation), its scores LIM and ZD.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.allocation.candidates import Candidates
from compress.allocation.program import Choice
from compress.linear import weight_of
from compress.walk.blocks import find_blocks
from compress.walk.capture import block_calls, on_device, run_block
from kernels.linear import fast_linear


@torch.no_grad()
def cosine_scores(model: nn.Module, batches: Sequence[Tensor], device: torch.device) -> list[float]:
    """LIM: minus the cosine of each block's input and output, mean over the tokens; larger is more important."""
    _, blocks = find_blocks(model)
    calls = block_calls(model, blocks, batches)
    scores = []
    for index, block in enumerate(blocks):
        total = 0.0
        with on_device(block, device), fast_linear():
            for call in calls:
                before, call.hidden = call.hidden, run_block(block, call, index, device)
                cosines = nn.functional.cosine_similarity(before.float(), call.hidden.float(), dim=-1)
                total -= float(cosines.double().sum())
        scores.append(total / sum(batch.numel() for batch in batches))
    return scores


@torch.no_grad()
def z_scores(model: nn.Module, names: Sequence[str], device: torch.device) -> list[float]:
    """ZD: minus the share of each block's weights that lie more than one standard deviation above their mean."""
    prefix, blocks = find_blocks(model)
    scores = []
    for index, block in enumerate(blocks):
        own = [name for name in names if name.startswith(f"{prefix}.{index}.")]
        with on_device(block, device):
            w = torch.cat([weight_of(model.get_submodule(name)).flatten() for name in own] or [torch.zeros(2)])
            scores.append(-float(((w - w.mean()) / w.std()).gt(1).float().mean()))
    return scores


def random_scores(model: nn.Module, seed: int = 0) -> list[float]:
    """A random order of the blocks, to compare with."""
    count = len(find_blocks(model)[1])
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def ranked(scores: Sequence[float], blocks: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, Candidates]:
    """Blocks as layers, whose loss is their rank of importance times the bytes that a choice saves.

    With this loss the best set under a budget gives the largest choice to the most important blocks and the smallest to
    the others, with at most one block in between, as in the paper; only the order of the scores matters.

    Args:
        scores: one score for each block.
        blocks: for each block {linear: {choice: bytes}}; only choices that all of its linears have are used.
    """
    order = sorted(range(len(scores)), key=lambda index: scores[index])
    rank = {index: place + 1 for place, index in enumerate(order)}
    layers: dict[str, Candidates] = {}
    for index, linears in enumerate(blocks):
        if not linears:
            continue
        shared = [choice for choice in next(iter(linears.values())) if all(choice in own for own in linears.values())]
        sizes = {choice: sum(own[choice] for own in linears.values()) for choice in shared}
        most = max(sizes.values())
        choices = {choice: Choice(size, rank[index] * float(most - size)) for choice, size in sizes.items()}
        layers[next(iter(linears))] = Candidates(tuple(linears), choices)
    return layers
