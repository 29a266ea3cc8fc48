"""How a budget is shared out over heads and layers. All give counts [B, H_kv] that add up to the uniform ones where
they can."""

import torch
from torch import Tensor

ADA_FLOOR = 0.2  # of a head's even share, which it keeps at least
PYRAMID = 20  # the last layer's share is the even one over this


def uniform(target: Tensor, tokens: Tensor) -> Tensor:
    """The same for every head. target [B], tokens [B, H] -> [B, H]"""
    return torch.minimum(target[:, None], tokens)


def pyramid(target: Tensor, tokens: Tensor, seen: Tensor, layer: int, layers: int) -> Tensor:
    """PyramidKV (Cai et al., 2024, arXiv:2406.02069, section 3.2): falls in equal steps from the first layer to the
    last.

    Args:
        seen: [B], tokens of each row so far, kept or not; no layer gets more.
    """
    least = (target / PYRAMID).long()
    most = torch.minimum(2 * target - least, seen)
    least = 2 * target - most
    even = most + (least - most) * layer / max(layers - 1, 1)
    return torch.minimum((even if layers > 1 else target).round().long().clamp(min=1)[:, None], tokens)


def ada(scores: Tensor, valid: Tensor, target: Tensor) -> Tensor:
    """Ada-KV (Feng et al., 2024, arXiv:2407.11550, algorithm 1): a layer's highest scores, of whatever head, above a
    floor.

    Args:
        scores, valid: [B, H, T]. target: [B].
    """
    floor = (uniform(target, valid.sum(-1)) * ADA_FLOOR).long()
    return _shared_out([scores], [valid], [floor], target)[0]


def over_layers(scores: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """The highest scores of all layers and heads (KVzip's budgets, arXiv:2505.23416); one position a head at least."""
    return _shared_out(scores, valid, [one.any(-1).long() for one in valid], target)


def _shared_out(scores: list[Tensor], valid: list[Tensor], floor: list[Tensor], target: Tensor) -> list[Tensor]:
    """Counts [B, H] of each layer: `floor`, and the highest of all other scores, `target` times the heads in all.

    Of equal scores, such as infinite ones, those come first that rank higher in their own head, so that no head gets
    them all.
    """
    longest = max(one.shape[-1] for one in scores)

    def padded(x: Tensor, value: float | bool) -> Tensor:
        return torch.nn.functional.pad(x, (0, longest - x.shape[-1]), value=value)

    real = torch.cat([padded(one, False) for one in valid], 1)  # [B, all heads, longest]
    ranked = torch.cat([padded(one.float(), -torch.inf) for one in scores], 1).masked_fill(~real, -torch.inf)
    ranked = ranked.sort(-1, descending=True).values
    tokens, least = real.sum(-1), torch.cat(floor, 1)  # [B, all heads]
    place = torch.arange(longest, device=real.device)
    open = ((place >= least[..., None]) & (place < tokens[..., None])).transpose(
        1, 2
    )  # [B, longest, all heads]: by rank first
    flat = ranked.transpose(1, 2).masked_fill(~open, -torch.inf).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    open_first = open.flatten(1).gather(1, order).to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, open_first)  # what may not be chosen comes last, also behind scores of -inf
    count = torch.minimum(target * real.shape[1], tokens.sum(1)) - least.sum(1)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    chosen = ((rank < count[:, None]) & open.flatten(1)).view_as(open).sum(1)  # [B, all heads]
    return list((least + chosen).split([one.shape[1] for one in scores], 1))


def kept(scores: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [B, H] highest scores [B, H, T] of valid positions; the latest of equal, and of too many infinite,
    ones."""
    place = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float32)
    certain = torch.isposinf(scores) & valid
    crowded = certain.sum(-1, keepdim=True) > counts[..., None]
    scores = torch.where(crowded, torch.where(certain, place, -1.0), scores).masked_fill(~valid, -torch.inf)
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = (
        torch.empty_like(order)
        .scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
        .flip(-1)
    )
    return (rank < counts[..., None]) & valid
