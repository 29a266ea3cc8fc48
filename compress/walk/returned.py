"""What a block returns: its hidden state alone, or first in a tuple or a list; and what it gives to the next block
beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Passed = tuple[tuple[int, int | str], ...]  # (place among a block's outputs, place or name among the next arguments)


@dataclass(frozen=True)
class Returned:
    """The kind of a block's output: `kind` is tuple or list, of `count` values; None: the hidden state alone."""

    kind: type | None
    count: int

    @classmethod
    def like(cls, output: object) -> "Returned":
        return cls(type(output), len(output)) if isinstance(output, tuple | list) else cls(None, 1)

    def of(self, hidden: Tensor) -> Any:
        """An output of this kind with this hidden state; the other values are None."""
        return hidden if self.kind is None else self.kind([hidden, *[None] * (self.count - 1)])


def first_of(output: Any) -> Tensor:
    """The hidden state of a block's output."""
    return output[0] if isinstance(output, tuple | list) else output


def passed_on(output: object, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[int, int | str]]:
    """Values of a block's output, beside the hidden state, that are arguments of the next block."""
    others = {id(value): place for place, value in enumerate(output) if place} if Returned.like(output).kind else {}
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor) and id(value) in others:
            yield others[id(value)], key


def with_values(arguments: tuple[tuple, dict], values: Mapping[int | str, Any]) -> tuple[tuple, dict]:
    """The arguments (args, kwargs) of a block with other values in some places."""
    args, kwargs = list(arguments[0]), dict(arguments[1])
    for key, value in values.items():
        if isinstance(key, int):
            args[key] = value
        else:
            kwargs[key] = value
    return tuple(args), kwargs
