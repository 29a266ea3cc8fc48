"""ShadowKV (Sun et al., 2024, arXiv:2410.21465): keys of low rank, values elsewhere, chunks read by their landmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from compress.kv.layer import KVLayer
from compress.kv.policy import CacheMethod, tokens_of
from compress.kv.reading.chunked import ChunkedSlab, PromptPlan
from compress.kv.reading.method import LayerQuery, Reading, Role
from compress.kv.reading.offload import check_folder
from compress.kv.storage import Slab, from_start, joined
from compress.method import Method, knob

LOCAL = 4  # chunks at the end of a prompt that are not compressed


@dataclass(frozen=True, kw_only=True)
class ShadowKV(Reading):
    """Keeps a prompt's keys in low rank and its values in main memory; each token fetches the chunks that it reads.

    After a prompt the keys of each layer, before RoPE and with all heads side by side, are stored as two factors (a
    truncated singular value decomposition). The mean of the rotated keys of a chunk is its landmark. A token reads the
    chunks whose landmarks get the largest softmax from its query: their keys are computed from the factors and rotated,
    and their values are fetched from main memory or, with `path`, from a mapped file; `tiers` in
    `compress.kv.tiers` counts the bytes. For each head, the chunks with the keys that are least like their
    landmarks, by cosine, stay exact and are always read. So are the last 4 whole chunks of the prompt, the positions
    behind them, and all tokens that are written afterwards.

    Deviations: `budget` counts all positions of the prompt that a token reads, including exact chunks; the paper's
    counts only the chosen ones. One chunk is always chosen. The number of exact chunks follows the budget (in the
    paper: 48 beside 2,048 tokens). Prompts of fewer than 5 chunks are not compressed. Chunks that the previous token
    has fetched are fetched again. A further prompt, or a piece of one (more than 8 tokens at once), is read in full,
    for which all values are fetched, and it is decomposed together with the earlier ones.
    """

    rank_share: float = knob(
        0.5, "rank of a layer's keys, as a share of the channels of its kv heads together", range=(0.0, 1.0),
        describes=True,
    )  # fmt: skip
    chunk: int = knob(8, "positions that are chosen together", range=(1, 1024))
    outliers: float = knob(
        0.1875,
        "share of the budget for exact chunks, which every token reads: the chunks that are least like their landmarks",
        range=(0.0, 1.0),
    )  # fmt: skip
    path: str = knob("", "folder for a memory-mapped file with the values; empty: values are kept in main memory")

    name = "shadowkv"
    source = "Sun et al. 2024, arXiv:2410.21465, and its public code"
    turns: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank_share == 0:
            raise ValueError(f"`rank_share` (=0) of {self.name} must be above 0, such as 0.5")

    @property
    def page(self) -> int:
        return self.chunk

    def check(self, model: nn.Module) -> None:
        super().check(model)
        check_folder(self.name, self.path)

    def remarks(self, device: torch.device) -> list[str]:
        where = f"a file in {self.path}" if self.path else "main memory"
        counted = f"The bytes of the cache of {self.name} count the prompt's values, which lie in {where}."
        return [*super().remarks(device), counted]

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for other in (*before, *after):
            if isinstance(other, CacheMethod) and other.slot in ("policy", "storage", "projecting"):
                raise ValueError(
                    f"`recipe`: {self} keeps all positions of a prompt, keys in factors and values in other memory; "
                    f"{other} cannot be combined with it: leave one out"
                )
        return super().within(before, after)

    def roles(self, layers: int) -> list[Role]:
        return [Role(reads_all=False, chooses=True)] * layers

    def join(self, layers: Sequence[KVLayer]) -> None:
        for layer in layers:
            (slab,) = layer.slabs
            chunked = isinstance(slab, ChunkedSlab)
            if chunked and not slab.due:
                continue
            k, v, starts = joined(layer.slabs)
            fetched = slab.values.fetched if chunked else 0
            turn = layer.about["turn"]
            layer.slabs = [ChunkedSlab(k, v, starts, self._plan(k, starts), turn, self.path, fetched)]

    def _plan(self, k: Tensor, starts: Tensor) -> PromptPlan:
        """The plan for keys [B, H, T, D], right-packed from starts [B, H] on."""
        tokens = k.shape[2] - starts.long()  # [B, H]
        counts = (tokens // self.chunk - LOCAL).clamp(min=0)
        wanted = tokens_of(self.budget, tokens)
        early = from_start(k, starts)[:, :, : int(counts.max()) * self.chunk]
        means, likeness = landmarks(early, self.chunk)
        likeness = likeness.masked_fill(_number(means) >= counts[..., None], torch.inf)
        exact = least((self.outliers * wanted.double() / self.chunk).long().minimum(counts), likeness)
        always = tokens - (counts - exact.sum(-1)) * self.chunk
        chosen = (wanted - always + self.chunk - 1).div(self.chunk, rounding_mode="floor").clamp(min=1)
        rank = max(round(self.rank_share * k.shape[1] * k.shape[3]), 1)
        return PromptPlan(self.chunk, counts, exact, means, chosen.minimum(counts - exact.sum(-1)), rank)

    def share(self, slab: Slab | ChunkedSlab, length: int) -> tuple[Tensor, int]:
        tokens = (length - slab.starts).long()
        if not isinstance(slab, ChunkedSlab):  # a prompt that is not divided yet
            return tokens, length
        behind = (tokens - slab.counts * self.chunk + self.chunk - 1) // self.chunk
        most = slab.most + -(-slab.tail.length // self.chunk)
        return (slab.reads + behind) * self.chunk, most * self.chunk

    def scores(self, query: LayerQuery) -> Tensor:
        slab, (B, _, n, _) = query.slab, query.queries.shape
        pages = -(-slab.length // self.chunk)
        scores = torch.full((B, slab.starts.shape[1], n, pages), torch.inf, device=query.queries.device)
        if isinstance(slab, ChunkedSlab):
            inside = _number(slab.landmarks) < slab.counts[..., None]
            among = inside & (slab.slots < 0)
            found = chunk_scores(query.queries, slab.landmarks, among, query.scaling)
            scores[..., : found.shape[-1]] = found.masked_fill(~among[:, :, None], torch.inf)
        return scores


def landmarks(k: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The means [B, H, C, D] of chunks of rotated keys k [B, H, C chunk, D], and the smallest cosine of any key of each
    chunk with its mean, [B, H, C]."""
    chunks = k.unflatten(2, (k.shape[2] // chunk, chunk))
    means = chunks.mean(3)
    return means, cosine_similarity(means[:, :, :, None].float(), chunks.float(), dim=-1).amin(-1)


def least(counts: Tensor, likeness: Tensor) -> Tensor:
    """bool [B, H, C]: the counts [B, H] chunks with the smallest likeness [B, H, C]."""
    return likeness.argsort(-1).argsort(-1) < counts[..., None]


def chunk_scores(q: Tensor, means: Tensor, among: Tensor, scale: float) -> Tensor:
    """The score of each chunk: its largest softmax over landmarks among the query heads of a kv head.

    Args:
        q: [B, H_q, n, D]. means: [B, H, C, D]. among: bool [B, H, C], the chunks that are compared.

    Returns:
        [B, H, n, C] float32.
    """
    logits = torch.einsum("bhgnd,bhcd->bhgnc", q.unflatten(1, (means.shape[1], -1)).float(), means.float()) * scale
    logits = logits.masked_fill(~among[:, :, None, None], torch.finfo(torch.float32).min)
    return logits.softmax(-1).amax(2)


def _number(means: Tensor) -> Tensor:
    """The numbers of the chunks of means [B, H, C, D]."""
    return torch.arange(means.shape[2], device=means.device)
