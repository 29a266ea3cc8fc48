"""KVzap (Jegou and Jeblick, 2026, arXiv:2601.07891): small networks on hidden states predict KVzip's scores."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.kv.learned.networks import check_networks, remembered, with_ends
from compress.kv.policy import ALLOCATIONS, Policy
from compress.kv.seen import Seen
from compress.method import knob

COMMAND = "compress.commands.train_kvzap"


@dataclass(frozen=True, kw_only=True)
class KVzap(Policy):
    """Keeps the positions to which a second reading of the prompt would attend most, as small networks predict.

    A network for every layer sees the hidden state that the attention reads, and predicts the logarithm of KVzip's
    score for each kv head. They are trained once per model, in minutes, by `compress.commands.train_kvzap`,
    and scoring costs a small product per token in place of a second reading of the prompt. Deviations: the target is
    KVzip's score, not its refinement by the norms of values; the highest scores within a budget stay, where the paper
    keeps those above a threshold. Networks that `train_costs` has written predict how much the loss can change when a
    position is lost; they keep more answers right where a quarter of the positions or more stay. `mix` makes one
    network of several, such as one of each kind. Long contexts need networks that were trained on long texts.
    """

    path: str = knob("", "file of the trained networks, as `python -m compress.commands.train_kvzap` writes it")
    allocation: str = knob("global", "how the budget is shared out", choices=ALLOCATIONS)
    sinks: int = knob(4, "tokens at the beginning that always stay", range=(0, 1024))
    recent: int = knob(16, "tokens at the end that always stay", range=(0, 65536))

    name = "kvzap"
    source = "Jegou and Jeblick 2026, arXiv:2601.07891, section 3"
    window = 1
    remembers = True
    memory_dtype = torch.bfloat16
    reads_hidden = True
    at_every_pass = True

    def check(self, model: nn.Module) -> None:
        super().check(model)
        hidden = model.config.get_text_config(decoder=True).hidden_size
        check_networks(self, self.path, model, hidden, command=COMMAND, kind="hidden states")

    def remember(self, seen: Seen) -> Tensor:
        """The predicted scores of the kept positions, with those of new tokens at the end."""
        return remembered(seen, self.path, seen.hidden)

    def scores(self, seen: Seen) -> Tensor:
        return with_ends(seen.memory, seen, self.sinks, self.recent)
