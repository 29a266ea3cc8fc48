"""`gram`: H += XᵀX in float32, the statistic behind GPTQ, SparseGPT and every layer-output error. See README.md."""

import torch
from torch import Tensor

from kernels.registry import ran

PANEL = 128  # columns of H computed at once; the part below the diagonal panels is never computed


def gram(x: Tensor, H: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Add XᵀX to the upper triangle of H, in place, in float32.

    Args:
        x: [tokens, in], any floating dtype (converted to float32, never TF32).
        H: [in, in] float32, or None for zeros. Only its upper triangle is meaningful: finish with `symmetric`.
        impl: "reference" (one full product), "cpu" (oneDNN, upper panels only) or "auto".

    Returns:
        H

    Raises:
        ValueError: `x` is not a matrix, `H` does not fit it, or an implementation that does not exist here.
    """
    if x.dim() != 2:
        raise ValueError(f"`x` must be [tokens, in], not {tuple(x.shape)}")
    if impl not in ("auto", "reference", "cpu"):
        raise ValueError(f"`impl` (={impl!r}) must be 'auto', 'reference' or 'cpu'")
    here = x.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if impl == "cpu" and not here:
        raise ValueError(f"`impl` (='cpu') needs a CPU tensor and a torch with oneDNN; `x` is on {x.device}")
    columns = x.shape[1]
    if H is None:
        H = torch.zeros(columns, columns, dtype=torch.float32, device=x.device)
    if H.shape != (columns, columns) or H.dtype != torch.float32:
        raise ValueError(f"`H` must be float32 {(columns, columns)}, not {H.dtype} {tuple(H.shape)}")
    if x.shape[0] == 0:
        return H
    if impl == "reference" or not here:
        ran("gram", "reference")
        return _full(x.float(), H)
    ran("gram", "cpu")
    Xt = x.detach().float().t().contiguous()  # [in, tokens]
    for start in range(0, columns, PANEL):
        end = min(start + PANEL, columns)
        H[:end, start:end] += torch.ops.mkldnn._linear_pointwise(Xt[:end], Xt[start:end], None, "none", [], "")
    return H


def _full(x: Tensor, H: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return H.addmm_(x.t(), x)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return H.addmm_(x.t(), x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def symmetric(H: Tensor) -> Tensor:
    """[in, in] whose lower triangle is the mirror of H's upper one."""
    upper = H.triu()
    return upper + upper.triu(1).t()
