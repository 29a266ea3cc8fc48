"""One-line messages of errors, and a check of counts: in `kernels`, which every other package may import."""


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
