"""One-line messages of errors. This module is in `kernels` because every other package may import `kernels`."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the kind of the error if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_and_first_line(error: BaseException) -> str:
    """Kind and first line of an error, at most 300 characters."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:300]
