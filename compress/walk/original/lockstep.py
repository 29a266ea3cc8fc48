"""One pass over a block for all its linears: every micro-batch waits at each linear until the linear has been solved.

The micro-batches run side by side, each in a greenlet (a function that can be left in the middle and entered again), so
no layer of the block is computed twice, and each linear is solved on the outputs of the solved ones before it. This
needs memory for the tensors that every micro-batch holds while it waits.
"""

import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from compress.linear import CompressedLinear, StandIn, met_by, replace, shape_of
from compress.walk.capture import Call, Stop, run_once, same_memory
from compress.walk.finite import check_activations
from compress.walk.statistics import Collector, LayerStatistics

HELD_BYTES = 1 << 29  # of the last group's input, over all micro-batches, that may be held while it is solved
Pass = Any  # a greenlet; its package is imported when a walk begins, as other uses of a model do not need it
Solve = Callable[[list[tuple[str, LayerStatistics]]], dict[str, CompressedLinear]]


class Lockstep:
    """The passes of all micro-batches over a block, each a greenlet, and the gates at which they wait.

    `run` solves each group of linears when all passes have arrived at it. At the last group, whose input is the widest
    in most models, they wait only if that takes little memory; otherwise they stop there, and the block runs a second
    time, with all its linears solved.
    """

    def __init__(
        self,
        model: nn.Module,
        block: nn.Module,
        index: int,
        linears: dict[str, nn.Module],
        groups: list[list[str]],
        calls: list[Call],
        needs: Sequence[str],
        device: torch.device,
        *,
        to_the_end: bool,
        beside: Sequence[Call] = (),
    ) -> None:
        """
        Args:
            linears: by name in the model; none is called more than once in a pass.
            groups: names of linears that read the same input, in the order in which they are reached.
            to_the_end: let the passes finish, and make their outputs the inputs of the next block; False: stop after
                the last group, as nothing follows this block.
            beside: the same micro-batches in the stream of the uncompressed model, which pass through the original
                linears.

        Raises:
            ModuleNotFoundError: the package `greenlet` is not installed.
        """
        self.greenlet, self.getcurrent = _greenlets()
        self.model, self.block, self.index, self.linears, self.groups = model, block, index, linears, groups
        self.calls, self.needs, self.device, self.to_the_end, self.beside = calls, needs, device, to_the_end, beside
        self.gates = {name: _Gate(linear, name, self.pass_through) for name, linear in linears.items()}
        self.number = {name: i for i, group in enumerate(groups) for name in group}
        self.collectors: dict[int, Collector] = {}
        # For each group: per pass, the input that its linears share, and the linears that are not reached yet.
        self.inputs: list[dict[Pass, tuple[Tensor, set[str]]]] = [{} for _ in groups]
        self.waiting: dict[int, list[Pass]] = defaultdict(list)  # by the group at which they wait
        self.passes: dict[Pass, Call] = {}
        self.stopped: list[Call] = []
        self.solved, self.finished = 0, False  # number of solved groups; whether all are solved
        self.originals: dict[Pass, set[int]] = {}  # passes through the original linears: groups they have reached
        self.read: dict[tuple[int, int], Tensor] = {}  # by group and micro-batch, the input of the original linears

    def run(self, solve: Solve) -> None:
        """All passes, from group to group.

        Args:
            solve: given the linears of a group, each with its statistics, returns the replacement of each linear.

        Raises:
            RuntimeError: a micro-batch reached the linears in another order.
        """
        with ExitStack() as stack:
            stack.callback(self.gates.clear)  # gates refer to this object; without them it and its weights are freed
            for name, linear in self.linears.items():
                replace(self.model, name, self.gates[name])
                stack.callback(replace, self.model, name, linear)
            stack.callback(lambda: [one.throw() for one in self.passes if not one.dead])
            for i, call in enumerate(self.calls):  # each original pass just before the other, which reads its inputs
                if self.beside:
                    self.start(self.beside[i], as_it_was=True)
                self.start(call, as_it_was=False)
            for i, group in enumerate(self.groups):
                if i not in self.collectors:  # experts that no token reached
                    columns = shape_of(self.linears[group[0]])[1]
                    self.collectors[i] = Collector(group[0], self.needs, columns, self.device)
                statistics = self.collectors.pop(i).result()
                for name, new in solve([(name, statistics) for name in group]).items():
                    self.gates[name].linear = new.to(self.device)
                    stack.enter_context(new.dense())
                self.solved = i + 1
                for one in self.waiting.pop(i, []):
                    self.go_on(one)
            self.finished = True
            again, self.stopped = self.stopped, []
            for call in again if self.to_the_end else ():
                self.start(call, as_it_was=call in self.beside)

    def start(self, call: Call, *, as_it_was: bool) -> None:
        """Begin the pass of a micro-batch, and run it to the first gate."""
        one = self.greenlet(self.run_pass)
        self.passes[one] = call
        if as_it_was:
            self.originals[one] = set()
        self.go_on(one, call)

    def run_pass(self, call: Call) -> None:
        try:
            hidden = run_once(self.block, call, self.index, self.device)
            check_activations(hidden, f"the output of block {self.index}", call.place)
            call.hidden = hidden
        except Stop as stop:
            traceback.clear_frames(stop.__traceback__)  # else its tensors stay until garbage is collected
            self.stopped.append(call)

    def go_on(self, one: Pass, *arguments: Call) -> None:
        """Run a pass to its next gate or its end."""
        at = one.switch(*arguments)
        if not one.dead:
            self.waiting[at].append(one)

    def pass_through(self, gate: "_Gate", x: Tensor) -> Tensor:
        """The output of a linear for its input x [..., in], as soon as the linear is solved."""
        if self.getcurrent() in self.originals:
            self.arrive_beside(gate.name, x)
            return gate.original(x)
        self.arrive(gate.name, x)
        return gate.linear(x)

    def arrive(self, name: str, x: Tensor) -> None:
        """Count the input of a linear that is not solved yet, and wait until it is."""
        i, me = self.number[name], self.getcurrent()
        if self.finished:
            return
        if me in self.inputs[i]:  # its group was solved while this pass waited at the group's first linear
            shared, missing = self.inputs[i][me]
            assert same_memory(shared, x), f"{self.groups[i]} shared an input in one pass, not in another"
            missing.discard(name)
            if not missing:
                del self.inputs[i][me]
            return
        if i < self.solved:
            raise RuntimeError(
                f"{name} is reached in another order in another pass; `sequential=False` works in any order"
            )
        if len(self.groups[i]) > 1:
            self.inputs[i][me] = x, set(self.groups[i]) - {name}
        if i not in self.collectors:
            self.collectors[i] = Collector(name, self.needs, x.shape[-1], self.device)
        place = self.passes[me].place
        beside = self.read.pop((i, place.number), None)
        self.collectors[i].update(met_by(self.linears[name], x), place, beside)
        self.wait(me, i, x)

    def arrive_beside(self, name: str, x: Tensor) -> None:
        """Keep the input of an original linear for the other pass of the micro-batch, and wait until that pass has read
        it."""
        i, me = self.number[name], self.getcurrent()
        if self.finished or i < self.solved or i in self.originals[me]:
            return
        self.originals[me].add(i)
        if x.dim() == 3:  # else these may be the tokens of an expert, which has others in the other stream
            self.read[i, self.passes[me].place.number] = met_by(self.linears[name], x)
        self.wait(me, i, x)

    def wait(self, me: Pass, i: int, x: Tensor) -> None:
        """Leave the pass until group i is solved, or end it if holding its input x would take too much memory."""
        last = i == len(self.groups) - 1
        if last and (not self.to_the_end or x.nbytes * len(self.calls) > HELD_BYTES):
            raise Stop
        me.parent.switch(i)


def _greenlets() -> tuple[Callable[..., Pass], Callable[[], Pass]]:
    """What makes a greenlet, and what tells which one runs."""
    try:
        from greenlet import getcurrent, greenlet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "solving the linears of a block in sequence needs the package `greenlet`: `pip install greenlet` brings "
            "it, and `sequential` (=False) does without it"
        ) from error
    return greenlet, getcurrent


class _Gate(StandIn):
    """Stands in a linear's place and lets no pass through before the linear has been solved."""

    def __init__(self, linear: nn.Module, name: str, pass_through: Callable[["_Gate", Tensor], Tensor]) -> None:
        super().__init__(linear)  # blocks may read the dtype of a linear's weight
        self.linear, self.original, self.name, self.pass_through = linear, linear, name, pass_through

    def forward(self, x: Tensor) -> Tensor:
        return self.pass_through(self, x)
