"""The checks of `gptq_block`, and the shapes on which it is timed."""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from kernels.gptq_block import gptq_block
from kernels.interpreter import triton_takes
from kernels.support.declarations import TOLERANCE, Check, Contest, Expected, TimedSizes

ROTATED = (
    128 << 20
)  # bytes of operands and results in rotation; the loop it is timed against takes a thousand launches a call
MARGIN = 1e-4  # of a step: least distance of a check's weights from the edge between two codes, where rounding decides

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # W, U, scale, zero, group


def checks(device: torch.device) -> list[Check]:
    cases = (  # name, batch, columns, steps, out, groups, bits, symmetric
        ("one block", (), 40, 40, 37, 5, 4, True),
        ("asymmetric, rest updated", (), 37, 21, 33, 3, 4, False),
        ("group of a block", (), 64, 32, 32, 1, 3, True),
        ("batch", (2,), 24, 16, 20, 2, 4, False),
        ("8 bits", (), 18, 18, 40, 1, 8, True),
        ("one column", (), 1, 1, 5, 1, 2, True),
        ("nothing to quantise", (), 7, 0, 9, 1, 4, True),
        ("no outputs", (), 16, 16, 0, 2, 4, True),
    )
    found = [_check(name, _operands(device, *case), case[-2]) for name, *case in cases]
    W, U, scale, zero, group = _operands(device, (), 32, 24, 50, 3, 4, True)
    wide = torch.zeros(40, 60, device=device)
    wide[8:, 3:53] = W
    factor = torch.zeros(30, 48, device=device)
    factor[2:26, 8:40] = U
    strided = (wide[8:, 3:53], factor[2:26, 8:40], scale.t().contiguous().t(), zero, group.flip(0))
    found.append(_check("slices, transposed scales, groups in another order", strided, 4))
    for name, batch, symmetric in (("half of them pruned", (), True), ("pruned, asymmetric, batch", (2,), False)):
        operands = _operands(device, batch, 40, 24, 37, 3, 4, symmetric)
        g = torch.Generator().manual_seed(1)
        keep = torch.rand(*batch, 24, 37, generator=g) < 0.5
        found.append(_check(name, operands, 4, keep.to(device)))
    table = torch.tensor([-5.0, -2.5, -1.0, 0.0, 0.7, 1.9, 3.2, 6.0])
    for name, batch, keep in (("table of 8", (), None), ("table of 8, pruned, batch", (2,), 0.5)):
        operands = list(_operands(device, batch, 40, 24, 37, 3, 3, True, table))
        operands[3] = torch.full_like(operands[3], 3.0)  # the code of 0
        g = torch.Generator().manual_seed(1)
        mask = None if keep is None else (torch.rand(*batch, 24, 37, generator=g) < keep).to(device)
        found.append(_check(name, tuple(operands), 3, mask, table.to(device)))
    return found


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy:
        shapes = [(16, 48)] if triton_takes(device) else []
    elif device.type == "cuda":
        shapes = [(128, 4096), (128, 14336), (128, 1024)]
    else:
        shapes = [(128, 576), (128, 1536), (128, 4096)]
    for columns, out in shapes:
        yield _contest(device, columns, out, toy)


