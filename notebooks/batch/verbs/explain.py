"""`workbench explain MODEL RECIPE`: where the time of a decoded token, or of a prompt, goes, in 16 bits and after a
recipe."""

import argparse
from typing import Any

CONTEXT = 512
SAMPLES, SEQLEN = 2, 64  # of calibration: formats are timed, and accuracy does not matter


def declare(command) -> None:
    """The options of `workbench explain`."""
    parser = command(
        "explain",
        explain,
        "time the parts of a decoding step or a prompt, in 16 bits and after a recipe, and say what limits them",
        ("model", {"metavar": "MODEL", "help": "a folder, a .gguf file, a hub id, or smollm2-135m (embedded)"}),
        ("recipe", {"metavar": "RECIPE", "help": 'methods in order, with their knobs: "gptq(bits=4)"'}),
    )
    parser.add_argument("--context", metavar="N", type=int, help=f"cached tokens (default: {CONTEXT})")
    prompt = "explain a pass over a prompt of N tokens instead of a decoded token"
    parser.add_argument("--prompt", metavar="N", type=int, help=prompt)
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="rounds of timing (default: 5)")


def explain(options: argparse.Namespace) -> int:
    """Compress a copy of the model with two short texts, and print the times of its parts beside the original's."""
    from notebooks.batch.verbs.loading import check_model

    for option in ("context", "rounds", "prompt"):
        if (value := getattr(options, option)) is not None and value < 1:
            raise ValueError(f"`--{option}` (={value}) must be 1 or more")
    if options.prompt and options.context:
        raise ValueError(f"`--prompt` and `--context` (={options.context}) exclude each other: give one")
    check_model(options.model, "MODEL")
    recipe = _recipe(options.recipe)
    from compress import apply, calibration, load_model
    from compress.linear import sharing_copy
    from eval.speed import explain as timing
    from notebooks.batch.status import aligned

    model, tokenizer = load_model(options.model)
    context = options.context or CONTEXT
    if options.prompt:
        timing.check_prompt_explained(model, prompt_tokens=options.prompt)
    else:
        timing.check_explained(model, prompt_tokens=context)
    batches = calibration(tokenizer, samples=SAMPLES, seqlen=SEQLEN)
    result = apply(recipe, sharing_copy(model), batches)
    models = {"16 bits": model, options.recipe: result.model}
    if options.prompt:
        prompts = timing.explain_prompts(models, prompt_tokens=options.prompt, rounds=options.rounds)
        print(aligned(_prompt_rows(prompts)))
        print(
            f"\na prompt of {prompts.tokens:,} tokens; a large product in 16 bits: {prompts.rate / 1e9:,.0f} GFLOP/s\n"
        )
        print(*prompts.sentences(options.recipe), sep="\n")
        return 0
    found = timing.explain(models, prompt_tokens=context, rounds=options.rounds)
    print(aligned(_rows(found)))
    print(f"\na token after {context:,} cached ones; memory is read at {found.bandwidth / 1e9:,.0f} GB/s\n")
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


def _prompt_rows(found: Any) -> list[tuple[str, ...]]:
    """The parts of a pass over a prompt: operations, milliseconds, and operations per second."""
    before, after = found.prompts.values()
    rows = [("", "16 bits: GFLOP", "ms", "GFLOP/s", "recipe: GFLOP", "ms", "GFLOP/s", "kernel")]
    for name in before.parts:
        own = after.parts.get(name)  # it may have been dropped
        after_it = (*_rate(own), ", ".join(own.kernels)) if own else ("", "", "", "")
        rows.append((name, *_rate(before.parts[name]), *after_it))
    rows.append(("the rest", "", f"{before.rest * 1e3:.1f}", "", "", f"{after.rest * 1e3:.1f}", "", ""))
    return [*rows, ("a prompt", *_rate(before), *_rate(after), "")]


def _rate(part: Any) -> tuple[str, str, str]:
    return f"{part.operations / 1e9:.1f}", f"{part.seconds * 1e3:.1f}", f"{part.operations / part.seconds / 1e9:,.0f}"


def _cells(part: Any) -> tuple[str, str, str]:
    return f"{part.bytes / 1e6:.1f}", f"{part.seconds * 1e3:.3f}", f"{100 * part.least / part.seconds:.0f} %"
