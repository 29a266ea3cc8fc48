"""The parts of a transformers decoder, found by inspection, so that the workbench's own kernels can run its passes.

A decoder is recognised by its modules and their contents, never by the name of its class: blocks of two norms (or
Gemma's four), attention of q, k, v and o with optional norms of heads, an MLP with a gate; either may have been dropped
from a block (`ADDS_NOTHING`). Anything unknown is refused with a reason, and the model's own code runs instead. The
code that runs a recognised decoder checks that its logits are those of the model.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kernels import native
from kernels.step.program import Norm

BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
FOUR_NORMS = BLOCK | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
ACTIVATION = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
CHANGING = ("dynamic", "longrope")  # rotary frequencies that depend on the length
STREAM = "rotated_stream"  # name of the module that keeps a model's residual stream rotated between the blocks
ACCELERATION = "acceleration"  # attribute that `kernels.step.accelerate` sets on a model, beside its forward
# Attribute of the object that puts hooks and an attention of this name on a model, for caches that compute the
# attention (`kernels.step.cache.AttendingCache`).
ATTACHED = "attention_name"
# Attribute, True, of a module in the place of a block's attention or MLP that was dropped: its output is zeros.
ADDS_NOTHING = "adds_nothing"
FACTORS = ("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier", "attention_multiplier")


class NotNative(Exception):
    """The model's pass cannot be run by `kernels.step`; the message says why."""


@dataclass(frozen=True)
class DecoderBlock:
    """A block: norms, attention and a gated MLP, whose linears are the model's modules.

    index: of its layer in the cache. after_attention, after_mlp: norms of the results that are added to the residual
    stream, or None. attention: the module that holds q, k, v and o. activation: the gate's, a name of
    `program.ACTIVATIONS`. kind: of its rotary tables, or None for the only one. scale: of scores. softcap: softcap *
    tanh(score / softcap), or 0. window: number of positions that a token sees, itself included, or 0 for all. attends,
    has_mlp: False if the part was dropped. Its linears are None then, and a layer of the cache without attention keeps
    one number for each position, which nothing reads.
    """

    name: str
    index: int
    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
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


@dataclass(frozen=True)
class Decoder:
    """A model of the Llama family.

    norm: before the head. stream: the module that rotates the residual stream between the blocks, or None.
    cap: soft cap of the logits, cap * tanh(logit / cap), or 0 for none; the largest logit stays the largest.
    """

    embedding: nn.Module
    blocks: tuple[DecoderBlock, ...]
    norm: Norm
    head: nn.Module
    rotary: "RotaryTables"
    dtype: torch.dtype
    stream: nn.Module | None = None
    cap: float = 0.0

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
    """Cosines and sines of all positions, as the model's rotary module gives them, in float32."""

    module: nn.Module
    made: dict[str | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, kind: str | None, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [at least `length`, rotated channels] for layers of this kind."""
        made = len(self.made[kind][0]) if kind in self.made else 0
        if made < length:
            device = next((buffer.device for buffer in self.module.buffers()), None)
            # Passes over one more token need one more place.
            positions = torch.arange(max(length, 2 * made), device=device)[None]
            more = () if kind is None else (kind,)
            cos, sin = self.module(torch.zeros(1, dtype=torch.float32, device=device), positions, *more)
            self.made[kind] = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self.made[kind]


def knows(model: nn.Module) -> bool:
    """Does this package have passes for a model, judging by its kind and dtype alone?"""
    try:
        recognise(model)
    except NotNative:
        return False
    return native.why_not() is None and model.dtype in (torch.bfloat16, torch.float16)


def hooked(model: nn.Module, *known: object) -> str | None:
    """The first part of a model with a forward of its own or a hook that belongs to none of these objects."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        own = "forward" in vars(module) and not (module is model and hasattr(model, ACCELERATION))
        owners = [getattr(hook, "__self__", None) for hook in hooks]
        if own or any(owner is None or all(owner is not one for one in known) for owner in owners):
            return name or "the model"
    return None


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """Values that differ once a model has been changed: its kind of attention, its tensors' addresses and versions."""
    tensors = (*model.parameters(), *model.buffers())
    versions = ((t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version) for t in tensors)
    return getattr(model.config, "_attn_implementation", None), *versions


def attached_to(model: nn.Module) -> object | None:
    """The object that has put hooks and the present attention on a model, for caches that compute it; or None."""
    kind = getattr(model.config, "_attn_implementation", None)
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if getattr(owner, ATTACHED, None) == kind), None)


