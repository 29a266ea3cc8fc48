"""The time of each part of a decoding step that runs in one call of C++."""

from collections.abc import Callable, Sequence

from eval.record.speed import StepPart
from eval.record.steps import ATTENTION
from kernels.step.assemble import OPS, weights_in
from kernels.step.native import DecodeStep
from kernels.step.program import Attention, Experts, Mixture, Weight

PARTS = {
    "qkv": "q, k, v",
    "o": "o",
    "mlp": "gate, up",
    "down": "down",
    "router": "router",
    "chosen": "experts: gate, up",
    "shared": "gate, up",
    "shared down": "down",
    "experts": "experts: down",
    "logits": "head",
}  # by what a product writes


def time_parts(
    step: DecodeStep, context: int, usual: float, take: Callable[[], Sequence[float]]
) -> dict[str, StepPart]:
    """The parts of a step.

    Args:
        context: cached tokens that a step reads.
        usual: seconds of a usual step, of which each part gets its share; a single pass may be disturbed.
        take: takes steps, and returns the seconds of each.

    Returns:
        {name: its bytes, seconds, and so on}; `least` is 0, because the bandwidth is not known here.
    """
    step.time()
    try:
        whole = sum(take())
        seconds = [usual * total / whole for total in step.seconds]
    finally:
        step.time(False)
    found: dict[str, StepPart] = {}
    for one, taken in zip(step.program.instructions, seconds, strict=True):
        if not isinstance(one, Attention):
            weights = weights_in(one)
            name, size = PARTS[one.writes], sum(map(_bytes, weights))
            if isinstance(one, Experts | Mixture):  # of the experts that the tokens of a step choose, if they differ
                first = isinstance(one, Experts)
                chosen, experts = (one.choice.count, len(one.gates)) if first else (one.chosen, len(weights))
                size *= min(1.0, chosen * step.program.tokens / experts)
            kernels = {OPS.get(type(w.stored), "linear") for w in weights}
        else:
            name, kernels = ATTENTION, {"kv_decode"}
            seen = min(context, one.window or context)
            size = 2 * len(one.keys) * one.kv_heads * one.channels * seen * one.keys.element_size()
        before = found.get(name, StepPart(0.0, 0.0, 0, (), 0.0))
        used = tuple(sorted({*before.kernels, *kernels}))
        found[name] = StepPart(before.bytes + size, before.seconds + taken, before.calls + 1, used, 0.0)
    order = [*dict.fromkeys((PARTS["qkv"], ATTENTION, *PARTS.values()))]
    return {name: found[name] for name in sorted(found, key=order.index)}


def _bytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in weight.tensors() if tensor is not None)
