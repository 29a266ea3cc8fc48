"""A recognised decoder: its blocks, linears, norms and rotary tables."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kernels.step.program import Norm
from kernels.step.recognition.mixture import MixtureOfExperts
from kernels.step.recognition.parts import NotNative

UNTURNED = "without rotation"  # kind of the rotary tables of a layer that rotates nothing


@dataclass(frozen=True)
class DecoderBlock:
    """A block: norms, attention and a gated MLP, whose linears are the model's modules.

    index: of its layer in the cache. before_attention, before_mlp: norms of the residual stream, or None.
    after_attention, after_mlp: norms of the results that are added to it, or None. attention: the module that holds q,
    k, v and o. activation: the gate's, a name of `program.ACTIVATIONS`. kind: of its rotary tables, or None for the
    only one. scale: of scores. softcap: softcap * tanh(score / softcap), or 0. window: number of positions that a token
    sees, itself included, or 0 for all. query_norm, key_norm: of each head, or of all heads together. attends, has_mlp:
    False if the part was dropped. Its linears are None then, and a layer of the cache without attention keeps
    one number for each position, which nothing reads. mixture: in the place of gate, up and down. neighbours: as in
    `program.Attention`.
    """

    name: str
    index: int
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    attention: nn.Module
    q: nn.Module | None
    k: nn.Module | None
    v: nn.Module | None
    o: nn.Module | None
    gate: nn.Module | None
    up: nn.Module | None
    down: nn.Module | None
    activation: str
    heads: int
    kv_heads: int
    channels: int
    kind: str | None
    scale: float
    softcap: float
    window: int
    query_norm: Norm | None
    key_norm: Norm | None
    attends: bool = True
    has_mlp: bool = True
    mixture: MixtureOfExperts | None = None
    neighbours: bool = False


@dataclass(frozen=True)
class Decoder:
    """A model of the Llama family.

    The residual stream here is the model's, divided by `residual_scale`, the factor with which the model adds the
    results of its parts: they are added as they are, and norms, which divide the factor out, have an `eps` that fits.

    norm: before the head. stream: the module that rotates the residual stream between the blocks, or None.
    cap: soft cap of the logits, cap * tanh(logit / cap), or 0 for none; the largest logit stays the largest.
    embedding_scale: factor of embedded tokens. residual_scale, logit_scale: factors of parts and of logits, positive.
    """

    embedding: nn.Module
    blocks: tuple[DecoderBlock, ...]
    norm: Norm
    head: nn.Module
    rotary: "RotaryTables"
    dtype: torch.dtype
    stream: nn.Module | None = None
    cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream of tokens, float32 [..., hidden]."""
        embedded = self.embedding(ids).float()
        return embedded if self.entry_scale == 1 else embedded * self.entry_scale

    @property
    def entry_scale(self) -> float:
        """The factor with which embedded tokens enter the residual stream."""
        return self.embedding_scale / self.residual_scale

    @property
    def changes_logits(self) -> bool:
        """Whether the head's products are not yet the logits, which are in the same order."""
        return bool(self.cap) or self.logit_scale != 1

    def logits(self, products: Tensor) -> Tensor:
        """The logits of a model whose head has these products."""
        logits = products if self.logit_scale == 1 else products * self.logit_scale
        return self.cap * (logits / self.cap).tanh() if self.cap else logits

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.norm.weight.numel()

    @property
    def attending(self) -> list[DecoderBlock]:
        """The blocks whose attention was not dropped."""
        return [block for block in self.blocks if block.attends]


@dataclass
class RotaryTables:
    """Cosines and sines of all positions, as the model's rotary module gives them, in float32.

    changes_at: the length of text from which on a pass has other frequencies for all its positions, as Phi-4-mini's
        have behind 4,096 tokens; None: none has.
    """

    module: nn.Module
    changes_at: int | None = None
    made: dict[tuple[str | None, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, kind: str | None, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [at least `length`, rotated channels] for layers of this kind, in a pass up to so many tokens."""
        later = self.changes_at is not None and length > self.changes_at
        key = kind, "later" if later else "first"
        made = len(self.made[key][0]) if key in self.made else 0
        if made < length:
            device = next((buffer.device for buffer in self.module.buffers()), None)
            room = max(length, 2 * made)  # passes over one more token need one more place
            if self.changes_at is not None and not later:
                room = min(room, self.changes_at)
            self.made[key] = self.at(kind, torch.arange(room, device=device))
        return self.made[key]

    def of_steps(self, kind: str | None, length: int) -> tuple[Tensor, Tensor]:
        """The same for steps of one token, each of which has the frequencies of its own position."""
        first = self.changes_at
        if first is None or length <= first:
            return self.of(kind, length)
        if len(self.made.get((kind, "steps"), ((),))[0]) != length:
            pairs = zip(self.of(kind, first), self.of(kind, length), strict=True)
            cos, sin = (torch.cat([early[:first], late[first:length]]) for early, late in pairs)
            self.made[kind, "steps"] = cos, sin
        return self.made[kind, "steps"]

    def at(self, kind: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [positions, rotated channels] for layers of this kind, at these positions, int64.

        Raises:
            NotNative: the module gives no such tables.
        """
        more = () if kind in (None, UNTURNED) else (kind,)
        try:
            tables = self.module(torch.zeros(1, dtype=torch.float32, device=positions.device), positions[None], *more)
        except TypeError as error:
            raise NotNative(f"its rotary module takes other arguments: {error}") from error
        cos, sin = (table[0].float().contiguous() for table in tables)
        return (torch.ones_like(cos), torch.zeros_like(sin)) if kind == UNTURNED else (cos, sin)
