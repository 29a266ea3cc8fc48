"""Why a compressed model is as fast as it is: the time of each part of its decoding step, beside the 16-bit model's."""

from collections.abc import Mapping

from torch import nn

from eval.machine.size import positions
from eval.record.steps import Explanation
from eval.speed.speed import contestants, make, make_ready, measure_speed

NEW_TOKENS = 32


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


def _without_step(name: str, step: object, execution: str) -> str:
    why = getattr(step, "why_compiled", "") or execution
    return f"{name}: its parts cannot be timed, because it has no native step on this machine ({why})"
