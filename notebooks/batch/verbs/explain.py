"""`workbench explain MODEL RECIPE`: where the time of a decoded token goes, in 16 bits and after a recipe."""

import argparse
from typing import Any

SAMPLES, SEQLEN = 2, 64  # of calibration: formats are timed, and accuracy does not matter


def declare(command) -> None:
    """The options of `workbench explain`."""
    parser = command(
        "explain",
        explain,
        "time the parts of a decoding step, in 16 bits and after a recipe, and say what limits them",
        ("model", {"metavar": "MODEL", "help": "a folder, a .gguf file, a hub id, or smollm2-135m (embedded)"}),
        ("recipe", {"metavar": "RECIPE", "help": 'methods in order, with their knobs: "gptq(bits=4)"'}),
    )
    parser.add_argument("--context", metavar="N", type=int, default=512, help="cached tokens (default: 512)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="rounds of timing (default: 5)")


def explain(options: argparse.Namespace) -> int:
    """Compress a copy of the model with two short texts, and print the times of its parts beside the original's."""
    from notebooks.batch.verbs.loading import check_model

    for option in ("context", "rounds"):
        if getattr(options, option) < 1:
            raise ValueError(f"`--{option}` (={getattr(options, option)}) must be 1 or more")
    check_model(options.model, "MODEL")
    recipe = _recipe(options.recipe)
    from compress import apply, calibration, load_model
    from compress.linear import sharing_copy
    from eval.speed import explain as timing
    from notebooks.batch.status import aligned

    model, tokenizer = load_model(options.model)
    timing.check_explained(model, prompt_tokens=options.context)
    batches = calibration(tokenizer, samples=SAMPLES, seqlen=SEQLEN)
    result = apply(recipe, sharing_copy(model), batches)
    models = {"16 bits": model, options.recipe: result.model}
    found = timing.explain(models, prompt_tokens=options.context, rounds=options.rounds)
    print(aligned(_rows(found)))
    print(f"\na token after {options.context:,} cached ones; memory is read at {found.bandwidth / 1e9:,.0f} GB/s\n")
    for sentence in found.sentences(options.recipe):
        print(sentence)
    return 0


def _recipe(text: str) -> Any:
    """The methods of a recipe, none of which is of the cache, which a native step in one call does not read."""
    from compress.method import settle
    from compress.recipe import parse_recipe

    methods = parse_recipe(text)
    for method in settle(methods):
        if method.stage == "cache":
            raise ValueError(
                f"`RECIPE` (={text!r}): {method} is of the cache, whose time the notebook kv_eviction measures; leave "
                "it out"
            )
    return methods


def _rows(found: Any) -> list[tuple[str, ...]]:
    before, after = found.steps.values()
    rows = [("", "16 bits: MB", "ms", "bandwidth", "recipe: MB", "ms", "bandwidth", "kernel", "limited by")]
    for name, own in after.parts.items():
        rows.append((name, *_cells(before.parts[name]), *_cells(own), ", ".join(own.kernels), own.bound))
    rows.append(("the rest", "", f"{before.rest * 1e3:.3f}", "", "", f"{after.rest * 1e3:.3f}", "", "", ""))
    whole = [(f"{one.bytes / 1e6:.1f}", f"{one.seconds * 1e3:.3f}", "") for one in (before, after)]
    return [*rows, ("a token", *whole[0], *whole[1], "", "")]


def _cells(part: Any) -> tuple[str, str, str]:
    return f"{part.bytes / 1e6:.1f}", f"{part.seconds * 1e3:.3f}", f"{100 * part.least / part.seconds:.0f} %"
