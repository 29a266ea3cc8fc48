"""The bytes and the loss of each choice for a model's token embedding and head."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.allocation.candidates import (
    Candidates,
    Loss,
    Solved,
    as_json,
    from_json,
    sampled,
    stored_bytes,
    takes,
    with_rows,
)
from compress.allocation.program import Choice
from compress.embedding import find_ends
from compress.walk.blocks import end_targets, find_blocks
from compress.walk.ends.inputs import head_statistics, lookup_statistics
from compress.walk.ends.solve import solve_end
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.resume import BlockStore
from compress.walk.statistics.saved import SavedStatistics
from compress.walk.walk import with_errors

TOKENS = 16  # factor of the sampled rows of a weight: rows of tokens differ more than those of other linears


@torch.no_grad()
def measure_ends(
    model: nn.Module,
    methods: Mapping[str, LayerwiseMethod],
    batches: Sequence[Tensor],
    loss: Loss,
    *,
    skip: str,
    device: torch.device,
    store: BlockStore | None = None,
    saved: SavedStatistics | None = None,
) -> dict[str, Candidates]:
    """The choices of the embedding and of the head, as one layer if they are tied; see `candidates.measure`."""
    index, ends = len(find_blocks(model)[1]), find_ends(model)
    if store and (kept := store.get(index)):
        return {name: from_json(one) for name, one in kept[1].items()}
    needs = with_errors([need for method in methods.values() for need in method.statistics] + list(loss.statistics))
    found: dict[str, Candidates] = {}
    for name, shape in end_targets(model, skip).items():
        if name != ends.head:
            statistics = lookup_statistics(shape[1], sum(b.numel() for b in batches), needs, device)
        elif saved is not None:
            statistics = saved.of_head(needs, device)
        else:
            statistics = head_statistics(model, batches, needs, device=device)
        choices: dict[str, Choice] = {}
        module = model.get_submodule(name)
        W = module.weight.detach().to(device).float()
        for text, method in methods.items():
            if takes(method, name, shape):
                rows = sampled(method, module, TOKENS * loss.sample if choices else 0)
                new, _ = solve_end(with_rows(module, W, rows), name, None, statistics.for_another(), method, device)
                solved = Solved(new, W[rows], statistics, rows)
                choices[text] = Choice(stored_bytes(solved, method, shape), loss.of_end(name, solved))
        found[name] = Candidates((name,), choices)
    if store:
        store.put(index, {}, {name: as_json(one) for name, one in found.items()})
    return found
