"""Training of invertible transforms that minimise the error of a block with rounded weights and inputs (FlatQuant, Sun
et al., 2024, arXiv:2410.09426)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.linear import StandIn
from compress.transforms import Kronecker
from compress.transforms.kronecker import kronecker
from compress.transforms.rotation import random_hadamard, random_orthogonal
from compress.transforms.rounding import SMALLEST, largest_code
from compress.tuning.training import token_loss
from compress.walk.capture import Call, run_block
from kernels.hadamard import widest_block
from kernels.linear import linear

LIMIT = 4.0  # of the logarithm of a singular value: all lie between 1 / 55 and 55
EPSILON = 1e-4  # of a typical channel's size; added to the size of each channel


@dataclass(frozen=True)
class Aim:
    """The rounding at which training aims, and its schedule.

    bits, group_size: of inputs; -1: one step for a whole token. weight_bits, weight_group_size: of weights; 0 bits:
        they are not rounded.
    steps: updates of each block. rate: size of the first updates; it falls to 0. scales: the channels' factors are
        trained, too.
    """

    bits: int
    group_size: int
    weight_bits: int
    weight_group_size: int
    steps: int
    rate: float
    scales: bool


class InvertibleFactor(nn.Module):
    """P = H U diag(e^s) Vᵀ [n, n] with rotations U and V, which are Cayley's maps of free matrices: always invertible.

    At the start U, V and the singular values are 1, so that P is the rotation H.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        n = len(start)
        self.register_buffer("start", start)
        self.free = nn.ParameterList([nn.Parameter(torch.zeros(n, n, device=start.device)) for _ in "UV"])
        self.logs = nn.Parameter(torch.zeros(n, device=start.device))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """P and P⁻ᵀ."""
        U, V = map(_cayley, self.free)
        logs = self.logs.clamp(-LIMIT, LIMIT)
        HU = self.start @ U
        return HU * logs.exp() @ V.t(), HU * (-logs).exp() @ V.t()


class Flat(nn.Module):
    """The transform of one input while it is trained. Linears that share the input share it, and its result."""

    def __init__(self, start: Kronecker) -> None:
        super().__init__()
        self.left, self.right = InvertibleFactor(start.left), InvertibleFactor(start.right)
        self.logs = nn.Parameter(start.scale.log())
        self.latest: tuple[Tensor, Tensor] | None = None

    def prepare(self) -> None:
        """Compute the matrices that passes use until the next call of this."""
        (self.P1, self.T1), (self.P2, self.T2) = self.left.matrices(), self.right.matrices()
        self.scale, self.latest = self.logs.exp(), None

    def rounded(self, x: Tensor, aim: Aim) -> Tensor:
        """x P, rounded."""
        if self.latest is None or self.latest[0] is not x:
            moved = kronecker(x.float() * self.scale, self.P1, self.P2)
            self.latest = x, round_through(moved, aim.bits, aim.group_size)
        return self.latest[1]

    def folded(self, W: Tensor, aim: Aim) -> Tensor:
        """W P⁻ᵀ, rounded."""
        moved = kronecker(W / self.scale, self.T1, self.T2)
        return round_through(moved, aim.weight_bits, aim.weight_group_size) if aim.weight_bits else moved

    def result(self) -> Kronecker:
        """The transform as it is now."""
        with torch.no_grad():
            self.prepare()
        return Kronecker(self.P1, self.P2, self.scale)


class FlatLinear(StandIn):
    """Stands for a linear while the transform of its input is trained."""

    def __init__(self, linear: nn.Module, W: Tensor, flat: Flat, aim: Aim) -> None:
        super().__init__(linear)  # blocks may read the dtype of a linear's weight
        self.linear, self.flat, self.aim = linear, flat, aim
        self.original, self.W = W, W

    def prepare(self) -> None:
        """Compute the weight that passes use until the next call of this."""
        self.W = self.flat.folded(self.original, self.aim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.flat.rounded(x, self.aim).to(x.dtype), self.W.to(x.dtype))
        return y if self.linear.bias is None else y + self.linear.bias


