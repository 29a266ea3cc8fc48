"""One pass over a block for all its linears: every micro-batch waits at each linear until that has been solved.

The micro-batches run side by side, each in a greenlet (a function that can be left in the middle and entered again), so
no layer of the block is computed twice, and each linear is solved on what the solved ones before it give. The price is
memory for what every micro-batch holds while it waits.
"""

import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from compress.linear import CompressedLinear, met_by, replace, shape_of
from compress.walk.capture import Call, Stop, run_block, same_memory
from compress.walk.statistics import Collector, LayerStatistics

HELD_BYTES = 1 << 29  # of the last group's input, over all micro-batches, that may be held while it is solved
Solve = Callable[[list[tuple[str, LayerStatistics]]], dict[str, CompressedLinear]]


def run_in_step(
    model: nn.Module,
    block: nn.Module,
    index: int,
    linears: dict[str, nn.Module],
    groups: list[list[str]],
    calls: list[Call],
    needs: Sequence[str],
    device: torch.device,
    solve: Solve,
    *,
    to_the_end: bool,
    beside: Sequence[Call] = (),
) -> None:
    """Run the block over all micro-batches, solving each group of linears when all have arrived at it.

    At the last group, whose input is the widest in most models, they wait only if that takes little memory; otherwise
    they stop there, and the block runs a second time, with all its linears solved.

    Args:
        linears: by name in the model; none is called more than once in a pass.
        groups: names of linears that read the same input, in the order in which they are reached.
        solve: given the linears of a group, each with its statistics, returns what is to stand for each of them.
        to_the_end: let the passes finish, and make their outputs the inputs of the next block; False: stop after the
            last group, as nothing follows this block.
        beside: the same micro-batches in the stream of the model as it was, which pass through the original linears.

    Raises:
        RuntimeError: a micro-batch reached the linears in another order.
    """
    number = {name: i for i, group in enumerate(groups) for name in group}
    collectors: dict[int, Collector] = {}
    # Per pass, what the linears of a group share, and which of them have not been reached.
    inputs: list[dict[greenlet, tuple[Tensor, set[str]]]] = [{} for _ in groups]
    waiting: dict[int, list[greenlet]] = defaultdict(list)
    passes: dict[greenlet, Call] = {}
    stopped: list[Call] = []
    solved, finished = 0, False
    originals: dict[greenlet, set[int]] = {}  # passes through the original linears: groups that they have reached
    read: dict[tuple[int, int], Tensor] = {}  # by group and micro-batch, the input of the original linears

    def too_much(i: int, x: Tensor) -> bool:
        return i == len(groups) - 1 and (not to_the_end or x.nbytes * len(calls) > HELD_BYTES)

    def arrive_beside(name: str, x: Tensor) -> None:
        i, me = number[name], getcurrent()
        if finished or i < solved or i in originals[me]:
            return
        originals[me].add(i)
        if x.dim() == 3:  # else tokens may have been chosen for an expert, and others in the other stream
            read[i, passes[me].place.number] = met_by(linears[name], x)
        if too_much(i, x):
            raise Stop
        me.parent.switch(i)

    def arrive(name: str, x: Tensor) -> None:
        i, me = number[name], getcurrent()
        if finished:
            return
        if me in inputs[i]:  # its group was solved while this pass waited at the group's first linear
            shared, missing = inputs[i][me]
            assert same_memory(shared, x), f"{groups[i]} shared an input in one pass, not in another"
            missing.discard(name)
            if not missing:
                del inputs[i][me]
            return
        if i < solved:
            raise RuntimeError(f"{name} is reached in another order in another pass; `sequential=False` needs no order")
        if len(groups[i]) > 1:
            inputs[i][me] = x, set(groups[i]) - {name}
        if i not in collectors:
            collectors[i] = Collector(needs, x.shape[-1], device)
        place = passes[me].place
        collectors[i].update(met_by(linears[name], x), place, read.pop((i, place.number), None))
        if too_much(i, x):
            raise Stop
        me.parent.switch(i)

    def run(call: Call) -> None:
        try:
            call.hidden = run_block(block, call, index, device)
        except Stop as stop:
            traceback.clear_frames(stop.__traceback__)  # else what the pass held stays until garbage is collected
            stopped.append(call)

    def go_on(one: greenlet, *arguments: Call) -> None:
        at = one.switch(*arguments)
        if not one.dead:
            waiting[at].append(one)

    def start(call: Call, *, as_it_was: bool) -> None:
        one = greenlet(run)
        passes[one] = call
        if as_it_was:
            originals[one] = set()
        go_on(one, call)

    def pass_through(gate: "_Gate", x: Tensor) -> Tensor:
        if getcurrent() in originals:
            arrive_beside(gate.name, x)
            return gate.original(x)
        arrive(gate.name, x)
        return gate.linear(x)

    gates = {name: _Gate(linear, name, pass_through) for name, linear in linears.items()}
    with ExitStack() as stack:
        for name, linear in linears.items():
            replace(model, name, gates[name])
            stack.callback(replace, model, name, linear)
        stack.callback(lambda: [one.throw() for one in passes if not one.dead])
        for i, call in enumerate(calls):  # each original pass just before the other one, which reads what it left
            if beside:
                start(beside[i], as_it_was=True)
            start(call, as_it_was=False)
        for i, group in enumerate(groups):
            if i not in collectors:  # experts that no token reached
                collectors[i] = Collector(needs, shape_of(linears[group[0]])[1], device)
            statistics = collectors.pop(i).result()
            for name, new in solve([(name, statistics) for name in group]).items():
                gates[name].linear = new.to(device)
                stack.enter_context(new.dense())
            solved = i + 1
            for one in waiting.pop(i, []):
                go_on(one)
        finished = True
        again, stopped = stopped, []
        for call in again if to_the_end else ():
            start(call, as_it_was=call in beside)


class _Gate(nn.Module):
    """Stands in a linear's place and lets no pass through before the linear has been solved."""

    def __init__(self, linear: nn.Module, name: str, pass_through: Callable[["_Gate", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.original, self.name, self.pass_through = linear, linear, name, pass_through

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("linear"), name)  # blocks may ask a linear for its weight's dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.pass_through(self, x)
