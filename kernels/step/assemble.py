"""A decoder's step of decoding as one call of C++ (`DecodeStep`): its program, checked against the model."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from kernels import native
from kernels.hadamard import widest_block
from kernels.int_matmul import Packed
from kernels.lut_matmul import Codebook
from kernels.registry import recording
from kernels.sparse_matmul import SparseRows
from kernels.step.cache import LayerRoom, rooms_of
from kernels.step.native import DecodeStep, why_not
from kernels.step.program import (
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
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.likeness import check_likeness, check_logits, difference, shaken
from kernels.step.recognition.mixture import MixtureOfExperts
from kernels.step.recognition.parts import NotNative, Rows
from kernels.step.recognition.recognise import STREAM, recognise
from kernels.trellis_matmul import Trellis
from kernels.w8a8_matmul import W8

OPS = {
    Packed: "int_matmul", Codebook: "lut_matmul", W8: "w8a8_matmul", Trellis: "trellis_matmul",
    SparseRows: "sparse_matmul",
}  # fmt: skip
CHECKED = 4  # steps
Instruction = Products | Experts | Mixture | Attention | CacheAttention


@dataclass
class NativeStep:
    """A step of decoding: (tokens [batch, 1], positions [1, 1]) -> the next tokens [batch, 1]. Of one sequence, several
    tokens [n, 1] can be read in one step, which gives the next token behind each.

    Attributes:
        decoder: whose embedding gives the hidden state if the program has no embedding.
        kernels: {op: implementations that run}.
    """

    step: DecodeStep
    decoder: Decoder
    idle: tuple[Tensor, ...] = ()  # numbers of positions in use of layers of the cache whose attention was dropped
    kernels: dict[str, set[str]] = field(default_factory=dict)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.at(tokens, int(positions[0, -1]))

    def at(self, tokens: Tensor, position: int) -> Tensor:
        """The next tokens [batch, 1] behind tokens [batch, 1] at a position; of one sequence, those [n, 1] behind each
        of tokens [n, 1], the first at the position."""
        hidden = self.decoder.embed(tokens).flatten(0, 1) if self.step.program.embedding is None else None
        largest = self.step(tokens, position, hidden)
        for length in self.idle:
            length.fill_(position + len(tokens) // self.step.program.sequences)
        return largest

    @property
    def logits(self) -> Tensor:
        """The logits of the last call, float32 [tokens, vocabulary]."""
        return self.decoder.logits(self.step.logits)


@torch.no_grad()
def native_step(
    model: nn.Module,
    cache: Cache,
    tokens: Tensor,
    positions: Tensor,
    restore: Callable[[], None],
    decoder: Decoder | None = None,
) -> NativeStep:
    """The native step of a decoder.

    Args:
        model: a causal decoder. cache: static, filled up to the position of the step.
        tokens, positions: [batch, 1] and [1, 1], for the step that is checked; all later steps have these shapes.
        restore: restores the cache to its state before the step.
        decoder: the model, if it is recognised and its layers are compared already (`native_prompt` does).

    Raises:
        NotNative: an unknown model, format or cache, or a step whose logits differ from the model's.
    """
    known = decoder or recognise(model)
    step = step_of(known, rooms_of(known, cache), len(tokens))
    if decoder is None:
        check_likeness(model, known)
    restore()
    try:
        with recording() as step.kernels:
            _check(step, model, cache, tokens, int(positions[0, -1]))
    except RuntimeError as error:  # such as a cache that counts its positions in another way
        raise NotNative(str(error).splitlines()[0]) from error
    for op, ran in _products_of(step.step.program, model.dtype):
        step.kernels.setdefault(op, set()).add(ran)
    return step


def step_of(decoder: Decoder, rooms: Sequence[LayerRoom], tokens: int) -> NativeStep:
    """A decoder's step for `tokens` sequences, or for up to so many tokens of one, not yet compared with the model.

    Raises:
        NotNative: an unknown format or cache.
    """
    program = program_of(decoder, rooms, tokens)
    try:
        idle = tuple(room.length for block, room in zip(decoder.blocks, rooms, strict=True) if not block.attends)
        return NativeStep(DecodeStep(program, decoder.dtype), decoder, idle)
    except (ValueError, RuntimeError) as error:
        raise NotNative(str(error).splitlines()[0]) from error


def _products_of(program: Program, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """(op, implementation) for each weight of a program."""
    for weight in {id(w): w for one in program.instructions for w in weights_in(one)}.values():
        op, kept = OPS.get(type(weight.stored), "linear"), isinstance(weight.stored, SparseRows)
        if op == "linear" or kept:
            yield op, f"cpu {native.rows_isa(dtype, weight.shape[1], kept=kept, step=True)}"
        else:
            yield op, f"cpu {native.integers() if op == 'w8a8_matmul' else native.isa(dtype)}"


def weights_in(one: Instruction) -> tuple[Weight, ...]:
    """The weights of an instruction."""
    if isinstance(one, Experts):
        return one.gates + one.others
    return one.weights if isinstance(one, Products | Mixture) else ()


def program_of(decoder: Decoder, rooms: Sequence[LayerRoom] | None, tokens: int) -> Program:
    """The program of a decoder's step; without an embedding if the program cannot look it up.

    Args:
        rooms: one for each block; None: the cache computes the attention. tokens: number of sequences, or the largest
            number of tokens of the rooms' only sequence.

    Raises:
        NotNative: there is no program for this decoder or format.
    """
    if reason := why_not(decoder.dtype, tokens, tokens if rooms is None else len(rooms[0].keys)):
        raise NotNative(reason)
    if native.isa(decoder.dtype) == "portable":
        raise NotNative("the loops have no vector instructions of this processor")
    instructions: list[Instruction] = []
    pending = Pending()
    for block, room in zip(decoder.blocks, rooms or [None] * len(decoder.blocks), strict=True):
        own, pending = _instructions(decoder, block, room, pending)
        instructions += own
    head = (weight_of(decoder.head, "lm_head"),)
    final = Products("residual", "logits", head, before=decoder.norm, added=pending.name, after=pending.norm)
    embedding, scale = _embedding(decoder.embedding)
    turned = None if decoder.stream is None else _change(decoder.stream.rotation, STREAM, decoder.hidden)
    return Program(
        decoder.hidden, tokens, embedding, (*instructions, final), scale * decoder.entry_scale, turned
    )  # fmt: skip


class Pending(NamedTuple):
    """A result that the next instruction that reads the residual stream adds to it first, normalised by `norm`."""

    name: str | None = None
    norm: Norm | None = None


def _instructions(
    decoder: Decoder, block: DecoderBlock, room: LayerRoom | None, pending: Pending
) -> tuple[list[Instruction], Pending]:
    """The instructions of a block, and what they leave to be added."""
    found: list[Instruction] = []

    def weights(*names: str) -> tuple[Weight, ...]:
        return tuple(weight_of(getattr(block, n), f"{block.name}'s {n}_proj") for n in names)

    if block.attends:
        before = {"before": block.before_attention, "added": pending.name, "after": pending.norm}
        found.append(Products("residual", "qkv", weights("q", "k", "v"), **before))
        found.append(_attention(decoder, block, room))
        found.append(Products("attention", "o", weights("o")))
        pending = Pending("o", block.after_attention)
    if block.mixture is not None:
        found += _mixture(block, block.mixture, pending)
        pending = Pending("experts", block.after_mlp)
    elif block.has_mlp:
        before = {"before": block.before_mlp, "added": pending.name, "after": pending.norm}
        found.append(Products("residual", "mlp", weights("gate", "up"), block.activation, **before))
        found.append(Products("mlp", "down", weights("down")))
        pending = Pending("down", block.after_mlp)
    return found, pending


def _mixture(block: DecoderBlock, m: MixtureOfExperts, pending: Pending) -> Iterator[Instruction]:
    """The instructions of a mixture, which read the residual stream after the pending sum."""

    def weights(linears: Sequence[nn.Module], which: str) -> tuple[Weight, ...]:
        return tuple(weight_of(linear, f"{block.name}'s {which}_proj") for linear in linears)

    router = Weight(m.router), *weights([] if m.shared_gate is None else [m.shared_gate], "shared_gate")
    yield Products("residual", "router", router, before=block.before_mlp, added=pending.name, after=pending.norm)
    first = weights(m.gates, "experts' gate"), weights(m.ups, "experts' up")
    yield Experts("router", "chosen", *first, block.activation, m.choice)
    shared = None
    if m.shared is not None:
        both, shared = weights(m.shared[:2], "shared gate and up"), "shared down"
        yield Products("residual", "shared", both, block.activation, before=block.before_mlp)
        yield Products("shared", shared, weights(m.shared[2:], "shared down"))
    gate = None if m.shared_gate is None else "router"
    yield Mixture("chosen", "experts", weights(m.downs, "experts' down"), m.choice.count, shared, gate)


def _attention(decoder: Decoder, block: DecoderBlock, room: LayerRoom | None) -> Attention | CacheAttention:
    """A block's attention to the positions in its room, or, without one, by the cache."""
    norms = {"softcap": block.softcap, "query_norm": block.query_norm, "key_norm": block.key_norm}
    norms |= {"neighbours": block.neighbours}
    if room is None:
        return CacheAttention("qkv", block.heads, block.kv_heads, block.channels, block.scale, **norms)
    cos, sin = decoder.rotary.of_steps(block.kind, room.keys.shape[2])
    return Attention(
        "qkv", block.heads, block.kv_heads, room.keys, room.values, room.length, cos, sin, block.scale,
        window=block.window, **norms,
    )  # fmt: skip


