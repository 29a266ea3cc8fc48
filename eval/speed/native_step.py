"""A decoder's step of decoding as one call of C++ (`kernels.step`), where the decoder is of a kind that it knows.

A decoder is recognised by its modules and by what they hold, never by the name of its class: blocks of two norms (or
Gemma's four), attention of q, k, v and o with optional norms of heads, an MLP with a gate. Whatever is not known is
refused with a reason, and the compiled step runs instead. What is recognised is then checked: its logits must be those
of the model.
"""

import copy
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN

from kernels import native
from kernels.hadamard import widest_block
from kernels.int_matmul import Packed
from kernels.lut_matmul import Codebook
from kernels.registry import recording
from kernels.step import Attention, Change, DecodeStep, Norm, Products, Program, Weight, why_not
from kernels.trellis_matmul import Trellis
from kernels.w8a8_matmul import W8

BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
FOUR_NORMS = BLOCK | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
CHANGING = ("dynamic", "longrope")  # rotary frequencies that depend on the length
OPS = {Packed: "int_matmul", Codebook: "lut_matmul", W8: "w8a8_matmul", Trellis: "trellis_matmul"}
STREAM = "rotated_stream"  # a model's module that keeps its residual stream rotated between its blocks
FACTORS = ("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier", "attention_multiplier")
CHECKED = 4  # steps
# Median relative difference of their logits from the model's, which rounds to 16 bits after every operation. A wrong
# program gives about 1; a model in 3 bits that is 0.04 from float32 after one text may give 0.2 after another.
MOST = 0.3


class NotNative(Exception):
    """The model's step cannot be run by `kernels.step`; the message says why."""


@dataclass
class NativeStep:
    """A step of decoding, like the function that `eval.speed.regional` compiles.

    Attributes:
        cap: of the logits, cap * tanh(logit / cap), or 0 for none; it leaves the largest one the largest.
        kernels: {op: implementations that run}.
    """

    step: DecodeStep
    embedding: nn.Module | None  # that gives the hidden state, where the program has no embedding
    cap: float = 0.0
    kernels: dict[str, set[str]] = field(default_factory=dict)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = None if self.embedding is None else self.embedding(tokens).float().flatten(0, 1)
        return self.step(tokens, int(positions[0, -1]), hidden)

    @property
    def logits(self) -> Tensor:
        """float32 [tokens, vocabulary] of the last call."""
        logits = self.step.logits
        return self.cap * (logits / self.cap).tanh() if self.cap else logits


@torch.no_grad()
def native_step(
    model: nn.Module, cache: Cache, tokens: Tensor, positions: Tensor, restore: Callable[[], None]
) -> NativeStep:
    """The native step of a decoder.

    Args:
        model: a causal decoder. cache: static, filled up to the position of the step.
        tokens, positions: [batch, 1] and [1, 1], of the step that is checked; all later ones have these shapes.
        restore: puts the cache back to where it is before the step.

    Raises:
        NotNative: a model, a format or a cache that is not known, or a step whose logits are not the model's.
    """
    program, embedding = assemble(model, cache, len(tokens))
    try:
        cap = getattr(model.config, "final_logit_softcapping", None) or 0.0
        step = NativeStep(DecodeStep(program, model.dtype), embedding, cap)
    except (ValueError, RuntimeError) as error:
        raise NotNative(str(error).splitlines()[0]) from error
    restore()
    try:
        with recording() as step.kernels:
            _check(step, model, cache, tokens, int(positions[0, -1]))
    except RuntimeError as error:  # such as a cache that counts its positions in another way
        raise NotNative(str(error).splitlines()[0]) from error
    for weight in {id(w): w for i in program.instructions if isinstance(i, Products) for w in i.weights}.values():
        op = OPS.get(type(weight.stored), "linear")
        ran = native.integers() if op == "w8a8_matmul" else native.isa(model.dtype)
        step.kernels.setdefault(op, set()).add(f"cpu {ran}")
    return step


