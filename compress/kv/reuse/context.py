"""How chunks depend on the texts that they were read behind, and what must be computed again behind other texts
(Cache-Craft, Agarwal et al., 2025, arXiv:2502.15734)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from compress.kv.support import attentions_of


@dataclass(frozen=True)
class ChunkContext:
    """The attention of a chunk to the texts that it was read behind. The prefix of all prompts is not one of them.

    Attributes:
        before: the names of these texts, in order. lengths: their numbers of tokens.
        inter: the attention to each of these texts, summed over the tokens of both, mean over heads and layers.
        intra: the attention of the chunk to itself, in the same unit.
        outside: [n], the attention of each token of the chunk to all of these texts, mean over heads and layers.
    """

    before: tuple[str, ...]
    lengths: tuple[int, ...]
    inter: tuple[float, ...]
    intra: float
    outside: Tensor

    @property
    def impact(self) -> float:
        """The paper's cache context impact, 0.5 to 1: the sigmoid of the mean attention to a token of other texts over
        that to a token of the chunk. 1 for a chunk that was read alone, which the paper does not have: it lacks most.
        """
        if not self.before:
            return 1.0
        n = len(self.outside)
        others = sum(mass / (n * length) for mass, length in zip(self.inter, self.lengths, strict=True))
        return 1 / (1 + math.exp(-others * n * n / self.intra))

    def overlap(self, now: Sequence[str]) -> float:
        """The paper's adjusted prefix overlap, 0 to 1: the share of the attention to other texts that went to texts
        which stand before the chunk in the new prompt too, less a penalty for pairs of them in another order.

        Args:
            now: the names of the texts before the chunk in the new prompt.
        """
        if not self.before:
            return float(not now)  # it saw none of them
        place = {name: i for i, name in enumerate(now)}
        common = [name for name in self.before if name in place]
        seen = sum(mass for name, mass in zip(self.before, self.inter, strict=True) if name in place)
        pairs = [place[a] > place[b] for a, b in combinations(common, 2)]
        return seen / sum(self.inter) * (1 - sum(pairs) / max(len(pairs), 1))

    def overhead(self, now: Sequence[str]) -> float:
        """The share of the chunk to compute again, up to a factor: the impact times what the overlap leaves."""
        return self.impact * (1 - self.overlap(now))


def places_by_context(contexts: Sequence[ChunkContext], names: Sequence[str], count: int) -> list[Tensor]:
    """The tokens of each chunk of a prompt that are computed again, counted within the chunk.

    The number of a chunk's tokens is proportional to their number and to the overhead, and those are taken that
    attended most to other texts when the chunk was read.

    Args:
        contexts, names: of the chunks of the prompt, in order. count: of tokens in all; fewer if overheads are zero.
    """
    sizes = [len(context.outside) for context in contexts]
    needs = {i: context.overhead(names[:i]) * sizes[i] for i, context in enumerate(contexts)}
    shares, left, needs = [0.0] * len(sizes), float(count), {i: need for i, need in needs.items() if need}
    while needs:
        each = left / sum(needs.values())
        full = [i for i, need in needs.items() if each * need >= sizes[i]]
        for i in full or needs:
            shares[i] = min(each * needs[i], float(sizes[i]))
        if not full:
            break
        left -= sum(sizes[i] for i in full)
        needs = {i: need for i, need in needs.items() if i not in full}
    ends = [round(sum(shares[: i + 1])) for i in range(len(shares))]
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [
        context.outside.argsort(descending=True, stable=True)[:n] for context, n in zip(contexts, counts, strict=True)
    ]


@contextmanager
def attention_noted(model: nn.Module, bounds: Sequence[int]) -> Iterator[Tensor]:
    """Inside, a model's pass over one prompt adds up its attention.

    Args:
        bounds: the first position of each part of the prompt, and the number of all positions.

    Yields:
        [positions, parts]: how much each position attends to each part, mean over heads and layers, after the pass.

    Raises:
        ValueError: the model does not return its attention.
    """
    found = torch.zeros(bounds[-1], len(bounds) - 1)
    attentions = attentions_of(model).values()

    def note(module: nn.Module, args: tuple, output: object) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if weights is None:
            raise ValueError(
                f"`model` ({type(model).__name__}) does not return its attention: its chunks can be read alone (`read`)"
            )
        mean = weights[0].float().mean(0)
        parts = [mean[:, a:b].sum(1) for a, b in zip(bounds, bounds[1:], strict=False)]
        found.add_(torch.stack(parts, 1).cpu() / len(attentions))

    before = model.config._attn_implementation
    hooks = [m.register_forward_hook(note) for m in attentions]
    try:
        model.set_attn_implementation("eager")  # the other implementations do not compute it
        yield found
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
