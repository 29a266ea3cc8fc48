"""The order in which the blocks of stacks are taken, and how many blocks of each stack fit into a budget."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

Name = TypeVar("Name", bound=str | tuple)  # the name of a stack: any type with an order


class Stack(NamedTuple):
    """Blocks of equal cost; a block is useful only with all blocks before it. gains: each block's decrease of loss."""

    gains: Sequence[float]
    cost: int


def falling(gains: Sequence[float]) -> list[float]:
    """Gains as a sequence that never rises: a gain that is larger than those before it shares a mean with them.

    It is the nearest one of all such sequences (isotonic regression, by pooling neighbours), so that a block with a
    small gain is taken early enough if the block behind it has a large gain.
    """
    pools: list[tuple[float, int]] = []  # (mean, number of gains)
    for gain in gains:
        pool = (float(gain), 1)
        while pools and pools[-1][0] < pool[0]:
            mean, count = pools.pop()
            pool = ((mean * count + pool[0] * pool[1]) / (count + pool[1]), count + pool[1])
        pools.append(pool)
    return [mean for mean, count in pools for _ in range(count)]


def in_order(stacks: Mapping[Name, Stack]) -> list[Name]:
    """The stacks' names, once for every block except the first of each stack, by falling gain for the cost."""
    rates = [
        (-gain / stack.cost, number, name)
        for name, stack in stacks.items()
        for number, gain in enumerate(falling(stack.gains[1:]))
    ]
    return [name for _, _, name in sorted(rates)]


def within(stacks: Mapping[Name, Stack], budget: float) -> dict[Name, int]:
    """The number of blocks of each stack: the longest beginning of the one order that costs at most `budget`.

    Every stack keeps its first block. A larger budget takes all blocks of a smaller one; the unused rest is less than
    the next block's cost.

    Raises:
        ValueError: the first blocks alone cost more.
    """
    left = budget - sum(stack.cost for stack in stacks.values())
    if left < 0:
        raise ValueError(f"the budget (={budget:g}) is less than the first blocks cost, {budget - left:g}")
    counts = dict.fromkeys(stacks, 1)
    for name in in_order(stacks):
        if stacks[name].cost > left:
            break
        left -= stacks[name].cost
        counts[name] += 1
    return counts
