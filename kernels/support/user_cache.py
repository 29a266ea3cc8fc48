"""The folder of files that the workbench builds for one user: converted models, compiled kernels, locks.

Its content is loaded as code, or determines what is loaded. It therefore belongs to the user who runs the workbench,
and no other user may write in it.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache_home() -> Path:
    """$WORKBENCH_CACHE, or `model-compression-workbench` in the user's cache folder; nothing is created."""
    if home := os.environ.get("WORKBENCH_CACHE"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "model-compression-workbench"


def cache_folder(name: str = "") -> Path:
    """A folder below `cache_home()`, made for this user alone if it is not there yet.

    If other users may write in a folder of this user, that permission is removed.

    Raises:
        ValueError: the folder belongs to another user, or cannot be created, or the permission cannot be removed.
    """
    home = cache_home()
    for folder in dict.fromkeys((home, home / name)):
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.stat()
            own = os.getuid() if hasattr(os, "getuid") else found.st_uid  # Windows has no numbers of users
            if found.st_uid != own:
                raise ValueError(
                    f"the cache folder {folder} belongs to user id {found.st_uid}, not to you ({own}); name "
                    "another one in WORKBENCH_CACHE"
                )
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                folder.chmod(0o700)
        except OSError as error:
            raise ValueError(
                f"the cache folder {folder} cannot be used: {error.strerror}; name another one in WORKBENCH_CACHE"
            ) from error
    return home / name


def compile_in_cache() -> None:
    """Let torch.compile store its code in the user's cache folder rather than in the machine's shared /tmp.

    torch sets the variable itself, and makes an empty folder there, as soon as a function is marked for its compiler.
    """
    set_by_torch = os.path.join(tempfile.gettempdir(), "torchinductor_")
    given = os.environ.get(COMPILED, "")
    if not given or given.startswith(set_by_torch):
        os.environ[COMPILED] = str(cache_folder("inductor"))
        with contextlib.suppress(OSError):  # other processes' code lies there
            os.rmdir(given)
