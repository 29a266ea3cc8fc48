"""torch's own product of compressed rows: MKL on a CPU, cuSPARSE on a GPU."""

import warnings
from functools import cache

import torch
from torch import Tensor

from kernels.csr_matmul.layout import Csr


def csr_matmul(x: Tensor, w: Csr) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype, multiplied in float32: MKL does not support 16-bit values."""
    _warn_nobody()
    W = torch.sparse_csr_tensor(w.offsets, w.columns, w.values, w.shape, check_invariants=False)
    if x.shape[0] == 1:
        return (W @ x[0].float())[None].to(x.dtype)
    columns = x.contiguous().float().t()  # [in, tokens]: always the same layout, so that one of cuSPARSE's loops runs
    return (W @ columns).t().to(x.dtype).contiguous()


@cache
def _warn_nobody() -> None:
    """Suppress torch's warning that compressed rows are in beta state, about which our users can do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1))
