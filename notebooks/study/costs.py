"""A decoding step of a model with its weights and its cache stored by recipes, from shapes alone.

Nothing is loaded or compressed: shapes come from the configuration, and stored sizes from the formats of the recipes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.checkpoint.fits import linears_to_be
from compress.classes import auto_class
from compress.embedding import find_ends, stored_specs
from compress.formats import FORMATS, bits_of
from compress.inputs.skeleton import skeleton
from compress.kv.policy import Policy
from compress.kv.timed import check_sized, sizes
from compress.linear import replace as replace_linear
from compress.linear import sharing_copy
from compress.method import Method, settle
from compress.plan import check_recipe
from compress.recipe import parse_recipe
from compress.walk.blocks import find_blocks, targets
from compress.walk.experts import split_experts
from compress.walk.window import plan_window
from eval.record.serving import Combination
from eval.speed.cost import Tiers, combine
from eval.speed.work import CacheLayer, StoredLinear, StoredTable, Work, stored_bytes, work
from kernels.harness.model_weights import SHAPES
from kernels.support.deploy import deployed
from kernels.support.errors import kind_and_first_line

HALF = 2  # bytes of a float in deployed models
PLAIN = "16 bits"
WEIGHTS = (
    "8 bits: gptq(bits=8); 4 bits: gptq(bits=4); "
    "4 bits, table: gptq(bits=4, group_size=32, grid=iq4_nl, scale_dtype=int6), "
    "rtn(bits=8, group_size=32, scale=search, where=embedding)"
)


@dataclass(frozen=True)
class Weights:
    """Stored weights. work: of a step with them and a cache in 16 bits. nbytes: of all of them. model: without values,
    with stand-ins of stored weights."""

    work: Work
    nbytes: int
    model: nn.Module


def outline(name: str) -> nn.Module:
    """A model on the meta device, with shapes and without weights.

    Args:
        name: as for `load_model`; or a key of `kernels.harness.model_weights.SHAPES`, unless a folder has this name.

    Raises:
        ValueError: there is no such model.
    """
    if name not in SHAPES or Path(name).exists():
        return skeleton(name)
    kind, config = SHAPES[name]
    with torch.device("meta"):
        return kind(config())


def is_recipe(name: str) -> bool:
    """Whether a name is the text of its recipe, and not one that a user gave it."""
    try:
        return bool(parse_recipe(name))
    except ValueError:
        return False


def plain_weights(name: str, model: nn.Module, parameter: str = "MODEL") -> Weights:
    """The weights of an outline as they are stored, with floats in 16 bits.

    Args:
        name, parameter: of the model and of the parameter that gives it, for the error.

    Raises:
        ValueError: the model cannot be run without values, so that what it caches is not known.
    """
    try:
        own = deployed(model)
        if not stored_specs(model):
            return Weights(work(own), stored_bytes(own), own)
        with torch.device("meta"):  # stored weights do not run without values
            plain = auto_class(model.config).from_config(model.config, trust_remote_code=False)
        return Weights(work(own, like=work(deployed(plain))), stored_bytes(own), own)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"`{parameter}` (={name!r}): a {type(model).__name__} cannot be run without its weights, so that what it "
            f"caches is not known ({kind_and_first_line(error)}); the notebook `recipe` predicts the cost of loaded "
            "models"
        ) from error


def tiers_of(name: str, weights: Weights, memory: int, host: int | None, disk: bool) -> Tiers:
    """What stays in a device's memory, and what is read for every token (`compress.in_window`): as much of it as the
    host's memory holds from there, and the rest from a disk.

    Args:
        name: of the weights, for the error. memory, host: bytes of the device and of its host; None: no weights stay in
            the host's memory. disk: whether weights may lie on a disk.

    Raises:
        ValueError: a memory does not hold two blocks, or all of them together do not hold the weights.
    """
    prefix, blocks = find_blocks(weights.model)
    sizes = {f"{prefix}.{index}": stored_bytes(block) for index, block in enumerate(blocks)}
    if (head := weights.model.get_output_embeddings()) is not None:
        sizes["head"] = stored_bytes(head)
    window = plan_window(sizes, memory, "--memory")
    away, rest = {one: sizes[one] for one in window.streamed}, weights.nbytes - sum(sizes.values())
    if disk:
        held = plan_window(away, host, "--host-memory").held_bytes if host and away else 0
        return Tiers(window.held_bytes, held, window.streamed_bytes - held, rest)
    if weights.nbytes > memory and (needed := window.streamed_bytes + rest) > (host or 0):
        raise ValueError(
            f"`--host-memory` (={host} bytes) must be at least {needed / 1e9:,.2f} GB, the bytes of the weights {name} "
            "that `--memory` does not hold; or give `--disk`, from which the others are read"
        )
    return Tiers(window.held_bytes, window.streamed_bytes, 0, rest)


def check_weights(name: str, methods: Sequence[Method], parameter: str, cache_parameter: str = "--cache") -> None:
    """Raise ValueError if what these methods store of any model does not follow from its shapes.

    Args:
        parameter, cache_parameter: that give the recipes of the weights and those of the cache, for the error.
    """
    for method in settle(methods):
        if method.stage == "cache":
            instead = f"`{cache_parameter}` takes methods of the cache"
        elif method.stage == "drop":
            instead = "what it drops depends on the weights; the notebook `recipe` predicts the cost of loaded models"
        elif len(method.variants()) > 1:
            instead = "what it chooses depends on the weights; the notebook `recipe` predicts the cost of loaded models"
        else:
            continue
        raise ValueError(f"`{parameter}` (={name!r}) must do without {method}: {instead}")


def check_cache(name: str, methods: Sequence[Method], parameter: str) -> None:
    """Raise ValueError if what these methods keep of a prompt does not follow from shapes."""
    try:
        check_sized(settle(methods))
    except ValueError as error:
        raise ValueError(f"`{parameter}` (={name!r}): {error}") from error


def stored_weights(methods: Sequence[Method], model: nn.Module, plain: Weights) -> Weights:
    """The weights of an outline after a recipe, with stand-ins of their stored size in their place.

    Raises:
        ValueError: the recipe does not fit the model.
    """
    recipe = check_recipe(methods, model, outline=True)
    specs, _ = linears_to_be(recipe, model)
    zeros = max((method.zeros for method in recipe), default=0.0)
    made = deployed(sharing_copy(model))
    if specs.keys() - dict(made.named_modules()).keys():
        split_experts(made)
    ends = find_ends(made)
    for name, spec in specs.items():
        out, columns = spec["parts"][0]["shape"]
        size = round(bits_of(spec["parts"], zeros=zeros) * out * columns / 8)
        if name != ends.embedding:
            bias = getattr(made.get_submodule(name), "bias", None)
            macs = sum(FORMATS[part["format"]].macs(part) for part in spec["parts"])
            replace_linear(made, name, StoredLinear(out, columns, size, macs, bias))
        if name == ends.embedding or (ends.tied and name == ends.head):
            replace_linear(made, ends.embedding, StoredTable(out, size, tied=ends.tied))
    return Weights(work(made, like=plain.work), stored_bytes(made), made)


def stored_cache(methods: Sequence[Method], model: nn.Module, plain: Weights, context: int) -> tuple[CacheLayer, ...]:
    """What a sequence keeps in the cache that these methods keep of a prompt of `context` tokens.

    Raises:
        ValueError: the methods do not fit the model.
    """
    kept, cache = sizes(check_recipe(methods, model, outline=True), model, context), list[CacheLayer]()
    for layer in plain.work.cache:
        if layer.number in kept:
            own = kept[layer.number]
            layer = replace(layer, bytes=own.bytes / context, macs=layer.macs * own.positions / context)
        cache.append(layer)
    return tuple(cache)


def rooms(model: nn.Module, context: int, further: float = 0.0) -> tuple[int, int]:
    """Bytes beside weights and caches: while one prompt is read in one pass, and for each sequence of a step.

    Of every token, three vectors of hidden units and three of the width of the blocks' widest linear are alive at once
    (the units of a gated MLP), in 16 bits; of a sequence's last token also the logits, in 16 and in 32 bits.

    Args:
        further: bytes of the prompt's cache that are freed when it has been read.
    """
    config = model.config.get_text_config(decoder=True)
    widest = max(max(shape) for shape in targets(model).values())
    token, logits = HALF * 3 * (config.hidden_size + widest), (HALF + 4) * config.vocab_size
    return round(context * token + logits + further), token + logits


def combinations(
    model: nn.Module,
    stored: Mapping[str, Weights],
    kept: Mapping[str, tuple[CacheLayer, ...]],
    caches: Mapping[str, Sequence[Method]],
    *,
    context: int,
    **about: Any,
) -> list[Combination]:
    """Every combination of weights and caches in a memory.

    Args:
        kept: what a sequence keeps in each cache. caches: their methods; a policy evicts when the whole prompt has been
            read, and until then its cache is in 16 bits.
        about: memory, batch and ceilings of `eval.speed.cost.combine`.
    """
    found, plain = [], next(iter(stored.values())).work
    for name, one in stored.items():
        for cache, layers in kept.items():
            work = replace(one.work, cache=layers)
            evicts = any(isinstance(method, Policy) for method in caches.get(cache, ()))
            more = max(plain.kept_bytes(context) - work.kept_bytes(context), 0) if evicts else 0
            prompt, step = rooms(model, context, more)
            how = {"weight_bytes": one.nbytes, "prompt_room": prompt, "step_room": step, "context": context}
            found.append(combine(name, cache, work, **how, **about))
    return found


def too_small(found: Sequence[Combination], context: int, memory: str, batch: str) -> str:
    """Why none of these combinations fits, and how near one comes.

    Args:
        memory, batch: the parameters with their values, "`memory` (=1GB)".
    """
    if any(one.sequences for one in found):
        best = max(found, key=lambda one: one.sequences)
        return (
            f"{batch} does not fit into {memory}: at most {best.sequences:,} sequences of {context:,} tokens do, with "
            f"weights {best.weights} and cache {best.cache}"
        )
    best = min(found, key=lambda one: one.least)
    return (
        f"{memory} is too small: one sequence of {context:,} tokens needs at least {best.least / 1e6:,.1f} MB, with "
        f"weights {best.weights} ({best.weight_bytes / 1e6:,.1f} MB) and cache {best.cache} "
        f"({best.cache_bytes / 1e6:,.1f} MB)"
    )
