"""The speed at which a model decodes after contexts of several lengths, with different compressed caches.

Every variant, including the full 16-bit cache, is timed in turns with the same kernel and the same native step
(`kernels/step`), or by the model's own code if there is no native step for it, as in `generate`. A native step's
attention lasts from the end of one product to the beginning of the next, with the rotation and storage of the new keys,
and with what the cache decides. The baseline of attention is the faster of two: a full cache, and torch's attention on
its keys with the heads that share keys folded into rows.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from tqdm.auto import tqdm
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs

from eval.machine.load import LoadMeter
from eval.record.speed import CacheSpeed, Interval, TimingSettings
from eval.speed.device_lock import undisturbed
from eval.speed.regional import Step
from eval.speed.speed import quartiles, spreads
from eval.speed.work import config_of_layer, head_width
from kernels.clock import clock
from kernels.huge_pages import in_huge_pages
from kernels.registry import recording
from kernels.step.assemble import CHECKED
from kernels.step.in_parts import StepInParts
from kernels.step.recognition.likeness import LEAST, difference
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import recognise
from kernels.support.errors import check_positive

FULL = "full"
SDPA = "full, torch SDPA"
_Times = dict[str, dict[int, Interval]]  # by variant and context
REPEATS = 2  # rounds at each context in which the full cache is timed twice, so that noise is known


class TimedCache(Protocol):
    """A cache that can be set to its state after any number of tokens."""

    def at(self, tokens: int) -> Cache: ...
    def attend(self, q: Tensor) -> None: ...
    def dense(self) -> list[tuple[Tensor, Tensor]]: ...


@torch.no_grad()
def measure_cache_speed(
    model: nn.Module,
    variants: Mapping[str, Callable[[], TimedCache]],
    contexts: Sequence[int],
    *,
    new_tokens: int = 8,
    rounds: int = 5,
) -> CacheSpeed:
    """Time decoding after every context, and attention: within the native step, or alone if there is none.

    Args:
        model: a decoder that takes such caches as `past_key_values`, in the dtype in which it is deployed.
        variants: {name: function that makes its cache}; "full" must be among them.
        contexts: numbers of tokens before the timed ones.
        new_tokens: number of tokens decoded after each context, in every round.

    Raises:
        ValueError: no full cache among the variants, or numbers that are not positive.
    """
    check_positive(new_tokens=new_tokens, rounds=rounds)
    for context in contexts:
        check_positive(contexts=context)
    if FULL not in variants:
        raise ValueError(
            f"`variants` (={list(variants)}) must hold {FULL!r}, the cache with which all others are compared"
        )
    execution: dict[str, str] = {}
    speeds: _Times = {}
    attention: _Times = {}
    made = _Made(model, {}, {}, new_tokens)
    in_huge_pages([*model.parameters(), *model.buffers()])
    progress = tqdm(
        total=len(variants) + len(contexts) * rounds * (2 * len(variants) + 1), desc="cache speed", unit="run"
    )
    twice: dict[str, list[float]] = {"decode": [], "attention": []}
    with undisturbed(model.device), recording() as kernels:
        for name, make in variants.items():
            progress.set_postfix_str(f"{name}: making ready")
            made.caches[name] = make()
            made.steps[name], execution[name] = _step(model, made.caches[name], contexts[0])
            progress.update()
        with LoadMeter() as meter:
            for context in contexts:
                timed, alone = _in_turns(made, context, rounds, twice, progress)
                meter.look()
                for found, into in ((timed, speeds), (alone, attention)):
                    for name, values in found.items():
                        into.setdefault(name, {})[context] = (statistics.median(values), *quartiles(values))
    progress.close()
    return CacheSpeed(
        speeds,
        attention,
        _speedups(attention),
        execution,
        TimingSettings(rounds, new_tokens, batch=1, dtype=str(model.dtype).removeprefix("torch.")),
        spreads(twice, rounds),
        meter.load,
        {op: tuple(sorted(used)) for op, used in kernels.items()},
    )


def _speedups(attention: _Times) -> dict[str, dict[int, float]]:
    """The time of the faster attention with a full 16-bit cache, divided by that of each variant's, by context."""
    full = {context: min(attention[name][context][0] for name in (FULL, SDPA)) for context in attention[FULL]}
    return {name: {c: full[c] / of[c][0] for c in of} for name, of in attention.items()}


@dataclass
class _Made:
    """The prepared caches and steps of a model, by variant."""

    model: nn.Module
    caches: dict[str, TimedCache]
    steps: dict[str, Step | StepInParts]
    new_tokens: int

    def times(self, name: str, context: int) -> tuple[float, float]:
        """Tokens per second of the whole model, and seconds of its attention."""
        cache, step = self.caches[name], self.steps[name]
        if isinstance(step, StepInParts):
            return _decode_in_parts(step, cache, context, self.new_tokens)
        speed = 1 / _decode(step, cache, context, self.new_tokens, self.model.device)
        cache.at(context)
        return speed, _attention(self.model, cache.attend)


