"""The parts of a transformers decoder, found by inspection, so that the workbench's own kernels can run its passes.

A decoder is recognised by its modules and their contents, never by the name of its class: blocks of two norms (or
Gemma's four), attention of q, k, v and o with optional norms of heads, an MLP with a gate; either may have been dropped
from a block (`ADDS_NOTHING`). Anything unknown is refused with a reason, and the model's own code runs instead. The
code that runs a recognised decoder checks that its logits are those of the model.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kernels import native
from kernels.step.program import Norm
from kernels.step.recognition.decoder import UNTURNED, Decoder, DecoderBlock, RotaryTables
from kernels.step.recognition.mixture import mixture_of
from kernels.step.recognition.parts import (
    MLP,
    NotNative,
    activation_of,
    children_of,
    expect,
    linears_of_mlp,
    norm_of,
    split,
    unlike,
)

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
FULL = "full_attention"  # a type of layer in a configuration
GRANITES_MLP = "block_sparse_moe"  # the name of a block's mixture in Granite
FUSED_MLP = {"gate_up_proj", "down_proj", "activation_fn"}
MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
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
    expect(body, MODEL, "the model")
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
        body.embed_tokens, blocks, _smaller(norm_of(body.norm), residual), head, RotaryTables(body.rotary_emb, change),
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
    children = {"mlp" if n == GRANITES_MLP else n for n in children_of(block)}
    names = next((names for names in NORMS if children == PARTS | {*names} - {None}), NORMS[0])
    if different := children ^ (PARTS | {*names} - {None}):
        raise unlike(name, different)
    attention, mlp = block.self_attn, block.mlp if hasattr(block, "mlp") else getattr(block, GRANITES_MLP)
    attends, has_mlp = (getattr(part, ADDS_NOTHING, False) is not True for part in (attention, mlp))
    mixture = mixture_of(mlp, f"{name}'s mixture", model.dtype) if has_mlp and "experts" in children_of(mlp) else None
    if has_mlp and mixture is None and children_of(mlp) != FUSED_MLP:
        expect(mlp, MLP, f"{name}'s MLP")
    if mixture is not None:
        linears = {"gate": None, "up": None, "down": None, "activation": activation_of(mlp.experts.act_fn)}
    else:
        linears = linears_of_mlp(mlp) if has_mlp else {"gate": None, "up": None, "down": None, "activation": ""}
    fields = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    inner = {
        **{field: n and norm_of(getattr(block, n)) for field, n in zip(fields, names, strict=True)},
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
    if children_of(attention) not in (ATTENTION | HEAD_NORMS, FUSED_ATTENTION):
        expect(attention, ATTENTION, f"{name}'s attention")
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
    norms = [norm_of(getattr(attention, n)) if hasattr(attention, n) else None for n in ("q_norm", "k_norm")]
    for norm, linear in zip(norms, (q, k), strict=True):
        if norm is not None and norm.weight.numel() not in (channels, linear.out_features):
            raise NotNative(f"{name} has a norm of {norm.weight.numel()} channels of {linear.out_features}")
    window = getattr(attention if hasattr(attention, "sliding_window") else model.config, "sliding_window", None)
    if _type_of_layer(attention, model.config) == FULL:  # the modules of EXAONE's full layers name a window, too
        window = None
    return DecoderBlock(
        name,
        attention.layer_idx,
        attention=attention, q=q, k=k, v=v, o=attention.o_proj,
        heads=heads, kv_heads=kv_heads, channels=channels,
        kind=_kind(attention, several, model),
        scale=attention.scaling,
        softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        window=window or 0,
        query_norm=norms[0], key_norm=norms[1], neighbours=turns_neighbours(attention), **inner,
    )  # fmt: skip


def _kind(attention: nn.Module, several: bool, model: nn.Module) -> str | None:
    """The kind of a layer's rotary tables."""
    kind = _type_of_layer(attention, model.config)
    if not getattr(attention, "use_rope", True):
        return UNTURNED
    if not several:
        return UNTURNED if kind == FULL and not _turns(attention, model) else None
    for name in KINDS:
        if hasattr(attention, name):
            return getattr(attention, name)
    if kind is None:
        raise NotNative("a layer does not say which rotary tables it takes")
    return kind


def _type_of_layer(attention: nn.Module, config: Any) -> str | None:
    """What a configuration says of a layer, "full_attention" or "sliding_attention"; None: nothing."""
    kinds = getattr(config, "layer_types", None) or ()
    return kinds[attention.layer_idx] if attention.layer_idx < len(kinds) else None


def _turns(attention: nn.Module, model: nn.Module) -> bool:
    """Whether a layer with full attention rotates its queries and keys: its result for two tokens then depends on the
    rotary table of the second one. If all layers are of one type, all rotate."""
    if len(set(model.config.layer_types)) == 1:
        return True
    kind, generator = model.config._attn_implementation, torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, model.config.hidden_size, generator=generator).to(model.device, model.dtype)
    one, zero = x.new_ones(1, 1, attention.head_dim), x.new_zeros(1, 1, attention.head_dim)
    unturned = torch.cat([one, one], 1), torch.cat([zero, zero], 1)
    turned = torch.cat([one, zero], 1), torch.cat([zero, one], 1)  # the second token's, by a right angle
    model.config._attn_implementation = "sdpa"  # the attention of an attached cache needs more arguments
    try:
        found = [attention(x, position_embeddings=of, attention_mask=None)[0] for of in (unturned, turned)]
    except Exception:  # of another kind: queries and keys are compared with the model's in any case
        return True
    finally:
        model.config._attn_implementation = kind
    return not torch.equal(*found)


def turns_neighbours(attention: nn.Module) -> bool:
    """Does a layer rotate channels in pairs of neighbours, by the function of its module?"""
    rotate = getattr(sys.modules.get(type(attention).__module__), "rotate_half", None)
    try:
        return rotate is not None and rotate(torch.arange(4.0)).tolist() == [-1, 0, -3, 2]
    except Exception:  # a function of another kind: queries and keys are compared with the model's in any case
        return False
