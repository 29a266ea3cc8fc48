"""Values that lie on a GPU and that the host reads later."""

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors on the host. Those of a GPU are made when the work before them is done; nobody waits for that
    until they are read, and then not for later work."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._copies = [None if tensor is None else tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._made = None
        if gpu := next((tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda), None):
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(gpu))

    def read(self) -> list[Tensor | None]:
        """The copies, in order."""
        if self._made is not None:
            self._made.synchronize()
        return self._copies
