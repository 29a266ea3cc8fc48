"""A prompt composed of chunks that were read separately; a share of their tokens is computed again (CacheBlend, Yao et
al., 2024, arXiv:2405.16444; Cache-Craft, Agarwal et al., 2025, arXiv:2502.15734)."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from compress.kv.reuse.chunks import Chunk, kinds_of
from compress.kv.reuse.context import places_by_context
from compress.kv.rotation import turn_of
from compress.walk.capture import device_of

CHOICES = ("deviation", "context", "first", "drawn")


@dataclass(frozen=True)
class Blended:
    """The result of reading a prompt of chunks.

    Attributes:
        ids: [1, tokens] of the whole prompt.
        cache: the cache of the whole prompt, for `generate`, given `ids` and the next token, and for further passes.
        logits: [1, q, vocabulary] behind each token of the question.
        places: [m], positions of the chunks' tokens that were computed again.
        share: the share of the prompt's tokens that went through the model.
    """

    ids: Tensor
    cache: DynamicCache
    logits: Tensor
    places: Tensor
    share: float


@torch.no_grad()
def blend(
    model: nn.Module,
    chunks: Sequence[Chunk],
    question: Tensor,
    *,
    share: float = 0.15,
    choose: str = "deviation",
    seed: int = 0,
) -> Blended:
    """Read a question behind chunks that were read separately.

    Keys are rotated to their places in the prompt. Then a share of the tokens goes through the model again, together
    with the question, and attends to everything before it, so that the cache knows how the chunks relate. Keys and
    values of the other tokens stay as they were read. With share=1 the result is that of the whole prompt.

    Args:
        chunks: the first one stays as it is, because it was read at its place: the store's `prefix`, usually.
        question: [1, q] tokens behind the chunks.
        share: of the tokens of the other chunks that are computed again, 0 to 1.
        choose: the rule for choosing them. "deviation": the tokens whose keys and values in the second layer change
            most once the chunks see each other, for which all tokens go through the first layer (CacheBlend narrows
            its choice in every layer; this one is made once). "context": the more the texts before a chunk differ from
            those behind which it was read, the more of its tokens are chosen, and first those that attended most to
            other texts in that reading (Cache-Craft). No token of a chunk behind the same texts is chosen, so that it
            may be less than `share`. It is for chunks of `ChunkStore.read_together`; of a chunk that was read alone it
            takes the first tokens. "first": the first tokens of each chunk (EPIC, Hu et al., 2024, arXiv:2410.15332).
            "drawn": random ones, by `seed`.

    Raises:
        ValueError: an invalid share, choice or batch.
    """
    _check(chunks, question, share, choose)
    if choose == "deviation" and len(chunks[0].keys) < 2:
        raise ValueError("`choose` (='deviation') compares second layers, and `model` has one layer; 'first' works")
    kinds = kinds_of(model)
    device, total = device_of(model), sum(len(chunk.ids) for chunk in chunks)
    ids = torch.cat([*(chunk.ids.to(device) for chunk in chunks), question[0].to(device)])
    keys, values = _placed(model, chunks)
    fixed, count = len(chunks[0].ids), math.ceil(share * (total - len(chunks[0].ids)))
    again = torch.arange(fixed, fixed + count, device=device)
    if 0 < count < total - fixed:
        again = _chosen(model, chunks, ids[:total], keys, values, count, choose, seed)
    places = torch.cat([again, torch.arange(total, len(ids), device=device)])
    cache = _Scattered(keys, values, places, len(ids))
    out = model(
        ids[places][None], position_ids=places[None], past_key_values=cache, use_cache=True,
        attention_mask=_masks(model, kinds, places, len(ids)), logits_to_keep=question.shape[1],
    )  # fmt: skip
    made = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        made.update(layer.keys, layer.values, number)
    return Blended(ids[None], made, out.logits, again, len(places) / len(ids))


def _check(chunks: Sequence[Chunk], question: Tensor, share: float, choose: str) -> None:
    if not chunks or chunks[0].start:
        raise ValueError("`chunks` must begin with one that was read at position 0, such as the store's `prefix`")
    if question.dim() != 2 or question.shape[0] != 1 or not question.shape[1]:
        raise ValueError(f"`question` {tuple(question.shape)} must be [1, q]: one prompt at a time, at least one token")
    if not 0 <= share <= 1:
        raise ValueError(f"`share` (={share}) must be from 0 to 1")
    if choose not in CHOICES:
        raise ValueError(f"`choose` (={choose!r}) must be one of {', '.join(map(repr, CHOICES))}")


def _placed(model: nn.Module, chunks: Sequence[Chunk]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [1, H_kv, total, D] of each layer, keys rotated to the places of their tokens in the prompt."""
    keys, values = [], []
    for number in range(len(chunks[0].keys)):
        turn, moved, at = turn_of(model, number), [], 0
        for chunk in chunks:
            k = chunk.keys[number]
            if at != chunk.start:  # in float32, so that it is rounded once
                before = torch.arange(chunk.start, chunk.start + k.shape[2], device=k.device)[None]
                k = turn(turn(k.float(), before, True), before - chunk.start + at, False).to(k.dtype)
            moved.append(k)
            at += k.shape[2]
        keys.append(torch.cat(moved, 2))
        values.append(torch.cat([chunk.values[number] for chunk in chunks], 2))
    return keys, values


