"""GemFilter (Shi et al., 2024, arXiv:2409.17422): an early layer chooses tokens of the prompt; only they are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d

from compress.kv.attention import expect, note_hidden
from compress.kv.cache import CompressedCache, Whole
from compress.kv.layer import KVLayer, packed
from compress.kv.policy import Policy
from compress.kv.rotation import rotaries_of
from compress.kv.seen import Seen
from compress.kv.support import keeping_layers, layer_kinds
from compress.method import knob


@dataclass(frozen=True, kw_only=True)
class GemFilter(Policy):
    """Reads the prompt again with only the tokens that one layer chooses by the last query of the prompt.

    It chooses by the products of the last query and all keys, summed over heads, without a softmax, and averaged over
    neighbours. All layers and heads keep the same tokens. The kept tokens hold no information about the evicted ones,
    because the cache is computed from the shorter prompt. They get the positions directly before the text that follows,
    which is the same for rotary attention as the paper's positions from 0 on. Layers with a sliding window keep what
    they had.

    By default the whole prompt is read first, so that the next token is predicted from all of it. With
    `prefill="short"`, as in the paper, a first pass stops at the layer that chooses, and the next token is predicted
    from the shorter prompt: reading takes about `depth` plus `budget` of the time. This holds for first prompts of
    which only the last logits are wanted, as `generate` reads them; if all logits are wanted, the whole prompt is read.

    Which layer chooses well depends on the model. The paper takes layer 13 of the 32 of Llama 3.1 8B. In SmolLM2-135M,
    layer 22 of 30 finds 4 of 4 numbers in 1,024 tokens; layers at a depth of 0.2 to 0.4 find none, and layers at 0.5
    and 0.6 find two.
    """

    allocation: str = knob("uniform", "every head of every layer keeps the same tokens", choices=("uniform",))
    depth: float = knob(0.7, "the layer that chooses, as a share of all layers", range=(0.0, 1.0))
    pool: int = knob(5, "positions over which the products are averaged; odd", range=(1, 101))
    prefill: str = knob(
        "whole",
        "whole: all layers read the whole prompt first; short: those up to the layer that chooses, if only the next "
        "token is wanted",
        choices=("whole", "short"),
    )

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
        if self.prefill == "short" and (others := sorted(set(layer_kinds(model)) - {"full_attention"})):
            raise ValueError(
                f"`prefill` (='short') of {self.name}: {type(model).__name__} has layers ({', '.join(others)}) that "
                "must read the whole prompt; 'whole' works"
            )

    def scores(self, seen: Seen) -> Tensor:
        return torch.zeros(seen.valid.shape, device=seen.valid.device)  # the evicted tokens are already removed

    def shortened(self, model: nn.Module, cache: CompressedCache, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a pass over the chosen tokens of a first prompt, after which the cache counts all of it."""
        ids, real = cache.ids[-1], cache.masks[-1].bool()
        first = cache.get_seq_length() == 0 and not cache.paused
        if self.prefill != "short" or not first or given.get("logits_to_keep") != 1:
            return given
        tokens = real.sum(1)
        if bool((self.target(tokens) >= tokens).all()):
            return given
        until = UpTo(model, self._chooses(keeping_layers(model)), traces=cache.traces)
        layer = until.read(model, given)
        shorter = self._shorter(layer, self._choose(layer), ids, real)
        cache.ids, cache.masks = [shorter.ids], [shorter.stays]
        cache.whole = Whole(ids.shape[1], tokens, shorter.places)
        without = {name: value for name, value in given.items() if name != "cache_position"}
        return {**without, **shorter.arguments()}

    def read_again(self, model: nn.Module, cache: CompressedCache) -> None:
        if cache.whole is not None:  # the pass that has just ended was over the chosen tokens
            cache.count_whole()
            return
        layers = cache.filled
        chosen = self._choose(layers[self._chooses(range(len(layers)))])  # [B, T]
        ids, real = torch.cat(cache.ids, 1), torch.cat(cache.masks, 1).bool()
        if torch.equal(chosen, layers[0].valid[:, 0]):  # the whole prompt fits
            cache.ids, cache.masks = [ids], [real]
            return
        shorter = self._shorter(layers[0], chosen, ids, real)
        again = CompressedCache(model, traces=cache.traces)
        model(**shorter.arguments(), past_key_values=again, logits_to_keep=1)
        cache.replace_by(again, shorter.places)
        cache.ids, cache.masks = [shorter.ids], [shorter.stays]

    def _chooses(self, layers: Sequence[int]) -> int:
        """The one of these layers that chooses."""
        return layers[min(int(self.depth * len(layers)), len(layers) - 1)]

    def _shorter(self, layer: KVLayer, chosen: Tensor, ids: Tensor, real: Tensor) -> "Shorter":
        """The tokens of `ids` [B, n], with padding, that were chosen [B, T] among those of a layer."""
        order = real.to(torch.uint8).argsort(dim=1, stable=True)[:, ids.shape[1] - chosen.shape[1] :]  # padding first
        index = chosen.to(torch.uint8).argsort(dim=1, stable=True)[:, chosen.shape[1] - int(chosen.sum(1).max()) :]
        stays = chosen.gather(1, index)
        positions = (layer.tokens[:, None] - stays.long().flip(1).cumsum(1).flip(1)).clamp(min=0)
        places = None if layer.positions is None else layer.positions.view[:, 0].gather(1, index)
        return Shorter(ids.gather(1, order.gather(1, index)), stays, positions, places)

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


class Shorter(NamedTuple):
    """The tokens of a prompt that stay, [B, kept] each.

    Attributes:
        ids, stays: tokens, and whether one is of that row; padding comes first.
        positions: directly before the text that follows. places: the original ones, or None.
    """

    ids: Tensor
    stays: Tensor
    positions: Tensor
    places: Tensor | None

    def arguments(self) -> dict[str, Tensor]:
        """Of a pass over them."""
        return {"input_ids": self.ids, "attention_mask": self.stays.long(), "position_ids": self.positions}


class UpTo(CompressedCache):
    """A cache with which a pass over a prompt ends at one layer: it gets its queries and keys, and does not attend."""

    def __init__(self, model: nn.Module, number: int, *, traces: bool) -> None:
        super().__init__(model, traces=traces)
        self.number = number

    def read(self, model: nn.Module, given: dict[str, Any]) -> KVLayer:
        """The layer, with the last queries, after the beginning of a pass with these arguments; outputs of layers are
        not asked for, because transformers would leave what records them in the model."""
        plain = {name: value for name, value in given.items() if not name.startswith("output_")}
        try:
            model(**{**plain, "past_key_values": self, "use_cache": True})
        except _Reached:
            expect(None)
            note_hidden(None)
        return self.layers[self.number]

    def _attend(
        self, layer: KVLayer, module: nn.Module, q: Tensor, key: Tensor, mask: Tensor | None, **about: Any
    ) -> Tensor:
        if layer.number != self.number:
            return super()._attend(layer, module, q, key, mask, **about)
        k, v = layer.take_incoming(module, key)
        real, whole = k.new_ones(k.shape[::2], dtype=torch.bool), True
        if mask is not None:
            real, whole = self._real_tokens(mask)
        layer.about = {**about, "turn": None}
        layer.keep(k, v, real, whole)
        queries, asked = packed(q, real, whole)
        layer.queries, layer.asked = queries[:, :, -1:], asked[:, -1:]
        raise _Reached


class _Reached(Exception):
    """The layer at which a pass ends was reached."""
