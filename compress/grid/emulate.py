"""Run any model as if its linears were computed in another number format."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.grid.floats import ROUNDINGS, Float, float_named
from compress.grid.grids import GRIDS, TABLES
from compress.grid.nearest import rtn


@contextmanager
def emulate(
    model: nn.Module,
    grid: str | Float,
    *,
    inputs: bool = False,
    rounding: str = "nearest",
    bits: int = 4,
    group_size: int = -1,
    seed: int = 0,
) -> Iterator[nn.Module]:
    """While the context lasts, the weights of all linears of the model are rounded to a number format.

    Products are accumulated in the model's own dtype. A head that shares its weight with the embedding rounds both.

    Args:
        grid: a floating-point format, as a `Float` or by a name such as "e4m3", "e5m10" (float16) or "e8m7" (bfloat16),
            to which values are rounded as they are; or one of `GRIDS`, whose scales cover each group.
        inputs: whether what the linears read is rounded in the same way, too, each time.
        rounding: of floats: one of `ROUNDINGS`.
        bits: of grid="int".
        group_size: columns that share a scale, where the format does not say it; -1 for a whole row.
        seed: of the stochastic rounding.

    Raises:
        ValueError: there is no such format, or no such rounding of it.

    Source: the library pychop (arXiv:2504.07835), whose roundings these are bit for bit where both have a format
    (`seeds/peers/compare_pychop.py`).
    """
    rounds = _rounder(grid, rounding, bits, group_size, seed)
    with ExitStack() as stack, torch.no_grad():
        done: set[int] = set()
        for module in model.modules():
            if not isinstance(module, nn.Linear | Conv1D):
                continue
            weight = module.weight
            if id(weight) not in done:
                done.add(id(weight))
                stack.callback(setattr, weight, "data", weight.data)
                W = weight.data.t() if isinstance(module, Conv1D) else weight.data  # [out, in]
                rounded = rounds(W).to(W.dtype)
                weight.data = rounded.t().contiguous() if isinstance(module, Conv1D) else rounded
            if inputs:
                hook = module.register_forward_pre_hook(lambda _, args: (_like(args[0], rounds), *args[1:]))
                stack.callback(hook.remove)
        yield model


def _like(x: Tensor, rounds: Callable[[Tensor], Tensor]) -> Tensor:
    return rounds(x.reshape(-1, x.shape[-1])).view(x.shape).to(x.dtype) if x.numel() else x


def _rounder(grid: str | Float, rounding: str, bits: int, group_size: int, seed: int) -> Callable[[Tensor], Tensor]:
    """What rounds [rows, columns] to the format."""
    numbers = float_named(grid) if isinstance(grid, str) else grid
    if rounding not in ROUNDINGS or (numbers is None and rounding != "nearest"):
        allowed = ", ".join(ROUNDINGS) if numbers else "nearest"
        raise ValueError(f"`rounding` (={rounding!r}) must be one of {allowed} for `grid` (={grid!r})")
    if numbers is not None:
        return lambda t: numbers.round(t.float(), rounding, seed=seed)
    if grid not in GRIDS:
        raise ValueError(f"`grid` (={grid!r}) must be one of {', '.join(GRIDS)}, or a float such as e4m3")
    values = TABLES.get(grid)
    return lambda t: rtn(
        t,
        bits=values.bits if values else bits,
        group_size=(values.group_size if values else None) or group_size,
        grid=grid,
        scale_dtype=(values.scale_dtype if values else "") or "float32",
    ).dequantize()
