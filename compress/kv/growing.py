"""Tensors that are appended to in place."""

from torch import Tensor


class Growing:
    """A tensor [B, H, n, ...] that is appended to along n in place; when it is full, it grows by an eighth, and by at
    least `least`."""

    def __init__(self, x: Tensor, least: int = 16) -> None:
        self.buffer, self.length, self.least = x.contiguous(), x.shape[2], least
        self._blank = self.length  # behind this position and `length`, the buffer holds zeros

    @property
    def view(self) -> Tensor:
        """[B, H, n, ...], all positions so far."""
        return self.buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes held, including unused room."""
        return self.buffer.numel() * self.buffer.element_size()

    def append(self, x: Tensor) -> None:
        """x [B, H, m, ...]"""
        end = self.length + x.shape[2]
        self.reserve(x.shape[2])
        self.buffer[:, :, self.length : end] = x
        self.length = end

    def extend(self, count: int) -> None:
        """Append `count` zeros."""
        self.reserve(count)
        if self.length < self._blank:
            self.buffer[:, :, self.length :] = 0
            self._blank = self.length
        self.length += count

    def reserve(self, count: int) -> None:
        """Make room in the buffer for `count` more positions."""
        end = self.length + count
        if end > self.buffer.shape[2]:
            B, H, _, *rest = self.buffer.shape
            larger = self.buffer.new_empty(B, H, end + max(self.least, end // 8), *rest)
            larger[:, :, : self.length] = self.view
            self.buffer, self._blank = larger, larger.shape[2]

    def drop_last(self, count: int) -> None:
        """Remove the last `count` positions."""
        self._blank = max(self._blank, self.length)
        self.length -= count

    def rows(self, change) -> None:
        """Put change(buffer) in the buffer's place: another choice or order of batch rows."""
        self.buffer = change(self.buffer).contiguous()