def weight_of(module: nn.Module, name: str) -> Weight:
    """The weight of a linear module, dense or compressed."""
    if isinstance(module, Rows):
        try:
            return weight_of(module.whole, name).rows(module.start, module.stop)
        except ValueError as error:
            raise NotNative(f"{name}: {error}") from error
    bias = None if module.bias is None else module.bias.detach().float().contiguous()
    if type(module) is nn.Linear:
        stored = module.weight.detach()
    else:
        parts = getattr(module, "parts", None)
        if parts is None or len(parts) != 1:
            raise NotNative(f"{name} ({type(module).__name__}) is not one stored weight")
        stored = _stored(parts[0], name)
    change = _change(getattr(module, "transform", None), name, stored.shape[1])
    if isinstance(stored, Tensor) and (not stored.is_contiguous() or stored.dtype.itemsize != 2):
        raise NotNative(f"{name} is not in 16 bits, row by row")
    if isinstance(stored, Trellis | W8) and change is not None:
        raise NotNative(f"{name} has a transform beside that of its format")
    if isinstance(stored, W8):
        return Weight(stored, bias, x_scale=parts[0].x_scale)
    if isinstance(stored, Packed) and hasattr(parts[0], "x_scale"):  # int8, multiplied by inputs that are rounded first
        if change is not None:
            raise NotNative(f"{name} has a transform beside that of its format")
        fixed = 0.0 if parts[0].x_scale is None else float(parts[0].x_scale)
        change = InputChange(bits=8, group_size=stored.shape[1], step=fixed)
    if isinstance(stored, Trellis):
        signs, gains = parts[0].flips, parts[0].gains
        return Weight(stored, bias, InputChange(signs, widest_block(len(signs))), gains)
    return Weight(stored, bias, change)


