"""Is the model hub there? Asked once, quickly: its own client retries for half a minute before it says no."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch
from urllib.parse import urlparse
from urllib.request import getproxies

TIMEOUT_S = 3.0


@cache
def hub_reachable() -> bool:
    """False where the user said offline, or where the hub's host cannot be connected to."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if getproxies():
        return True  # a proxy answers for the host; let the client try
    endpoint = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def quick_to_fail() -> Iterator[None]:
    """While the block runs, the hub's clients use only what is cached if the hub is not there, and do not retry."""
    if hub_reachable():
        yield
        return
    with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True), patch("datasets.config.HF_HUB_OFFLINE", True):
        yield


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
