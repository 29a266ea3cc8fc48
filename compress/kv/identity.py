"""Whether a cache that keeps everything gives the model's own logits: the condition for attaching a compressed one.

Some attention reads a cache in another way than once for every update (keys that several layers share, two softmaxes
over one set of keys, keys that are expanded after the cache). Configurations do not tell this reliably, so that a
prompt and a few tokens of decoding decide, against transformers' own cache.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig

from compress.kv.rotation import check_rotations
from compress.walk.capture import device_of
from compress.walk.experts import has_experts
from kernels.support.errors import first_line
from kernels.support.modes import evaluating

PROMPT, DECODED = 12, 2  # tokens
LEAST = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative difference of logits that rounding may cause
LEAST_16 = 0.02
TIMES_NOISE, MOST = 8.0, 0.3  # of the difference between the model's own passes with and without a cache; at most
HEADS = 4
# Sizes of the small copy, by the names that configurations give them; others stay as they are.
WIDTHS = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "head_dim": 16, "global_head_dim": 16, "vocab_size": 128, "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16, "ffn_dim": 64, "n_inner": 64,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
Attached = Callable[[nn.Module], AbstractContextManager]
_agreed: set[int] = set()  # descriptions of the models that have passed


def check_identity(model: nn.Module, attached: Attached, *, turns: bool = False, planned: bool = False) -> None:
    """Raise ValueError if a full cache of ours does not give the logits that transformers' own cache gives.

    Models of one structure are checked once.

    Args:
        attached: a context in which a model has a cache that keeps everything.
        turns: also refuse models whose keys are rotated in a way that is not known.
        planned: check a small model of the same configuration, if one can be built, and not the model itself. Models
            whose weights are not in memory are checked in this way or not at all.
    """
    away = any(p.is_meta for p in model.parameters())
    planned = planned or away
    structure = [] if planned else map(_kind, model.modules())
    about = hash((type(model), str(model.dtype), model.config.to_json_string(), turns, planned, *structure))
    if about in _agreed:
        return
    checked = small_copy(model.config) if planned else model
    checked = model if checked is None and not away else checked
    if checked is not None:
        _compare(checked, type(model).__name__, attached)
        if turns:
            check_rotations(checked)
    _agreed.add(about)


def _kind(module: nn.Module) -> tuple[type, bool]:
    return type(module), "forward" in vars(module)


@torch.no_grad()
def _compare(model: nn.Module, name: str, attached: Attached) -> None:
    count, routed = PROMPT + DECODED, has_experts(model)
    ids = (torch.arange(count, device=device_of(model)) * 7919 % model.get_input_embeddings().num_embeddings)[None]
    with evaluating(model):
        with _refusing(name, "without a compressed cache"):
            # An accelerated model reads this cache as fast as a compressed one; its own code rounds more than that.
            own = _by_pieces(model, ids, DynamicCache(config=model.config.get_text_config(decoder=True)))
            noise = _difference(model(ids, use_cache=False).logits, own, routed)
        if not own.isfinite().all():
            raise ValueError(f"`model` ({name}) gives logits that are not finite, so that no cache can be compared")
        with attached(model) as attachment, _refusing(name, "with a compressed cache that keeps everything"):
            found = _by_pieces(model, ids, cache := attachment.cache())
    if not cache.filled:
        raise ValueError(f"`model` ({name}) gives a cache no keys and values: there is nothing to evict or compress")
    least = LEAST.get(model.dtype, LEAST_16)
    if not (difference := _difference(found, own, routed)) <= min(max(least, TIMES_NOISE * noise), MOST):
        raise ValueError(
            f"`model` ({name}): with a compressed cache that keeps everything, its logits differ by {difference:.2g} "
            "of their size from those with transformers' own cache, so that its attention reads the cache in a way "
            "that is not supported (more than once for every layer, say)"
        )


@contextmanager
def _refusing(name: str, how: str) -> Iterator[None]:
    """Any error of a pass is a reason not to attach."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"`model` ({name}) cannot be attached: {how}, its pass fails: {first_line(error)}") from error


def _by_pieces(model: nn.Module, ids: Tensor, cache: Cache) -> Tensor:
    """Logits [1, tokens, vocabulary] of a prompt and single tokens behind it."""
    pieces = ids.split([PROMPT, *[1] * DECODED], 1)
    return torch.cat([model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], 1)


def _difference(found: Tensor, wanted: Tensor, routed: bool) -> float:
    """The largest difference of the logits of a position, relative to their size without their mean.

    Args:
        routed: a router chooses experts, and rounding may make it choose others for a token. The result is then the
            median over the prompt's tokens, or the smallest over the tokens behind it, whichever is larger.
    """
    found, wanted = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, wanted))
    each = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-20)
    if not routed:
        return float(each.max())
    return float(torch.maximum(each[:, :PROMPT].median(), each[:, PROMPT:].min()))  # NaN if a token has NaN


def small_copy(config: PreTrainedConfig) -> nn.Module | None:
    """A narrow model with random weights and the same kinds of layers; None if its sizes do not go together."""
    config = config.get_text_config(decoder=True)
    values = json.loads(config.to_json_string())
    smaller: dict[str, object] = {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    smaller |= {"initializer_range": 0.1, "dtype": "float32"}
    names = config.attribute_map
    smaller |= _narrow(values, {**WIDTHS, **_heads(values, names)}, names)
    if by_layer := values.get("per_layer_config"):  # other widths stay, so that layers that differ still do
        smaller["per_layer_config"] = {
            number: {**own, **_narrow(own, _heads({**values, **own}, names), names)} for number, own in by_layer.items()
        }
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            small = AutoModelForCausalLM.from_config(type(config)(**{**values, **smaller}), trust_remote_code=False)
            small.eval().requires_grad_(False)
            small(torch.arange(4)[None])
    except Exception:  # sizes that depend on each other: attaching compares the model itself
        return None
    return small


def _narrow(values: Mapping[str, Any], sizes: Mapping[str, int], names: Mapping[str, str]) -> dict[str, Any]:
    """The settings that are larger than these sizes, with the sizes.

    Args:
        names: the names of a class for settings, where they are others than those of `sizes`.
    """
    narrow = {}
    for name, size in sizes.items():
        key = names.get(name, name)
        if isinstance(given := values.get(key), list):
            narrow[key] = [min(size, one) for one in given]
        elif isinstance(given, int) and given:
            narrow[key] = min(size, given)
    return narrow


def _heads(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Numbers of heads for the small copy: one key head, as many as query heads, or half of them, as in the model."""
    heads, kv_heads = (values.get(names.get(name, name)) for name in ("num_attention_heads", "num_key_value_heads"))
    kv_heads = HEADS if kv_heads == heads else 1 if kv_heads == 1 else HEADS // 2
    return {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads}
