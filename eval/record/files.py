"""`kernels.support.files`, for `reports`, which imports only this package."""

from kernels.support.files import sync, write_whole

__all__ = ["sync", "write_whole"]
