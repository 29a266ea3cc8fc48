"""Products of one input with several stored weights in one call, where a CPU has loops for prompts.

The tokens are rounded and packed once for all products, and the rows of all weights are distributed over the threads.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kernels import native
from kernels.int_matmul import Packed
from kernels.lut_matmul import Codebook
from kernels.registry import ran
from kernels.sparse_matmul import SparseRows, in_tiles, products
from kernels.step.assemble import OPS, weight_of
from kernels.step.program import InputChange, Weight
from kernels.step.recognition.parts import NotNative
from kernels.w4a8_matmul import fast, holds_integers
from kernels.w4a8_matmul.groups import decoded_once
from kernels.w8a8_matmul import W8

Joined = Callable[[Tensor], list[Tensor]]  # x [..., in] -> [..., out_i] for each weight


def joined(linears: Sequence[nn.Module]) -> Joined | None:
    """The products of one input with these linears, for bfloat16 and more tokens than `native.FEW_ROUNDED` and
    `native.most_in_loops()`.

    Returns:
        None if they are stored in different formats, or in one that this CPU multiplies one by one.
    """
    if not native.tiles() and not native.w4a8_runs():
        return None
    try:
        weights = [weight_of(linear, "a linear") for linear in linears]
    except NotNative:
        return None
    stored, change = [w.stored for w in weights], weights[0].change
    same = all((w.change is None) == (change is None) and (change is None or change.same(w.change)) for w in weights)
    kinds = {type(one) for one in stored}
    if not same or len(kinds) > 1 or any(w.gains is not None for w in weights):
        return None
    biases = [None if w.bias is None else w.bias.bfloat16() for w in weights]
    if kinds <= {Packed, Codebook} and change is None and native.tiles():
        product = _panels(stored)
    elif kinds == {SparseRows} and change is None:
        product = _kept(stored)
    elif kinds == {W8} and native.tiles() == "amx":
        product = _bytes(weights)
    elif kinds <= {Packed, Codebook} and change is not None and _rounds_tokens(change, weights):
        product = _rounded(stored, change.bits)
    else:
        return None
    return product and (lambda x: [y if b is None else y.add_(b) for y, b in zip(product(x), biases, strict=True)])


def _rounds_tokens(change: InputChange, weights: Sequence[Weight]) -> bool:
    """Is the only change rounding with one step per token, and do the integer kernels support these weights?"""
    if change.signs is not None or change.order is not None or change.step or change.wide or change.bits not in (4, 8):
        return False
    x = torch.empty(1, weights[0].shape[1], dtype=torch.bfloat16)
    return change.group_size == weights[0].shape[1] and all(
        fast(x, w.stored, None) and (isinstance(w.stored, Packed) or holds_integers(w.stored.table)) for w in weights
    )


def _panels(stored: Sequence[Packed | Codebook]) -> Joined:
    op = OPS[type(stored[0])]
    tables, zeros = [getattr(w, "table", None) for w in stored], [getattr(w, "zero", None) for w in stored]
    arguments = [w.codes for w in stored], [w.scale for w in stored], tables, zeros, [w.shape[0] for w in stored]

    def product(x: Tensor) -> list[Tensor]:
        ran(op, f"cpu {native.isa(x.dtype, x.numel() > native.most_in_loops() * x.shape[-1])}")
        return torch.ops.workbench.panels_matmul_several(x, *arguments)

    return product


def _kept(stored: Sequence[SparseRows]) -> Joined | None:
    more = torch.empty(native.FEW_ROUNDED + 1, stored[0].shape[1], dtype=torch.bfloat16)
    return (lambda x: products(x, stored)) if in_tiles(more, stored) else None


def _rounded(stored: Sequence[Packed | Codebook], bits: int) -> Joined:
    tables, zeros = [getattr(w, "table", None) for w in stored], [getattr(w, "zero", None) for w in stored]
    arguments = [w.codes for w in stored], [w.scale for w in stored], zeros, tables, [w.shape[0] for w in stored], bits

    def product(x: Tensor) -> list[Tensor]:
        matrices = native.matrices() if all(decoded_once(x, w) for w in stored) else ""
        ran("w4a8_matmul", f"cpu {matrices or native.integers(many=True)}")
        return torch.ops.workbench.panels_w4a8_several(x, *arguments)

    return product


def _bytes(weights: Sequence[Weight]) -> Joined | None:
    steps = [w.x_scale for w in weights]
    if any((a is None) != (steps[0] is None) or (a is not None and not torch.equal(a, steps[0])) for a in steps):
        return None
    codes, scales = [w.stored.codes for w in weights], [w.stored.scale for w in weights]

    def product(x: Tensor) -> list[Tensor]:
        ran("w8a8_matmul", "cpu amx")
        return torch.ops.workbench.int8_matmul_several(x, codes, scales, steps[0])

    return product


@native.shapes_of("panels_matmul_several")
def _(x, codes, scales, tables, zeros, outs):
    return [x.new_empty(*x.shape[:-1], out) for out in outs]


@native.shapes_of("panels_w4a8_several")
def _(x, codes, scales, zeros, tables, outs, x_bits):
    return [x.new_empty(*x.shape[:-1], out) for out in outs]


@native.shapes_of("int8_matmul_several")
def _(x, codes, scales, x_scale):
    return [x.new_empty(*x.shape[:-1], scale.shape[0]) for scale in scales]
