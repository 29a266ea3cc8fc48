"""The inputs of a model's blocks: recorded once while the model runs, so that blocks can be run by themselves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from compress.linear import StandIn
from compress.walk.finite import check_activations, is_finite
from compress.walk.parallel.places import SLICES, Place, places
from compress.walk.parallel.ranks import current
from compress.walk.returned import Passed, Returned, first_of, passed_on, with_values
from compress.walk.shards import OnDisk, WorkFolder
from kernels.linear import fast_linear
from kernels.support.errors import first_line

MICRO_BATCH_TOKENS = 2048  # tokens that go through a block at once
FEW = 8  # tokens on which a model is tried


class Stop(Exception):
    """Ends a forward pass as soon as everything needed from it is recorded."""


class Call:
    """One micro-batch on its way through the blocks.

    hidden: [batch, T, hidden], the input of the next block. If the call was made inside `activations_on_disk`, it lies
        on disk and is read again at each access.
    arguments: per block, the other arguments that the model passes.
    passed: what every block gives to the next one beside `hidden`; `run_block` puts it into the arguments.
    place: the position of the micro-batch in the calibration.
    """

    def __init__(self, hidden: Tensor, arguments: list[tuple[tuple, dict]] | None = None, passed: Passed = ()) -> None:
        self._folder = _activations.get()
        self._device = hidden.device
        self.hidden = hidden
        self.arguments = [] if arguments is None else arguments
        self.passed = passed
        self.place = Place()

    def __copy__(self) -> "Call":
        """A call that passes through the blocks by itself."""
        other = object.__new__(Call)
        other.__dict__ |= self.__dict__ | {"arguments": list(self.arguments)}
        return other

    def pass_on(self, index: int, output: object) -> None:
        """Make what block `index` gives beside its hidden state the arguments of the next block."""
        if self.passed and index + 1 < len(self.arguments):
            values = {key: output[place] for place, key in self.passed}
            self.arguments[index + 1] = with_values(self.arguments[index + 1], values)

    def passed_to(self, index: int) -> dict[str, Tensor]:
        """The tensors that block `index` gets from the one before it beside its hidden state, by `str` of their key."""
        args, kwargs = self.arguments[index] if self.passed else ((), {})
        values = {str(key): args[key] if isinstance(key, int) else kwargs[key] for _, key in self.passed}
        return {key: value for key, value in values.items() if value is not None}

    def take(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Give block `index` what `passed_to` gave."""
        values = {key: tensors.get(str(key)) for _, key in self.passed}
        if values:
            self.arguments[index] = with_values(self.arguments[index], values)

    @property
    def hidden(self) -> Tensor:
        return self._hidden if isinstance(self._hidden, Tensor) else self._hidden.read().to(self._device)

    @hidden.setter
    def hidden(self, value: Tensor) -> None:
        self._hidden: Tensor | OnDisk = value.to(self._device)
        if self._folder is not None:
            self._hidden = self._folder.keep({"hidden": value}).tensors["hidden"]


_activations: ContextVar[WorkFolder | None] = ContextVar("activations", default=None)


@contextmanager
def activations_on_disk(folder: WorkFolder | None) -> Iterator[None]:
    """While the context lasts, activations between blocks are kept in files of this folder; None: in memory."""
    token = _activations.set(folder)
    try:
        yield
    finally:
        _activations.reset(token)


def block_calls(
    model: nn.Module,
    blocks: nn.ModuleList,
    batches: Sequence[Tensor],
    *,
    stacked: bool = True,
    divided: bool = False,
) -> list[Call]:
    """Micro-batches with the arguments that the model itself passes to each block.

    Args:
        stacked: several batches of equal length make a micro-batch; False: each by itself.
        divided: only the micro-batches of this process, if several processes compress the model together.

    Raises:
        ValueError: the batches give outputs that are not finite, or the blocks do not form a chain.
    """
    if not batches:
        return []
    returned, passed = _probe(model, blocks, batches[0])
    calls: list[Call] = []
    originals = list(blocks)
    latest: dict[tuple, Tensor] = {}
    try:
        for i, block in enumerate(originals):
            last = i == len(originals) - 1
            blocks[i] = _BlockRecorder(block, calls, latest, returned, passed, first=i == 0, last=last)
        taken = micro_batches(batches) if stacked else list(batches)
        for batch, place in zip(taken, places(taken), strict=True):
            if divided and not current().has(place, min(SLICES, len(taken))):
                continue
            with suppress(Stop):
                model(batch.to(device_of(model)), use_cache=False)
            calls[-1].place = place
    finally:
        for i, block in enumerate(originals):
            blocks[i] = block
    return calls


