"""Room on the disk: asked for before a checkpoint is written, and named when it ran out on the way."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from kernels.errors import first_line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, a quota, a limit on the size of files


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything that a model stores, each shared tensor once."""
    state = model.state_dict().items()
    tensors = {name if t.is_meta or not t.numel() else (t.data_ptr(), t.shape): t for name, t in state}
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def room_for(needed: int, path: Path) -> Iterator[None]:
    """Run a block that writes `needed` bytes into the folder of `path`.

    Raises:
        OSError: there is not enough room, before the block is entered or while it writes; the message says how many
            bytes are needed and how many are free.
    """
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise _full(path, needed, free)
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors raises an error of its own, which says the system's error number in its text only.
        full = any(f"(os error {number})" in str(error) for number in FULL)
        if full or isinstance(error, OSError) and error.errno in FULL:
            raise _full(path, needed, shutil.disk_usage(path.parent).free, f" ({first_line(error)})") from error
        raise


def _full(path: Path, needed: int, free: int, why: str = "") -> OSError:
    return OSError(
        errno.ENOSPC,
        f"`path` (={str(path)!r}) needs {needed} bytes ({needed / 1e9:.2f} GB), and its disk has {free} free "
        f"({free / 1e9:.2f} GB){why}: make room, or name a folder on another disk",
    )
