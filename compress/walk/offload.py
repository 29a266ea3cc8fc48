"""Models whose weights lie on disk: a block, or a module outside the blocks, is in memory only during use.

The model itself lies on the meta device. A part is loaded when `capture.on_device` or a forward pass needs it. What
changed in the meantime is written to a file of the work folder, and the memory is freed. Code that changes a model
block by block (the walk, folds, dropped layers) therefore works in the same way on a model on disk.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.linear import CompressedLinear, compressed_linears, is_linear, replace
from compress.walk.blocks import end_targets, find_blocks
from compress.walk.shards import OnDisk, WorkFolder
from kernels.huge_pages import give_memory_back


@contextmanager
def empty_weights() -> Iterator[None]:
    """While the context lasts, new modules have their parameters on the meta device, and their buffers in memory."""
    with init_empty_weights(include_buffers=False), _EmptyOnMeta():
        yield


class _EmptyOnMeta(TorchFunctionMode):
    """Puts tensors that are created without content, as parameters are, on the meta device at once."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class AwayLinear(CompressedLinear):
    """Stands for a compressed linear whose stored tensors lie on disk.

    Args:
        spec: as `CompressedLinear.spec` gives it.
        dtype: the dtype of the activations when the linear was stored.
        cast: the dtype of the activations now; None: the same.
    """

    def __init__(self, spec: dict[str, Any], dtype: torch.dtype, cast: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = spec["parts"][0]["shape"]
        self.stored, self.stored_dtype, self.dtype = spec, dtype, cast or dtype
        self.parts, self.transform, self.bias = nn.ModuleList(), None, None

    def spec(self) -> dict[str, Any]:
        return self.stored

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the weight of this linear lies on disk: its block must be loaded first")

    def dequantize(self) -> Tensor:
        raise RuntimeError("the weight of this linear lies on disk: its block must be loaded first")

    def back(self, tensors: dict[str, Tensor]) -> CompressedLinear:
        """The linear itself, made from its stored tensors."""
        linear = CompressedLinear.from_tensors(self.stored, tensors, self.stored_dtype).eval()
        return linear if self.dtype == self.stored_dtype else linear.to(self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, on disk"

    def _apply(self, fn, recurse: bool = True) -> "AwayLinear":
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class Offloaded:
    """A part of a model, such as a block, whose weights lie on disk while it is not used.

    Args:
        module: with its weights on the meta device, and `AwayLinear` for compressed ones.
        name: the name of the part in the model.
        where: the tensors of its state, by their names in the part.
        home: the device on which the part lies while the model itself runs it.
        folder: where changed weights are written.
        is_table: the part is a table; while the model runs, only the rows that are looked up are read.

    Attributes:
        ahead: gives the tensors of the state by name, which were read in advance (`compress.walk.window`); None: they
            are read when they are needed.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        where: Mapping[str, OnDisk],
        *,
        home: torch.device,
        folder: WorkFolder,
        is_table: bool = False,
    ) -> None:
        self.is_table = is_table
        self.module, self.name, self.where, self.home, self.folder = module, name, dict(where), home, folder
        self.ahead: Callable[[], Mapping[str, Tensor]] | None = None
        self._depth = 0
        self._as_loaded: dict[str, tuple[weakref.ref, int]] = {}
        self._meta: dict[int, tuple[weakref.ref, Tensor]] = {}  # by a loaded tensor's identity, its meta tensor
        self._lookup: tuple[Tensor, int | None] | None = None
        self._written_as: str | None = None  # the part's name in the file that holds its state
        module._offloaded = self
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    @contextmanager
    def loaded(self, device: torch.device) -> Iterator[None]:
        """While the context lasts, the weights are on this device; afterwards changed weights are written.

        Raises:
            OSError: the weights cannot be written; the model must then be loaded again.
        """
        depth = self._depth
        self._load(device)
        try:
            yield
        finally:
            self._depth = depth + 1  # a pass that was left in the middle did not count itself out
            self._unload()
            if not depth:
                give_memory_back()

    def let_go(self, written: bool = True) -> None:
        """Free the memory of a part that a pass, which was left in the middle, did not give back. written: changed
        weights are written; else they are forgotten."""
        if not self._depth:
            return
        self._depth = 1
        if written:
            self._unload()
            return
        self._depth = 0
        self._give_back()
        self._as_loaded, self._meta = {}, {}

    @property
    def nbytes(self) -> int:
        """Bytes that the state takes on disk."""
        return sum(tensor.nbytes for tensor in self.where.values())

    def settle(self) -> None:
        """Write the state again if the model was cast since the last write, so that the files hold the weights that are
        used in computations."""
        linears = [module for module in self.module.modules() if isinstance(module, AwayLinear)]
        dtypes = {name: tensor.dtype for _, _, name, tensor in _state(self.module)}
        cast = any(dtypes.get(name, tensor.dtype) != tensor.dtype for name, tensor in self.where.items())
        if cast and not linears:
            self.where = {name: dataclasses.replace(it, dtype=dtypes[name]) for name, it in self.where.items()}
            self._written_as = None
        elif cast or any(linear.dtype != linear.stored_dtype for linear in linears):
            with self.loaded(self.home):
                self._as_loaded = {}

    def file_of_its_own(self, name: str) -> bool:
        """Whether one file of the work folder holds this state and nothing else, under this name of the part."""
        return self._written_as == name

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._depth or not self.is_table or not args:
            try:
                self._load(self.home)
            except BaseException:  # an interrupt, too, after which torch calls no further hook
                self.let_go(written=False)
                raise
            return None
        if args[0].is_meta:
            raise ValueError(
                f"`weights` (='disk') cannot serve this model: its code moves the tokens to where {self.name}.weight "
                "lies, which is on disk; weights='memory' works"
            )
        # Only the rows of a table that are looked up are read.
        numbers, places = args[0].unique(return_inverse=True)
        self._lookup = module.weight, module.padding_idx
        rows = self.where["weight"].rows(numbers).to(self.home, module.weight.dtype)
        module.weight, module.padding_idx = nn.Parameter(rows, requires_grad=False), None
        return (places, *args[1:]), kwargs

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._lookup is not None:
            (module.weight, module.padding_idx), self._lookup = self._lookup, None
        elif self._depth:  # not where another hook ended the pass before `_before` was called
            self._unload()

    def _load(self, device: torch.device) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        away = {name: m for name, m in self.module.named_modules() if isinstance(m, AwayLinear)}
        read = self.ahead().__getitem__ if self.ahead else lambda name: self.where[name].read()
        rest = set(self.where)
        for name, linear in away.items():
            inside = {key for key in rest if key.startswith(f"{name}.")}
            own = {key.removeprefix(f"{name}."): read(key) for key in inside}
            replace(self.module, name, linear.back(own).to(device))
            rest -= inside
        shared: dict[int, Tensor] = {}  # by the meta tensor: tied weights are loaded once
        for owner, key, name, meta in list(_state(self.module)):
            if name not in rest:  # a buffer that no file holds stays in memory
                continue
            if id(meta) not in shared:
                loaded = read(name).to(device, meta.dtype)
                is_parameter = isinstance(meta, nn.Parameter)
                shared[id(meta)] = nn.Parameter(loaded, requires_grad=False) if is_parameter else loaded
                self._meta[id(shared[id(meta)])] = weakref.ref(shared[id(meta)]), meta
            setattr(owner, key, shared[id(meta)])
        if device != self.home:
            _move_buffers(self.module, device)
        self._as_loaded = self._identities()

    def _unload(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if not _same(self._identities(), self._as_loaded):
                self.where = self._written()
        finally:
            self._give_back()
            self._as_loaded, self._meta = {}, {}

    def _written(self) -> dict[str, OnDisk]:
        """The state in a new file, which is read again and compared before it is used."""
        state = self.module.state_dict()
        file = self.folder.keep({f"{self.name}.{name}": tensor for name, tensor in state.items()})
        where = {name: file.tensors[f"{self.name}.{name}"] for name in state}
        for name, tensor in state.items():
            if not _same_bytes(where[name].read(), tensor.cpu()):
                raise OSError(f"{self.folder.path}: {self.name}.{name} has changed since it was written")
        self._written_as = self.name
        return where

    def _give_back(self) -> None:
        """Replace the tensors and compressed linears in memory by meta tensors and `AwayLinear`."""
        for name, linear in list(self.module.named_modules()):
            if isinstance(linear, CompressedLinear) and not isinstance(linear, AwayLinear):
                replace(self.module, name, AwayLinear(linear.spec(), linear.dtype))
        shared: dict[int, Tensor] = {}
        for owner, key, name, tensor in list(_state(self.module)):
            if name not in self.where:
                continue
            reference, meta = self._meta.get(id(tensor), (None, None))
            if reference is None or reference() is not tensor:
                meta = shared.setdefault(id(tensor), _on_meta(tensor))
            setattr(owner, key, meta)
        _move_buffers(self.module, self.home)

    def _identities(self) -> dict[str, tuple[weakref.ref, int]]:
        """By name, a reference to the tensor or compressed linear, and the number of writes into it."""
        tensors = {name: (weakref.ref(tensor), tensor._version) for _, _, name, tensor in _state(self.module)}
        linears = {name: m for name, m in self.module.named_modules() if isinstance(m, CompressedLinear)}
        return tensors | {name: (weakref.ref(linear), 0) for name, linear in linears.items()}


def offload(
    model: nn.Module, where: Mapping[str, OnDisk], *, home: torch.device | str = "cpu", folder: WorkFolder
) -> nn.Module:
    """Give a model on the meta device its weights on disk.

    Args:
        where: every tensor of its state dict, by name; they are cast to the model's dtypes when they are read.
    """
    state = model.state_dict()
    where = {
        name: dataclasses.replace(it, dtype=state[name].dtype) if name in state else it for name, it in where.items()
    }
    prefix, blocks = find_blocks(model)
    parts = {f"{prefix}.{index}": block for index, block in enumerate(blocks)}
    inside = tuple(f"{name}." for name in parts)
    for name, module in model.named_modules():
        if name in parts or name.startswith(inside):
            continue
        if isinstance(module, AwayLinear):
            raise ValueError(f"{name} is stored compressed, outside the blocks: weights='memory' works")
        own = [(key, tensor) for owner, key, _, tensor in _state(module) if owner is module]
        if own and any(
            module.children()
        ):  # few numbers, such as a scale of the stream: the rest are parts of their own
            _keep_in_memory(module, own, where, f"{name}." if name else "", torch.device(home))
        elif own:
            parts[name] = module
    _move_buffers(model, torch.device(home))
    table = model.get_input_embeddings()
    for name, module in parts.items():
        start = f"{name}." if name else ""
        own = {full.removeprefix(start): tensor for full, tensor in where.items() if full.startswith(start)}
        is_table = module is table and isinstance(module, nn.Embedding) and type(module.weight) is nn.Parameter
        Offloaded(module, name, own, home=torch.device(home), folder=folder, is_table=is_table)
    return model


def _keep_in_memory(
    module: nn.Module, own: list[tuple[str, Tensor]], where: Mapping[str, OnDisk], start: str, home: torch.device
) -> None:
    """Load the tensors that a module itself owns, and not its children."""
    for key, meta in own:
        if f"{start}{key}" in where:
            loaded = where[f"{start}{key}"].read().to(home, meta.dtype)
            as_parameter = isinstance(meta, nn.Parameter)
            setattr(module, key, nn.Parameter(loaded, requires_grad=False) if as_parameter else loaded)


def put_on_disk(model: nn.Module, home: torch.device | str = "cpu", offload_path: str | Path = "") -> nn.Module:
    """Write the weights of a model in memory to a work folder in `offload_path`, and leave them there, in place."""
    folder = WorkFolder(offload_path)
    file = folder.keep(model.state_dict())
    for name, linear in compressed_linears(model).items():
        replace(model, name, AwayLinear(linear.spec(), linear.dtype))
    shared: dict[int, Tensor] = {}
    for owner, key, _, tensor in list(_state(model)):
        setattr(owner, key, shared.setdefault(id(tensor), _on_meta(tensor)))
    return offload(model, file.tensors, home=home, folder=folder)


def offloaded_parts(model: nn.Module) -> dict[str, Offloaded]:
    """The parts of a model whose weights lie on disk, by their current names; empty for a model in memory."""
    return {name: m._offloaded for name, m in model.named_modules() if hasattr(m, "_offloaded")}


def is_offloaded(model: nn.Module) -> bool:
    return any(hasattr(module, "_offloaded") for module in model.modules())


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict of any model by sorted names; tensors on disk are read one at a time."""
    state: dict[str, Any] = dict(model.state_dict())
    for part, offloaded in offloaded_parts(model).items():
        state |= {f"{part}.{name}" if part else name: tensor for name, tensor in offloaded.where.items()}
    for name in sorted(state):
        tensor = state[name]
        yield name, tensor.read() if isinstance(tensor, OnDisk) else tensor


def original_linears(model: nn.Module) -> Mapping[str, nn.Module]:
    """The linears of the blocks, the embedding and the head, by name, as they are now, for later use. Of a model on
    disk, only the linears of the blocks; each is read at its look-up."""
    prefix, blocks = find_blocks(model)
    linears = {name: m for name, m in blocks.named_modules(prefix=prefix) if is_linear(m)}
    parts = {name: part for name, part in offloaded_parts(model).items() if name.startswith(f"{prefix}.")}
    if not parts:
        return linears | {name: model.get_submodule(name) for name in end_targets(model)}
    where = {f"{part}.{key}": tensor for part, offloaded in parts.items() for key, tensor in offloaded.where.items()}
    return _LinearsOnDisk({name: copy.deepcopy(linear) for name, linear in linears.items()}, where)


class _LinearsOnDisk(Mapping[str, nn.Module]):
    """linears: without their weights, by name. where: the tensors of their states."""

    def __init__(self, linears: Mapping[str, nn.Module], where: Mapping[str, OnDisk]) -> None:
        self._linears = linears
        self._where: dict[str, dict[str, OnDisk]] = {name: {} for name in linears}
        for full, tensor in where.items():
            name, _, key = full.rpartition(".")
            while name and name not in linears:  # the tensors of a compressed linear have names of several parts
                name, _, part = name.rpartition(".")
                key = f"{part}.{key}"
            if name:
                self._where[name][key] = tensor

    def __getitem__(self, name: str) -> nn.Module:
        linear, state = self._linears[name], {key: tensor.read() for key, tensor in self._where[name].items()}
        if isinstance(linear, AwayLinear):
            return linear.back(state)
        again = copy.deepcopy(linear)
        for key in dict(linear.named_parameters()):
            setattr(again, key, nn.Parameter(state[key], requires_grad=False))
        return again

    def __iter__(self) -> Iterator[str]:
        return iter(self._linears)

    def __len__(self) -> int:
        return len(self._linears)


def _state(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """(owner, attribute, name, tensor) of the parameters and stored buffers outside compressed linears."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        inside = prefix
        while inside and not isinstance(module.get_submodule(inside), CompressedLinear):
            inside = inside.rpartition(".")[0]
        if inside or isinstance(owner, CompressedLinear):
            continue
        kept = {k: b for k, b in owner._buffers.items() if k not in owner._non_persistent_buffers_set}
        for key, tensor in (owner._parameters | kept).items():
            if tensor is not None:
                yield owner, key, f"{prefix}.{key}" if prefix else key, tensor


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers that are not part of the state, such as the frequencies of position embeddings."""
    for owner in module.modules():
        for key in owner._non_persistent_buffers_set & owner._buffers.keys():
            if owner._buffers[key] is not None and not owner._buffers[key].is_meta:
                owner._buffers[key] = owner._buffers[key].to(device)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _same(now: Mapping[str, tuple[weakref.ref, int]], before: Mapping[str, tuple[weakref.ref, int]]) -> bool:
    """Whether both are the same tensors and linears, in the same places, with no writes in between."""
    return now.keys() == before.keys() and all(
        now[name][0]() is before[name][0]() and now[name][1] == before[name][1] for name in now
    )


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