@torch.no_grad()
def check_runs(model: nn.Module, blocks: nn.ModuleList, batch: Tensor) -> None:
    """Raise ValueError if `block_calls` would refuse this model, seen on a few tokens."""
    _probe(model, blocks, batch[:, :FEW])


def micro_batches(batches: Sequence[Tensor]) -> list[Tensor]:
    """Stack neighbouring batches of equal length, up to MICRO_BATCH_TOKENS tokens."""
    stacked: list[list[Tensor]] = []
    for batch in batches:
        last = stacked[-1] if stacked else None
        if last and last[0].shape[1] == batch.shape[1] and (len(last) + 1) * batch.shape[1] <= MICRO_BATCH_TOKENS:
            last.append(batch)
        else:
            stacked.append([batch])
    return [torch.cat(group) for group in stacked]


class _BlockRecorder(StandIn):
    """Stands in a block's place, records the arguments that the model passes, and returns its input unchanged."""

    def __init__(
        self,
        block: nn.Module,
        calls: list[Call],
        latest: dict,
        returned: Returned,
        passed: Passed,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__(block)
        self.calls, self.latest, self.returned, self.passed = calls, latest, returned, passed
        self.first, self.last = first, last

    def forward(self, *args, **kwargs):
        hidden, args, kwargs = _take_hidden(args, kwargs)
        if self.first:
            self.calls.append(Call(hidden, passed=self.passed))
        call = self.calls[-1]
        call.arguments.append((self._keep("args", args), self._keep("kwargs", kwargs)))
        if self.last:
            raise Stop
        return self.returned.of(hidden)

    def _keep(self, key, value):
        """The value; tensors equal to those of the previous micro-batch are shared: masks and positions repeat."""
        if isinstance(value, Tensor):
            before = self.latest.get(key)
            if before is None or before.shape != value.shape or not torch.equal(before, value):
                self.latest[key] = value
            return self.latest[key]
        if isinstance(value, dict):
            return {k: self._keep((key, k), v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._keep((key, i), v) for i, v in enumerate(value))
        return value


def _probe(model: nn.Module, blocks: nn.ModuleList, batch: Tensor) -> tuple[Returned, Passed]:
    """Check in one pass that outputs are finite and blocks form a chain; returns what blocks return, and what they
    give to the next block beside the hidden state."""
    inputs: list[tuple[Tensor, tuple, dict]] = []
    outputs: list[object] = []
    first = Place(windows=len(batch))

    def hook(module, args, kwargs, output):
        inputs.append(_take_hidden(args, kwargs))
        outputs.append(output)

    handles = [block.register_forward_hook(hook, with_kwargs=True) for block in blocks]
    try:
        with fast_linear():
            logits = model(batch.to(device_of(model)), use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        if _is_skeleton(model):  # runs as far as no values are needed, which its callers know
            raise
        raise ValueError(
            f"`model` ({type(model).__name__}) cannot run the first batch: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for index, output in enumerate(outputs):
        check_activations(first_of(output), f"the output of block {index}", first)
    check_activations(logits, "the model's output", first)
    passed: Passed = ()
    for output, (following, args, kwargs) in zip(outputs, inputs[1:], strict=False):
        if not torch.equal(first_of(output), following):
            raise ValueError(
                "`model`: its blocks do not form a chain (a block's input is not the output of the one before)"
            )
        passed = tuple(dict.fromkeys((*passed, *passed_on(output, args, kwargs))))
    return Returned.like(outputs[0]), passed


def _is_skeleton(model: nn.Module) -> bool:
    """Whether no weight of a model has values, on any device or disk."""
    on_disk = any(hasattr(part, "_offloaded") for part in model.modules())
    return not on_disk and all(p.is_meta for p in model.parameters())


def run_block(block: nn.Module, call: Call, index: int, device: torch.device) -> Tensor:
    """Output [batch, T, hidden] of a block for one micro-batch.

    Raises:
        NotFinite: an output is NaN or infinite; the message names the module inside the block, and the windows.
    """
    output = run_once(block, call, index, device)
    if not is_finite(output.detach()):  # run again, to find the module
        handles = [
            module.register_forward_pre_hook(
                lambda _, args, name=name: check_activations(
                    args[0] if args else None, f"the input of {name} of block {index}", call.place
                )
            )
            for name, module in block.named_modules()
            if not any(module.children())
        ]
        try:
            check_activations(run_once(block, call, index, device), f"the output of block {index}", call.place)
        finally:
            for handle in handles:
                handle.remove()
    return output


def run_once(block: nn.Module, call: Call, index: int, device: torch.device) -> Tensor:
    """The same, unchecked."""
    args, kwargs = mapped(call.arguments[index], lambda t: t.to(device))
    output = block(call.hidden.to(device), *args, **kwargs)
    call.pass_on(index, output)
    return first_of(output)


def advance(block: nn.Module, calls: Sequence[Call], index: int, device: torch.device) -> None:
    """Make the block's outputs the inputs of the next one."""
    for call in calls:
        call.hidden = run_block(block, call, index, device)


@contextmanager
def on_device(block: nn.Module, device: torch.device) -> Iterator[None]:
    """While the context lasts, the block lies on this device; then it goes back to where it was.

    Modules that were replaced inside the block go back with it, because they may be used for comparison later. A block
    whose weights lie on disk (`compress.walk.offload`) is loaded, and its changed weights are written.
    """
    if hasattr(block, "_offloaded"):
        with block._offloaded.loaded(device):
            yield
        return
    home = device_of(block)
    leaves = [module for module in block.modules() if not any(module.children())]
    block.to(device)
    try:
        yield
    finally:
        block.to(home)
        for module in set(leaves) - set(block.modules()):
            module.to(home)


def mapped(value, change: Callable[[Tensor], Tensor]):
    """The same nested arguments with every tensor in them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(v, change) for v in value)
    return value


def _take_hidden(args: tuple, kwargs: dict) -> tuple[Tensor, tuple, dict]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


class Tail:
    """The part of a model after its last block, which is its final norm and its head, called as the model itself calls
    them."""

    def __init__(
        self, model: nn.Module, blocks: nn.ModuleList, batches: Sequence[Tensor], *, stacked: bool = True
    ) -> None:
        """batches, stacked: as for `block_calls`; `logits` numbers the micro-batches in the same order."""
        self.model, self.blocks = model, blocks
        self.batches = micro_batches(batches) if stacked else list(batches)
        seen: list[object] = []

        def hook(_, args: tuple, output: object) -> None:
            seen.append(output)
            raise Stop

        handle = blocks[0].register_forward_hook(hook)
        with suppress(Stop):
            model(batches[0].to(device_of(model)), use_cache=False)
        handle.remove()
        self.returned = Returned.like(seen[0])

    def logits(self, i: int, hidden: Tensor, *, last: int = 0) -> Tensor:
        """[batch, T, vocabulary] of micro-batch i, whose last block gave `hidden` [batch, T, hidden].

        Args:
            last: the number of last positions that get logits; 0: all positions.
        """
        originals = list(self.blocks)
        only = {"logits_to_keep": last} if last else {}
        try:
            for n, block in enumerate(originals):
                self.blocks[n] = _Given(block, self.returned.of(hidden))
            return self.model(self.batches[i].to(device_of(self.model)), use_cache=False, **only).logits
        finally:
            for n, block in enumerate(originals):
                self.blocks[n] = block


class _Given(StandIn):
    """Stands in a block's place and gives this output, whatever the input."""

    def __init__(self, block: nn.Module, output: object) -> None:
        super().__init__(block)
        self.output = output

    def forward(self, *args, **kwargs):
        return self.output


def device_of(module: nn.Module) -> torch.device:
    """The device of a module, or, if its weights are on disk, the device to which they would be loaded."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    for part in module.modules():
        if hasattr(part, "_offloaded"):
            return part._offloaded.home
    return torch.device("cpu")


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same numbers in the same memory; empty tensors have no memory."""
    alike = a.shape == b.shape and a.stride() == b.stride() and a._version == b._version
    return alike and a.numel() > 0 and a.data_ptr() == b.data_ptr()
