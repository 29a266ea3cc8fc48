"""The description of a stored weight and its tensors, checked as they are taken from a file.

Kernels compute addresses from the shapes and the values of stored tensors. Each format therefore takes its tensors
through `Stored`, and compares every number that addresses memory with its range, once, when a weight is loaded.
"""

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int16, torch.int32)


class Stored:
    """A weight's description and tensors.

    Attributes:
        out, columns: of the weight [out, in].

    Raises:
        ValueError: the description has no shape of two positive numbers.
    """

    def __init__(self, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.spec, self.tensors = spec, tensors
        shape = spec.get("shape")
        if not isinstance(shape, list | tuple) or [type(n) for n in shape] != [int, int] or min(shape) < 1:
            raise ValueError(f"`shape` (={shape!r}) of a stored weight must be two positive numbers")
        self.out, self.columns = self.shape = (shape[0], shape[1])

    def number(self, key: str, allowed: Container[int]) -> int:
        """A setting that must be one of these integers."""
        value = self.spec.get(key)
        if type(value) is not int or value not in allowed:
            raise ValueError(f"`{key}` (={value!r}) of a stored weight must be one of {_shown(allowed)}")
        return value

    def group_size(self, key: str = "group_size") -> int:
        """A setting that must divide the number of columns."""
        size = self.number(key, range(1, self.columns + 1))
        if self.columns % size:
            raise ValueError(f"`{key}` (={size}) of a stored weight must divide its {self.columns} columns")
        return size

    def tensor(self, name: str, shape: tuple[int | None, ...], dtypes: torch.dtype | Iterable[torch.dtype]) -> Tensor:
        """The tensor of this name, which must have this shape (None: any length) and one of these dtypes."""
        if name not in self.tensors:
            raise ValueError(f"`{name}` of a stored weight {self.shape} is missing")
        found, dtypes = self.tensors[name], (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        fits = found.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, found.shape, strict=True))
        if not fits or found.dtype not in dtypes:
            wanted = f"[{', '.join('any' if n is None else str(n) for n in shape)}] of {_shown(dtypes)}"
            raise ValueError(
                f"`{name}` of a stored weight {self.shape} is {list(found.shape)} of {found.dtype}, instead of {wanted}"
            )
        return found

    def packed(self, name: str, rows: int, columns: int, bits: int) -> Tensor:
        """The tensor of codes that `kernels.int_matmul.pack_bits` packed."""
        return self.tensor(name, (rows, math.ceil(columns / 8) * bits), torch.uint8)

    def counted(self, name: str, entries: int) -> Tensor:
        """The number of entries of each row [out], which must add up to `entries`."""
        counts = self.tensor(name, (self.out,), INDICES)
        if int(counts.min()) < 0 or int(counts.sum(dtype=torch.int64)) != entries:
            raise ValueError(
                f"`{name}` of a stored weight {self.shape} does not add up to the {entries} that are stored"
            )
        return counts


def check_range(name: str, values: Tensor, end: int) -> None:
    """Raise ValueError unless all of these integers lie in [0, end)."""
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
        raise ValueError(
            f"`{name}` of a stored weight holds {int(values.min())} to {int(values.max())}, outside 0 to {end - 1}"
        )


def _shown(allowed: Any) -> str:
    return f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
