"""Whether the model hub can be reached. This package holds it because every other one may import this one."""

import os
import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

TIMEOUT_S = 3.0
_YES = ("1", "TRUE", "YES", "ON")


def hub_reachable(*offline: str) -> bool:
    """False where the user said offline, or where the hub's host cannot be connected to.

    The connection is tried once per process and quickly; the hub's own client retries for half a minute.

    Args:
        offline: environment variables beside HF_HUB_OFFLINE by which a user says so, such as HF_DATASETS_OFFLINE.
    """
    if any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", *offline)):
        return False
    if getproxies():
        return True  # a proxy answers for the host; let the client try
    return _connects(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")


@cache
def _connects(address: str) -> bool:
    endpoint = urlparse(address)
    try:
        socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True
