"""`workbench cost MODEL`: the bytes and the least time of a decoding step, of the model as it is and with recipes, and
how many sequences fit into a memory, or how fast weights decode that a memory does not hold.

Nothing is loaded or compressed: shapes come from the configuration, and stored sizes from the formats of the recipes.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any


def declare(command) -> None:
    """The options of `workbench cost`."""
    names = (
        "a folder, a .gguf file, a hub id, smollm2-135m (embedded), or a shape: llama-1b, llama-8b, qwen3-8b, "
        "yi-34b, qwen2.5-72b, llama-405b, deepseek-v3"
    )
    parser = command(
        "cost",
        cost,
        "predict bytes, time and bound of a decoding step, or what fits into a memory, without loading the model",
        ("model", {"metavar": "MODEL", "help": names}),
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        action="append",
        default=[],
        help='a recipe of the weights to set beside the model as it is: "gptq(bits={4,8})", or several, each with an '
        'optional name: "small: gptq(bits=4); rtn"; may be given several times',
    )
    parser.add_argument(
        "--cache",
        metavar="RECIPE",
        action="append",
        default=[],
        help='a recipe of the cache to set beside 16 bits, for all weights: "kv_int(bits=4)"; likewise',
    )
    parser.add_argument("--context", metavar="N", type=int, default=1024, help="cached tokens a row (default: 1024)")
    parser.add_argument(
        "--batch",
        metavar="B",
        type=int,
        default=None,
        help="rows that decode together (default: 1; with --memory as many as fit)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="here",
        help="here (default; measured in some seconds), or a device by its data sheet: a100-80gb, h100-sxm, ...",
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        default="",
        help="a device's memory, such as 24GB: how many sequences of this context fit into it with each combination of "
        "weights and caches, and how fast they decode; a standard set of recipes and caches unless some are given; "
        "with --host-memory or --disk the bytes of weights that stay in it",
    )
    parser.add_argument(
        "--host-memory",
        metavar="BYTES",
        default="",
        help="memory of the device's host, such as 64GB, from which weights that --memory does not hold are read over "
        "the link for every token; with --disk those that fit into neither are read from there",
    )
    parser.add_argument(
        "--link",
        metavar="BYTES",
        default="",
        help="bytes per second in one direction between host and device, such as 20GB (default: by the device's data "
        "sheet); a sequence's cache is moved over it, too, if more are served than fit",
    )
    parser.add_argument(
        "--disk",
        metavar="BYTES",
        default="",
        help="bytes per second that a disk gives, such as 2GB: how fast one sequence decodes if --memory holds only "
        "some of the weights, and the others are read for every token",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, in bytes and seconds")


def cost(options: argparse.Namespace) -> int:
    """Print a row for every combination of weights and caches."""
    _check(options)
    memory, host, link, disk = _sizes(options)
    from compress.embedding import stored_specs
    from compress.search.caches import STANDARD_CACHES
    from eval.speed.cost import predict_prompt
    from eval.speed.devices import ceilings_of
    from eval.speed.work import cache_bytes_per_token
    from notebooks.batch.status import aligned
    from notebooks.study import costs

    tiered = bool(host or disk)
    serving = memory and not tiered
    recipes = _recipes(options.recipe, "--recipe", costs.check_weights, costs.WEIGHTS if serving else "")
    caches = _recipes(options.cache, "--cache", costs.check_cache, STANDARD_CACHES if serving else "")
    model = costs.outline(options.model)
    plain = costs.plain_weights(options.model, model)
    stored = {"as stored" if stored_specs(model) else costs.PLAIN: plain}
    stored |= {name: costs.stored_weights(one, model, plain) for name, one in recipes.items()}
    kept = {costs.PLAIN: plain.work.cache}
    kept |= {name: costs.stored_cache(one, model, plain, options.context) for name, one in caches.items()}
    ceilings, how = ceilings_of(options.device)
    about = {"context": options.context, "batch": options.batch, "ceilings": ceilings}
    prompts = {
        name: predict_prompt(name, one.model, one.work, tokens=options.context, ceilings=ceilings)
        for name, one in stored.items()
    }
    if tiered:
        tiers = {name: costs.tiers_of(name, one, memory, host, bool(disk)) for name, one in stored.items()}
        facts, cells = _rows_of_tiers(tiers, stored, prompts, {"link": link, "disk": disk}, **about)
    elif memory:
        found = costs.combinations(model, stored, kept, caches, memory=memory, **about)
        facts, cells = _rows_of_memory(options, found, prompts, link)
    else:
        facts, cells = _rows(stored, kept, prompts, **about)
    grows = cache_bytes_per_token(model.config)
    if options.json:
        asked = {"model": options.model, "device": options.device, "context": options.context, "batch": options.batch}
        rates = {"read_bytes_per_s": ceilings.bandwidth, "flops_per_s": ceilings.rates.get("bfloat16"), "how": how}
        rates |= {"link_bytes_per_s": link, "disk_bytes_per_s": disk, "memory": memory, "host_memory": host}
        print(json.dumps(asked | rates | {"cache_bytes_per_token": grows, "rows": facts}))
        return 0
    print(aligned(cells))
    peak = ceilings.rates.get("bfloat16")
    rate = f" and {peak / 1e12:,.3g} TFLOP/s" if peak else ""
    together = "as many rows as fit" if serving and options.batch is None else options.batch or 1
    print(
        f"\na step of {together} x 1 token behind {options.context:,} on {options.device}: "
        f"{ceilings.bandwidth / 1e9:,.0f} GB/s{rate} ({how})"
    )
    print(f"each token adds {grows / 1e3:,.3f} kB to the cache in 16 bits, in layers without a window")
    print(f"prompt: {options.context:,} tokens of one sequence, read in one pass")
    if memory and link:
        print(f"between host and device: {link / 1e9:,.3g} GB/s in one direction")
    if memory:
        print(_STREAMED if tiered else _ROOM + _SWAP * bool(link))
    for kind, named in (("weights", recipes), ("cache", caches)):
        for name, one in named.items():
            if not costs.is_recipe(name):
                print(f"{kind}, {name}: {', '.join(map(str, one))}")
    return 0


def _sizes(options: argparse.Namespace) -> tuple[int | None, int | None, float | None, int | None]:
    """Bytes of the device's and of the host's memory, and bytes per second of the link and of the disk.

    Raises:
        ValueError: one is no number of bytes, or needs another one, or makes another option void.
    """
    from eval.speed.devices import link_of
    from kernels.support.units import bytes_of

    memory, host, link, disk = (
        bytes_of(getattr(options, name.replace("-", "_")), f"--{name}")
        for name in ("memory", "host-memory", "link", "disk")
    )
    for option, size in (("host-memory", host), ("disk", disk)):
        if size and not memory:
            text = getattr(options, option.replace("-", "_"))
            raise ValueError(f"`--{option}` (={text!r}) needs `--memory`, the bytes of weights that stay in it")
        if size and options.cache:
            raise ValueError(
                f"`--cache` does not matter with `--{option}`, which holds weights in `--memory`; leave it out"
            )
    if link and not memory:
        raise ValueError(f"`--link` (={options.link!r}) needs `--memory`, beyond which weights and caches are moved")
    rate = link or link_of(options.device)
    if host and not rate:
        raise ValueError(
            f"`--host-memory` (={options.host_memory!r}) needs `--link`, the bytes per second between host and device, "
            f"which are known of devices by their data sheets, and not with `--device` (={options.device!r})"
        )
    return memory, host, rate, disk


def _check(options: argparse.Namespace) -> None:
    """Everything that can be refused before the model's files are read."""
    from eval.speed.devices import check_device_name
    from kernels.harness.model_weights import SHAPES
    from notebooks.batch.verbs.loading import check_model

    for option in ("context", "batch"):
        if (given := getattr(options, option)) is not None and given < 1:
            raise ValueError(f"`--{option}` (={given}) must be 1 or more")
    check_device_name(options.device)
    if options.model not in SHAPES:
        check_model(options.model, "MODEL")


