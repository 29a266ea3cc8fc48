"""Some rows of an integer-quantised weight, for the look-up of an embedding: the others are not unpacked."""

from torch import Tensor

from kernels.int_matmul import panels, tiles
from kernels.int_matmul.layout import Packed
from kernels.int_matmul.reference import dequantize


def look_up(w: Packed, ids: Tensor) -> Tensor:
    """Rows [n, in] of W in float32, as `dequantize` gives them.

    Args:
        w: in any layout; for `tiles` the whole weight is unpacked, because torch's kernel hides the order of rows.
        ids: [n] int64, row numbers.
    """
    if w.layout == "tiles":
        return tiles.dequantize(w)[ids]
    return dequantize(panels.take_rows(w, ids) if w.layout == "panels" else take_rows(w, ids))


def take_rows(w: Packed, ids: Tensor) -> Packed:
    """Rows `ids` [n] of the layout `rows`."""
    zero = None if w.zero is None else w.zero[ids]
    return w._replace(codes=w.codes[ids], scale=w.scale[ids], zero=zero, shape=(len(ids), w.shape[1]))
