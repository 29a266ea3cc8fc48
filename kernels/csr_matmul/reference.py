"""Look up, multiply and add, in plain torch on any device."""

from torch import Tensor

from kernels.csr_matmul.layout import Csr, rows_of


def csr_matmul(x: Tensor, w: Csr) -> Tensor:
    """y [tokens, out] = x [tokens, in] Wᵀ in x's dtype, summed in float32."""
    y = x.new_zeros(x.shape[0], w.shape[0], dtype=w.values.dtype)
    y.index_add_(1, rows_of(w), x.index_select(1, w.columns).to(w.values.dtype) * w.values)
    return y.to(x.dtype)
