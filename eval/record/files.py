"""`kernels.files`, for `reports`, which imports nothing but this room."""

from kernels.files import sync, write_whole

__all__ = ["sync", "write_whole"]
