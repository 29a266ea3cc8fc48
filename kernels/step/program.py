"""A decoding step as data: a list of instructions over the tensors of a model and of its cache.

From "The Fused Kernel Library" (arXiv:2508.07071): norms, activations, changes of inputs and residual sums are fields
of the product beside them, so that whatever executes the list fuses them with it, and what lies between stays in
registers or caches. The paper compiles a kernel for each chain; here the kernels are there before, in C++ and Triton.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.hadamard import hadamard
from kernels.int_matmul import Packed
from kernels.int_matmul import dequantize as dequantize_integers
from kernels.int_matmul import to_rows as integer_rows
from kernels.lut_matmul import Codebook
from kernels.lut_matmul import dequantize as dequantize_codebook
from kernels.lut_matmul import to_rows as codebook_rows
from kernels.sparse_matmul import SparseRows, dense_rows
from kernels.trellis_matmul import Trellis
from kernels.trellis_matmul import decode as decode_trellis
from kernels.w8a8_matmul import W8
from kernels.w8a8_matmul import to_rows as w8a8_rows

ACTIVATIONS = ("", "silu", "gelu_tanh", "relu")  # numbered as in native/step_types.inc
PANELS = {"panels": 16, "int8": 32}  # rows that lie together, by the layout of a weight


@dataclass(frozen=True)
class InputChange:
    """The change of a product's input before the multiplication: a transform, a permutation of the columns, and then
    rounding to integer codes.

    signs: [in], ±1 float32, multiplied into x before a Hadamard transform of each `block` neighbouring columns; None: x
        is not transformed. order: [in] integers, the source column of each place; None: no permutation. bits: of
        symmetric codes, 0 for no rounding. group_size: number of columns that share a step, chosen so that the largest
        of them has the largest code. step: one step for all codes, or 0. wide: number of first groups with 8-bit codes.
    """

    signs: Tensor | None = None
    block: int = 1
    bits: int = 0
    group_size: int = 1
    step: float = 0.0
    order: Tensor | None = None
    wide: int = 0

    def same(self, other: "InputChange") -> bool:
        """Do the two changes give the same result for every input?"""
        settings = (self.block, self.bits, self.group_size, self.step, self.wide)
        if settings != (other.block, other.bits, other.group_size, other.step, other.wide):
            return False
        tensors = (self.signs, other.signs), (self.order, other.order)
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in tensors)

    def turn(self, x: Tensor) -> Tensor:
        """The transform alone, without the permutation. It is orthogonal."""
        return x if self.signs is None else hadamard((x * self.signs).unflatten(-1, (-1, self.block))).flatten(-2)

    def turn_back(self, x: Tensor) -> Tensor:
        """The inverse of `turn`."""
        return x if self.signs is None else hadamard(x.unflatten(-1, (-1, self.block))).flatten(-2) * self.signs


@dataclass(frozen=True)
class Weight:
    """W [out, in], and the bias of its product.

    stored: 16-bit floats [out, in], with or without their zeros; codes in the layout "panels"; int8 codes in the layout
        "panels", whose product rounds x to 8 bits; or walks through a trellis. bias: float32 [out], or None. change: of
        the input, or None.
    gains: float32 [in], factors of the columns (trellis only), or None. x_scale: the step of all inputs of int8 codes,
        float32 without dimensions; None: one step per token.
    """

    stored: Tensor | SparseRows | Packed | Codebook | W8 | Trellis
    bias: Tensor | None = None
    change: InputChange | None = None
    gains: Tensor | None = None
    x_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return tuple(self.stored.shape)

    @property
    def layout(self) -> str:
        """ "rows", "kept", "panels", "int8" or "walks"."""
        kinds = {Tensor: "rows", SparseRows: "kept", Trellis: "walks", W8: "int8"}
        return next((name for kind, name in kinds.items() if isinstance(self.stored, kind)), "panels")

    @property
    def sizes(self) -> list[int]:
        """The shape; for walks also their bits and the bits of a state."""
        w = self.stored
        return [*self.shape, *((w.bits, w.states) if isinstance(w, Trellis) else ())]

    def rows(self, start: int, stop: int) -> "Weight":
        """The weight of these outputs alone, which shares the memory.

        Raises:
            ValueError: it is stored so that the rows do not lie apart.
        """
        w, size = self.stored, PANELS.get(self.layout, 1)
        if self.layout == "walks" or start % size or (stop % size and stop != self.shape[0]):
            raise ValueError(f"rows {start} to {stop} of {list(self.shape)} do not lie apart in {self.layout}")
        shape, panels = (stop - start, self.shape[1]), slice(start // size, -(-stop // size))
        if isinstance(w, Tensor):
            stored = w[start:stop]
        elif isinstance(w, SparseRows):
            first, last = w.starts[start], w.starts[stop]
            stored = SparseRows(w.mask[start:stop], w.values[first:last], w.starts[start : stop + 1] - first)
        elif isinstance(w, W8):
            stored = w._replace(codes=w.codes[panels], scale=w.scale[start:stop], shape=shape)
        else:
            stored = w._replace(codes=w.codes[panels], scale=w.scale[panels], shape=shape)
            if getattr(w, "zero", None) is not None:
                stored = stored._replace(zero=w.zero[panels])
        return replace(self, stored=stored, bias=None if self.bias is None else self.bias[start:stop])

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(data, scale, zero, table) in the form that the loops read."""
        w = self.stored
        if isinstance(w, Tensor):
            return w, None, None, None
        if isinstance(w, SparseRows):
            return w.values, w.mask, w.starts, None
        if isinstance(w, Trellis):
            return w.codes, w.scale, None, None
        if w.layout != "panels":
            raise ValueError(f"`stored` lies in {w.layout}; a step of decoding takes panels")
        return w.codes, w.scale, getattr(w, "zero", None), getattr(w, "table", None)

    def dequantize(self) -> Tensor:
        """W in float32, to be multiplied by the changed input."""
        if isinstance(self.stored, Trellis):
            return decode_trellis(self.stored) * (1 if self.gains is None else self.gains)
        if isinstance(self.stored, W8):
            return w8a8_rows(self.stored).codes.float() * self.stored.scale[:, None]
        if isinstance(self.stored, Packed):
            return dequantize_integers(integer_rows(self.stored)).float()
        if isinstance(self.stored, Codebook):
            return dequantize_codebook(codebook_rows(self.stored)).float()
        if isinstance(self.stored, SparseRows):
            return dense_rows(self.stored).float()
        return self.stored.float()


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x²) + eps) * weight, with weight in float32 [n]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Products:
    """Products of one input with one or several weights, side by side: [tokens, out] each.

    reads: "residual" (after the norm `before`, if given), "attention" (the last one), or a name that another
        instruction writes.
    writes: a name for the result. activation: if set, activation(first product) * second product replaces both.
    added: a result that is added to the residual stream first, normalised by `after` if given.
    """

    reads: str
    writes: str
    weights: tuple[Weight, ...]
    activation: Literal["", "silu", "gelu_tanh", "relu"] = ""
    before: Norm | None = None
    added: str | None = None
    after: Norm | None = None