def _in_turns(
    made: _Made, context: int, rounds: int, twice: dict[str, list[float]], progress: tqdm
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second and seconds of attention of every variant behind a context, a number for each round. The ratios
    of the full cache's two timings in a turn go into `twice`."""
    timed: dict[str, list[float]] = {name: [] for name in made.caches}
    alone: dict[str, list[float]] = {name: [] for name in (*made.caches, SDPA)}
    for turn in range(rounds):
        for name in made.caches:
            progress.set_postfix_str(f"{name} behind {context} tokens")
            whole, attention = made.times(name, context)
            timed[name].append(whole)
            alone[name].append(attention)
            progress.update(2)
        made.caches[FULL].at(context)
        alone[SDPA].append(_attention(made.model, partial(_by_sdpa, made.caches[FULL].dense())))
        progress.update()
        if turn < REPEATS:
            again = made.times(FULL, context)
            for phase, first, second in zip(twice, (timed[FULL][-1], alone[FULL][-1]), again, strict=True):
                twice[phase].append(first / second)
    return timed, alone


def _native(model: nn.Module, cache: TimedCache, context: int) -> StepInParts:
    """The decoding of tokens by the native step, as in an accelerated model; some tokens' logits are compared with
    those of the model.

    Raises:
        NotNative: an unknown model, or logits that differ.
    """
    step, position = StepInParts(recognise(model, by_cache=True), 1), torch.tensor([[context]])
    differences = []
    for token in (torch.arange(CHECKED) * 7919 % model.get_input_embeddings().num_embeddings)[:, None, None]:
        at = cache.at(context)
        wanted = model(token, past_key_values=at, position_ids=position, use_cache=True).logits[:, -1]
        step(token, cache.at(context), position)
        differences.append(difference(step.logits[:, -1], wanted))
    # With artificial caches, the logits of many tokens depend on rounding in any program. A wrong program differs for
    # all tokens.
    if not (other := min(differences)) < LEAST:
        raise NotNative(f"its logits differ from the model's by {other:.2g} or more, and at most {LEAST} is allowed")
    return step


def _step(model: nn.Module, cache: TimedCache, context: int) -> tuple[Step | StepInParts, str]:
    """The decoding of tokens by the native step, or by the model's own code; and a description of the execution."""
    try:
        return _native(model, cache, context), "native step"
    except NotNative as error:
        why = f"eager; no native step: {error}"

    def step(token: Tensor, position: Tensor) -> Tensor:
        logits = model(token, past_key_values=cache, position_ids=position, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    return step, why


def _decode(step: Step, cache: TimedCache, context: int, count: int, device: torch.device) -> float:
    """Seconds per token, the median of `count` tokens."""
    cache.at(context)
    token, seconds = torch.ones(1, 1, dtype=torch.long, device=device), []
    for i in range(count):
        position = torch.tensor([[context + i]], device=device)
        start = clock(device)
        token = step(token, position)
        seconds.append(clock(device) - start)
    return statistics.median(seconds)


def _decode_in_parts(step: StepInParts, cache: TimedCache, context: int, count: int) -> tuple[float, float]:
    """Tokens per second, and seconds of the attention within a step; medians of `count` tokens."""
    of, token, seconds, attention = cache.at(context), torch.ones(1, 1, dtype=torch.long), [], []
    for i in range(count):
        position = torch.tensor([[context + i]])
        step.time_attention()
        start = time.perf_counter()
        token = step(token, of, position)
        seconds.append(time.perf_counter() - start)
        attention.append(step.attention_s)
    return 1 / statistics.median(seconds), statistics.median(attention)


def _attention(model: nn.Module, attend: Callable[[Tensor], object]) -> float:
    """Seconds of the attention of all layers, one after the other, for one token; the best of three."""
    config, device = model.config.get_text_config(decoder=True), model.device
    own = config_of_layer(config, get_layer_types_and_kwargs(config)[0].index("full_attention"))  # they are alike
    # A cache may hold fewer channels than a head has.
    q = torch.randn(1, own.num_attention_heads, 1, head_width(own), dtype=model.dtype, device=device)
    best = float("inf")
    for _ in range(3):
        start = clock(device)
        attend(q)
        best = min(best, clock(device) - start)
    return best


def _by_sdpa(layers: Sequence[tuple[Tensor, Tensor]], q: Tensor) -> None:
    for k, v in layers:
        scaled_dot_product_attention(q.reshape(1, k.shape[1], -1, q.shape[-1]), k, v)