def exact(
    W: Tensor,
    U: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    bits: int,
    keep: Tensor | None = None,
    table: Tensor | None = None,
    found: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Codes, errors and rest of one matrix in float64, and the least distance of a weight from an edge between two
    codes, in steps. Where that is below MARGIN, the code in `found` is equally right, and the loop continues with it.

    A column is corrected for all earlier columns when it is reached, not after each of them.
    """
    W, U, steps = W.double(), U.double(), U.shape[0]
    codes, errors = W.new_zeros(steps, W.shape[1]), W.new_zeros(steps, W.shape[1])
    margin = 0.5
    for i in range(steps):
        w = W[i] - U[:i, i] @ errors[:i]
        s, z = scale[group[i]].double(), zero[group[i]].double()
        position = w / s + z
        codes[i] = position.round().clamp(0, 2**bits - 1)
        edges = (position - position.floor() - 0.5).abs()
        if table is not None:
            away = (w / s - table.double()[:, None]).abs()  # [entries, out]
            codes[i] = away.argmin(0)
            nearest = away.topk(2, dim=0, largest=False).values
            edges = (nearest[1] - nearest[0]) / 2
        if found is not None:
            codes[i] = torch.where(edges < MARGIN, found[i].double(), codes[i])
        if keep is not None:
            codes[i] = torch.where(keep[i], codes[i], z)
        value = codes[i] - z if table is None else table.double()[codes[i].long()]
        errors[i] = (w - value * s) / U[i, i]
        if W.shape[1]:
            margin = min(margin, edges.min().item())
    return codes, errors, W[steps:] - U[:, steps:].t() @ errors, margin


def following(W: Tensor, U: Tensor, scale: Tensor, zero: Tensor, group: Tensor, bits: int) -> Expected:
    """Codes, errors and rest; among millions of weights, some are so near an edge that either code is right."""

    def expected(outputs: list[Tensor]) -> tuple[Tensor, ...]:
        return exact(W, U, scale, zero, group, bits, found=outputs[0])[:3]

    return expected


def _check(name: str, operands: Operands, bits: int, keep: Tensor | None = None, table: Tensor | None = None) -> Check:
    def run(impl: str) -> tuple[Tensor, Tensor, Tensor]:
        return gptq_block(*operands, bits=bits, keep=keep, table=table, impl=impl)

    def expected() -> tuple[Tensor, Tensor, Tensor]:
        if operands[0].dim() == 2:
            return exact(*operands, bits, keep, table)[:3]
        masks = [None] * len(operands[0]) if keep is None else keep
        each = [exact(*(t[b] for t in operands), bits, masks[b], table)[:3] for b in range(len(operands[0]))]
        return tuple(torch.stack(outputs) for outputs in zip(*each, strict=True))

    impls = ("triton", "cpu") if operands[0].device.type == "cpu" else ("triton",)
    return Check("gptq_block", name, run, expected, TOLERANCE[torch.float32], impls)


def _operands(
    device: torch.device,
    batch: tuple[int, ...],
    columns: int,
    steps: int,
    out: int,
    groups: int,
    bits: int,
    symmetric: bool,
    table: Tensor | None = None,
) -> Operands:
    """Operands of the first seeds for which rounding gives the same codes in float32 and in float64."""
    matrices: list[Operands] = []
    for seed in count():
        operands = _matrix(seed, columns, steps, out, groups, bits, symmetric)
        if exact(*operands, bits, table=table)[-1] > MARGIN:
            matrices.append(operands)
        if len(matrices) == max(1, *batch, 1):
            break
    stacked = (torch.stack(each) if batch else each[0] for each in zip(*matrices, strict=True))
    return tuple(t.to(device) for t in stacked)


def _matrix(seed: int, columns: int, steps: int, out: int, groups: int, bits: int, symmetric: bool) -> Operands:
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(columns, out, generator=g) * 0.02
    U = _factor(torch.randn(4 * columns, columns, generator=g, dtype=torch.float64))[:steps]
    scale = (0.04 * (1 + torch.rand(groups, out, generator=g)) / 2 ** (bits - 1)).bfloat16().float()
    middle = torch.full((groups, out), float(2 ** (bits - 1)))
    zero = middle if symmetric else torch.randint(0, 2**bits, (groups, out), generator=g).float()
    return W, U.float(), scale, zero, torch.arange(steps) * groups // max(steps, 1)


def _factor(X: Tensor) -> Tensor:
    """U upper triangular with (XᵀX / tokens)⁻¹ = Uᵀ U, for correlated columns."""
    X = X + 0.5 * X.roll(1, 1)
    return torch.linalg.cholesky(torch.linalg.inv(X.t() @ X / len(X)), upper=True)


def _contest(device: torch.device, columns: int, out: int, toy: bool) -> Contest:
    bits, group_size = 4, min(columns, 64)
    groups = columns // group_size
    ours = "triton" if device.type == "cuda" or toy else "cpu"
    # W and U read, errors and codes written; scales and zero points read.
    least_bytes = out * (9 * columns + 8 * groups) + 4 * columns * columns
    copies = 2 if toy else max(2, -(-ROTATED // least_bytes))
    U = _factor(torch.randn(4 * columns, columns, dtype=torch.float64)).float().to(device)
    group = torch.arange(columns, device=device) // group_size
    weights = [torch.randn(columns, out, device=device) * 0.02 for _ in range(copies)]
    scales = [W.view(groups, group_size, out).abs().amax(1) / 7.5 for W in weights]
    zero = torch.full_like(scales[0], 8.0)

    def contestant(impl: str):
        return lambda i: gptq_block(weights[i], U, scales[i], zero, group, bits=bits, impl=impl)

    tune_key, candidates = None, []
    if ours == "triton":
        from kernels.gptq_block.triton import CANDIDATES, key

        tune_key, candidates = key(columns, out), CANDIDATES
    return Contest(
        op="gptq_block",
        detail=f"{bits} bits g{group_size}",
        shape=(out, columns),
        tokens=0,
        contestants={ours: contestant(ours), "plain loop": contestant("reference")},
        copies=copies,
        ours=ours,
        baseline="plain loop",
        least_bytes=least_bytes,
        flops=out * columns * (columns - 1),
        rate="float32",
        goal=10.0 if device.type == "cuda" and not toy else None,
        tune_key=tune_key,
        candidates=candidates,
        expected=dict.fromkeys((ours, "plain loop"), following(weights[0], U, scales[0], zero, group, bits)),
        tolerance=dict.fromkeys((ours, "plain loop"), 1e-4),
        graph=False,  # the goal refers to the eager loop, whose launches are replaced by a single one
    )
