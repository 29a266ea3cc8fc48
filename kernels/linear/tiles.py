"""Products of many tokens with 16-bit weights in the order of tiles: the C++ kernel for prompts on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import native

STRIP, ROWS, COLUMNS = 32, 16, 32  # rows of two tiles, rows and columns of one


def in_tiles(weight: Tensor) -> Tensor:
    """A bfloat16 weight [out, in] in the order of tiles.

    Returns:
        int16 [strips of 32 rows, 2, column tiles, 16 pairs of columns, 16 rows * 2], with zeros for lacking rows and
        columns.
    """
    out, columns = weight.shape
    whole = pad(weight.detach().contiguous().view(torch.int16), (0, -columns % COLUMNS, 0, -out % STRIP))
    tiles = whole.view(len(whole) // STRIP, 2, ROWS, -1, COLUMNS // 2, 2)  # strips, 2, rows, tiles, pairs, 2
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous().flatten(4)


def products(x: Tensor, tiles: Sequence[Tensor], outs: Sequence[int], isa: str = "auto") -> list[Tensor]:
    """x [..., in] in bfloat16 times weights of `in_tiles`: [..., outs[i]] for each, summed in float32.

    Raises:
        RuntimeError: tensors that do not match, or a machine or an `isa` without such products.
    """
    return torch.ops.workbench.dense_tiles(x, list(tiles), list(outs), isa)


@native.shapes_of("dense_tiles")
def _(x, weights, outs, isa):
    return [x.new_empty(*x.shape[:-1], out) for out in outs]
