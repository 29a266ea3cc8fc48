"""Scaling of keys and queries against each other before RoPE rotates them: the modules that give them, and the channels
that RoPE rotates together.

If channel c of the keys of a head is multiplied by s[c], and that of all queries that meet it divided by s[c], no
product of the two changes. RoPE mixes channels in pairs, so that both channels of a pair need the same factor if it is
folded into a module before RoPE. Modules and pairs are found by trials, and never by names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from compress.kv.attention import NAME, expect, register
from compress.kv.rotation import likely_rotations
from compress.kv.support import attends_by_interface
from compress.linear import CompressedLinear, is_linear, shape_of
from compress.walk.capture import Call, Stop, on_device, run_block
from compress.walk.folds.links import divide_outputs, gain_offset, is_norm

TOLERANCE = 1e-3  # relative change of the scores between queries and keys: more than rounding in float32
POSITIONS = (1, 2, 5)  # positions at which the channels that RoPE rotates together are searched


@dataclass(frozen=True, eq=False)
class KeyLink:
    """The place where the keys of a block can be scaled against its queries.

    keys, queries: names in the block of the last modules before RoPE, linears or norms, that give keys and queries.
    key_heads, query_heads: the number of heads in the output channels of the two; 1 for a norm that all heads share.
    pairs: [D], for each channel of a head the number of its pair; channels with the same number must scale alike.
    """

    keys: str
    queries: str
    key_heads: int
    query_heads: int
    pairs: Tensor

    def scale(self, block: nn.Module, s: Tensor) -> None:
        """Multiply the keys of each head by s [key_heads, D], and the queries that meet them by its inverse."""
        divide_outputs(block.get_submodule(self.keys), (1 / s).flatten())
        divide_outputs(block.get_submodule(self.queries), self.of_queries(s).flatten())

    def of_queries(self, s: Tensor) -> Tensor:
        """Factors of key heads [key_heads, D] for the heads of queries [query_heads, D]."""
        return s.repeat_interleave(self.query_heads // self.key_heads, 0)

    def largest(self, given: Tensor) -> Tensor:
        """The largest length of each pair [key_heads, D] in the outputs of the keys' module, [..., key_heads * D]."""
        squares = given.float().reshape(-1, self.key_heads, len(self.pairs)).square()
        lengths = torch.zeros_like(squares).index_add_(-1, self.pairs.to(given.device), squares).sqrt()
        return lengths.amax(0)[:, self.pairs.to(given.device)]


@torch.no_grad()
def key_link(model: nn.Module, block: nn.Module, call: Call, index: int, device: torch.device) -> KeyLink | str:
    """The place where the keys of a block can be scaled, or the reason why they cannot.

    Args:
        call: a few tokens.
    """
    if not attends_by_interface(model):
        return "it does not attend by transformers' attention interface"
    modules = {name: m for name, m in block.named_modules() if is_linear(m) or is_norm(m)}
    with on_device(block, device), _captured(model) as capture:
        first = capture(block, call, index, device, {})
        if first is None:
            return "it does not attend by transformers' attention interface"
        attention, q, k, called = first
        last: dict[str, str] = {}
        for name in (name for name in called if name in modules):
            sides = _changed(capture, block, call, index, device, name, (q, k))
            if sides in ("queries", "keys"):
                last[sides] = name
        if len(last) < 2:
            return "its queries and keys do not come from modules of their own (one linear may give both)"
        D = k.shape[-1]
        widths = {side: _width(modules[name]) for side, name in last.items()}
        heads = {"queries": q.shape[1], "keys": k.shape[1]}
        if any(widths[side] not in (D, D * heads[side]) for side in last):
            return f"{last['keys']} and {last['queries']} do not give keys and queries channel by channel"
        if stored := [name for name in last.values() if isinstance(modules[name], CompressedLinear)]:
            return f"{stored[0]} is stored compressed already"
        if any(is_norm(modules[name]) and gain_offset(modules[name]) is None for name in last.values()):
            return "the gain of a norm of its keys or queries is neither its weight nor 1 + its weight"
        key_heads, query_heads = widths["keys"] // D, widths["queries"] // D
        if query_heads % key_heads:
            return f"all heads share {last['queries']}, and each has a part of {last['keys']} of its own"
        link = KeyLink(last["keys"], last["queries"], key_heads, query_heads, pairs_of(model, attention, D, k))
        s = torch.rand(key_heads, D, generator=torch.Generator().manual_seed(0)).add(0.5).to(k)[:, link.pairs]
        changes = {link.keys: partial(_times, s), link.queries: partial(_times, 1 / link.of_queries(s))}
        _, q_after, k_after, _ = capture(block, call, index, device, changes)
    before, after = _scores(q, k), _scores(q_after, k_after)
    moved = ((after - before).norm() / before.norm()).item()
    if not moved <= max(TOLERANCE, 8 * torch.finfo(next(block.parameters()).dtype).eps):
        return f"something else rotates its keys: with keys and queries scaled inversely, scores change by {moved:.0e}"
    return link


