"""Objects that hold tensors, split into a message and the tensors, so that each can be sent in its own way."""

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1 << 30  # bytes of a tensor that are sent in one message


@dataclass(frozen=True)
class Kind:
    """The properties of a tensor. on_device: it lies on an accelerator, and the receiver puts it on one, too."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool


@dataclass(frozen=True)
class PackedObject:
    """An object without the content of its tensors."""

    content: bytes
    tensors: tuple[Kind, ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor:  # parameters are pickled as parameters; the tensor inside is packed
            return None
        self.tensors.append(value.detach().contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]


def pack(value: Any) -> tuple[PackedObject, list[Tensor]]:
    """An object as a message, and its tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    kinds = tuple(Kind(t.dtype, tuple(t.shape), t.device.type != "cpu") for t in pickler.tensors)
    return PackedObject(file.getvalue(), kinds), pickler.tensors


def unpack(packed: PackedObject, tensors: Sequence[Tensor]) -> Any:
    """The object, made from a message and its tensors."""
    return _Unpickler(io.BytesIO(packed.content), tensors).load()


def empty(kind: Kind, device: torch.device) -> Tensor:
    """An empty tensor of this kind."""
    return torch.empty(kind.shape, dtype=kind.dtype, device=device)


def flat(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor, in its own memory, as many at a time as are sent in one message."""
    if tensor.numel():
        yield from tensor.reshape(-1).view(torch.uint8).split(AT_ONCE)