def assemble(model: nn.Module, cache: Cache, tokens: int) -> tuple[Program, nn.Module | None]:
    """The program of a decoder's step, and the embedding that it cannot look up itself, if so.

    Raises:
        NotNative: it is not known how.
    """
    if reason := why_not(model.dtype, tokens):
        raise NotNative(reason)
    if model.device.type != "cpu":
        raise NotNative(f"the model is on {model.device.type}")
    if native.isa(model.dtype) == "portable":
        raise NotNative("the loops have no vector instructions of this processor")
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "sdpa_fast", "eager"):
        raise NotNative(f"attention of {model.config._attn_implementation!r}")
    for name in FACTORS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise NotNative(f"the model has `{name}`")
    stream = getattr(model, STREAM, None)
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or any(
            stream is None or getattr(h, "__self__", None) is not stream for h in hooks
        ):
            raise NotNative(f"{name or 'the model'} has hooks")
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    if body is None or head is None or {n for n, _ in model.named_children()} - {STREAM} != {"model", "lm_head"}:
        raise NotNative("the model is not a body and a head")
    _expect(body, MODEL, "the model")
    tables = _RotaryTables(body.rotary_emb, max(layer.max_cache_len for layer in cache.layers))
    instructions: list[Products | Attention] = []
    for place, block in enumerate(body.layers):
        before = body.layers[place - 1] if place else None
        instructions += _block(block, before, f"block {place}", cache, tables, model.config)
    last = instructions[-1]
    final = Products(
        "residual",
        "logits",
        (_weight(head, "lm_head"),),
        before=_norm(body.norm),
        added=last.writes,
        after=_after(body.layers[-1]),
    )
    embedding, scale = _embedding(body.embed_tokens)
    turned = None if stream is None else _change(stream.rotation, STREAM, body.norm.weight.numel())
    program = Program(body.norm.weight.numel(), tokens, embedding, (*instructions, final), scale, turned)
    return program, body.embed_tokens if embedding is None else None


def _block(
    block: nn.Module, before: nn.Module | None, name: str, cache: Cache, tables: "_RotaryTables", config: Any
) -> list[Products | Attention]:
    """The instructions of a block, the first of which adds what the MLP of the block `before` gives."""
    children = {n for n, _ in block.named_children()}
    four = children == FOUR_NORMS
    if not four:
        _expect(block, BLOCK, name)
    attention, mlp = block.self_attn, block.mlp
    _expect(mlp, MLP, f"{name}'s MLP")
    if {n for n, _ in attention.named_children()} != ATTENTION | HEAD_NORMS:
        _expect(attention, ATTENTION, f"{name}'s attention")
    qkv = tuple(_weight(getattr(attention, f"{n}_proj"), f"{name}'s {n}_proj") for n in "qkv")
    after_attention = _norm(block.post_attention_layernorm) if four else None
    before_mlp = _norm(block.pre_feedforward_layernorm if four else block.post_attention_layernorm)
    return [
        Products(
            "residual",
            "qkv",
            qkv,
            before=_norm(block.input_layernorm),
            added=None if before is None else "down",
            after=None if before is None else _after(before),
        ),
        _attention(attention, name, qkv, cache, tables, config),
        Products("attention", "o", (_weight(attention.o_proj, f"{name}'s o_proj"),)),
        Products(
            "residual",
            "mlp",
            (_weight(mlp.gate_proj, f"{name}'s gate_proj"), _weight(mlp.up_proj, f"{name}'s up_proj")),
            _activation(mlp.act_fn),
            before=before_mlp,
            added="o",
            after=after_attention,
        ),
        Products("mlp", "down", (_weight(mlp.down_proj, f"{name}'s down_proj"),)),
    ]


def _after(block: nn.Module) -> Norm | None:
    """The norm between a block's MLP and the residual stream, if there is one."""
    after = getattr(block, "post_feedforward_layernorm", None)
    return None if after is None else _norm(after)


