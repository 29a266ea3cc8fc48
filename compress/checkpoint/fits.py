"""Checks before any work whether a checkpoint format can hold the model that a recipe will make."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from compress.checkpoint.save import check_holds, format_named
from compress.embedding import find_ends, stored_specs
from compress.formats import FORMATS, Bitmap, Sparse24Weight
from compress.formats.masked import masked_like_spec
from compress.linear import CompressedLinear, is_linear, sharing_copy
from compress.method import Method, settle
from compress.recipe import Recipe, methods_of
from compress.walk.blocks import targets
from compress.walk.layerwise import LayerwiseMethod


def check_save_format(save_format: str, recipe: Recipe, model: nn.Module, *, sized: bool = False) -> None:
    """Raise ValueError, before any work, if a checkpoint format cannot hold the model that a recipe will make.

    The message names the format, the method with its knobs, a linear, the reason, and the formats that could hold it.
    If the stored form depends on the data, the check assumes the general case, and saving checks again.

    Args:
        save_format: one of `compress.checkpoint.save.SAVE_FORMATS`.
        model: the model before the recipe is applied; it may be on the meta device, and is not changed.
        sized: also refuse a form that the files hold in more bytes, for which a limit of bytes would not hold.
    """
    writer = format_named(save_format)
    settled, outline = settle(methods_of(recipe)), sharing_copy(model)
    for method in settled:
        method.outline(outline)
    for variant in itertools.product(*(method.variants() for method in settled)):
        linears, made_by = linears_to_be(variant, outline)
        check_holds(save_format, outline, linears, made_by)
        if not sized:
            continue
        grids = {method.grid for method in variant if hasattr(method, "grid")}
        if name := next((name for name in made_by if writer.grows(linears[name], grids)), ""):
            raise ValueError(
                f"`save_format` (={save_format!r}) holds {name}, as {made_by[name]} stores it, in more bytes than "
                f"`max_bytes` counts; choices={save_format} is a standard set that it holds as it is"
            )


def linears_to_be(recipe: Sequence[Method], model: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The form in which a settled recipe will store each linear of a model.

    Returns:
        By name, the future `CompressedLinear.spec()`, and the methods that store the linear.
    """
    specs, ends = stored_specs(model), find_ends(model)
    looked_up = {ends.embedding, ends.head} if ends.tied else {ends.embedding}
    # A model that was pruned before keeps its zeros; their number is not in its specification.
    pruned = (Bitmap.name, Sparse24Weight.name)
    zeros = {name: 1.0 for name, spec in specs.items() if spec["parts"][0]["format"] in pruned}
    made_by: dict[str, str] = {}
    for method in recipe:
        taken = targets(model, method.skip, method.where) if isinstance(method, LayerwiseMethod) else {}
        for name, shape in taken.items():
            if (parts := method.stores(shape)) is None or (method.adds and name not in specs):
                continue
            if method.adds:
                parts = [*specs[name]["parts"], *parts]
            else:
                before = specs[name]["parts"] if name in specs else []
                exact = [part for part in before if FORMATS[part["format"]].exact]
                if zeros.get(name):
                    parts = masked_like_spec(before, parts, zeros[name])
                parts = [*parts, *exact]
            bias = has_bias(model, name)
            specs[name] = CompressedLinear.spec_of(parts, bias=bias, looked_up=name in looked_up)
            zeros[name] = zeros.get(name, 0.0) or method.zeros
            made_by[name] = f"{made_by[name]}, {method}" if name in made_by else str(method)
    return specs, made_by


def has_bias(model: nn.Module, name: str) -> bool:
    """Whether a linear has a bias; an expert's may still lie in the parameters that hold all experts."""
    modules = dict(model.named_modules())
    if isinstance(modules.get(name), CompressedLinear):
        return modules[name].spec()["bias"]
    if is_linear(modules.get(name)):
        return modules[name].bias is not None
    owner = name.rpartition(".")[0].rpartition(".")[0]  # mlp.experts.down_proj.3 belongs to mlp.experts
    return bool(getattr(modules[owner], "has_bias", False))