def _recipes(texts: Sequence[str], option: str, check: Any, standard: str) -> dict[str, Any]:
    """Recipes by name.

    Args:
        standard: the text of those that are taken if none are given.

    Raises:
        ValueError: what is stored does not follow from shapes; or two recipes have one name.
    """
    from compress.recipe import parse_recipes
    from notebooks.study.costs import PLAIN

    found: dict[str, Any] = {}
    for text in texts or [standard]:
        for name, methods in parse_recipes(text, parameter=option).items():
            if name in {PLAIN, *found}:
                raise ValueError(f"`{option}` (={text!r}): {name!r} is the name of another row; put a name before it")
            check(name, methods, option)
            found[name] = methods
    return found


Rows = tuple[list[dict[str, Any]], list[tuple]]  # facts, and the cells of a table with its head


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def _prompt(seconds: float, bound: str) -> tuple[str, dict[str, Any]]:
    """The cell of the time of a prompt, and its facts."""
    return f"{_time(seconds)}, {bound}", {"prompt_seconds": seconds, "prompt_bound": bound}


def _rows(
    stored: Mapping[str, Any], kept: Mapping[str, Any], prompts: Mapping[str, Any], *, batch: int | None, **about: Any
) -> Rows:
    """Predicted steps."""
    from dataclasses import replace

    from eval.speed.cost import predict

    sizes = "weights read", "cache read", "operations"
    facts, rows = [], [("weights", "cache", *sizes, "least time", "tokens/s", "bound by", "prompt")]
    for name, one in stored.items():
        prompt, its = _prompt(prompts[name].predicted_s, prompts[name].bound)
        for cache, layers in kept.items():
            row = predict(name, replace(one.work, cache=layers), batch=batch or 1, **about)
            read = f"{row.weight_bytes / 1e6:,.1f} MB", f"{row.cache_bytes / 1e6:,.1f} MB"
            time = f"{row.predicted_s * 1e3:,.3g} ms", f"{row.batch / row.predicted_s:,.0f}"
            rows.append((name, cache, *read, f"{row.flops / 1e9:,.2f} GFLOP", *time, row.bound, prompt))
            sizes = {"weight_bytes": row.weight_bytes, "cache_bytes": row.cache_bytes, "flops": row.flops}
            facts.append({"weights": name, "cache": cache, **sizes, "seconds": row.predicted_s, "bound": row.bound})
            facts[-1] |= its | {"prompt_flops": prompts[name].flops}
    return facts, rows


