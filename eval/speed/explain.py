"""Why a compressed model is as fast as it is: the time of each part of its decoding step and of its passes over
prompts, beside the 16-bit model's."""

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from eval.machine.load import LoadMeter
from eval.record.noise import disturbed
from eval.record.steps import ATTENTION, Explanation, PromptExplanation, PromptPart, PromptTimes
from eval.speed.device_lock import undisturbed
from eval.speed.speed import TimedModel, contestants, make, make_ready, measure_speed
from kernels.harness import roofline
from kernels.step.assemble import OPS, weight_of
from kernels.step.forward import REST, Laps, NativePrompt
from kernels.step.recognition.decoder import Decoder
from kernels.step.recognition.parts import NotNative
from kernels.support.positions import positions

NEW_TOKENS = 32
LINEARS = {"q, k, v": ("q", "k", "v"), "o": ("o",), "gate, up": ("gate", "up"), "down": ("down",)}  # of a block


def check_explained(
    model: nn.Module, *, prompt_tokens: int, new_tokens: int = NEW_TOKENS, name: str = "16 bits"
) -> None:
    """Raise ValueError if the parts of a step of the model of this name cannot be timed; the message says why."""
    longest = positions(model) - new_tokens
    if not 2 <= prompt_tokens <= longest:
        raise ValueError(f"`context` (={prompt_tokens}) must be at least 2, and at most {longest} for this model")
    [(name, variant)] = contestants({name: model}, compiled=False).items()
    make_ready(variant, make(variant), prompt_tokens, 1)
    if not getattr(variant.step, "in_one_call", False):
        raise ValueError(_without_step(name, variant.step, variant.execution))


def explain(
    models: Mapping[str, nn.Module], *, prompt_tokens: int = 512, new_tokens: int = NEW_TOKENS, rounds: int = 5
) -> Explanation:
    """Time the decoding step and its parts of several models, in turns, as pages do.

    Args:
        models: the first one is that in 16 bits. All are timed in bfloat16.
        prompt_tokens: cached tokens before the first step.

    Raises:
        ValueError: a model has no native step on this machine; the message says why.
    """
    for name, model in models.items():
        check_explained(model, prompt_tokens=prompt_tokens, new_tokens=new_tokens, name=name)
    speeds = measure_speed(contestants(models), prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds)
    if lacking := next((name for name, one in speeds.items() if not one.parts), ""):
        raise ValueError(_without_step(lacking, None, speeds[lacking].execution))
    found = Explanation.of(speeds, next(iter(models)))
    assert found is not None, "the first model has parts"
    return found


def check_prompt_explained(model: nn.Module, *, prompt_tokens: int, name: str = "16 bits") -> TimedModel:
    """The model in bfloat16, ready to read prompts.

    Raises:
        ValueError: the parts of its passes cannot be timed; the message says why.
    """
    longest = positions(model) - 1
    if not 2 <= prompt_tokens <= longest:
        raise ValueError(f"`prompt` (={prompt_tokens}) must be at least 2, and at most {longest} for this model")
    [variant] = contestants({name: model}, compiled=False).values()
    make_ready(variant, make(variant), prompt_tokens, 1)
    if not isinstance(getattr(variant.step, "prompt", None), NativePrompt):
        raise ValueError(f"{name}: its parts cannot be timed, because it has no native passes ({variant.execution})")
    return variant


@torch.no_grad()
def explain_prompts(models: Mapping[str, nn.Module], *, prompt_tokens: int = 512, rounds: int = 5) -> PromptExplanation:
    """Time passes over a prompt and their parts for several models, in turns.

    Args:
        models: the first one is that in 16 bits. All are timed in bfloat16.

    Raises:
        ValueError: a model has no native passes on this machine, or too few positions; the message says why.
    """
    device, meter = next(next(iter(models.values())).parameters()).device, LoadMeter()
    with undisturbed(device):
        variants = {
            name: check_prompt_explained(model, prompt_tokens=prompt_tokens, name=name)
            for name, model in models.items()
        }
        whole: dict[str, list[float]] = {name: [] for name in variants}
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        with meter:
            for _ in range(rounds):
                meter.look()
                for name, variant in variants.items():
                    seconds, by_part = _pass(variant, prompt_tokens)
                    whole[name].append(seconds)
                    parts[name].append(by_part)
        rate = roofline.measure(device).rates.get("bfloat16", 0.0)
    prompts = {}
    for name, variant in variants.items():
        ran = variant.step.prompt.kernels
        attention = tuple(op for op in ("prompt_attention", "kv_decode") if op in ran) or ("torch",)
        operations = operations_of(variant.step.prompt.forward.decoder, prompt_tokens, attention)
        found = {
            part: PromptPart(count, statistics.median(one[part] for one in parts[name]), kernels)
            for part, (count, kernels) in operations.items()
        }
        prompts[name] = PromptTimes(found, statistics.median(whole[name]))
    return PromptExplanation(prompts, prompt_tokens, rate, disturbed(meter.load))


def _pass(variant: TimedModel, tokens: int) -> tuple[float, dict[str, float]]:
    """Seconds of a pass over a prompt into the empty cache, and of its parts."""
    forward, ids = variant.step.prompt.forward, _ids(variant.model, tokens)
    variant.cache.reset()
    forward.laps = laps = Laps()
    try:
        variant.step.prompt(ids, torch.arange(tokens)[None])
    finally:
        forward.laps = None
    seconds = laps.seconds
    return sum(seconds.values()), {part: time for part, time in seconds.items() if part != REST}


def _ids(model: nn.Module, tokens: int) -> Tensor:
    return (torch.arange(tokens) * 7919 % model.get_input_embeddings().num_embeddings)[None]


def operations_of(
    decoder: Decoder, tokens: int, attention: tuple[str, ...] = ()
) -> dict[str, tuple[float, tuple[str, ...]]]:
    """{part: operations of a pass over so many tokens, two for each multiply-add, and the ops that multiply}; only the
    last token reaches the head, and a token attends to itself and those before it. attention: what computed it."""
    found = {name: (0.0, set[str]()) for name in ("q, k, v", ATTENTION, "o", "gate, up", "down", "head")}

    def add(part: str, operations: float, *kernels: str) -> None:
        found[part] = found[part][0] + operations, found[part][1] | set(kernels)

    for block in decoder.blocks:
        for part, names in LINEARS.items():
            for linear in filter(None, (getattr(block, name) for name in names)):
                add(part, 2.0 * tokens * linear.in_features * linear.out_features, _op(linear))
        if block.attends:
            seen = sum(min(i + 1, block.window or tokens) for i in range(tokens))
            add(ATTENTION, 4.0 * seen * block.heads * block.channels, *attention)
    add("head", 2.0 * decoder.head.in_features * decoder.head.out_features, _op(decoder.head))
    return {part: (count, tuple(sorted(kernels))) for part, (count, kernels) in found.items() if count}


def _op(linear: nn.Module) -> str:
    """The op that multiplies by a linear."""
    try:
        return OPS.get(type(weight_of(linear, "").stored), "linear")
    except NotNative:
        return type(linear).__name__


def _without_step(name: str, step: object, execution: str) -> str:
    why = getattr(step, "why_compiled", "") or execution
    return f"{name}: its parts cannot be timed, because it has no native step on this machine ({why})"
