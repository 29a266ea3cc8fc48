"""Upper panels by oneDNN's float32 product, which has AVX-512 where torch's own does not."""

from torch import Tensor

from kernels.linear.onednn import product

PANEL = 128  # columns of H computed at once; the part below the diagonal panels is never computed


def gram(x: Tensor, H: Tensor) -> None:
    """H += XᵀX, upper panels only."""
    Xt = x.float().t().contiguous()  # [in, tokens]
    columns = x.shape[1]
    for start in range(0, columns, PANEL):
        end = min(start + PANEL, columns)
        H[:end, start:end] += product(Xt[:end], Xt[start:end])
