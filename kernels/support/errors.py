"""One-line messages of errors, a check of counts, and logs of libraries that write errors alone. This module is in
`kernels` because every other package may import `kernels`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def check_positive(**counts: object) -> None:
    """Raise ValueError for the first of these values that is no positive integer."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` (={value!r}) must be a positive integer")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the kind of the error if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_and_first_line(error: BaseException) -> str:
    """Kind and first line of an error, at most 300 characters."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:300]


@contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """While the context lasts, these loggers write errors alone."""
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.ERROR)
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
