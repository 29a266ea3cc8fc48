"""`workbench explain MODEL RECIPE`: where the time of a decoded token, or of a prompt, goes, in 16 bits and after a
recipe; measured here, or predicted for a device that is not at hand."""

import argparse
from typing import Any

CONTEXT, ROUNDS = 512, 5
SAMPLES, SEQLEN = 2, 64  # of calibration: formats are timed, and accuracy does not matter


def declare(command) -> None:
    """The options of `workbench explain`."""
    parser = command(
        "explain",
        explain,
        "time the parts of a decoding step or a prompt, in 16 bits and after a recipe, and say what limits them",
        (
            "model",
            {
                "metavar": "MODEL",
                "help": "a folder, a .gguf file, a hub id, or smollm2-135m (embedded); with --device also a shape, "
                "such as llama-8b",
            },
        ),
        ("recipe", {"metavar": "RECIPE", "help": 'methods in order, with their knobs: "gptq(bits=4)"'}),
    )
    parser.add_argument("--context", metavar="N", type=int, help=f"cached tokens (default: {CONTEXT})")
    prompt = "explain a pass over a prompt of N tokens instead of a decoded token"
    parser.add_argument("--prompt", metavar="N", type=int, help=prompt)
    parser.add_argument("--rounds", metavar="N", type=int, help=f"rounds of timing (default: {ROUNDS})")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="predict the times on this device by its data sheet (h100-sxm, l4, ...) from shapes, instead of timing; "
        "nothing is loaded or compressed",
    )
    batch = "with --device: sequences that decode together (default: 1)"
    parser.add_argument("--batch", metavar="B", type=int, help=batch)
    launch = "with --device: microseconds of Python for each kernel that a model's own code starts (default: 17)"
    parser.add_argument("--launch", metavar="US", type=float, help=launch)


def explain(options: argparse.Namespace) -> int:
    """Compress a copy of the model with two short texts, and print the times of its parts beside the original's."""
    from notebooks.batch.verbs.loading import check_model

    for option in ("context", "rounds", "prompt", "batch"):
        if (value := getattr(options, option)) is not None and value < 1:
            raise ValueError(f"`--{option}` (={value}) must be 1 or more")
    if options.prompt and options.context:
        raise ValueError(f"`--prompt` and `--context` (={options.context}) exclude each other: give one")
    if options.device is not None:
        return _predict(options)
    for option in ("batch", "launch"):
        if (value := getattr(options, option)) is not None:
            raise ValueError(f"`--{option}` (={value:g}) is for predictions: give `--device` as well")
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
        prompts = timing.explain_prompts(models, prompt_tokens=options.prompt, rounds=options.rounds or ROUNDS)
        print(aligned(_prompt_rows(prompts)))
        print(
            f"\na prompt of {prompts.tokens:,} tokens; a large product in 16 bits: {prompts.rate / 1e9:,.0f} GFLOP/s\n"
        )
        print(*prompts.sentences(options.recipe), sep="\n")
        return 0
    found = timing.explain(models, prompt_tokens=context, rounds=options.rounds or ROUNDS)
    print(aligned(_rows(found)))
    print(f"\na token after {context:,} cached ones; memory is read at {found.bandwidth / 1e9:,.0f} GB/s\n")
    for sentence in found.sentences(options.recipe):
        print(sentence)
    return 0


def _predict(options: argparse.Namespace) -> int:
    """Print the times of the parts on a device that is not at hand."""
    from compress.embedding import stored_specs
    from eval.speed.cost import LAUNCH, predict_step
    from eval.speed.devices import HERE, ceilings_of, check_device_name
    from kernels.harness.model_weights import SHAPES
    from notebooks.batch.status import aligned
    from notebooks.batch.verbs.loading import check_model
    from notebooks.study import costs

    check_device_name(options.device)
    if options.device == HERE:
        raise ValueError(
            f"`--device` (={HERE!r}): times are predicted for other devices; leave it out to measure them here"
        )
    if options.prompt and options.batch:
        raise ValueError(f"`--batch` (={options.batch}) is for decoding steps: leave it out beside `--prompt`")
    if options.rounds:
        raise ValueError(f"`--rounds` (={options.rounds}) is for times that are measured: leave it out with `--device`")
    if options.launch is not None and not 0 <= options.launch < 1e6:
        raise ValueError(f"`--launch` (={options.launch:g}) must be microseconds, 0 or more")
    if options.model not in SHAPES:
        check_model(options.model, "MODEL")
    recipe = _recipe(options.recipe)
    costs.check_weights(options.recipe, recipe, "RECIPE")
    model = costs.outline(options.model)
    if stored_specs(model):
        raise ValueError(
            f"`MODEL` (={options.model!r}) is compressed already, and is no model in 16 bits to compare with: give its "
            "original"
        )
    plain = costs.plain_weights(options.model, model)
    after = costs.stored_weights(recipe, model, plain)
    ceilings, how = ceilings_of(options.device)
    found = predict_step(
        {costs.PLAIN: plain.model, options.recipe: after.model},
        plain.work,
        context=options.context or CONTEXT,
        batch=options.batch or 1,
        prompt_tokens=options.prompt or 0,
        ceilings=ceilings,
        device=options.device,
        launch=LAUNCH if options.launch is None else options.launch * 1e-6,
    )
    print(aligned(_predicted_rows(found)))
    what = f"a prompt of {options.prompt:,} tokens" if options.prompt else (
        f"a step of {options.batch or 1} x 1 token behind {options.context or CONTEXT:,}"
    )  # fmt: skip
    rate = f" and {peak / 1e12:,.3g} TFLOP/s in 16 bits" if (peak := ceilings.rates.get("bfloat16")) else ""
    print(f"\n{what} on {options.device}: {ceilings.bandwidth / 1e9:,.0f} GB/s{rate} ({how})")
    print("products of 8-bit activations can be twice as fast\n")
    print(*found.sentences(options.recipe), sep="\n")
    return 0


def _predicted_rows(found: Any) -> list[tuple[str, ...]]:
    before, after = found.steps.values()
    rows = [("", "GFLOP", "16 bits: MB", "ms", "limited by", "recipe: MB", "ms", "limited by")]
    for name, own in after.parts.items():
        rows.append((name, f"{own.operations / 1e9:,.2f}", *_least(before.parts[name]), *_least(own)))
    sums = [(sum(part.bytes for part in one.parts.values()), one.seconds) for one in (before, after)]
    operations = sum(part.operations for part in after.parts.values())
    whole = [cell for size, seconds in sums for cell in (f"{size / 1e6:,.1f}", f"{seconds * 1e3:.3f}", "")]
    return [*rows, ("together", f"{operations / 1e9:,.2f}", *whole)]


def _least(part: Any) -> tuple[str, str, str]:
    return f"{part.bytes / 1e6:,.1f}", f"{part.seconds * 1e3:.3f}", part.bound


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
