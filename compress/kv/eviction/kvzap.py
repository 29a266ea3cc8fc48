"""KVzap (Jegou and Jeblick, 2026, arXiv:2601.07891): small networks on hidden states predict KVzip's scores."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import gelu

from compress.kv.policy import ALLOCATIONS, Policy
from compress.kv.seen import Seen
from compress.method import knob


class Scorer(NamedTuple):
    """Of one layer: scores [n, H_kv] = gelu((x - mean) / deviation up) down + bias, of hidden states x [n, hidden].

    up: [hidden, width], first_bias: [width], down: [width, H_kv], bias: [H_kv]; mean, deviation: [hidden].
    """

    mean: Tensor
    deviation: Tensor
    up: Tensor
    first_bias: Tensor
    down: Tensor
    bias: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> [..., H_kv], float32: the logarithm of the attention that is expected."""
        x = (hidden.float() - self.mean) / self.deviation
        return gelu(x @ self.up + self.first_bias) @ self.down + self.bias


@dataclass(frozen=True, kw_only=True)
class KVzap(Policy):
    """Keeps the positions that the model would attend to when it read the prompt again, as small networks predict it.

    A network for every layer sees the hidden state that the attention reads, and predicts the logarithm of KVzip's
    score for each kv head. They are trained once per model, in minutes, by the module `train_kvzap` beside this one,
    and scoring costs a small product per token in place of a second reading of the prompt. Deviations: the target is
    KVzip's score, not its refinement by the norms of values; the highest scores within a budget stay, where the paper
    keeps those above a threshold.
    """

    path: str = knob("", "file of the trained networks, as `python -m compress.kv.eviction.train_kvzap` writes it")
    allocation: str = knob("global", "how the budget is shared out", choices=ALLOCATIONS)
    sinks: int = knob(4, "tokens at the beginning that always stay", range=(0, 1024))
    recent: int = knob(16, "tokens at the end that always stay", range=(0, 65536))

    name = "kvzap"
    source = "Jegou and Jeblick 2026, arXiv:2601.07891, section 3"
    window = 1
    remembers = True
    reads_hidden = True

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not self.path:
            raise ValueError(
                f"`path` (='') of {self.name} must name a file of trained networks; "
                "`python -m compress.kv.eviction.train_kvzap --model MODEL --out FILE` writes one"
            )
        if not Path(self.path).is_file():
            raise ValueError(f"`path` (={self.path!r}) of {self.name} is no file")
        config, found = model.config.get_text_config(decoder=True), scorers(self.path)
        hidden = next(iter(found.values())).up.shape[0]
        if hidden != config.hidden_size or max(found) >= config.num_hidden_layers:
            raise ValueError(
                f"`path` (={self.path!r}) of {self.name} is of a model with hidden states of {hidden} channels and "
                f"{max(found) + 1} layers or more; this one has {config.hidden_size} and {config.num_hidden_layers}"
            )

    def remember(self, seen: Seen) -> Tensor:
        """The predicted scores of what is kept; new ones at its end."""
        scorer, n = scorers(self.path)[seen.layer], seen.hidden.shape[1]
        new = scorer._make(t.to(seen.hidden.device) for t in scorer)(seen.hidden).transpose(1, 2)  # [B, H, n]
        memory = seen.memory.clone()
        memory[:, :, -n:] = torch.where(seen.asked[:, None], new.to(memory.dtype), memory[:, :, -n:])
        return memory

    def scores(self, seen: Seen) -> Tensor:
        order = seen.order()
        certain = ((order >= 0) & (order < self.sinks)) | seen.last(self.recent)
        return seen.memory.masked_fill(certain, torch.inf)


def scorers(path: str) -> dict[int, Scorer]:
    """The networks of a file by layer."""
    return _read(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> dict[int, Scorer]:
    with safe_open(path, "pt") as file:
        layers = sorted({int(name.partition(".")[0]) for name in file.keys()})
        return {i: Scorer(*(file.get_tensor(f"{i}.{field}") for field in Scorer._fields)) for i in layers}