def start_of(scale: Tensor, left: int, seed: int) -> Kronecker:
    """Factors of n channels, and a rotation that is the Kronecker product of one of `left` channels and one of the
    rest: Hadamard matrices with random signs, or random orthogonal ones if there are none of these sizes.

    Args:
        scale: [n]. left: 0: the divisor of n nearest to √n from below.
    """
    n = len(scale)
    left = left or next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)
    rotations = (_rotation(size, seed + i).to(scale.device) for i, size in enumerate((left, n // left)))
    return Kronecker(*rotations, scale)


def balance(x: Tensor, W: Tensor) -> Tensor:
    """Factors [n] of channels with the least rounding error after a rotation that mixes the channels evenly.

    The error of rounding x s is then spread in proportion to Σ x² s² of each token, and is multiplied by the weights'
    columns W / s; the error of rounding W / s is multiplied by x s. Both are Σ x² s² · Σ w² / s², which is least for
    s² = w / x, with w and x the root mean squares of a channel.

    Args:
        x: [tokens, n], in which all tokens have the same weight. W: [out, n].
    """
    unit = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(SMALLEST)
    logs = [(values.square().mean(0).sqrt() + EPSILON).log() for values in (W / W.square().mean().sqrt(), unit)]
    s = (logs[0] - logs[1]) / 2
    return (s - s.mean()).exp()


def train(
    block: nn.Module,
    index: int,
    linears: Mapping[str, FlatLinear],
    calls: Sequence[Call],
    wanted: Sequence[Call],
    aim: Aim,
    device: torch.device,
) -> tuple[float, float]:
    """Train the transforms of a block that contains these stand-ins; the weights do not change.

    Each update is made from one window, by Adam; its steps fall to 0 along a half cosine (the paper's optimiser and
    schedule; its learned clipping thresholds are left out, as the methods that follow choose their steps themselves).

    Args:
        calls: a window of the calibration each, with the block's input.
        wanted: the same windows with the block's output without rounding.

    Returns:
        The loss of the first windows before, and after the training.
    """
    flats = list({id(one.flat): one.flat for one in linears.values()}.values())
    trained = [p for flat in flats for p in flat.parameters() if aim.scales or p is not flat.logs]
    optimizer = torch.optim.Adam(trained, lr=aim.rate, betas=(0.9, 0.95))
    order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(index)).tolist()

    def prepare() -> None:
        for one in (*flats, *linears.values()):
            one.prepare()

    def loss_of(i: int) -> Tensor:
        return token_loss(run_block(block, calls[i], index, device), wanted[i].hidden.to(device))

    def total() -> float:
        with torch.no_grad():
            prepare()
            return sum(loss_of(i).item() for i in order[:2]) / len(order[:2])

    before = total()
    if not aim.steps:
        return before, before
    for step in range(aim.steps):
        for group in optimizer.param_groups:
            group["lr"] = aim.rate * (1 + math.cos(math.pi * step / aim.steps)) / 2
        with torch.enable_grad():
            prepare()
            loss_of(order[step % len(order)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, total()


def round_through(x: Tensor, bits: int, group_size: int) -> Tensor:
    """x rounded to symmetric integers, with one step for every `group_size` columns (-1: for all of a row).

    The gradient passes straight through the codes (arXiv:1308.3432), and reaches the step, which follows from the
    largest magnitude of a group; otherwise training could not make this magnitude smaller.
    """
    groups = x.unflatten(-1, (-1, x.shape[-1] if group_size == -1 else group_size))
    step = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / largest_code(bits)
    with torch.no_grad():
        units = groups / step
        error = units.round() - units
    return (groups + error * step).flatten(-2)


def errors_of(x: Tensor, W: Tensor, transform: Kronecker, aim: Aim) -> tuple[float, float]:
    """||xWᵀ - Q(x)Q(W)ᵀ||² / ||xWᵀ||² without the transform and with it."""
    y, found = linear(x, W), []
    for rows, weight in ((x, W), (transform(x), transform.fold(W))):
        rounded = round_through(weight, aim.weight_bits, aim.weight_group_size) if aim.weight_bits else weight
        left = y - linear(round_through(rows, aim.bits, aim.group_size), rounded)
        found.append((left.square().sum() / y.square().sum().clamp_min(1e-30)).item())
    return found[0], found[1]


def _cayley(free: Tensor) -> Tensor:
    """(I + A)⁻¹ (I - A) with A = S - Sᵀ, for a free matrix S: a rotation."""
    A = free - free.t()
    one = torch.eye(len(A), device=A.device)
    return torch.linalg.solve(one + A, one - A)


def _rotation(n: int, seed: int) -> Tensor:
    """[n, n]"""
    rotation = random_hadamard(n, seed) if widest_block(n) == n else random_orthogonal(n, seed)
    return rotation(torch.eye(n))