def _attention(
    attention: nn.Module, name: str, qkv: Sequence[Weight], cache: Cache, tables: "_RotaryTables", config: Any
) -> Attention:
    layer = cache.layers[attention.layer_idx]
    if getattr(layer, "is_sliding", False) or not getattr(layer, "is_initialized", False):
        raise NotNative(f"{name}'s cache ({type(layer).__name__}) is not of fixed tensors")
    channels = attention.head_dim
    heads, kv_heads = qkv[0].shape[0] // channels, qkv[1].shape[0] // channels
    if layer.keys.shape[1:] != (kv_heads, layer.max_cache_len, channels) or layer.values.shape != layer.keys.shape:
        raise NotNative(f"{name}'s cache {tuple(layer.keys.shape)} is not of {kv_heads} heads of {channels} channels")
    if (
        qkv[0].shape[0] != heads * channels
        or qkv[2].shape[0] != kv_heads * channels
        or getattr(attention, "sinks", None) is not None
    ):
        raise NotNative(f"{name}'s attention is of another kind")
    norms = [_norm(getattr(attention, n), channels) if hasattr(attention, n) else None for n in ("q_norm", "k_norm")]
    window = (
        attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    )
    cos, sin = tables.of(attention)
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return Attention(
        "qkv", heads, kv_heads, layer.keys, layer.values, layer.cumulative_length, cos, sin, attention.scaling,
        softcap=softcap or 0.0, window=window or 0, query_norm=norms[0], key_norm=norms[1],
    )  # fmt: skip


