"""Groups of linears of a block that read the same input, from which statistics are collected once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from compress.linear import met_by, shape_of
from compress.transforms import same_transform
from compress.walk.capture import Call, Stop, run_block, same_memory
from compress.walk.parallel.places import Place
from compress.walk.parallel.ranks import current
from compress.walk.statistics import Collector


def input_groups(
    block: nn.Module, linears: dict[str, nn.Module], calls: list[Call], index: int, device: torch.device
) -> tuple[list[list[str]], bool]:
    """Linears by the input that they read, in the order of the computation, found by running one micro-batch.

    Two linears share an input if they are given the same memory in the same pass, and transform it alike. Also returns
    whether no linear was called more than once. Experts that no token reached form groups of their own, at the places
    where they would have been reached.
    """
    ranks = current()
    found = _input_groups(block, linears, calls, index, device) if ranks.rank == 0 else None
    return ranks.from_first(found)  # where experts share the tokens, another micro-batch may show other groups


def _input_groups(
    block: nn.Module, linears: dict[str, nn.Module], calls: list[Call], index: int, device: torch.device
) -> tuple[list[list[str]], bool]:
    if not calls:
        return [[name] for name in linears], True
    inputs: list[tuple[str, Tensor]] = []  # held, so that no memory is used twice while we compare
    with hooked(linears, lambda name, x: inputs.append((name, x))):
        run_block(block, calls[0], index, device)
    called = [name for name, _ in inputs]
    repeated = {name for name in called if called.count(name) > 1}  # each forms its own group: it has several inputs
    found: list[tuple[Tensor, list[str]]] = []
    for name, x in inputs:
        if any(name in members for _, members in found):
            continue
        for leader, members in found:
            alike = same_transform(*(getattr(linears[n], "transform", None) for n in (name, members[0])))
            if alike and name not in repeated and members[0] not in repeated and same_memory(leader, x):
                members.append(name)
                break
        else:
            found.append((x, [name]))
    groups = [members for _, members in found]
    for name in linears:
        if name not in called:
            groups.insert(_place(name, list(linears), groups), [name])
    return groups, not repeated


def _place(name: str, order: list[str], groups: list[list[str]]) -> int:
    """The place of a linear without tokens among the groups: beside similar ones (expert 3's beside expert 2's)."""
    placed = {member: i for i, group in enumerate(groups) for member in group}
    at, parent = order.index(name), name.rpartition(".")[0]
    like = [other for other in order if other in placed and other.rpartition(".")[0] == parent]
    for other in reversed([o for o in like if order.index(o) < at]):
        return placed[other] + 1
    if like:
        return placed[like[0]]
    return max((placed[o] + 1 for o in order[:at] if o in placed), default=0)


def collect(
    block: nn.Module,
    linears: dict[str, nn.Module],
    groups: list[list[str]],
    calls: list[Call],
    index: int,
    needs: Sequence[str],
    device: torch.device,
    *,
    stop_early: bool,
    pass_on: bool = False,
) -> dict[str, Collector]:
    """Run every micro-batch and feed the statistics of each group once, from its first linear, whose name is the key.

    Args:
        stop_early: leave the block once every group has been reached.
        pass_on: make the block's outputs the inputs of the next one, which takes whole passes.
    """
    assert not (stop_early and pass_on)
    leader_of = {name: group[0] for group in groups for name in group}
    collectors = {group[0]: Collector(group[0], needs, shape_of(linears[group[0]])[1], device) for group in groups}
    seen: dict[str, Tensor] = {}
    place = Place()

    def on_input(name: str, x: Tensor) -> None:
        leader = leader_of[name]
        if name != leader:
            assert same_memory(seen[leader], x), f"{name} and {leader} shared an input in one pass, not in another"
            return
        seen[name] = x
        collectors[name].update(met_by(linears[name], x), place)
        if stop_early and len(seen) == len(collectors):
            raise Stop

    with hooked({name: linears[name] for name in leader_of}, on_input):
        for call in calls:
            seen.clear()
            place = call.place
            with suppress(Stop):
                hidden = run_block(block, call, index, device)
                if pass_on:
                    call.hidden = hidden
    return collectors


@contextmanager
def hooked(linears: dict[str, nn.Module], on_input: Callable[[str, Tensor], None]) -> Iterator[None]:
    handles = [
        m.register_forward_pre_hook(lambda _, args, name=name: on_input(name, args[0])) for name, m in linears.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