def _change(transform: nn.Module | None, name: str, columns: int) -> InputChange | None:
    """The effect of a transform of `compress.transforms` on an input with `columns` columns."""
    change = None
    for step in getattr(transform, "steps", [] if transform is None else [transform]):
        signs, block = getattr(step, "signs", None), getattr(step, "block", None)
        rounded = bool(change and change.bits)
        if change is None and signs is not None and isinstance(block, int):
            change = InputChange(signs.float(), block)
        elif getattr(step, "name", "") == "permutation" and not rounded and (change is None or change.order is None):
            change = dataclasses.replace(change or InputChange(), order=step.order)
        elif getattr(step, "in_integers", False) and not rounded:
            group_size = columns if step.group_size == -1 else step.group_size
            fixed = 0.0 if step.step is None else float(step.step)
            how = {"bits": step.bits, "group_size": group_size, "step": fixed, "wide": step.wide}
            change = dataclasses.replace(change or InputChange(), **how)
        else:
            raise NotNative(f"{name} has a transform ({type(step).__name__}) that the step does not know")
    return change


def _stored(part: nn.Module, name: str) -> Tensor | SparseRows | Packed | Codebook | W8 | Trellis:
    rows = getattr(part, "rows", None)
    if isinstance(rows, SparseRows):
        return rows
    part = getattr(part, "plain", None) or part  # a sparse format keeps a dense copy, zeros included
    packed = getattr(part, "packed", None)
    if isinstance(packed, Packed | Codebook) and packed.layout == "panels" or isinstance(packed, Trellis):
        return packed
    int8 = getattr(part, "w8", None)
    if isinstance(int8, W8) and int8.layout == "panels":
        return int8
    if isinstance(panels := getattr(part, "panels", None), Packed):
        return panels
    if packed is None and part.name == "dense":
        return part.weight
    raise NotNative(
        f"{name} is stored as {getattr(part, 'name', type(part).__name__)} in a layout without a native step"
    )


