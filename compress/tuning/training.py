"""Training of one block: the stored weights are trained until its output is close to that of the original block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.linear import CompressedLinear, met_by
from compress.recover.trained_parts import TrainedParts
from compress.walk.capture import Call, run_block


@dataclass(frozen=True)
class Schedule:
    """The schedule of training a block.

    steps: number of updates. batch: calibration windows per update. rate, scale_rate, norm_rate: size of the first
        update of the offsets (in steps of the grid), the factors and the norms (both as a fraction of their value); it
        falls linearly to 0. 0: they are not trained.
    from_original: a weight starts where its original lies within the step of its code, or at its edge; False:
        in the middle.
    sink_weight: the weight of the first token of each window in the loss.
    keep_zeros: weights that are stored as 0 stay 0.
    dtype: of the products with weights; None: that of the activations.
    """

    steps: int
    batch: int
    rate: float
    scale_rate: float
    norm_rate: float = 0.0
    from_original: bool = True
    sink_weight: float = 1.0
    keep_zeros: bool = False
    dtype: torch.dtype | None = None


class TrainedLinear(TrainedParts):
    """Stands for a compressed linear while it is trained; parts that cannot be trained do not change.

    Args:
        original: W [out, in] before the compression.
        schedule: sets the dtype in which the weight is multiplied, and whether zeros stay.
    """

    def __init__(self, linear: CompressedLinear, original: Tensor, schedule: Schedule) -> None:
        fixed = [part.dequantize() for part in linear.parts if part.trainable() is None]
        alone = schedule.from_original and len(linear.parts) - len(fixed) == 1
        wanted = original - sum(fixed) if alone else None
        views = {i: view for i, part in enumerate(linear.parts) if (view := part.trainable(wanted)) is not None}
        super().__init__(linear, views, keep_zeros=schedule.keep_zeros)
        self.dtype = schedule.dtype
        self.W: Tensor | None = None

    def prepare(self) -> None:
        """Compute the weight that passes use until the next call of this."""
        self.W = self.weight().to(self.dtype or self.stands_for.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = met_by(self.stands_for, x)
        y = F.linear(x.to(self.W.dtype), self.W).to(x.dtype)
        return y if self.stands_for.bias is None else y + self.stands_for.bias


def train(
    block: nn.Module,
    index: int,
    linears: Iterable[TrainedLinear],
    norms: Iterable[nn.Parameter],
    calls: Sequence[Call],
    wanted: Sequence[Call],
    schedule: Schedule,
    device: torch.device,
) -> None:
    """Train the views of these linears, which are in the block, and its norms.

    Args:
        calls: a window of the calibration each, with the block's input.
        wanted: the same windows with the target output.

    Every update follows the sign of the gradient, as in AutoRound (arXiv:2309.05516): a weight on which the loss hardly
    depends moves as far as any other one, and no moments have to be kept.
    """
    linears = list(linears)
    views = [view for linear in linears for view in linear.views.values()]
    rates = {view.offsets: schedule.rate for view in views}
    rates |= {view.factors: schedule.scale_rate for view in views if view.factors is not None}
    rates |= {norm: schedule.norm_rate for norm in norms if schedule.norm_rate}
    sizes = {norm: norm.detach().abs().mean().item() for norm in norms}
    generator = torch.Generator().manual_seed(index)
    order: list[int] = []
    trained = [parameter.requires_grad_() for parameter, rate in rates.items() if rate]
    for step in range(schedule.steps):
        if len(order) < min(schedule.batch, len(calls)):
            order = torch.randperm(len(calls), generator=generator).tolist()
        batch = [order.pop() for _ in range(min(schedule.batch, len(calls)))]
        with torch.enable_grad():
            for linear in linears:
                linear.prepare()
            outputs = [run_block(block, calls[i], index, device) for i in batch]
            targets = [wanted[i].hidden.to(device) for i in batch]
            loss = sum(token_loss(y, t, schedule.sink_weight) for y, t in zip(outputs, targets, strict=True))
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        left = 1 - step / schedule.steps
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                size = rates[parameter] * left * sizes.get(parameter, 1.0)
                parameter.detach().add_(gradient.sign(), alpha=-size)
    for parameter in trained:
        parameter.requires_grad_(False)


def token_loss(y: Tensor, wanted: Tensor, sink_weight: float = 1.0) -> Tensor:
    """||y - y*||² / ||y*||² of a token, mean over all, for outputs [windows, tokens, hidden] of a block.

    A few tokens would dominate plain squares: the first token's residual stream is hundreds of times as large as the
    others' (arXiv:2402.17762).

    Args:
        sink_weight: the weight of the first token of each window, to which all later ones attend.
    """
    error = (y.float() - wanted.float()).square().sum(-1)
    error = error / wanted.float().square().sum(-1).clamp_min(1e-12)  # [windows, tokens]
    more = sink_weight - 1
    return (error.sum() + more * error[:, 0].sum()) / (error.numel() + more * len(error))
