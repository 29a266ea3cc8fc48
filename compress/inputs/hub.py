"""The model hub: the revision of a repository that this process uses, and the time limit of its clients."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

from kernels.support.hub import TIMEOUT_S, hub_reachable

REVISIONS = "WORKBENCH_REVISIONS"  # {"models/owner/name": revision, ...} as JSON: the revisions in the plan of a run


@cache
def revision(kind: str, name: str) -> str | None:
    """The revision of a repository that this process loads: fixed at the first call, and part of the key of a run.

    In a batch run it is the revision of the plan; else the one in this machine's cache; else the hub's newest.

    Args:
        kind: "models" or "datasets".
        name: "owner/name".

    Returns:
        None if the revision is not known (no network and nothing cached, or no such repository).
    """
    planned = json.loads(os.environ.get(REVISIONS) or "{}").get(f"{kind}/{name}")
    if planned is not None:
        return planned or None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"{kind}--{name.replace('/', '--')}" / "refs/main"
    if cached.is_file():
        return cached.read_text().strip() or None
    if not hub_reachable():
        return None
    from huggingface_hub import HfApi

    try:
        return HfApi().repo_info(name, repo_type=kind.removesuffix("s"), timeout=TIMEOUT_S).sha
    except Exception:  # no such repository, or no access to it: loading will raise the error
        return None


@contextmanager
def quick_to_fail() -> Iterator[None]:
    """While the block runs, the hub's clients do not retry, and use only the cache if the hub is not available."""
    if hub_reachable():
        yield
        return
    with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True), patch("datasets.config.HF_HUB_OFFLINE", True):
        yield
