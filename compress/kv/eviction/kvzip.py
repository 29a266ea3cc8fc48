"""KVzip (Kim et al., 2025, arXiv:2505.23416): keep the positions that the model needs to repeat its context, whatever
question follows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.kv.cache import CompressedCache
from compress.kv.layer import KVLayer
from compress.kv.policy import ALLOCATIONS, MASS_ALLOCATIONS, Policy
from compress.kv.rotation import rotaries_of
from compress.kv.seen import Seen
from compress.kv.storage import joined
from compress.method import knob
from kernels.support.positions import positions


@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keeps the positions that the model attends to when it reads the prompt a second time.

    The prompt is appended to itself piece by piece, and the score of a position is the largest attention that it gets
    from the second reading. The paper asks the model in words to repeat the prompt; here the prompt simply follows,
    which works with any language and template. The cost is about that of reading the prompt twice more.
    """

    allocation: str = knob("global", "how the budget is shared out", choices=(*ALLOCATIONS, *MASS_ALLOCATIONS))
    piece: int = knob(2048, "tokens that are repeated at a time", range=(16, 65536))
    sinks: int = knob(4, "tokens at the beginning that always stay", range=(0, 1024))

    name = "kvzip"
    source = "Kim et al. 2025, arXiv:2505.23416, section 3"
    remembers = True
    memory_dtype = torch.bfloat16
    runs_model = True
    mass = True

    def scores(self, seen: Seen) -> Tensor:
        order = seen.order()
        return seen.memory.masked_fill((order >= 0) & (order < self.sinks), torch.inf)

    def read_again(self, model: nn.Module, cache: CompressedCache) -> None:
        ids, real = torch.cat(cache.ids, 1), torch.cat(cache.masks, 1).bool()
        order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # padding last: pieces are the row's own
        ids, real = ids.gather(1, order), real.gather(1, order)
        count = real.sum(1)  # [B]
        for begin in range(0, int(count.max()), self.piece):
            end = min(begin + self.piece, int(count.max()))
            self._repeat(model, cache, ids[:, begin:end], real[:, begin:end], count - begin)

    def _repeat(self, model: nn.Module, cache: CompressedCache, ids: Tensor, real: Tensor, first: Tensor) -> None:
        """Read a piece again, and remember the attention to its places in the cache, which begin at -first [B]."""

        def listen(layer: KVLayer, q: Tensor, k: Tensor, asked: Tensor) -> None:
            kept, _, _ = joined(layer.slabs)
            B, H, n, D = k.shape
            at = (layer.length - first[:, None] + torch.arange(n, device=k.device)).clamp(0, layer.length - 1)
            at = at[:, None].expand(B, H, n)
            keys = torch.cat([kept.gather(2, at[..., None].expand(B, H, n, D)), k], 2)
            valid = real[:, None].expand(B, H, n).repeat(1, 1, 2)
            seen = Seen(
                keys,
                keys,
                valid,
                q,
                asked,
                positions=torch.arange(n, 2 * n, device=k.device).expand(B, n),
                tokens=layer.tokens,
                layer=layer.number,
                **layer.about,
            )
            got = seen.largest_attention(n).masked_fill(~real[:, None], 0)
            layer.memory.view.scatter_reduce_(2, at, got.to(layer.memory.view.dtype), "amax")

        seen, layer = cache.get_seq_length(), cache.filled[0]
        most, words = positions(model), model.get_input_embeddings()
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
        # Rotary positions have no limit, nor have models that know no positions.
        limited = not rotaries_of(model) and any(table.num_embeddings >= most for table in tables)
        if limited and (needed := int(layer.tokens.max()) + ids.shape[1]) > most:
            raise ValueError(
                f"`piece` (={self.piece}) of {self.name}: reading the prompt a second time takes {needed} positions, "
                f"and this model has {most} positions; a shorter prompt or piece works"
            )
        places = (layer.tokens[:, None] + real.long().cumsum(1) - 1).clamp(min=0)
        before = real.new_ones(len(ids), seen) if cache.mask is None else cache.mask
        mask = torch.cat([before, real], 1).long()
        with cache.looking(listen):
            model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1)