class _RotaryTables:
    """Cosines and sines of all positions, as the model's rotary module gives them, in float32."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        self.rotary, self.length = rotary, length
        self.made: dict[str | None, tuple[Tensor, Tensor]] = {}

    def of(self, attention: nn.Module) -> tuple[Tensor, Tensor]:
        """For the layers of this kind."""
        types = getattr(self.rotary, "layer_types", None)  # Gemma 3 has frequencies for each kind of layer
        kind = attention.layer_type if types is not None and hasattr(attention, "layer_type") else None
        kinds = getattr(self.rotary, "rope_type", "default")
        if any(one in CHANGING for one in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            raise NotNative(f"rotary positions of kind {kinds!r}")
        if kind not in self.made:
            positions = torch.arange(self.length)[None]
            more = () if kind is None else (kind,)
            cos, sin = self.rotary(torch.zeros(1, dtype=torch.float32), positions, *more)
            self.made[kind] = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self.made[kind]


def _expect(module: nn.Module, children: set[str], name: str) -> None:
    if different := {n for n, _ in module.named_children()} ^ children:
        raise NotNative(f"{name} differs from a Llama's in {', '.join(sorted(different))}")


def _norm(module: nn.Module, size: int | None = None) -> Norm:
    """The norm that a module computes: its weight, or 1 + its weight, whichever gives what it gives."""
    weight = getattr(module, "weight", None)
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None
    )
    if not isinstance(weight, Tensor) or eps is None or weight.dim() != 1 or (size is not None and len(weight) != size):
        raise NotNative(f"a norm of an unknown kind ({type(module).__name__})")
    x = torch.linspace(-3, 2, len(weight)).sin()[None] + 0.5
    # In float32, and every channel by itself: in 16 bits, beside a weight of 1,648 as in Gemma 3, 1 more is nothing.
    given = copy.deepcopy(module).float()(x)
    for added in (0, 1):
        norm = Norm((weight.float() + added).contiguous(), eps)
        expected = x * (x.square().mean() + eps).rsqrt() * norm.weight
        if torch.allclose(given, expected, rtol=1e-4, atol=1e-6):
            return norm
    raise NotNative(f"a norm of an unknown kind ({type(module).__name__})")


def _weight(module: nn.Module, name: str) -> Weight:
    """The weight of a linear, dense or compressed."""
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
    if isinstance(stored, Trellis):
        signs, gains = parts[0].flips, parts[0].gains
        return Weight(stored, bias, Change(signs, widest_block(len(signs))), gains)
    return Weight(stored, bias, change)


def _change(transform: nn.Module | None, name: str, columns: int) -> Change | None:
    """What a transform of `compress.transforms` does to an input of so many columns."""
    change = None
    for step in getattr(transform, "steps", [] if transform is None else [transform]):
        signs, block = getattr(step, "signs", None), getattr(step, "block", None)
        rounded = bool(change and change.bits)
        if change is None and signs is not None and isinstance(block, int):
            change = Change(signs.float(), block)
        elif getattr(step, "name", "") == "permutation" and not rounded and (change is None or change.order is None):
            change = dataclasses.replace(change or Change(), order=step.order)
        elif getattr(step, "in_integers", False) and not rounded:
            group_size = columns if step.group_size == -1 else step.group_size
            fixed = 0.0 if step.step is None else float(step.step)
            how = {"bits": step.bits, "group_size": group_size, "step": fixed, "wide": step.wide}
            change = dataclasses.replace(change or Change(), **how)
        else:
            raise NotNative(f"{name} has a transform ({type(step).__name__}) that the step does not know")
    return change


def _stored(part: nn.Module, name: str) -> Tensor | Packed | Codebook | W8 | Trellis:
    packed = getattr(part, "packed", None)
    if isinstance(packed, Packed | Codebook) and packed.layout == "panels" or isinstance(packed, Trellis):
        return packed
    int8 = getattr(part, "w8", None)
    if isinstance(int8, W8) and int8.layout == "panels":
        return int8
    if packed is None and part.name == "dense":
        return part.weight
    raise NotNative(
        f"{name} is stored as {getattr(part, 'name', type(part).__name__)} in a layout without a native step"
    )


def _embedding(table: nn.Module) -> tuple[Weight | None, float]:
    """The rows of an embedding and what they are multiplied by; no rows where only the module can look them up."""
    if type(table) is nn.Embedding and table.weight.dtype.itemsize == 2 and table.max_norm is None:
        return Weight(table.weight.detach()), 1.0
    parts = getattr(table, "parts", ())
    if len(parts) != 1:
        return None, 1.0
    try:
        weight = Weight(_stored(parts[0], "embed_tokens"))
    except NotNative:
        return None, 1.0
    scale = getattr(table, "scale", None)
    return weight, 1.0 if scale is None else float(scale.to(table.dtype))


def _activation(function: Any) -> str:
    for name, ours in ACTIVATIONS.items():
        if type(function) is type(ACT2FN[name]):
            return ours
    raise NotNative(f"an activation of {type(function).__name__}")


def _check(step: NativeStep, model: nn.Module, cache: Cache, tokens: Tensor, position: int) -> None:
    """Some steps of both, from the same cache, each of which reads what the steps before it have kept.

    Logits are compared without their means, which change no probability: rounding moves Gemma 3's, of about -30, by as
    much as the logits differ among themselves.
    """
    lengths = [layer.cumulative_length.clone() for layer in cache.layers]
    room = min(layer.max_cache_len for layer in cache.layers) - position
    places = [torch.tensor([[place]]) for place in range(position, position + min(CHECKED, room))]
    given, expected = [tokens], []
    for at in places:
        outcome = model(given[-1], past_key_values=cache, position_ids=at, use_cache=True, logits_to_keep=1)
        expected.append(outcome.logits[:, -1].float())
        given.append(expected[-1].argmax(-1, keepdim=True))
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.cumulative_length.copy_(length)
    differences = []
    for ids, at, logits in zip(given, places, expected, strict=False):
        step(ids, at)
        found, wanted = (x - x.mean(-1, keepdim=True) for x in (step.logits, logits))
        differences.append(float((found - wanted).norm() / wanted.norm()))
    if not statistics.median(differences) < MOST:  # not a number is refused, too
        raise NotNative(f"its logits differ from the model's by {statistics.median(differences):.2g}, more than {MOST}")
