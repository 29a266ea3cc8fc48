"""What a step of decoding does, as data: a list of instructions over the tensors of a model and of its cache."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kernels.int_matmul import Packed
from kernels.int_matmul import dequantize as dequantize_integers
from kernels.int_matmul import to_rows as integer_rows
from kernels.lut_matmul import Codebook
from kernels.lut_matmul import dequantize as dequantize_codebook
from kernels.lut_matmul import to_rows as codebook_rows

ACTIVATIONS = ("", "silu", "gelu_tanh", "relu")  # numbered as in native/step_types.inc


@dataclass(frozen=True)
class Weight:
    """W [out, in], and the bias of its product.

    stored: 16-bit floats [out, in], or codes in the layout "panels". bias: float32 [out], or None.
    """

    stored: Tensor | Packed | Codebook
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return tuple(self.stored.shape)

    @property
    def layout(self) -> str:
        """ "rows" or "panels"."""
        return "rows" if isinstance(self.stored, Tensor) else self.stored.layout

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(data, scale, zero, table) as the loops read them."""
        w = self.stored
        if isinstance(w, Tensor):
            return w, None, None, None
        if w.layout != "panels":
            raise ValueError(f"`stored` lies in {w.layout}; a step of decoding takes panels")
        return (w.codes, w.scale, w.zero, None) if isinstance(w, Packed) else (w.codes, w.scale, None, w.table)

    def dequantize(self) -> Tensor:
        """W in float32."""
        if isinstance(self.stored, Packed):
            return dequantize_integers(integer_rows(self.stored)).float()
        if isinstance(self.stored, Codebook):
            return dequantize_codebook(codebook_rows(self.stored)).float()
        return self.stored.float()


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x²) + eps) * weight, with weight in float32 [n]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Products:
    """Products of one input with one or several weights, one beside the other: [tokens, out] each.

    reads: "residual" (through the norm `before`), "attention" (the last one), or what another instruction writes.
    writes: a name for the result. activation: the first product, activated, times the second takes the place of both.
    added: a result that is added to the residual stream first, through the norm `after` if there is one.
    """

    reads: str
    writes: str
    weights: tuple[Weight, ...]
    activation: Literal["", "silu", "gelu_tanh", "relu"] = ""
    before: Norm | None = None
    added: str | None = None
    after: Norm | None = None


@dataclass(frozen=True)
class Attention:
    """Attention of one token per sequence; its key and value are put into the cache first.

    reads: the name of queries [tokens, heads * channels], keys and values, one beside the other.
    keys, values: the cache [tokens, kv heads, positions, channels] in 16 bits; length: int64, how many positions it
        holds, which grows by one. scale: of scores. softcap: softcap * tanh(score / softcap), or 0 for none.
    window: how many positions a token sees, itself included; 0: all.
    cos, sin: float32 [positions, turned channels]; the first half of them turns with the second.
    query_norm, key_norm: of every head before it is turned, or None.
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

    @property
    def channels(self) -> int:
        """Of a head."""
        return self.keys.shape[-1]


@dataclass(frozen=True)
class Program:
    """A step of decoding.

    embedding: rows that tokens look up, multiplied by `embedding_scale`; None: the hidden state is given.
    instructions: the last one is the head's product, which gives the logits.
    """

    hidden: int
    tokens: int
    embedding: Weight | None
    instructions: tuple[Products | Attention, ...]
    embedding_scale: float = 1.0
