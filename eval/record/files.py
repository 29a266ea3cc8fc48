"""`kernels.files`, for `reports`, which imports only this package."""

from kernels.files import sync, write_whole

__all__ = ["sync", "write_whole"]
