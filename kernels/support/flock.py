"""Locks on files between processes, which end with their process. Windows has none of this kind: there every lock is
granted, so that processes do not wait for one another, and `LOCKS` is False for code that must know it."""

from typing import IO

try:
    import fcntl
except ImportError:
    LOCKS = False
    EXCLUSIVE = SHARED = RELEASE = AT_ONCE = 0
else:
    LOCKS = True
    EXCLUSIVE, SHARED, RELEASE, AT_ONCE = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN, fcntl.LOCK_NB


def flock(file: IO | int, how: int) -> None:
    """Lock or release a file.

    Args:
        how: EXCLUSIVE, SHARED or RELEASE, with AT_ONCE (by |) to raise rather than to wait.

    Raises:
        BlockingIOError: another process holds the lock, and `how` has AT_ONCE.
    """
    if LOCKS:
        fcntl.flock(file, how)
