"""torch's own 2:4 products, cuSPARSELt and CUTLASS, on sparse tensor cores with float32 sums."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sparse24_matmul.layout import COLUMNS, Sparse24

TOKENS = 8  # both libraries need a multiple of 8 tokens in 16 bits


def sparse24_matmul(x: Tensor, w: Sparse24) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ, w in a library's layout, x in w's dtype."""
    tokens, columns = x.shape
    if columns % COLUMNS or tokens % TOKENS:  # padding copies even if it adds nothing
        x = F.pad(x, (0, -columns % COLUMNS, 0, -tokens % TOKENS))
    x = x.contiguous()
    if w.layout == "cusparselt":
        y = torch._cslt_sparse_mm(w.values, x.t(), transpose_result=True)  # [tokens, out], padded
    else:
        y = torch._sparse_semi_structured_mm(w.values, w.places, x.t()).t()
    return y[:tokens, : w.shape[0]].contiguous()