def _embedding(table: nn.Module) -> tuple[Weight | None, float]:
    """The rows of an embedding and their factor; None instead of rows if only the module can look them up."""
    if type(table) is nn.Embedding and table.weight.dtype.itemsize == 2 and table.max_norm is None:
        return Weight(table.weight.detach()), 1.0
    parts = getattr(table, "parts", ())
    if len(parts) != 1:
        return None, 1.0
    try:
        weight = Weight(_stored(parts[0], "embed_tokens"))
    except NotNative:
        return None, 1.0
    if isinstance(weight.stored, SparseRows):
        return None, 1.0
    scale = getattr(table, "scale", None)
    return weight, 1.0 if scale is None else float(scale.to(table.dtype))


def _check(step: NativeStep, model: nn.Module, cache: Cache, tokens: Tensor, position: int) -> None:
    """Run some steps of both from the same cache; each step reads the cache entries of the steps before it.

    Raises:
        NotNative: the logits differ.
    """
    lengths = [layer.cumulative_length.clone() for layer in cache.layers]
    room = min(layer.max_cache_len for layer in cache.layers) - position
    places = [torch.tensor([[place]]) for place in range(position, position + min(CHECKED, room))]
    given, expected = [tokens], []

    def own(ids: Tensor, at: Tensor) -> Tensor:
        outcome = model(ids, past_key_values=cache, position_ids=at, use_cache=True, logits_to_keep=1)
        return outcome.logits[:, -1].float()

    def back() -> None:
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.cumulative_length.copy_(length)

    def shaken_differences() -> list[float]:
        back()
        with shaken(model):
            again = [own(ids, at) for ids, at in zip(given, places, strict=False)]
        return [difference(one, logits) for one, logits in zip(again, expected, strict=True)]

    for at in places:
        expected.append(own(given[-1], at))
        given.append(expected[-1].argmax(-1, keepdim=True))
    back()
    differences = []
    for ids, at, logits in zip(given, places, expected, strict=False):
        step(ids, at)
        differences.append(difference(step.logits, logits))
    check_logits(differences, shaken_differences)
