"""Whether each layer of a recognised decoder prepares its attention as `kernels.step` does.

A decoder may have the modules of a Llama and still rotate other channels together, rotate only in some layers, scale
queries at late positions, or normalise values. Differences of a layer are lost among the rounding of a whole model's
logits, so that each layer is compared by itself, with the input that its own attention gets.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kernels import native
from kernels.linear import fast_linear
from kernels.step.between import turn_and_store
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.parts import NotNative

NAME = "workbench_look"
TOKENS = 16
# Largest relative difference of logits from the model's, which rounds to 16 bits after every operation. A wrong program
# gives about 1. A model that lost much to compression may differ from itself by more than the first limit, if it is
# rounded in another way: the limit is then twice that, but at most the second one.
LEAST, MOST = 0.3, 0.8
# (block, its queries, keys and values [1, tokens, heads * channels], cos and sin [tokens, channels]) -> queries, keys
# and values [1, heads, tokens, channels], after the norms of heads and the rotary embedding
Prepare = Callable[[DecoderBlock, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]
# Largest relative difference of a channel, mean over channels, in units of the rounding of the model's dtype. A module
# rounds after each of about four operations.
ROUNDINGS = 4


def check_logits(differences: Sequence[float], own: Callable[[], Sequence[float]]) -> None:
    """Compare logits with the model's.

    Args:
        differences: of the logits behind some tokens, relative to the model's. own: the same for the model where it is
            rounded in another way (`shaken`); called only if it decides.

    Raises:
        NotNative: the median is larger than rounding explains.
    """
    found, most = statistics.median(differences), LEAST
    if not found < most:  # NaN is refused, too
        most = min(max(2 * statistics.median(own()), LEAST), MOST)
    if not found < most:
        raise NotNative(f"its logits differ from the model's by {found:.2g}, more than {most:.2g}")


def difference(found: Tensor, wanted: Tensor) -> float:
    """The difference of logits [tokens, vocabulary], relative to the wanted logits.

    Means are subtracted first, as they change no probability: rounding moves Gemma 3's mean, about -30, by as much as
    the logits differ among themselves.
    """
    found, wanted = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def rounded_otherwise(hidden: Tensor, generator: torch.Generator) -> Tensor:
    """A hidden state in 16 bits, moved by half a unit in the last place, up or down."""
    signs = torch.randint(2, hidden.shape, generator=generator).to(hidden.device) * 2.0 - 1
    return (hidden.float() * (1 + torch.finfo(hidden.dtype).eps / 2 * signs)).to(hidden.dtype)


@contextmanager
def shaken(model: nn.Module) -> Iterator[None]:
    """While the block runs, the inputs of all blocks of the model are rounded in another way."""
    generator = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (rounded_otherwise(args[0], generator), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": rounded_otherwise(kwargs["hidden_states"], generator)}

    hooks = [block.register_forward_pre_hook(shake, with_kwargs=True) for block in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def check_likeness(model: nn.Module, decoder: Decoder, prepare: Prepare | None = None) -> None:
    """Compare queries, keys and values of every layer with those that its own attention compares, at the first
    positions and at the last ones that the model has.

    Args:
        prepare: makes those to compare; None: the C++ kernels do.

    Raises:
        NotNative: a layer differs by more than rounding.
    """
    if prepare is None and (reason := native.why_not()):
        raise NotNative(reason)
    device = model.device
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or TOKENS
    for start in sorted({0, max(most - TOKENS, 0)}):
        with _looking(model, decoder) as (looked, arguments), fast_linear():
            ids = (torch.arange(TOKENS, device=device) * 7919 % model.get_input_embeddings().num_embeddings)[None]
            at = torch.arange(start, start + TOKENS, device=device)[None]
            model(ids, position_ids=at, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
        for block in decoder.attending:
            hidden, *own = looked[id(block.attention)]
            if len(own) != 3:
                raise NotNative(f"{block.name}'s attention does not use transformers' attention interface")
            _check_arguments(block, arguments[id(block.attention)])
            qkv = [linear(hidden).contiguous() for linear in (block.q, block.k, block.v)]
            ours = (prepare or _natively)(block, qkv, decoder.rotary.at(block.kind, at[0]))
            for name, found, wanted in zip(("queries", "keys", "values"), ours, own, strict=True):
                if not (difference := _difference(found, wanted)) <= ROUNDINGS * torch.finfo(decoder.dtype).eps:
                    raise NotNative(
                        f"{block.name} makes other {name} than a Llama's from its input, different by {difference:.2g} "
                        f"at position {start}"
                    )


def _check_arguments(block: DecoderBlock, given: Mapping[str, Any]) -> None:
    """Compare a block's window, scale and cap of scores with those that its own attention asks for."""
    ours = {"sliding_window": block.window, "scaling": block.scale, "softcap": block.softcap}
    for name, value in ours.items():
        if name in given and not math.isclose(given[name] or 0, value, rel_tol=1e-6):
            raise NotNative(f"{block.name}'s attention has the {name} {given[name]}, not {value:g}")


def _natively(block: DecoderBlock, qkv: Sequence[Tensor], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A `Prepare` by the C++ kernels."""
    q, k, v = qkv
    keys, values = q.new_empty(2, 1, block.kv_heads, TOKENS, block.channels)
    norms = block.query_norm, block.key_norm
    turn_and_store(
        q, k, v, (tables[0], tables[1]), torch.arange(TOKENS)[None], norms, keys, values, 0, neighbours=block.neighbours
    )
    return q.unflatten(-1, (-1, block.channels)).transpose(1, 2), keys, values


@contextmanager
def _looking(model: nn.Module, decoder: Decoder) -> Iterator[tuple[dict[int, list[Tensor]], dict[int, dict[str, Any]]]]:
    """While the context lasts, by attention module: its input, and the queries, keys and values that it compares; and
    the other arguments of the attention."""
    looked: dict[int, list[Tensor]] = {}
    arguments: dict[int, dict[str, Any]] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        looked[id(module)] = [kwargs.get("hidden_states", args[0] if args else None)]

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        looked[id(module)] += [query, key, value]
        arguments[id(module)] = kwargs
        y = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).contiguous(), None  # later layers are compared by their own inputs, whatever these are

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    hooks = [block.attention.register_forward_pre_hook(note, with_kwargs=True) for block in decoder.attending]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield looked, arguments
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The relative difference of each channel of each head, over the tokens; the mean, so that channels with large
    values do not hide the others."""
    found, wanted = found.float(), wanted.float()
    relative = (found - wanted).norm(dim=2) / wanted.norm(dim=2).clamp(min=1e-20)
    return float(relative.clamp(max=1).mean())
