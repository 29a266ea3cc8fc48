"""The parts of a transformers decoder, found by inspection, so that the workbench's own kernels can run its passes.

A decoder is recognised by its modules and their contents, never by the name of its class: blocks of two norms (or
Gemma's four), attention of q, k, v and o with optional norms of heads, an MLP with a gate; either may have been dropped
from a block (`ADDS_NOTHING`). Anything unknown is refused with a reason, and the model's own code runs instead. The
code that runs a recognised decoder checks that its logits are those of the model.
"""

import copy
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kernels import native
from kernels.step.program import Choice, Norm

PARTS = {"self_attn", "mlp"}
# Names of the norms of a block: before attention, of its result, before the MLP, and of its result, or None.
NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM 4
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
)
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FUSED_ATTENTION = {"qkv_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
GRANITES_MLP = "block_sparse_moe"  # the name of a block's mixture in Granite
ROUTERS = ("gate", "router")  # names of the module of a mixture that chooses its experts
SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # of an MLP beside them, for all tokens
SHARED_GATE = "shared_expert_gate"
BIAS, FACTOR = "e_score_correction_bias", "routed_scaling_factor"  # attributes of a router or a mixture
PROBED = 3  # tokens for which a mixture is compared with its module
ALIKE = 0.05  # largest relative difference of a mixture from its module, whose results are rounded to 16 bits
FUSED_MLP = {"gate_up_proj", "down_proj", "activation_fn"}
MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
ACTIVATION = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# Kinds of rotary frequencies that depend on the length; those of longrope change once, see `changes_at`.
CHANGING = ("dynamic", "longrope")
STREAM = "rotated_stream"  # name of the module that keeps a model's residual stream rotated between the blocks
ACCELERATION = "acceleration"  # attribute that `kernels.step.accelerate` sets on a model, beside its forward
# Attribute of the object that puts hooks and an attention of this name on a model, for caches that compute the
# attention (`kernels.step.cache.AttendingCache`).
ATTACHED = "attention_name"
# Attribute, True, of a module in the place of a block's attention or MLP that was dropped: its output is zeros.
ADDS_NOTHING = "adds_nothing"
KINDS = ("layer_type", "attention_type")  # attributes of a layer that name the kind of its rotary tables
UNTURNED = "without rotation"  # kind of the rotary tables of a layer that rotates nothing


class NotNative(Exception):
    """The model's pass cannot be run by `kernels.step`; the message says why."""


class Rows(nn.Module):
    """Some of the outputs of a linear that computes several products at once, as Phi-3's for queries, keys and values
    does, as if they came from a linear of their own.

    Args:
        whole: the linear, whose weight is shared. start, stop: the outputs.
    """

    def __init__(self, whole: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop
        self.in_features, self.out_features = whole.in_features, stop - start

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.start : self.stop]


def split(whole: nn.Module, sizes: Sequence[int]) -> list[Rows]:
    """A linear in parts of so many outputs."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Rows(whole, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def together(linears: Sequence[nn.Module]) -> nn.Module | None:
    """The linear of which these are all outputs, in order; None: there is none."""
    first = linears[0]
    return first.whole if isinstance(first, Rows) else None  # parts are made by `split`, and kept together


@dataclass(frozen=True)
class MixtureOfExperts:
    """MLPs of which a router chooses some for each token; their results are added up with the experts' shares.

    module: the model's own, which does all of it. router: [experts, hidden], in the model's dtype. choice: its rule.
    gates, ups, downs: linears of the experts. shared: gate, up and down of an MLP that is added for all tokens, or
    None. shared_gate: a linear of one output, whose sigmoid is the share of that MLP; None: 1.
    """

    module: nn.Module
    router: Tensor
    choice: Choice
    gates: tuple[nn.Module, ...]
    ups: tuple[nn.Module, ...]
    downs: tuple[nn.Module, ...]
    shared: tuple[nn.Module, nn.Module, nn.Module] | None = None
    shared_gate: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The result [..., hidden] of the model's own module."""
        y = self.module(x)
        return y[0] if isinstance(y, tuple) else y

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens x [tokens, hidden] and their shares, [tokens, chosen]."""
        return self.choice(F.linear(x.float(), self.router.float()), x.dtype)


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
    """Values that differ once a model has been changed: its kind of attention, its tensors' addresses and versions.
    Rotary frequencies do not count, which some models write again in every pass."""
    computed = {id(buffer) for m in model.modules() if hasattr(m, "rope_type") for buffer in m.buffers(recurse=False)}
    tensors = (t for t in (*model.parameters(), *model.buffers()) if id(t) not in computed)
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
    embedding, residual, logits = (
        _factor(model.config, name) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    if _factor(model.config, "logit_scale") != 1:
        raise NotNative("the model has `logit_scale`")
    stream = getattr(model, STREAM, None)
    if (name := hooked(model, stream, attached)) is not None:
        raise NotNative(f"{name} has hooks")
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    if body is None or head is None or {n for n, _ in model.named_children()} - {STREAM} != {"model", "lm_head"}:
        raise NotNative("the model is not a body and a head")
    _expect(body, MODEL, "the model")
    kinds, change = getattr(body.rotary_emb, "rope_type", "default"), changes_at(model)
    if change is None and any(one in CHANGING for one in (kinds.values() if isinstance(kinds, dict) else [kinds])):
        raise NotNative(f"rotary positions of kind {kinds!r}")
    # Gemma 3 has rotary frequencies for each kind of layer.
    several = getattr(body.rotary_emb, "layer_types", None) is not None
    blocks = tuple(_block(b, f"block {i}", several, model) for i, b in enumerate(body.layers))
    if not any(block.attends for block in blocks):
        raise NotNative("none of its blocks has attention")
    if residual != 1:
        blocks = tuple(_of_smaller_stream(block, residual) for block in blocks)
    return Decoder(
        body.embed_tokens, blocks, _smaller(_norm(body.norm), residual), head, RotaryTables(body.rotary_emb, change),
        model.dtype, stream, cap=getattr(model.config, "final_logit_softcapping", None) or 0.0,
        embedding_scale=embedding, residual_scale=residual, logit_scale=1 / logits,
    )  # fmt: skip


def changes_at(model: nn.Module) -> int | None:
    """The length of text from which on a model has other rotary frequencies; None: it keeps them, or changes them in
    another way."""
    rotary = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return rotary["original_max_position_embeddings"] if rotary.get("rope_type") == "longrope" else None


def _factor(config: Any, name: str) -> float:
    """A factor of a configuration, or 1."""
    found = getattr(config, name, None)
    found = 1.0 if found is None else float(found)
    if not found > 0:
        raise NotNative(f"the model has `{name}` (={found:g})")
    return found


def _smaller(norm: Norm, factor: float) -> Norm:
    """The norm of x / factor that gives what this one gives of x."""
    return norm if factor == 1 else Norm(norm.weight, norm.eps / factor**2)


def _of_smaller_stream(block: DecoderBlock, factor: float) -> DecoderBlock:
    """The block in a residual stream that is divided by a factor."""
    if block.after_attention is not None:
        raise NotNative("the model has `residual_multiplier` and norms of what it multiplies")
    before = {name: _smaller(getattr(block, name), factor) for name in ("before_attention", "before_mlp")}
    return replace(block, **before)


def _block(block: nn.Module, name: str, several: bool, model: nn.Module) -> DecoderBlock:
    """several: does each kind of layer have its own rotary tables?"""
    children = {"mlp" if n == GRANITES_MLP else n for n in _children(block)}
    names = next((names for names in NORMS if children == PARTS | {*names} - {None}), NORMS[0])
    if different := children ^ (PARTS | {*names} - {None}):
        raise _other(name, different)
    attention, mlp = block.self_attn, block.mlp if hasattr(block, "mlp") else getattr(block, GRANITES_MLP)
    attends, has_mlp = (getattr(part, ADDS_NOTHING, False) is not True for part in (attention, mlp))
    mixture = _mixture(mlp, f"{name}'s mixture", model.dtype) if has_mlp and "experts" in _children(mlp) else None
    if has_mlp and mixture is None and _children(mlp) != FUSED_MLP:
        _expect(mlp, MLP, f"{name}'s MLP")
    if mixture is not None:
        linears = {"gate": None, "up": None, "down": None, "activation": _activation(mlp.experts.act_fn)}
    else:
        linears = _linears_of_mlp(mlp) if has_mlp else {"gate": None, "up": None, "down": None, "activation": ""}
    fields = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    inner = {
        **{field: n and _norm(getattr(block, n)) for field, n in zip(fields, names, strict=True)},
        **linears,
        "has_mlp": has_mlp,
        "mixture": mixture,
    }
    if not attends:
        if attention.layer_idx is None:
            raise NotNative(f"{name} has no layer in the cache")
        return DecoderBlock(
            name, attention.layer_idx, attention=attention, q=None, k=None, v=None, o=None, heads=1, kv_heads=1,
            channels=1, kind=None, scale=1.0, softcap=0.0, window=0, query_norm=None, key_norm=None, attends=False,
            **inner,
        )  # fmt: skip
    if _children(attention) not in (ATTENTION | HEAD_NORMS, FUSED_ATTENTION):
        _expect(attention, ATTENTION, f"{name}'s attention")
    channels = attention.head_dim
    if hasattr(attention, "qkv_proj"):
        whole, of_keys = attention.qkv_proj, attention.num_key_value_heads * channels
        q, k, v = split(whole, (whole.out_features - 2 * of_keys, of_keys, of_keys))
    else:
        q, k, v = (getattr(attention, f"{n}_proj") for n in "qkv")
    heads, kv_heads = q.out_features // channels, k.out_features // channels
    if (
        (q.out_features, k.out_features) != (heads * channels, kv_heads * channels)
        or v.out_features != k.out_features
        or getattr(attention, "sinks", None) is not None
    ):
        raise NotNative(f"{name}'s attention is of another kind")
    norms = [_norm(getattr(attention, n)) if hasattr(attention, n) else None for n in ("q_norm", "k_norm")]
    for norm, linear in zip(norms, (q, k), strict=True):
        if norm is not None and norm.weight.numel() not in (channels, linear.out_features):
            raise NotNative(f"{name} has a norm of {norm.weight.numel()} channels of {linear.out_features}")
    window = getattr(attention if hasattr(attention, "sliding_window") else model.config, "sliding_window", None)
    return DecoderBlock(
        name,
        attention.layer_idx,
        attention=attention, q=q, k=k, v=v, o=attention.o_proj,
        heads=heads, kv_heads=kv_heads, channels=channels,
        kind=_kind(attention, several, model.config),
        scale=attention.scaling,
        softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        window=window or 0,
        query_norm=norms[0], key_norm=norms[1], neighbours=_turns_neighbours(attention), **inner,
    )  # fmt: skip


def _mixture(mlp: nn.Module, name: str, dtype: torch.dtype) -> MixtureOfExperts:
    """The parts of a mixture, compared with what its module makes of a few tokens."""
    children, experts = _children(mlp), mlp.experts
    router = next((getattr(mlp, n) for n in ROUTERS if n in children), None)
    beside = next((getattr(mlp, n) for n in SHARED if n in children), None)
    if router is None or children - {*ROUTERS, *SHARED, SHARED_GATE, "experts"}:
        raise NotNative(f"{name} has {', '.join(sorted(children))}")
    W = getattr(router, "weight", None)
    if not isinstance(W, Tensor) or W.dim() != 2 or W.device.type != "cpu":
        raise NotNative(f"{name} has a router of another kind, or is not on a CPU")
    if any((getattr(router, n, None) or 1) > 1 for n in ("num_group", "n_group")):
        raise NotNative(f"{name} chooses groups of experts")
    if getattr(experts, "has_post_expert_norm", False) or not hasattr(experts, "act_fn"):
        raise NotNative(f"{name} has experts of another kind")
    firsts, downs = (_linears_of_experts(experts, n, name) for n in ("gate_up_proj", "down_proj"))
    halves = [split(first, (first.out_features // 2,) * 2) for first in firsts]
    shared = None
    if beside is not None:
        _expect(beside, MLP, f"{name}'s shared MLP")
        shared = beside.gate_proj, beside.up_proj, beside.down_proj
        if _activation(beside.act_fn) != _activation(experts.act_fn):
            raise NotNative(f"{name}'s shared MLP has another activation")
    tensors = itertools.chain(mlp.named_parameters(), mlp.named_buffers())
    bias = next((tensor.detach().float().flatten() for n, tensor in tensors if n.rpartition(".")[2] == BIAS), None)
    gates, ups = zip(*halves, strict=True)
    made = MixtureOfExperts(
        mlp, W.detach(), Choice(1, bias=bias), gates, ups, tuple(downs), shared, getattr(mlp, SHARED_GATE, None)
    )
    return _as_its_module_chooses(made, experts, name, dtype)


def _linears_of_experts(experts: nn.Module, which: str, name: str) -> list[nn.Module]:
    """A linear of each expert, whose memory is shared if one parameter holds all."""
    held = getattr(experts, which, None)
    if isinstance(held, nn.ModuleList):
        return list(held)
    if not isinstance(held, nn.Parameter) or held.dim() != 3 or experts.is_transposed or experts.has_bias:
        raise NotNative(f"{name} has experts of another kind")
    linears = []
    for W in held.detach():
        linear = nn.Linear(W.shape[1], W.shape[0], bias=False, device="meta", dtype=W.dtype)
        linear.weight = nn.Parameter(W, requires_grad=False)
        linears.append(linear)
    return linears


def _as_its_module_chooses(
    mixture: MixtureOfExperts, experts: nn.Module, name: str, dtype: torch.dtype
) -> MixtureOfExperts:
    """The mixture with the rule by which its module chooses experts, found by what the module gives them."""
    hidden, given = mixture.router.shape[1], []
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBED, hidden, generator=generator).to(dtype)
    hook = experts.register_forward_pre_hook(lambda module, args: given.append(args))
    try:
        wanted = mixture(x[None])[0]
    except Exception as error:
        raise NotNative(f"{name} cannot be run by itself: {str(error).splitlines()[0]}") from error
    finally:
        hook.remove()
    if len(given) != 1 or len(given[0]) != 3:
        raise NotNative(f"{name} calls its experts in another way")
    _, chosen, shares = given[0]
    factors = {1.0, *(float(getattr(m, FACTOR, 1.0) or 1.0) for m in mixture.module.modules())}
    biases = {id(bias): bias for bias in (mixture.choice.bias, None)}.values()
    values = itertools.product((False, True), (True, False), (True, False), factors, biases)
    rules = [replace(mixture, choice=Choice(chosen.shape[1], *one)) for one in values]
    apart = [_apart(rule.choose(x), (chosen, shares.float())) for rule in rules]
    found = rules[apart.index(min(apart))]
    if not (min(apart) < ALIKE and _relative(_mixed(found, x), wanted) < ALIKE):
        raise NotNative(f"{name} chooses or adds up experts by another rule")
    return found


def _linears_of_mlp(mlp: nn.Module) -> dict[str, Any]:
    if hasattr(mlp, "gate_up_proj"):
        gate, up = split(mlp.gate_up_proj, (mlp.gate_up_proj.out_features // 2,) * 2)
    else:
        gate, up = mlp.gate_proj, mlp.up_proj
    function = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    return {"gate": gate, "up": up, "down": mlp.down_proj, "activation": _activation(function)}


def _apart(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The largest relative difference of shares; infinite if other experts are chosen."""
    (chosen, order), (also, other) = (choice[0].sort(-1) for choice in (found, wanted))
    shares, its = found[1].gather(-1, order), wanted[1].gather(-1, other)
    if not torch.equal(chosen, also.to(chosen.dtype)):
        return torch.inf
    return float(((shares - its).abs() / its.abs().clamp(min=1e-20)).max())


def _mixed(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """The result for tokens x [tokens, hidden], part by part."""
    function = mixture.module.experts.act_fn
    y = torch.zeros(x.shape, dtype=torch.float32)
    for token, (chosen, shares) in enumerate(zip(*mixture.choose(x), strict=True)):
        for i, share in zip(chosen.tolist(), shares, strict=True):
            inner = function(mixture.gates[i](x[[token]])) * mixture.ups[i](x[[token]])
            y[token] += share * mixture.downs[i](inner)[0].float()
    if mixture.shared is not None:
        gate, up, down = mixture.shared
        part = 1.0 if mixture.shared_gate is None else mixture.shared_gate(x).float().sigmoid()
        y += part * down(function(gate(x)) * up(x)).float()
    return y


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20))