def pairs_of(model: nn.Module, attention: nn.Module, D: int, like: Tensor) -> Tensor:
    """[D], for each channel the number of the pair in which RoPE rotates it; its own number if it is not rotated."""
    channels = torch.eye(D, device=like.device)[None, None]
    turn = next(likely_rotations(model, attention, channels), None)
    together = torch.eye(D, dtype=torch.bool)
    for position in POSITIONS if turn else ():
        at = torch.full((1, D), position, device=like.device)
        turned = turn(channels, at)[0, 0].cpu()
        together |= (turned.abs() > 1e-6) | (turned.t().abs() > 1e-6)
    return together.to(torch.uint8).argmax(1)  # the first of the channels that are rotated together


Captured = tuple[nn.Module, Tensor, Tensor, list[str]]


@contextmanager
def _captured(model: nn.Module) -> Iterator[Callable[..., Captured | None]]:
    """While the context lasts: runs a block up to its attention, and gives its attention module, the queries
    [B, H_q, n, D] and keys [B, H_kv, n, D] that it would compare, and the names of the modules that ran before it."""
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)

    def capture(
        block: nn.Module, call: Call, index: int, device: torch.device, changes: dict[str, Callable[[Tensor], Tensor]]
    ) -> Captured | None:
        seen: list = []
        called: list[str] = []

        def look(attention: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, **about: object) -> Tensor:
            seen.extend((attention, q.float(), k.float()))
            raise Stop

        def note(module: nn.Module, args: tuple, output: Tensor, name: str) -> Tensor | None:
            called.append(name)
            return changes[name](output) if name in changes else None

        handles = [m.register_forward_hook(partial(note, name=name)) for name, m in block.named_modules() if name]
        expect(look)
        try:
            run_block(block, call, index, device)
        except Stop:
            return *seen, called
        finally:
            expect(None)
            for handle in handles:
                handle.remove()
        return None

    try:
        yield capture
    finally:
        model.set_attn_implementation(before)


def _changed(
    capture: Callable, block: nn.Module, call: Call, index: int, device: torch.device, name: str, first: tuple
) -> str:
    """Whether queries or keys change with the output of a module: "queries", "keys", "both" or "neither"."""

    def other(output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(output.shape, generator=generator).to(output) * output.float().std().to(output.dtype)

    _, *now, _ = capture(block, call, index, device, {name: other})
    queries, keys = (not torch.equal(a, b) for a, b in zip(now, first, strict=True))
    return "both" if queries and keys else "queries" if queries else "keys" if keys else "neither"


def _times(factors: Tensor, output: Tensor) -> Tensor:
    """The output of a module, [..., heads * D], times factors [heads, D]."""
    return output * factors.flatten().to(output.dtype)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


def _width(module: nn.Module) -> int:
    """The number of output channels of a linear or a norm."""
    return shape_of(module)[0] if is_linear(module) else len(module.weight)
