"""Run any model as if its linears, or other operations too, were computed in another number format."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from compress.floats import ROUNDINGS, Float, float_named
from compress.formats.scales import SCALE_KINDS, TILES
from compress.grid.grids import GRIDS, TABLES
from compress.grid.integer import check_group_size
from compress.grid.nearest import rtn

OPS = ("linears", "embedding", "norms", "softmax", "activations")
ACTIVATIONS = tuple(one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values())
EXP_RANGE = 16.0  # range of the table of exponentials: scores further below the largest one count as 0


@contextmanager
def emulate(
    model: nn.Module,
    grid: str | Float,
    *,
    ops: Sequence[str] = ("linears",),
    inputs: bool = False,
    rounding: str = "nearest",
    bits: int = 4,
    group_size: int = -1,
    scale_dtype: str = "float32",
    seed: int = 0,
) -> Iterator[nn.Module]:
    """While the context lasts, the weights of all linears of the model, or the operations in `ops`, are rounded to a
    number format.

    Products are accumulated in the model's own dtype. A head that shares its weight with the embedding rounds both.

    Args:
        grid: a floating-point format, as a `Float` or by a name such as "e4m3", "e5m10" (float16) or "e8m7" (bfloat16),
            to which values are rounded without scales; or one of `GRIDS`, whose scales cover each group.
        ops: some of `OPS`. "linears" and "embedding" are weights. "norms" and "activations" (activation functions)
            round their inputs and outputs, which a table of 2^bits entries per scale can compute. "softmax" takes its
            exponentials from a table of 2^bits entries with the same number of levels; its sums are exact. Residual
            sums and products of activations are not rounded.
        inputs: whether the inputs of the linears are also rounded in the same way, each time.
        rounding: for floats: one of `ROUNDINGS`.
        bits: for grid="int".
        group_size: columns that share a scale, if the format does not fix it; -1 for a whole row.
        scale_dtype: one of `SCALE_KINDS`, if the format does not fix it. With "tile16", 16 rows of a weight share a
            power of two, and each row of activations has its own.
        seed: for stochastic rounding.

    Raises:
        ValueError: the format or the operation does not exist, or the format does not support the rounding.

    Source: the library pychop (arXiv:2504.07835); both round alike bit for bit in the formats that both have
    (`seeds/peers/compare_pychop.py`). Operations in integers alone: BCT (arXiv:2304.01483), whose tiles of weights have
    a power of two each, and whose nonlinearities are tables.
    """
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"`ops` (={unknown[0]!r}) must be some of {', '.join(OPS)}")
    number = _Number(grid, rounding, bits, group_size, scale_dtype, seed)
    number.check()
    with ExitStack() as stack, torch.no_grad():
        done: set[int] = set()
        for module in model.modules():
            linear = isinstance(module, nn.Linear | Conv1D)
            rounds = linear and "linears" in ops or isinstance(module, nn.Embedding) and "embedding" in ops
            if rounds and id(module.weight) not in done:
                done.add(id(module.weight))
                _round_weight(module, number, stack)
            in_table = "norms" in ops and _is_norm(module) or "activations" in ops and isinstance(module, ACTIVATIONS)
            if linear and inputs or in_table:
                hook = module.register_forward_pre_hook(lambda _, args: (_like(args[0], number.of_inputs), *args[1:]))
                stack.callback(hook.remove)
            if in_table:
                hook = module.register_forward_hook(lambda _, args, y: _like(y, number.of_inputs))
                stack.callback(hook.remove)
        if "softmax" in ops:
            stack.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation("eager")  # the others do not call softmax
            stack.enter_context(_TableSoftmax(number.levels))
        yield model


def _round_weight(module: nn.Module, number: "_Number", stack: ExitStack) -> None:
    weight, turned = module.weight, isinstance(module, Conv1D)
    W = weight.data.t() if turned else weight.data  # [out, in]
    if number.as_float is None:
        check_group_size(number.group_size, type(module).__name__, (W.shape[0], W.shape[1]))
    stack.callback(setattr, weight, "data", weight.data)
    rounded = number.of_weight(W).to(weight.dtype)
    weight.data = rounded.t().contiguous() if turned else rounded


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name: transformers has a class for each family."""
    return type(module).__name__.endswith(("Norm", "Norm1p"))


class _TableSoftmax(TorchFunctionMode):
    """Softmax with exponentials from a table with `levels` distances from the largest score, and as many levels."""

    FUNCTIONS = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.FUNCTIONS:
            return func(*args, **kwargs)
        scores, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1)
        scores = scores.to(kwargs.get("dtype") or scores.dtype)
        return table_softmax(scores, dim, self.levels)


def table_softmax(scores: Tensor, dim: int, levels: int) -> Tensor:
    """Softmax whose exponentials are integers below `levels` from a table with `levels` entries.

    The integers are summed and divided exactly, as an integer unit does after the product with the values.
    """
    below = scores.amax(dim, keepdim=True) - scores
    place = (below * ((levels - 1) / EXP_RANGE)).round().clamp(max=levels - 1)
    whole = (torch.exp(place * (-EXP_RANGE / (levels - 1))) * (levels - 1)).round()
    return whole / whole.sum(dim, keepdim=True)


def _like(x: Tensor, rounds: Callable[[Tensor], Tensor]) -> Tensor:
    return rounds(x.reshape(-1, x.shape[-1])).view(x.shape).to(x.dtype) if x.numel() else x


@dataclass(frozen=True)
class _Number:
    """A number format with all its settings; see `emulate`."""

    grid: str | Float
    rounding: str
    bits: int
    group_size: int
    scale_dtype: str
    seed: int

    @cached_property
    def as_float(self) -> Float | None:
        return float_named(self.grid) if isinstance(self.grid, str) else self.grid

    @property
    def levels(self) -> int:
        if self.as_float:
            return 1 << min(16, 1 + self.as_float.exponent + self.as_float.mantissa)
        return 1 << (self.bits if self.grid == "int" else TABLES[self.grid].bits)

    def check(self) -> None:
        if self.rounding not in ROUNDINGS or (self.as_float is None and self.rounding != "nearest"):
            allowed = ", ".join(ROUNDINGS) if self.as_float else "nearest"
            raise ValueError(f"`rounding` (={self.rounding!r}) must be one of {allowed} for `grid` (={self.grid!r})")
        if self.as_float is None and self.grid not in GRIDS:
            raise ValueError(f"`grid` (={self.grid!r}) must be one of {', '.join(GRIDS)}, or a float such as e4m3")
        if self.scale_dtype not in SCALE_KINDS:
            raise ValueError(f"`scale_dtype` (={self.scale_dtype!r}) must be one of {', '.join(SCALE_KINDS)}")

    def of_weight(self, W: Tensor) -> Tensor:
        """[rows, columns], rounded."""
        return self._rounded(W, self.scale_dtype)

    def of_inputs(self, x: Tensor) -> Tensor:
        """[tokens, columns], rounded without a scale that tokens share."""
        return self._rounded(x, "e8m0" if self.scale_dtype in TILES else self.scale_dtype)

    def _rounded(self, t: Tensor, scale_dtype: str) -> Tensor:
        if self.as_float:
            return self.as_float.round(t.float(), self.rounding, seed=self.seed)
        values = TABLES.get(self.grid)
        return rtn(
            t,
            bits=values.bits if values else self.bits,
            group_size=(values.group_size if values else None) or self.group_size,
            grid=self.grid,
            scale_dtype=(values.scale_dtype if values else "") or scale_dtype,
        ).dequantize()
