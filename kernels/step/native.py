"""A program of a decoding step, run by `native/step.cpp`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.hadamard import widest_block
from kernels.hadamard.cpu import factors
from kernels.registry import ran
from kernels.step.cache_view import CacheView
from kernels.step.program import (
    ACTIVATIONS,
    Attention,
    CacheAttention,
    Experts,
    InputChange,
    Mixture,
    Norm,
    Products,
    Program,
    Weight,
)

RESIDUAL, ATTENDED = -1, -2  # numbers of a product's input in native/step_types.inc
MOST_TOKENS = 8  # of different sequences
MOST_IN_SEQUENCE = 16  # tokens of one sequence
DTYPES = (torch.bfloat16, torch.float16)


def why_not(dtype: torch.dtype, tokens: int, sequences: int) -> str | None:
    """None if steps of up to `tokens` tokens of so many sequences can run here with activations of this dtype; else the
    reason, in one line."""
    if dtype not in DTYPES:
        return f"activations in {str(dtype).removeprefix('torch.')}, not in 16 bits"
    most = MOST_IN_SEQUENCE if sequences == 1 else MOST_TOKENS
    if not 1 <= tokens <= most:
        return f"{tokens} tokens at a time, more than {most}"
    return native.why_not()


class DecodeStep:
    """A program that is ready to run. It keeps the program's tensors.

    Args:
        program: the instructions of a step.
        dtype: of the inputs of products, bfloat16 or float16; everything else is in float32.
        isa: the instruction set; "auto": the best of this machine.

    Raises:
        ValueError: a dtype or a number of tokens that cannot be run, or a machine without C++ kernels.
        RuntimeError: tensors that do not match.
    """

    def __init__(self, program: Program, dtype: torch.dtype, isa: str = "auto") -> None:
        if reason := why_not(dtype, program.tokens, program.sequences):
            raise ValueError(f"no native step: {reason}")
        self.program = program
        self.isa = native.isa(dtype) if isa == "auto" else isa
        bfloat16 = dtype == torch.bfloat16
        self._native = torch.classes.workbench.DecodeStep(program.hidden, program.tokens, bfloat16, self.isa)
        self._buffers: dict[str, int] = {}
        self._changes: list[InputChange] = []
        if program.stream is not None:
            self._native.rotates(self._change(program.stream))
        if program.embedding is not None:
            self._native.embed(self._weight(program.embedding), program.embedding_scale)
        add = {
            Products: self._products, Experts: self._experts, Mixture: self._mixture, Attention: self._attention,
            CacheAttention: self._handed,
        }  # fmt: skip
        for one in program.instructions:
            add[type(one)](one)

    def __call__(self, ids: Tensor, position: int, hidden: Tensor | None = None) -> Tensor:
        """The next token of every sequence, or of one sequence behind each of several tokens.

        Args:
            ids: int64 [tokens, 1], the last token of every sequence; or, if the cache is of one sequence, its next
                tokens, up to the program's number of tokens. The logits of each are then bit-equal to those of steps
                with one token, so that guessed tokens can be verified.
            position: of these tokens, or of the first; the number of positions in the cache.
            hidden: float32 [tokens, hidden], if the program has no embedding.

        Returns:
            int64 [tokens, 1]: the index of the first largest logit; `logits` gives all logits until the next call.
        """
        ran("decode_step", f"cpu {self.isa}")
        return self._native.run(ids, position, hidden)

    def begin(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The first part of a step whose program has `CacheAttention` instructions: up to the first attention.
        Arguments as in a call.

        Returns:
            float32 [n]: queries [tokens, heads * channels], keys and values, concatenated; memory of the step, valid
            until the next part.
        """
        ran("decode_step", f"cpu {self.isa}")
        return self._native.begin(ids, hidden)

    def go_on(self, attended: Tensor) -> Tensor:
        """The next part: takes the attention's result, float32 [tokens, heads * channels], and returns the same as
        `begin`; at the end, the next tokens, int64 [tokens, 1]."""
        return self._native.go_on(attended)

    def attend_kept(
        self, views: Sequence[CacheView], tables: Sequence[tuple[Tensor, Tensor]], positions: Tensor
    ) -> Tensor:
        """Run the next attentions and the part after them, as `go_on` does. Each attention reads the tensors that a
        layer of a cache has lent, after the new keys and values have been written there.

        Args:
            views: of the next layers, in order. tables: of each, cosines and sines, float32 [positions, rotated
                channels]. positions: int64 [tokens, 1], of the tokens.
        """
        tensors, numbers, lists = [], [], []
        for view, (cos, sin) in zip(views, tables, strict=True):
            coded = (view.params_k, view.params_v, view.tail_k, view.tail_v) if view.bits < 16 else ()
            parts = zip(view.k, view.v, view.starts, *coded, strict=True)
            tensors.append([cos, sin, *(tensor for part in parts for tensor in part)])
            bounds, pages, page, most, indices, lengths = view.sparse
            turned = int(view.turned_keys), int(view.turned_values)
            numbers.append([view.bits, view.group, *turned, page, most, *view.counts])
            lists += [bounds, pages, indices, lengths]
        return self._native.attend_kept(tensors, numbers, lists, positions)

    @property
    def last_input(self) -> Tensor:
        """float32 [tokens, hidden]: the input from which the last part computed queries, keys and values."""
        return self._native.last_input()

    @property
    def logits(self) -> Tensor:
        """The logits of the last call, float32 [tokens, vocabulary], rounded to the 16 bits of the activations."""
        return self._native.logits()

    def time(self, on: bool = True) -> None:
        """From now on, sum up the seconds of each instruction of the program in `seconds`, from 0 on; or no longer."""
        self._native.time(on)

    @property
    def seconds(self) -> list[float]:
        """Seconds of each instruction, in all calls since `time`, with the wait for the slowest thread; without the
        look-up of the embedding. A stop for a cache's attention lasts until the next part. Empty before `time`."""
        return self._native.seconds()

    def _weight(self, w: Weight) -> int:
        data, scale, zero, table = w.tensors()
        weight = self._native.weight(w.layout, data, scale, zero, table, w.bias, w.x_scale, w.sizes)
        if w.change is not None:
            self._native.changes(weight, self._change(w.change), w.gains)
        return weight

    def _change(self, change: InputChange) -> int:
        """The number of a change; equal changes have the same number, and run once if weights share an input."""
        for number, one in enumerate(self._changes):
            if one.same(change):
                return number
        self._changes.append(change)
        signs, matrices = None, []
        if change.signs is not None:
            signs, matrices = change.signs.float() * change.block**-0.5, list(factors(change.block))
        order = None if change.order is None else change.order.int().contiguous()
        return self._native.change(signs, matrices, order, change.bits, change.group_size, change.wide, change.step)

    def _products(self, p: Products) -> None:
        reads = {"residual": RESIDUAL, "attention": ATTENDED}
        self._native.products(
            reads[p.reads] if p.reads in reads else self._buffers[p.reads],
            self._buffer(p.writes),
            [self._weight(w) for w in p.weights],
            ACTIVATIONS.index(p.activation),
            -1 if p.added is None else self._buffers[p.added],
            *_norm(p.after),
            *_norm(p.before),
        )

    def _buffer(self, name: str) -> int:
        """The number of the buffer of this name."""
        return self._buffers.setdefault(name, len(self._buffers))

    def _experts(self, e: Experts) -> None:
        rule, sizes = e.choice, [self._buffers[e.reads], self._buffer(e.writes)]
        sizes += [rule.count, rule.sigmoid, rule.rounded, rule.whole, ACTIVATIONS.index(e.activation)]
        gates, others = ([self._weight(w) for w in weights] for weights in (e.gates, e.others))
        self._native.experts(sizes, gates, others, rule.factor, rule.bias)

    def _mixture(self, m: Mixture) -> None:
        more = (-1 if name is None else self._buffers[name] for name in (m.added, m.gate))
        sizes = [self._buffers[m.reads], self._buffer(m.writes), m.chosen, *more]
        self._native.mixture(sizes, [self._weight(w) for w in m.weights])

    def _handed(self, a: CacheAttention) -> None:
        (query, eps), (key, _) = _norm(a.query_norm), _norm(a.key_norm)
        sizes = [self._buffers[a.reads], a.heads, a.kv_heads, a.channels, a.neighbours]
        rotation = self._change(InputChange(torch.ones(a.channels), widest_block(a.channels)))
        self._native.hand_over(sizes, rotation, a.scale, a.softcap, query, key, eps or _norm(a.key_norm)[1])

    def _attention(self, a: Attention) -> None:
        sizes = [self._buffers[a.reads], a.heads, a.kv_heads, a.channels, a.window, a.neighbours]
        (query, eps), (key, _) = _norm(a.query_norm), _norm(a.key_norm)
        self._native.attend(
            sizes, a.scale, a.softcap, a.keys, a.values, a.length, a.cos, a.sin, query, key, eps or _norm(a.key_norm)[1]
        )


def _norm(norm: Norm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)
