"""BitStack (Wang et al., 2024, arXiv:2410.23918): weights as stacks of blocks; as many blocks are kept as fit."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.allocation.sensitivity import predicted_loss
from compress.formats import Format, SignStack
from compress.method import knob
from compress.walk.statistics import LayerStatistics
from compress.weights.by_fisher import FisherMethod

# For the subspace iteration. Its squared error is then within 0.3 % of the least one up to rank 16, and within 0.05 %
# up to rank 4 (SmolLM2-135M). The width is a multiple of 8, because products of other widths are slower.
OVERSAMPLING, PASSES = 8, 6
FAINTEST = 1e-3  # least scale of a column, relative to the mean scale


@dataclass(frozen=True, kw_only=True)
class BitStack(FisherMethod):
    """Stores each weight as a stack of blocks (signs times a low-rank matrix), so that one file serves at any size.

    Source: arXiv:2410.23918, section 2: columns are scaled by the norms of their inputs, and each block approximates
    the error of the blocks before it by the signs of that error times the first singular vectors of its magnitudes
    (2.2). `resize` of `compress` keeps the blocks of the whole model that fit into a budget, in one order for all sizes
    (2.3). Deviations: the paper sorts blocks by the measured perplexity, round by round, so that stacks never differ by
    more than a block. Here blocks are sorted by how much each lowers the loss per byte, estimated from squared
    gradients (`compress.allocation.sensitivity`), which takes one pass backward instead of thousands forward. The
    scales go into the right factors.

    Measured on SmolLM2-135M (`seeds/papers.yml` has the setting): the loss falls with every size of one file. With
    2.2 bits per weight it is far below that of rounding to nearest in 2 bits (KL 4.2 against 11.2 nats per token),
    with 3.2 bits it is as large as that of rounding in 3. `gptq`, which corrects errors in later columns, loses less at
    equal bytes: 2.2, 0.52 and 0.14 nats in 2, 3 and 4 bits against 4.2, 2.0 and 0.96. The paper's opposite result at 2
    bits is not reproduced. The method is for files that have to serve many sizes.
    """

    name: ClassVar[str] = "bitstack"
    source: ClassVar[str] = "arXiv:2410.23918"
    statistics: ClassVar[tuple[str, ...]] = ("gram",)
    working_set: ClassVar[tuple[float, float]] = (14.0, 1.0)

    rank: int = knob(4, "rank of the magnitudes of a block", range=(1, 1 << 10), describes=True)
    blocks: int = knob(8, "stored blocks of each weight; resizing keeps at most as many", range=(1, 32))

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return [SignStack.spec_of(shape, rank=self.rank, blocks=self.blocks)]

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        if self.rank > min(shape):
            raise ValueError(
                f"`rank` (={self.rank}) of {self.name} must be at most {min(shape)}, the smaller side of {name}"
            )

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        H = statistics.values["gram"] if statistics.tokens else None
        made = bitstack(W, column_scales(W, H), rank=self.rank, blocks=self.blocks)
        stack = SignStack.from_blocks(made, torch.zeros(self.blocks, device=W.device))
        if H is not None:  # a linear that no token reached gains nothing
            F = statistics.measured["fisher"].to(W.device)
            D = W.clone()
            losses = [predicted_loss(D, F, H)]
            for number in range(self.blocks):
                D -= stack.block(number)
                losses.append(predicted_loss(D, F, H))
            stack.gains.copy_(-torch.tensor(losses, dtype=torch.float64).diff())
        return [stack]


def column_scales(W: Tensor, H: Tensor | None) -> Tensor:
    """Root mean squares of the inputs by the Gram matrix H [in, in], relative to their mean; [in]."""
    if H is None:
        return W.new_ones(W.shape[1])
    norms = H.diagonal().clamp_min(0).sqrt()
    mean = norms.mean()
    return (norms / mean).clamp_min(FAINTEST) if mean > 0 else torch.ones_like(norms)


def bitstack(W: Tensor, scale: Tensor, *, rank: int, blocks: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Residual blocks whose sum approximates W [out, in], with columns weighted by `scale` [in].

    Each is (mask [out, in] of negative entries, left [out, rank], right [rank, in]), with both factors in float16 as
    they are stored, so that the next block corrects this rounding, too.
    """
    R = W * scale
    made = []
    for _ in range(blocks):
        negative = R < 0
        left, right = leading(R.abs(), rank)
        left, right = left.half(), (right / scale).half()
        magnitudes = left.float() @ (right.float() * scale)
        R = R - torch.where(negative, -magnitudes, magnitudes)
        made.append((negative, left, right))
    return made


def leading(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U√S [out, rank] and √S Vᵀ [rank, in] of the first singular values of M [out, in], by subspace iteration."""
    width = min(-(-(rank + OVERSAMPLING) // 8) * 8, *M.shape)
    generator = torch.Generator(M.device).manual_seed(0)
    Q = torch.randn(M.shape[1], width, generator=generator, device=M.device, dtype=M.dtype)
    for _ in range(PASSES):
        Q = torch.linalg.qr(M.t() @ torch.linalg.qr(M @ Q).Q).Q  # [in, width]
    U, S, V = torch.linalg.svd(M @ Q, full_matrices=False)
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * (V[:rank] @ Q.t())
