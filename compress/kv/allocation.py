"""The division of a budget among heads and layers. All functions give counts [B, H_kv] with the same sum as uniform
counts, where that is possible."""

import torch
from torch import Tensor

ADA_FLOOR = 0.2  # of a head's even share, which is the least that it keeps
PYRAMID = 20  # the last layer's share is the even share divided by this
REFINER = 0.5  # of the even share, for layers of concentrated attention


def uniform(target: Tensor, tokens: Tensor) -> Tensor:
    """The same count for every head. target [B], tokens [B, H] -> [B, H]"""
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
    """Ada-KV (Feng et al., 2024, arXiv:2407.11550, algorithm 1): the highest scores of a layer over all heads, and a
    floor for each head.

    Args:
        scores, valid: [B, H, T]. target: [B].
    """
    floor = (uniform(target, valid.sum(-1)) * ADA_FLOOR).long()
    return _shared_out([scores], [valid], [floor], target)[0]


def over_layers(scores: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """The highest scores of all layers and heads (KVzip's budgets, arXiv:2505.23416); at least one position a head."""
    return _shared_out(scores, valid, [one.any(-1).long() for one in valid], target)


def by_prefix(scores: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """PrefixKV (Wang et al., 2024, arXiv:2412.03409, section 3): every layer keeps one share p of its attention.

    A layer needs its n-th position as soon as p exceeds the attention of the n - 1 positions before it. So the p at
    which all layers together keep the budget, which the paper finds by bisection, results from taking positions in the
    order of the attention before them. All heads of a layer keep the same number; infinite scores come first.
    """
    ranked = []
    for one, real in zip(scores, valid, strict=True):
        order = one.float().masked_fill(~real, -torch.inf).sort(-1, descending=True).values  # [B, H, T]
        mass = order.clamp(min=0).masked_fill(torch.isinf(order), 0)
        mass = (mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)).mean(1)  # [B, T]
        before = mass.cumsum(-1) - mass
        ranked.append((-before).masked_fill(torch.isposinf(order).any(1), torch.inf))
    return _by_layer(ranked, valid, target)


def by_variance(scores: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """D2O (Wan et al., 2024, arXiv:2406.13035, section 3.2): in proportion to softmax(-variance of the attention).

    The variance is taken over positions, of the attention that they got. As in the authors' code, the variances of a
    layer's heads are scaled to lie between 0 and 1 and averaged, so that no layer gets more than e times as much as
    another: without that, a few layers of uneven attention keep almost nothing. Deviation: the first two layers and
    the last one, which the authors never compress, get the even share, so that the budget holds.
    """
    spread = torch.stack([_variance(one, real) for one, real in zip(scores, valid, strict=True)], -1)  # [B, layers]
    layers = spread.shape[-1]
    exempt = torch.tensor([i < 2 or i == layers - 1 for i in range(layers)], device=spread.device)
    weights = (-spread).softmax(-1).masked_fill(exempt, 0)
    free = (~exempt).sum() / layers
    weights = torch.where(exempt, 1 / layers, weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) * free)
    return _in_proportion(weights, scores, valid, target)


def by_spread(scores: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """Layers of spread attention (drafters) get more, layers of concentrated attention (refiners) get less.

    An analogue of ScaleKV (Li et al., 2025, arXiv:2505.19602) for text. ScaleKV is about models that draw images scale
    by scale: layers that attend across all scales are called drafters, and layers that attend to the current scale
    refiners; both are found for each scale. A decoder of text has no scales. Here the spread of a layer is the entropy
    of the attention that positions got in each head, over the largest possible entropy; the half of the layers with the
    largest spread are drafters. Refiners keep half of the even share, and drafters share the rest.
    """
    spread = torch.stack([_spread(one, real) for one, real in zip(scores, valid, strict=True)], -1)  # [B, layers]
    layers = spread.shape[-1]
    refiners = layers // 2
    rank = spread.argsort(dim=-1, stable=True).argsort(dim=-1)
    drafter = (layers - refiners * REFINER) / (layers - refiners)
    return _in_proportion(torch.where(rank < refiners, REFINER, drafter), scores, valid, target)


def _spread(scores: Tensor, valid: Tensor) -> Tensor:
    """[B]: the entropy of a layer's finite scores [B, H, T] as shares of each head's sum, relative to even shares."""
    used = valid & torch.isfinite(scores)
    mass = scores.float().masked_fill(~used, 0)
    mass = mass / mass.sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = -(mass * mass.clamp(min=1e-30).log()).sum(-1)
    return (entropy / used.sum(-1).clamp(min=2).log()).mean(-1)


def _in_proportion(weights: Tensor, scores: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """Counts of each layer in proportion to weights [B, layers], limited by the positions that it has."""
    ranked = []
    for i, one in enumerate(scores):
        # Places are taken in the order of n / weight, so that their number is in proportion to the weight.
        place = torch.arange(one.shape[-1], device=one.device) + 0.5
        ranked.append(-place / weights[:, i, None])
    return _by_layer(ranked, valid, target)


def _variance(scores: Tensor, valid: Tensor) -> Tensor:
    """[B], from 0 to 1: the variances over positions of a layer's finite scores [B, H, T], as shares of each head's
    sum, scaled from the smallest to the largest head and averaged."""
    used = valid & torch.isfinite(scores)
    mass = scores.float().masked_fill(~used, 0)
    count = used.sum(-1, keepdim=True).clamp(min=1)
    mass = mass / mass.sum(-1, keepdim=True).clamp(min=1e-30) * count  # 1 on average
    variance = ((mass - 1).square() * used).sum(-1) / used.sum(-1).clamp(min=1)  # [B, H]
    least, most = variance.aminmax(dim=1, keepdim=True)
    return ((variance - least) / (most - least).clamp(min=1e-30)).mean(1)


OF_ALL_LAYERS = {"global": over_layers, "prefix": by_prefix, "variance": by_variance, "drafters": by_spread}


def of_layer(
    allocation: str,
    scores: Tensor,
    valid: Tensor,
    target: Tensor,
    seen: Tensor,
    layer: int,
    layers: int,
) -> Tensor:
    """Counts [B, H] of one layer by an allocation that is not one of OF_ALL_LAYERS.

    Args:
        scores, valid: [B, H, T]. target, seen: [B]. layer, layers: the number of the layer, and of all layers.
    """
    if allocation == "ada":
        return ada(scores, valid, target)
    if allocation == "pyramid":
        return pyramid(target, valid.sum(-1), seen, layer, layers)
    return uniform(target, valid.sum(-1))


def _by_layer(ranked: list[Tensor], valid: list[Tensor], target: Tensor) -> list[Tensor]:
    """Counts [B, H] from scores [B, T] of the places of each layer, the same for all heads of a layer."""
    longest = [real.sum(-1).amax(-1, keepdim=True) for real in valid]  # [B, 1]
    real = [torch.arange(one.shape[-1], device=one.device) < n for one, n in zip(ranked, longest, strict=True)]
    least = [n.clamp(max=1) for n in longest]
    counts = _shared_out([one[:, None] for one in ranked], [one[:, None] for one in real], least, target)
    return [torch.minimum(n, one.sum(-1)) for n, one in zip(counts, valid, strict=True)]


def _shared_out(scores: list[Tensor], valid: list[Tensor], floor: list[Tensor], target: Tensor) -> list[Tensor]:
    """Counts [B, H] of each layer: `floor`, then the highest other scores, up to a sum of `target` times the heads.

    Among equal scores, such as infinite ones, those with a higher rank in their own head come first, so that no head
    gets them all.
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
    order = order.gather(1, open_first)  # positions that may not be chosen come last, after scores of -inf
    count = torch.minimum(target * real.shape[1], tokens.sum(1)) - least.sum(1)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    chosen = ((rank < count[:, None]) & open.flatten(1)).view_as(open).sum(1)  # [B, all heads]
    return list((least + chosen).split([one.shape[1] for one in scores], 1))


def kept(scores: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [B, H] highest scores [B, H, T] of valid positions; among equal scores, and among too many infinite
    ones, the latest."""
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