@torch.no_grad()
def recognise(model: nn.Module, by_cache: bool = False, anywhere: bool = False) -> Decoder:
    """The parts of a causal decoder of transformers.

    Args:
        by_cache: a cache will compute the attention, so that the model's own kind of attention does not matter.
        anywhere: the model may be on any device.

    Raises:
        NotNative: the model is of another kind, changed by hooks, or not on a CPU.
    """
    if model.device.type != "cpu" and not anywhere:
        raise NotNative(f"the model is on {model.device.type}")
    kind, attached = getattr(model.config, "_attn_implementation", None), attached_to(model)
    if kind not in ("sdpa", "sdpa_fast", "eager") and attached is None and not by_cache:
        raise NotNative(f"its attention is {kind!r} ('sdpa' and 'eager' are known)")
    for name in FACTORS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise NotNative(f"the model has `{name}`")
    stream = getattr(model, STREAM, None)
    if (name := hooked(model, stream, attached)) is not None:
        raise NotNative(f"{name} has hooks")
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    if body is None or head is None or {n for n, _ in model.named_children()} - {STREAM} != {"model", "lm_head"}:
        raise NotNative("the model is not a body and a head")
    _expect(body, MODEL, "the model")
    kinds = getattr(body.rotary_emb, "rope_type", "default")
    if any(one in CHANGING for one in (kinds.values() if isinstance(kinds, dict) else [kinds])):
        raise NotNative(f"rotary positions of kind {kinds!r}")
    # Gemma 3 has rotary frequencies for each kind of layer.
    several = getattr(body.rotary_emb, "layer_types", None) is not None
    blocks = tuple(_block(b, f"block {i}", several, model.config) for i, b in enumerate(body.layers))
    if not any(block.attends for block in blocks):
        raise NotNative("none of its blocks has attention")
    cap = getattr(model.config, "final_logit_softcapping", None) or 0.0
    rotary = RotaryTables(body.rotary_emb)
    return Decoder(body.embed_tokens, blocks, _norm(body.norm), head, rotary, model.dtype, stream, cap)


def _block(block: nn.Module, name: str, several: bool, config: Any) -> DecoderBlock:
    """several: does each kind of layer have its own rotary tables?"""
    children = {n for n, _ in block.named_children()}
    four = children == FOUR_NORMS
    if not four:
        _expect(block, BLOCK, name)
    attention, mlp = block.self_attn, block.mlp
    attends, has_mlp = (getattr(part, ADDS_NOTHING, False) is not True for part in (attention, mlp))
    if has_mlp:
        _expect(mlp, MLP, f"{name}'s MLP")
    inner = {
        "after_attention": _norm(block.post_attention_layernorm) if four else None,
        "before_mlp": _norm(block.pre_feedforward_layernorm if four else block.post_attention_layernorm),
        "after_mlp": _norm(block.post_feedforward_layernorm) if four else None,
        **{n: getattr(mlp, f"{n}_proj", None) for n in ("gate", "up", "down")},
        "activation": _activation(mlp.act_fn) if has_mlp else "",
        "has_mlp": has_mlp,
    }
    if not attends:
        if attention.layer_idx is None:
            raise NotNative(f"{name} has no layer in the cache")
        return DecoderBlock(
            name, attention.layer_idx, before_attention=_norm(block.input_layernorm), attention=attention,
            q=None, k=None, v=None, o=None, heads=1, kv_heads=1, channels=1, kind=None, scale=1.0, softcap=0.0,
            window=0, query_norm=None, key_norm=None, attends=False, **inner,
        )  # fmt: skip
    if {n for n, _ in attention.named_children()} != ATTENTION | HEAD_NORMS:
        _expect(attention, ATTENTION, f"{name}'s attention")
    channels = attention.head_dim
    q, k, v = (getattr(attention, f"{n}_proj") for n in "qkv")
    heads, kv_heads = q.out_features // channels, k.out_features // channels
    if (
        (q.out_features, k.out_features) != (heads * channels, kv_heads * channels)
        or v.out_features != k.out_features
        or getattr(attention, "sinks", None) is not None
    ):
        raise NotNative(f"{name}'s attention is of another kind")
    norms = [_norm(getattr(attention, n), channels) if hasattr(attention, n) else None for n in ("q_norm", "k_norm")]
    window = (
        attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    )
    return DecoderBlock(
        name,
        attention.layer_idx,
        before_attention=_norm(block.input_layernorm),
        attention=attention, q=q, k=k, v=v, o=attention.o_proj,
        heads=heads, kv_heads=kv_heads, channels=channels,
        kind=attention.layer_type if several and hasattr(attention, "layer_type") else None,
        scale=attention.scaling,
        softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        window=window or 0,
        query_norm=norms[0], key_norm=norms[1], **inner,
    )  # fmt: skip


def _expect(module: nn.Module, children: set[str], name: str) -> None:
    if different := {n for n, _ in module.named_children()} ^ children:
        raise NotNative(f"{name} differs from a Llama's in {', '.join(sorted(different))}")


def _norm(module: nn.Module, size: int | None = None) -> Norm:
    """The norm that a module computes: with its weight or 1 + its weight, whichever reproduces the module's output."""
    weight = getattr(module, "weight", None)
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None
    )
    if not isinstance(weight, Tensor) or eps is None or weight.dim() != 1 or (size is not None and len(weight) != size):
        raise NotNative(f"a norm of an unknown kind ({type(module).__name__})")
    x = torch.linspace(-3, 2, len(weight), device=weight.device).sin()[None] + 0.5
    # In float32, and every channel by itself: in 16 bits, beside a weight of 1,648 as in Gemma 3, 1 more is nothing.
    given = copy.deepcopy(module).float()(x)
    for added in (0, 1):
        norm = Norm((weight.float() + added).contiguous(), eps)
        expected = x * (x.square().mean() + eps).rsqrt() * norm.weight
        if torch.allclose(given, expected, rtol=1e-4, atol=1e-6):
            return norm
    raise NotNative(f"a norm of an unknown kind ({type(module).__name__})")


def _activation(function: Any) -> str:
    for name, ours in ACTIVATION.items():
        if type(function) is type(ACT2FN[name]):
            return ours
    raise NotNative(f"an activation of {type(function).__name__}")