def _kind(attention: nn.Module, several: bool, config: Any) -> str | None:
    """The kind of a layer's rotary tables."""
    if not getattr(attention, "use_rope", True):
        return UNTURNED
    if not several:
        return None
    for name in KINDS:
        if hasattr(attention, name):
            return getattr(attention, name)
    if (kinds := getattr(config, "layer_types", None)) is None or attention.layer_idx >= len(kinds):
        raise NotNative("a layer does not say which rotary tables it takes")
    return kinds[attention.layer_idx]


def _turns_neighbours(attention: nn.Module) -> bool:
    """Does a layer rotate channels in pairs of neighbours, by the function of its module?"""
    rotate = getattr(sys.modules.get(type(attention).__module__), "rotate_half", None)
    try:
        return rotate is not None and rotate(torch.arange(4.0)).tolist() == [-1, 0, -3, 2]
    except Exception:  # a function of another kind: queries and keys are compared with the model's in any case
        return False


def _children(module: nn.Module) -> set[str]:
    """The names of a module's parts, without dropout, which does nothing in evaluation."""
    return {n for n, m in module.named_children() if not (isinstance(m, nn.Dropout) and not (m.training and m.p))}


def _expect(module: nn.Module, children: set[str], name: str) -> None:
    if different := _children(module) ^ children:
        raise _other(name, different)


def _other(name: str, different: set[str]) -> NotNative:
    return NotNative(f"{name} differs from a Llama's in {', '.join(sorted(different))}")


def _norm(module: nn.Module) -> Norm:
    """The norm that a module computes: with its weight or 1 + its weight, whichever reproduces the module's output."""
    weight = getattr(module, "weight", None)
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None
    )
    if not isinstance(weight, Tensor) or eps is None or weight.dim() != 1:
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
