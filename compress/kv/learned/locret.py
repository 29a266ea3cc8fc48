"""Locret (Huang et al., 2024, arXiv:2410.01805): retaining heads predict how much each position will be attended to."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.kv.learned.networks import check_networks, remembered, with_ends
from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.kv.support import key_shapes, layer_config
from compress.method import knob

COMMAND = "compress.commands.train_locret"


@dataclass(frozen=True, kw_only=True)
class Locret(Policy):
    """Keeps the positions to which answers will attend most, as small networks predict from each token alone.

    A network for every layer (the retaining heads) sees the query, key and value of a token, all heads side by side,
    and predicts for each kv head the largest attention logit that a later answer gives to the position. A score is
    given once and never changes, because it depends on nothing behind the token; so prompts can be read in chunks and
    evicted after each, and the last tokens (stabilizers) always stay, on which the next chunk depends most. The
    networks are trained once per model, in minutes, by `compress.commands.train_locret`.

    Deviations: the networks see queries and keys as they are before RoPE; they are trained on the last quarter of plain
    texts in the place of answers to instructions. Predictions are logits, which are not comparable between heads, so
    that every head gets a fixed number of positions, as in the paper. `sinks` are not in the paper.
    """

    path: str = knob("", "file of the trained networks, as `python -m compress.commands.train_locret` writes it")
    allocation: str = knob(
        "uniform", "how the budget is shared out, by the number of positions alone", choices=("uniform", "pyramid")
    )
    sinks: int = knob(4, "tokens at the beginning that always stay", range=(0, 1024))
    recent: int = knob(
        64, "tokens at the end of the prompt, and of every chunk of it, that always stay", range=(0, 65536)
    )

    name = "locret"
    source = "Huang et al. 2024, arXiv:2410.01805, section 3"
    turns: ClassVar[bool] = True
    window: ClassVar[int] = 1
    remembers: ClassVar[bool] = True
    memory_dtype: ClassVar[torch.dtype] = torch.bfloat16
    at_every_pass: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        super().check(model)
        check_networks(self, self.path, model, channels(model), command=COMMAND, kind="queries, keys and values")

    def remember(self, seen: Seen) -> Tensor:
        """The predicted scores of the kept positions, with those of new tokens at the end."""
        return remembered(seen, self.path, features(seen))

    def scores(self, seen: Seen) -> Tensor:
        return with_ends(seen.memory, seen, self.sinks, self.recent)


def channels(model: nn.Module) -> int:
    """The number of channels of a token's query, key and value in all heads of a layer that keeps all positions."""
    shapes = {
        (layer_config(model, number).num_attention_heads + 2 * kv_heads) * width
        for number, (kv_heads, width) in key_shapes(model).items()
    }
    if len(shapes) > 1:
        raise ValueError(
            f"`model` ({type(model).__name__}) has layers whose queries, keys and values differ in their channels "
            f"({', '.join(map(str, sorted(shapes)))}), and networks of locret are of one width: kvzap works"
        )
    return shapes.pop()


def features(seen: Seen) -> Tensor:
    """Inputs of the networks for the queries' tokens, [B, n, channels] float32: query, key, value before RoPE."""
    n = seen.queries.shape[2]
    places = seen.positions.clamp(min=0)
    q, k = (seen.turn(x.float(), places, True) for x in (seen.queries, seen.keys[:, :, -n:]))
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, seen.values[:, :, -n:].float())], -1)


def largest_logits(seen: Seen, prompt: int) -> Tensor:
    """The largest attention logit that the tokens behind a prompt give to each of its positions, over the query heads
    that share a kv head, [B, H_kv, prompt], float32."""
    q = seen.queries[:, :, prompt:].unflatten(1, (seen.keys.shape[1], -1)).float()  # [B, H, G, n, D]
    logits = torch.einsum("bhgnd,bhtd->bhgnt", q, seen.keys[:, :, :prompt].float()) * seen.scaling
    return logits.amax((2, 3))
