"""Can the model hub be reached? This module is in `kernels` because every other package may import it."""

import os
import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

TIMEOUT_S = 3.0
_YES = ("1", "TRUE", "YES", "ON")


def hub_reachable(*offline: str) -> bool:
    """False if the user chose offline mode, or if no connection to the hub's host is possible.

    The connection is tried once per process and quickly; the hub's own client retries for half a minute.

    Args:
        offline: further environment variables, besides HF_HUB_OFFLINE, for offline mode, such as HF_DATASETS_OFFLINE.
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