def _rows_of_tiers(
    tiers: Mapping[str, Any],
    stored: Mapping[str, Any],
    prompts: Mapping[str, Any],
    rates: Mapping[str, float | None],
    *,
    batch: int | None,
    **about: Any,
) -> Rows:
    """Steps with weights of which the device's memory holds only some."""
    from eval.speed.cost import predict

    places = "device memory", "host memory", "disk", "rest"
    facts, rows = [], [("weights", *places, "device", "link", "disk", "least time", "tokens/s", "bound by", "prompt")]
    for name, split in tiers.items():
        row = predict(name, stored[name].work, batch=batch or 1, **about)
        times, reading = split.seconds(row, **rates), split.seconds(prompts[name], **rates)
        bound, slowest = max(times, key=times.__getitem__), max(reading, key=reading.__getitem__)
        prompt, its = _prompt(reading[slowest], slowest)
        sizes = [f"{size / 1e6:,.1f} MB" for size in asdict(split).values()]
        speed = _time(times[bound]), f"{row.batch / times[bound]:,.3g}"
        rows.append((name, *sizes, *map(_time, times.values()), *speed, bound, prompt))
        each = {
            f"{place}_seconds": took for place, took in zip(("device", "link", "disk"), times.values(), strict=True)
        }
        facts.append({"weights": name, **asdict(split), "streamed_bytes": split.streamed_bytes, **each})
        facts[-1] |= {"seconds": times[bound], "bound": bound} | its
    return facts, rows


_STREAMED = (
    "device, link and disk work at once: one block is read while the one before computes; the rest is an embedding, "
    "whose rows are read as they are looked up, and norms; caches and activations come on top of --memory"
)
_SWAP = (
    "\nif more sequences are served than fit, a switch moves the cache of one to the host and that of another back, "
    "each in the time of the column swap"
)
_ROOM = (
    "beside weights and caches there must be room to read a prompt in one pass (activations of all its tokens in the "
    "widest block, and for a policy that evicts its cache in 16 bits), or for a step's activations and logits; speeds "
    "are the most that the device's bandwidth and arithmetic allow"
)


def _rows_of_memory(
    options: argparse.Namespace, found: Sequence[Any], prompts: Mapping[str, Any], link: float | None
) -> Rows:
    """Combinations in a memory.

    Raises:
        ValueError: none fits; the message says how near one comes.
    """
    from eval.record.serving import fastest, largest
    from notebooks.study.costs import too_small

    most, quickest = largest(found), fastest(found)
    if most is None:
        given = f"`--memory` (={options.memory})", f"`--batch` (={options.batch})"
        raise ValueError(too_small(found, options.context, *given))
    facts, rows = [], [("weights", "cache", "weights, MB", "cache each, MB", "room, MB", "sequences", "tokens/s of one",
                        "tokens/s together", "bound by", "prompt", "swap", "")]  # fmt: skip
    for one in found:
        marks = [text for text, best in (("most sequences", most), ("most tokens/s", quickest)) if one is best]
        if not one.fits:
            marks = [f"{one.sequences} fit" if one.sequences else f"one needs {one.least / 1e9:,.3g} GB"]
        sizes = (f"{size / 1e6:,.1f}" for size in (one.weight_bytes, one.cache_bytes, one.room))
        speeds = (f"{one.alone:,.0f}", f"{one.tokens_per_s:,.0f}", one.bound) if one.fits else ("", "", "")
        prompt, its = _prompt(prompts[one.weights].predicted_s, prompts[one.weights].bound)
        swap = one.cache_bytes / link if link else None
        facts.append(asdict(one) | its | {"swap_seconds": swap})
        moved = (prompt, _time(swap) if swap else "") if one.fits else ("", "")
        rows.append((one.weights, one.cache, *sizes, f"{one.sequences:,}", *speeds, *moved, ", ".join(marks)))
    return facts, rows
