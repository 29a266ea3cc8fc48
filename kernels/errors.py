"""What an error says, in one line. This package holds it because every other one may import this one."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the kind of the error where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
