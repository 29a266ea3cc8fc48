"""Support for Triton kernels on a CUDA GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).

The interpreter stores bfloat16 as uint16 and float8 as uint8, and (3.6 to 3.7.1) computes with those integers: sums,
products, dots and casts are silently wrong (triton-lang/triton, issue 11584). `prepare` corrects them; `PATCHES` lists
the replaced functions.
"""

import os
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from kernels.capability import too_old

FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
PATCHES = ("binary_op", "create_fma", "cast_impl", "create_fp_to_fp", "create_dot", "get_bf16", "sum")

_INSTALLED = find_spec("triton") is not None


def interpreting() -> bool:
    """Does this process run Triton kernels in the interpreter?"""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def installed() -> bool:
    """Can `triton` be imported? (Looked up once, so that torch.compile can trace calls of this function.)"""
    return _INSTALLED


def triton_takes(device: torch.device) -> bool:
    """Can a Triton kernel run on tensors of this device on this machine?"""
    on_gpu = device.type == "cuda" and too_old(device) is None
    return installed() and (on_gpu or (device.type == "cpu" and interpreting()))


@cache
def prepare() -> None:
    """Correct bfloat16 and float8 in the interpreter; does nothing outside it, or when called again.

    bfloat16 is computed in float32 and rounded to nearest even after each operation, as the hardware does; float8
    saturates.
    """
    if not interpreting():
        return
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as runtime
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle, _get_np_dtype

    def wide(handle: TensorHandle) -> TensorHandle:
        """bfloat16 and float8 converted to float32; all other types unchanged."""
        dtype = handle.dtype.scalar
        if dtype == tl.bfloat16:
            return TensorHandle(bfloat16_to_float32(handle.data), tl.float32)
        if dtype.name in FLOAT8:
            return TensorHandle(float8_to_float32(handle.data, FLOAT8[dtype.name]), tl.float32)
        return handle

    def narrow(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(float32_to_bfloat16(handle.data), tl.bfloat16)

    def computed_wide(compute):
        def patched(self, *operands):
            if not any(isinstance(o, TensorHandle) and o.dtype.scalar == tl.bfloat16 for o in operands):
                return compute(self, *operands)
            result = compute(self, *(wide(o) if isinstance(o, TensorHandle) else o for o in operands))
            return narrow(result) if result.data.dtype == np.float32 else result  # comparisons give booleans

        return patched

    cast_impl, create_fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
    create_dot, total = InterpreterBuilder.create_dot, ReduceOps.sum

    def cast(self, src, dst_type):
        if tl.bfloat16 not in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        data = wide(src).data
        if dst_type.scalar == tl.bfloat16:
            return narrow(TensorHandle(np.asarray(data).astype(np.float32), tl.float32))
        return TensorHandle(data.astype(_get_np_dtype(dst_type)), dst_type.scalar)

    def fp_to_fp(self, src, dst_type, rounding_mode):
        names = src.dtype.scalar.name, dst_type.scalar.name
        known = set(FLOAT8) | {"bf16", "fp16", "fp32", "fp64"}
        if not known.issuperset(names) or str(rounding_mode).endswith("RTZ"):
            return create_fp_to_fp(self, src, dst_type, rounding_mode)
        if names[1] in FLOAT8:
            return TensorHandle(float32_to_float8(wide(src).data, FLOAT8[names[1]]), dst_type.scalar)
        return cast(self, wide(src), dst_type)

    def dot(self, a, b, d, *rest):
        result = create_dot(self, wide(a), wide(b), wide(d), *rest)
        return narrow(result) if d.dtype.scalar == tl.bfloat16 else result

    def get_bf16(self, value):
        return narrow(TensorHandle(np.array([value], dtype=np.float32), tl.float32))

    def sum_(self, input):
        if input.dtype != tl.bfloat16:
            return total(self, input)
        result = total(self, self.to_tensor(wide(input.handle).data, tl.float32))
        return self.to_tensor(narrow(result.handle).data, tl.bfloat16)

    for name in ("binary_op", "create_fma"):
        setattr(InterpreterBuilder, name, computed_wide(getattr(InterpreterBuilder, name)))
    for name, patched in (
        ("cast_impl", cast),
        ("create_fp_to_fp", fp_to_fp),
        ("create_dot", dot),
        ("get_bf16", get_bf16),
    ):
        setattr(InterpreterBuilder, name, patched)
    ReduceOps.sum = sum_
    if triton.__version__.startswith(
        "3.6."
    ):  # `range` over a run-time number: int() of an array, which numpy 2.4 refuses
        patch_tensor = runtime._patch_lang_tensor

        def patch_tensor_too(tensor, scope):
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        runtime._patch_lang_tensor = patch_tensor_too


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 bits -> the float32 of the same value."""
    return np.asarray(np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits, to nearest even."""
    bits = np.array(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))


def float8_to_float32(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """uint8 bits -> the float32 of the same value."""
    table = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    return table[bits]


def float32_to_float8(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Floats -> uint8 bits, to nearest even; values that are too large become the largest finite number, as with
    `cvt.satfinite`."""
    largest = torch.finfo(dtype).max
    clipped = torch.from_numpy(np.array(x, dtype=np.float32)).clamp(-largest, largest)
    return clipped.to(dtype).view(torch.uint8).numpy()
