"""GemFilter (Shi et al., 2024, arXiv:2409.17422): an early layer chooses tokens of the prompt; only they are kept."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d

from compress.kv.cache import CompressedCache
from compress.kv.layer import KVLayer
from compress.kv.policy import Policy
from compress.kv.rotation import rotaries_of
from compress.kv.seen import Seen
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class GemFilter(Policy):
    """Reads the prompt again with only the tokens that one layer chooses by the last query of the prompt.

    It chooses by the products of the last query and all keys, summed over heads, without a softmax, and averaged over
    neighbours. All layers and heads keep the same tokens. The kept tokens hold no information about the evicted ones,
    because the cache is computed from the shorter prompt. They get the positions directly before the text that follows,
    which is the same for rotary attention as the paper's positions from 0 on. The paper stops its first pass at the
    layer that chooses, which makes prefill shorter; here the whole prompt is read first, so that the next token is
    predicted from all of it. Layers with a sliding window keep what they had.

    Which layer chooses well depends on the model. The paper takes layer 13 of the 32 of Llama 3.1 8B. In SmolLM2-135M,
    layer 22 of 30 finds 4 of 4 numbers in 1,024 tokens; layers at a depth of 0.2 to 0.4 find none, and layers at 0.5
    and 0.6 find two.
    """

    allocation: str = knob("uniform", "every head of every layer keeps the same tokens", choices=("uniform",))
    depth: float = knob(0.7, "the layer that chooses, as a share of all layers", range=(0.0, 1.0))
    pool: int = knob(5, "positions over which the products are averaged; odd", range=(1, 101))

    name = "gemfilter"
    source = "Shi et al. 2024, arXiv:2409.17422, algorithm 1"
    runs_model = True
    replaces = True
    window = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"`pool` (={self.pool}) of {self.name} must be odd, such as {self.pool + 1}")

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not rotaries_of(model):
            raise ValueError(
                f"{self.name} moves tokens to other positions, which needs rotary ones, and {type(model).__name__} has "
                "none; snapkv works"
            )

    def scores(self, seen: Seen) -> Tensor:
        return torch.zeros(seen.valid.shape, device=seen.valid.device)  # the evicted tokens are already removed

    def read_again(self, model: nn.Module, cache: CompressedCache) -> None:
        layers = cache.filled
        chosen = self._choose(layers[min(int(self.depth * len(layers)), len(layers) - 1)])  # [B, T]
        ids, real = torch.cat(cache.ids, 1), torch.cat(cache.masks, 1).bool()
        n = ids.shape[1]
        if torch.equal(chosen, layers[0].valid[:, 0]):  # the whole prompt fits
            cache.ids, cache.masks = [ids], [real]
            return
        order = real.to(torch.uint8).argsort(dim=1, stable=True)[:, n - chosen.shape[1] :]  # padding first
        index = chosen.to(torch.uint8).argsort(dim=1, stable=True)[:, chosen.shape[1] - int(chosen.sum(1).max()) :]
        stays = chosen.gather(1, index)
        ids = ids.gather(1, order.gather(1, index))
        tokens = layers[0].tokens[:, None]
        positions = (tokens + stays.long().flip(1).cumsum(1).flip(1).neg()).clamp(min=0)
        shorter = CompressedCache(model, traces=cache.traces)
        how = {"attention_mask": stays.long(), "position_ids": positions, "past_key_values": shorter}
        model(input_ids=ids, **how, logits_to_keep=1)
        places = None if layers[0].positions is None else layers[0].positions.view[:, 0].gather(1, index)
        cache.replace_by(shorter, places)
        cache.ids, cache.masks = [ids], [stays]

    def _choose(self, layer: KVLayer) -> Tensor:
        """bool [B, T], right-packed like the layer's rows: the tokens that stay, including the last one."""
        seen = layer.seen_by(layer.queries, layer.asked)
        query = seen.queries[:, :, -1].unflatten(1, (seen.keys.shape[1], -1)).sum(2)  # [B, H_kv, D]
        got = torch.einsum("bhd,bhtd->bt", query.float(), seen.keys.float())
        valid = seen.valid[:, 0]
        last = torch.zeros_like(valid)
        last[:, -1] = True
        got = avg_pool1d(got.masked_fill(~valid, 0), self.pool, stride=1, padding=self.pool // 2)
        got = got.masked_fill(last, torch.inf).masked_fill(~valid, -torch.inf)
        rank = got.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank < self.target(layer.tokens)[:, None]) & valid