@dataclass(frozen=True)
class Choice:
    """The rule by which a router chooses `count` experts for each token.

    sigmoid: an expert's share is the sigmoid of its logit; or the softmax. rounded: logits are rounded to 16 bits.
    whole: the shares of the chosen experts are divided by their sum. factor: of the shares. bias: float32 [experts],
    added to the shares for the choice alone, or None.
    """

    count: int
    sigmoid: bool = False
    rounded: bool = True
    whole: bool = True
    factor: float = 1.0
    bias: Tensor | None = None

    def __call__(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The chosen experts, int64, and their shares, both [tokens, count], for float32 logits [tokens, experts] of a
        model in this dtype."""
        logits = logits.to(dtype).float() if self.rounded else logits
        shares = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        chosen = (shares if self.bias is None else shares + self.bias).topk(self.count, dim=-1).indices
        shares = shares.gather(-1, chosen)
        return chosen, self.factor * (shares / shares.sum(-1, keepdim=True) if self.whole else shares)


@dataclass(frozen=True)
class Experts:
    """The choice of some experts of a mixture for each token, and the gated products of the token with these: as many
    results as are chosen, [tokens, chosen, out], activation(first product) * second product.

    It follows the product of the router with the same input.

    reads: the name of the router's logits [tokens, experts]. gates, others: a weight of each expert.
    """

    reads: str
    writes: str
    gates: tuple[Weight, ...]
    others: tuple[Weight, ...]
    activation: Literal["silu", "gelu_tanh", "relu"]
    choice: Choice


@dataclass(frozen=True)
class Mixture:
    """The products of the results that the last `Experts` wrote with the second weights of the same experts, added up
    with the experts' shares: [tokens, hidden].

    reads: the name of the results. weights: one of each expert. added: a result that is added to the sum, or None;
    gate: the name of logits with one more product of one output behind them, whose sigmoid is the share of `added`;
    None: 1.
    """

    reads: str
    writes: str
    weights: tuple[Weight, ...]
    chosen: int
    added: str | None = None
    gate: str | None = None


@dataclass(frozen=True)
class Attention:
    """Attention of one token per sequence, or of several tokens of one sequence, which see those before them; new keys
    and values are written into the cache first.

    reads: the name of queries [tokens, heads * channels], keys and values, side by side.
    keys, values: the cache [sequences, kv heads, positions, channels] in 16 bits; length: int64, the number of
        positions in use, which grows by one for each token of a sequence. scale: of scores.
    softcap: softcap * tanh(score / softcap), or 0 for none.
    window: number of positions that a token sees, itself included; 0: all.
    cos, sin: float32 [positions, rotated channels]; each channel of the first half is paired with one of the second;
    neighbours: or each with its neighbour, whose angle is in the first half of the tables.
    query_norm, key_norm: before the rotation, of every head by itself, or, with a weight for all of them, of all heads
        together; or None.
    """

    reads: str
    heads: int
    kv_heads: int
    keys: Tensor
    values: Tensor
    length: Tensor
    cos: Tensor
    sin: Tensor
    scale: float
    softcap: float = 0.0
    window: int = 0
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    neighbours: bool = False

    @property
    def channels(self) -> int:
        """The number of channels of a head."""
        return self.keys.shape[-1]


@dataclass(frozen=True)
class CacheAttention:
    """Replaces an `Attention`: the step stops here, and continues with a result that the cache has computed, or attends
    to tensors that the cache lends (`kernels.step.cache_view.CacheView`).

    The fields are those of `Attention`, without a window.
    """

    reads: str
    heads: int
    kv_heads: int
    channels: int
    scale: float
    softcap: float = 0.0
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    neighbours: bool = False


@dataclass(frozen=True)
class Program:
    """A decoding step.

    tokens: number of sequences; or, if the cache is of one sequence, the largest number of its tokens in a step.
    embedding: rows that tokens look up, multiplied by `embedding_scale`; None: the hidden state is given.
    instructions: the last one is the head's product, which gives the logits.
    stream: transform of the residual stream after the embedding, undone before the head's norm; None: no transform.
    """

    hidden: int
    tokens: int
    embedding: Weight | None
    instructions: tuple[Products | Experts | Mixture | Attention | CacheAttention, ...]
    embedding_scale: float = 1.0
    stream: InputChange | None = None

    @property
    def sequences(self) -> int:
        """The number of sequences of a step, which have one token each if they are several."""
        caches = (len(one.keys) for one in self.instructions if isinstance(one, Attention))
        return next(caches, self.tokens)
