"""Attention layers and MLPs that a search may leave out: what is lost without each of them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress.allocation.candidates import Candidates
from compress.allocation.predictions import PredictionLoss
from compress.allocation.program import Choice
from compress.apply import apply
from compress.dropped import parts_of
from compress.linear import sharing_copy
from compress.pruning.layer_drop import LayerDrop, losses_without
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import on_device
from compress.walk.resume import BlockStore
from kernels.linear import fast_linear

KINDS = ("attention", "mlp")
TIMED = 4  # a model without one in so many parts is timed

Losses = dict[str, dict[int, float]]  # {kind of part: {block: nats per token that are lost without its part}}


def kinds_of(drops: str) -> tuple[str, ...]:
    """The kinds of parts that the parameter `drops` names.

    Raises:
        ValueError: it names anything else, or a kind twice.
    """
    kinds = tuple(part.strip() for part in drops.split(",") if part.strip())
    if set(kinds) - set(KINDS) or len(set(kinds)) < len(kinds):
        raise ValueError(
            f"`drops` (={drops!r}) must name parts of blocks that may be left out: {', '.join(KINDS)}, or both with a "
            "comma between them; empty: none"
        )
    return kinds


def text_of(kind: str) -> str:
    """The name of the choice to leave out a part of this kind."""
    return f"without {kind}"


def dropping(kinds: Sequence[str]) -> list[LayerDrop]:
    """One method for each kind, which drops one part; planning it shows whether a model allows this."""
    return [LayerDrop(target=kind, count=1) for kind in kinds]


def drops_in(chosen: Mapping[str, str], parts: Mapping[str, Mapping[int, Sequence[str]]]) -> list[LayerDrop]:
    """The methods that drop what was chosen; chosen: {layer: choice}, parts: as `parts_of_layers` gives them."""
    gone = {
        kind: [index for index, layers in of.items() if chosen[layers[0]] == text_of(kind)]
        for kind, of in parts.items()
    }
    return [LayerDrop(target=kind, layers=", ".join(map(str, blocks))) for kind, blocks in gone.items() if blocks]


@torch.no_grad()
def measure_drops(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    probes: Sequence[Tensor],
    kinds: Sequence[str],
    device: torch.device,
    store: BlockStore | None,
) -> Losses:
    """The divergence of the model's predictions without each part, one at a time.

    Args:
        batches: calibration tokens, of which the first show whether the model decodes without a part.
        probes: the tokens on which predictions are compared. store: where the losses of finished blocks are kept.

    Raises:
        ValueError: the model does not run without such a part, or a block is more than what its parts add.
    """
    for method in dropping(kinds):
        apply([method], sharing_copy(model), list(batches[:1]), device=str(device))
    prefix, blocks = find_blocks(model)
    loss = PredictionLoss(model, probes, device)
    found: Losses = {kind: {} for kind in kinds}
    with fast_linear():
        for index, block in enumerate(tqdm(blocks, desc="losses without parts", unit="block")):
            kept = store.get(index) if store else None
            own = kept[1] if kept else {}
            with on_device(block, device):
                own |= losses_without(loss, index, [k for k in kinds if k not in own], f"{prefix}.{index}")
                if store:
                    store.put(index, {}, own)
                loss.leave(index)
            for kind in kinds:
                if kind in own:
                    found[kind][index] = own[kind]
    return found


def parts_of_layers(
    model: nn.Module, layers: Mapping[str, Candidates], losses: Losses
) -> dict[str, dict[int, list[str]]]:
    """{kind: {block: the layers of its part}} of all parts that may be left out.

    All linears of such a part have choices, which they share with no linear outside it. One part of each kind must
    stay: the one without which most is lost. If nothing of a kind may be left out, there is a warning.
    """
    prefix, blocks = find_blocks(model)
    linears = targets(model)
    found: dict[str, dict[int, list[str]]] = {}
    for kind, own in losses.items():
        found[kind] = {}
        for index in sorted(own):
            starts = tuple(f"{prefix}.{index}.{child}." for child in parts_of(blocks[index])[kind])
            inside = [name for name, layer in layers.items() if all(m.startswith(starts) for m in layer.members)]
            covered = {member for name in inside for member in layers[name].members}
            if inside and covered == {n for n in linears if n.startswith(starts)} and own[index] < max(own.values()):
                found[kind][index] = inside
        if not found[kind]:
            warnings.warn(
                f"`drops`: no {kind} of this model may be left out, because some of its linears have no choices, or "
                "share them with linears of another part",
                stacklevel=2,
            )
    return found


def with_drops(
    layers: Mapping[str, Candidates], losses: Losses, parts: Mapping[str, Mapping[int, Sequence[str]]]
) -> dict[str, Candidates]:
    """The layers with the choice to be left out with all layers of their part, which share its loss."""
    found = dict(layers)
    for kind, of in parts.items():
        for index, names in of.items():
            for name in names:
                gone = Choice(0, losses[kind][index] / len(names))
                found[name] = replace(found[name], choices={**found[name].choices, text_of(kind): gone})
    return found


def thinner(
    model: PreTrainedModel, kind: str, batches: Sequence[Tensor], device: str | None
) -> tuple[PreTrainedModel, int]:
    """The model without some parts of a kind, evenly spread, for timing; and how many parts it lacks."""
    _, blocks = find_blocks(model)
    there = [index for index, block in enumerate(blocks) if parts_of(block)[kind]]
    gone = there[TIMED // 2 :: TIMED] or there[1:2]
    method = LayerDrop(target=kind, layers=", ".join(map(str, gone)))
    result = apply([method], sharing_copy(model), list(batches[:1]), device=device)
    return result.model, len(gone)
