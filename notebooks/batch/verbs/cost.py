"""`workbench cost MODEL`: the bytes and the least time of a decoding step, of the model as it is and with recipes.

Nothing is loaded or compressed: shapes come from the configuration, and stored sizes from the formats of the recipe.
"""

import argparse
from dataclasses import replace
from typing import Any


def declare(command) -> None:
    """The options of `workbench cost`."""
    parser = command(
        "cost",
        cost,
        "predict bytes, time and bound of a decoding step, without loading the model",
        ("model", {"metavar": "MODEL", "help": "a folder, a .gguf file, a hub id, or smollm2-135m (embedded)"}),
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        action="append",
        default=[],
        help='a recipe to set beside the model as it is: "gptq(bits=4)"; may be given several times',
    )
    parser.add_argument("--context", metavar="N", type=int, default=1024, help="cached tokens a row (default: 1024)")
    parser.add_argument("--batch", metavar="B", type=int, default=1, help="rows that decode together (default: 1)")
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="here",
        help="here (default; measured in some seconds), or a device by its data sheet: a100-80gb, h100-sxm, ...",
    )
    parser.add_argument(
        "--cache-bits",
        metavar="BITS",
        type=float,
        default=16.0,
        help="bits per number of the recipes' caches, scales included (default: 16; kv_int in 4 bits: 4.5)",
    )
    parser.add_argument(
        "--kept", metavar="SHARE", type=float, default=1.0, help="share of the positions that the recipes' caches keep"
    )


def cost(options: argparse.Namespace) -> int:
    """Print a row for the model in 16 bits and one for each recipe."""
    _check(options)
    from compress.embedding import stored_specs
    from compress.inputs.skeleton import skeleton
    from eval.speed.cost import predict
    from eval.speed.devices import ceilings_of
    from eval.speed.work import cache_bytes_per_token, work
    from notebooks.batch.status import aligned

    model = skeleton(options.model)
    plain = _work(options.model, model)
    works = {"as stored" if stored_specs(model) else "16 bits": plain}
    shrinks = options.cache_bits / 16 * options.kept
    cache = tuple(replace(layer, bytes=layer.bytes * shrinks, macs=layer.macs * options.kept) for layer in plain.cache)
    for text in options.recipe:
        works[text] = work(_stored(text, model), cache=cache)
    ceilings, how = ceilings_of(options.device)
    rows = [("", "weights read", "cache read", "operations", "least time", "tokens/s", "bound by")]
    for name, one in works.items():
        rows.append(
            (name, *_cells(predict(name, one, context=options.context, batch=options.batch, ceilings=ceilings)))
        )
    print(aligned(rows))
    peak = ceilings.rates.get("bfloat16")
    rate = f" and {peak / 1e12:,.3g} TFLOP/s" if peak else ""
    print(
        f"\na step of {options.batch} x 1 token behind {options.context:,} on {options.device}: "
        f"{ceilings.bandwidth / 1e9:,.0f} GB/s{rate} ({how})"
    )
    grows = cache_bytes_per_token(model.config)
    print(f"each token adds {grows / 1e3:,.3f} kB to the cache in 16 bits, in layers without a window")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Everything that can be refused before the model's files are read."""
    from eval.speed.devices import check_device_name
    from notebooks.batch.verbs.loading import check_model

    for option in ("context", "batch"):
        if getattr(options, option) < 1:
            raise ValueError(f"`--{option}` (={getattr(options, option)}) must be 1 or more")
    if not 0 < options.cache_bits <= 16:
        raise ValueError(f"`--cache-bits` (={options.cache_bits:g}) must be above 0, and 16 at most")
    if not 0 < options.kept <= 1:
        raise ValueError(f"`--kept` (={options.kept:g}) must be a share above 0, and 1 at most")
    if not options.recipe and (options.cache_bits, options.kept) != (16, 1):
        raise ValueError("`--cache-bits` and `--kept` are of the caches of recipes: name one, such as rtn(bits=4)")
    check_device_name(options.device)
    check_model(options.model, "MODEL")


def _work(name: str, model: Any) -> Any:
    """The work of a step of the model, with its floats in 16 bits.

    Raises:
        ValueError: the model cannot be run without values, so that what it caches is not known.
    """
    import torch

    from compress.classes import auto_class
    from compress.embedding import stored_specs
    from eval.speed.work import work
    from kernels.support.deploy import deployed
    from kernels.support.errors import kind_and_first_line

    try:
        if not stored_specs(model):
            return work(deployed(model))
        with torch.device("meta"):  # stored weights do not run without values
            plain = auto_class(model.config).from_config(model.config, trust_remote_code=False)
        return work(deployed(model), cache=work(deployed(plain)).cache)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"`MODEL` (={name!r}): a {type(model).__name__} cannot be run without its weights, so that what it caches "
            f"is not known ({kind_and_first_line(error)}); the notebook `recipe` predicts the cost of loaded models"
        ) from error


def _stored(text: str, model: Any) -> Any:
    """The outline of a model in which stand-ins of their stored size are in the place of what a recipe compresses."""
    from compress.checkpoint.fits import linears_to_be
    from compress.embedding import find_ends
    from compress.formats import FORMATS, bits_of
    from compress.linear import replace, sharing_copy
    from compress.walk.experts import split_experts
    from eval.speed.work import StoredLinear, StoredTable
    from kernels.support.deploy import deployed

    recipe = _settled(text, model)
    specs, _ = linears_to_be(recipe, model)
    zeros = max((method.zeros for method in recipe), default=0.0)
    outline = deployed(sharing_copy(model))
    if specs.keys() - dict(outline.named_modules()).keys():
        split_experts(outline)
    ends = find_ends(outline)
    for name, spec in specs.items():
        out, columns = spec["parts"][0]["shape"]
        size = round(bits_of(spec["parts"], zeros=zeros) * out * columns / 8)
        if name != ends.embedding:
            bias = getattr(outline.get_submodule(name), "bias", None)
            macs = sum(FORMATS[part["format"]].macs(part) for part in spec["parts"])
            replace(outline, name, StoredLinear(out, columns, size, macs, bias))
        if name == ends.embedding or (ends.tied and name == ends.head):
            replace(outline, ends.embedding, StoredTable(out, size))
    return outline


def _settled(text: str, model: Any) -> list[Any]:
    """The methods of a recipe.

    Raises:
        ValueError: they do not fit the model or each other, or the sizes do not follow from their knobs.
    """
    from compress.method import settle
    from compress.plan import check_recipe
    from compress.recipe import methods_of

    for method in settle(methods_of(text)):
        if method.stage == "cache":
            instead = "the size of a cache is given by --cache-bits and --kept"
        elif method.stage == "drop":
            instead = "what it drops depends on the weights; the notebook `recipe` predicts the cost of loaded models"
        elif len(method.variants()) > 1:
            instead = "what it chooses depends on the weights; the notebook `recipe` predicts the cost of loaded models"
        else:
            continue
        raise ValueError(f"`--recipe` (={text!r}) must do without {method}: {instead}")
    return check_recipe(text, model, outline=True)


def _cells(row: Any) -> tuple[str, ...]:
    """The cells of a predicted step."""
    return (
        f"{row.weight_bytes / 1e6:,.1f} MB",
        f"{row.cache_bytes / 1e6:,.1f} MB",
        f"{row.flops / 1e9:,.2f} GFLOP",
        f"{row.predicted_s * 1e3:,.3g} ms",
        f"{row.batch / row.predicted_s:,.0f}",
        row.bound,
    )
