"""`gram`: H += XᵀX in float32, the statistic behind GPTQ, SparseGPT and every layer-output error. See README.md."""

import torch
from torch import Tensor

from kernels.capability import described
from kernels.gram import cpu, reference
from kernels.interpreter import triton_takes
from kernels.registry import ran

__all__ = ["gram", "mirror_", "symmetric"]

IMPLS = ("auto", "reference", "cpu", "triton")
PANEL = 1024  # rows of H that are mirrored at once
ONEDNN = torch.backends.mkldnn.is_available()
TRITON = (torch.bfloat16, torch.float16, torch.float32)


def gram(x: Tensor, H: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Add XᵀX to the upper triangle of H, in place, summed in float32 (never TF32).

    Args:
        x: [tokens, in], any floating dtype; any strides; may be empty.
        H: [in, in] float32, contiguous, or None for zeros. Only its upper triangle is meaningful: finish with
            `symmetric`.
        impl: "reference" (one full float32 product), "cpu" (oneDNN, upper panels only), "triton" (upper tiles; 16-bit x
            on tensor cores) or "auto": "triton" for 16-bit x on CUDA, "cpu" on a CPU, "reference" for all others, such
            as float32 on CUDA, which tensor cores do not support.

    Returns:
        H

    Raises:
        ValueError: `x` is not a matrix, `H` does not match it, or an implementation that does not exist here.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"`x` must be floating-point [tokens, in], not {x.dtype} {tuple(x.shape)}")
    use = _implementation(x, impl)
    columns = x.shape[1]
    if H is None:
        H = torch.zeros(columns, columns, dtype=torch.float32, device=x.device)
    if H.shape != (columns, columns) or H.dtype != torch.float32 or H.device != x.device or not H.is_contiguous():
        wanted = f"contiguous float32 {(columns, columns)} on {x.device}"
        raise ValueError(f"`H` must be {wanted}, not {H.dtype} {tuple(H.shape)} of strides {H.stride()} on {H.device}")
    if x.numel() == 0:
        return H
    ran("gram", use)
    _op(x.detach(), H, use)
    return H


def symmetric(H: Tensor) -> Tensor:
    """A matrix [in, in] with H's upper triangle, and its mirror image as the lower triangle."""
    upper = H.triu()
    return upper + upper.triu(1).t()


def mirror_(H: Tensor) -> Tensor:
    """`symmetric` in place: copies the upper triangle of H [in, in] onto the lower one."""
    for start in range(0, len(H), PANEL):
        end = min(start + PANEL, len(H))
        H[start:end, :start] = H[:start, start:end].t()
        H[start:end, start:end] = symmetric(H[start:end, start:end])
    return H


def _implementation(x: Tensor, impl: str) -> str:
    if impl not in IMPLS:
        raise ValueError(f"`impl` (={impl!r}) must be one of {', '.join(map(repr, IMPLS))}")
    onednn = x.device.type == "cpu" and ONEDNN
    if impl == "cpu" and not onednn:
        raise ValueError(f"`impl` (='cpu') needs a CPU tensor and a torch with oneDNN; `x` is on {x.device}")
    if impl == "triton" and not (triton_takes(x.device) and x.dtype in TRITON):
        raise ValueError(
            f"`impl` (='triton') needs triton and bfloat16, float16 or float32 on CUDA (on a CPU: TRITON_INTERPRET=1), "
            f"not {x.dtype} on {described(x.device)}"
        )
    if impl != "auto":
        return impl
    if x.device.type == "cuda" and triton_takes(x.device) and x.dtype in (torch.bfloat16, torch.float16):
        return "triton"
    return "cpu" if onednn else "reference"


@torch.library.custom_op("workbench::gram", mutates_args=("H",))
def _op(x: Tensor, H: Tensor, use: str) -> None:
    if use == "triton":
        from kernels.gram import triton as implementation
    else:
        implementation = cpu if use == "cpu" else reference
    implementation.gram(x, H)


@_op.register_fake
def _(x, H, use):
    return None