def _chosen(
    model: nn.Module,
    chunks: Sequence[Chunk],
    ids: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    count: int,
    choose: str,
    seed: int,
) -> Tensor:
    """The places of at most `count` tokens of the chunks after the first one, in order."""
    device, sizes = ids.device, [len(chunk.ids) for chunk in chunks]
    if choose == "context":
        named = [chunk.name for chunk in chunks[1:]]
        within = places_by_context([chunk.context for chunk in chunks[1:]], named, count)
        starts = [sum(sizes[: i + 1]) for i in range(len(within))]
        places = torch.cat([start + chosen for start, chosen in zip(starts, within, strict=True)])
        return places.sort().values.to(device)
    if choose == "deviation":
        scores = _deviation(model, ids, keys[1], values[1])
    elif choose == "first":
        scores = -torch.cat([torch.arange(size, device=device) for size in sizes]).float()
    else:
        scores = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)).to(device)
    return (scores[sizes[0] :].argsort(descending=True, stable=True)[:count] + sizes[0]).sort().values


def _deviation(model: nn.Module, ids: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[total]: the squared distance of each token's key and value in the second layer from those in its chunk, relative
    to the mean square of all tokens."""
    seen = _SecondLayer()
    with suppress(_Enough):
        model(ids[None], past_key_values=seen, use_cache=True, logits_to_keep=1)
    far = torch.zeros(len(ids), device=ids.device)
    for was, now in ((key, seen.key), (value, seen.value)):
        far += (now.float() - was.float()).square().sum((0, 1, 3)) / now.float().square().sum((0, 1, 3)).mean()
    return far


def _masks(model: nn.Module, kinds: set[str], places: Tensor, total: int) -> Tensor | dict[str, Tensor]:
    """[1, 1, computed tokens, total]: 0 for positions that a token sees, the smallest number for the others; a dict by
    kind of layer if there are several kinds."""
    keys = torch.arange(total, device=places.device)
    seen = {"full_attention": keys <= places[:, None]}
    if "sliding_attention" in kinds:
        window = model.config.get_text_config(decoder=True).sliding_window
        seen["sliding_attention"] = seen["full_attention"] & (keys > places[:, None] - window)
    shape = len(places), total
    masks = {
        kind: torch.zeros(shape, dtype=model.dtype, device=places.device).masked_fill_(
            ~seen[kind], torch.finfo(model.dtype).min
        )[None, None]
        for kind in kinds
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


class _Scattered(Cache):
    """A cache of the whole prompt, into which keys and values of some places are written."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], places: Tensor, total: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in keys])
        self.places = places
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            layer.lazy_initialization(k, v)
            room = total - k.shape[2]
            layer.keys, layer.values = (nn.functional.pad(t, (0, 0, 0, room)) for t in (k, v))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.places, key_states)
        layer.values.index_copy_(2, self.places, value_states)
        return layer.keys, layer.values


class _Enough(Exception):
    """Ends the pass when the second layer has its keys and values."""


class _SecondLayer(DynamicCache):
    """Records the keys and values of the second layer, and then ends the pass."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx == 1:
            self.key, self.value = key_states, value_states
            raise _Enough
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
