"""Prefill and decode speed, each variant against the others in the same process, in turns.

Every variant reads and writes through the same code: a static cache, the fastest attention there is, the whole pass over the
prompt and the whole step compiled. On a CPU the compiler also freezes the weights, which prepacks 16-bit linears for oneDNN:
without that a 16-bit baseline reaches a quarter of the memory bandwidth and makes anything look fast.
"""

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from tqdm.auto import tqdm
from transformers import StaticCache

from eval.attention import fast_attention
from eval.deploy import deployed
from kernels.linear.prepacked import prepack
from kernels.registry import recording

_PREPACKED = "mkldnn_linear_weight_pack_matcher_count"  # inductor's own count of the linears that it has prepacked


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds, with the first and third quartile.

    decode and prefill in tokens per second, time_to_first_token in seconds; dtype and how the step was executed
    (compiled or eager, and why); kernels: {op: implementations that ran}.
    """

    decode_tokens_per_s: float
    decode_quartiles: tuple[float, float]
    prefill_tokens_per_s: float
    prefill_quartiles: tuple[float, float]
    time_to_first_token_s: float
    dtype: str
    execution: str
    kernels: dict[str, list[str]]
    settings: dict[str, int]


@dataclass
class Variant:
    """One contestant: the model as it is compiled, and as it runs where it is not; often the same."""

    model: nn.Module
    eager: nn.Module
    compiled: bool
    step: Callable | None = None  # of tokens [1, n] at positions [1, n]; the token that follows [1, 1]
    execution: str = "eager"
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    kernels: dict[str, set[str]] = field(default_factory=dict)


PLAIN = ("bfloat16", "float32")  # variants of the baseline as a plain transformers user has it


def standard_variants(
    baseline: nn.Module, compressed: nn.Module, others: Mapping[str, nn.Module] | None = None
) -> dict[str, Variant]:
    """Compressed models in bfloat16 against the baseline in float32, bfloat16, and bfloat16 at its best.

    "baseline" is the strongest: compiled, and prepacked on a CPU. "float32" and "bfloat16" are what a plain transformers
    user gets. Each of `others` is prepared as "compressed" is. All copies are held at once, since they take turns.
    """
    full, half = deployed(baseline, torch.float32), deployed(baseline)
    best = fast_attention(copy.deepcopy(half))
    packed = prepack(best, tokens=512) if next(baseline.parameters()).device.type == "cpu" else best
    variants = {"baseline": Variant(best, packed, compiled=True)}
    for name, model in {"compressed": compressed, **(others or {})}.items():
        small = fast_attention(deployed(model))
        variants[name] = Variant(small, small, compiled=True)
    plain = zip(PLAIN, (half, full), strict=True)
    return variants | {name: Variant(model, model, compiled=False) for name, model in plain}


@torch.no_grad()
def measure_speed(
    variants: dict[str, Variant], *, prompt_tokens: int = 512, new_tokens: int = 32, rounds: int = 5
) -> dict[str, Speed]:  # fmt: skip
    """Time every variant, round by round in turns, after warming each up.

    Args:
        prompt_tokens: length of the prompt, batch 1.
        new_tokens: decoded after it, greedily, one at a time; each is timed.
        rounds: of prefill and decode per variant.

    Raises:
        ValueError: lengths that are not positive, or beyond the model's positions.
    """
    for name, value in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens), ("rounds", rounds)):
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` (={value!r}) must be a positive integer")
    longest = min(getattr(v.model.config, "max_position_embeddings", 1 << 30) for v in variants.values())
    total = prompt_tokens + new_tokens
    if total > longest:
        raise ValueError(f"`prompt_tokens` (={prompt_tokens}) + `new_tokens` (={new_tokens}) must be at most {longest}")
    on_cpu = all(next(v.model.parameters()).device.type == "cpu" for v in variants.values())
    # torch's own setting, not an option of torch.compile: only so is the step traced with its weights as constants.
    with inductor_config.patch(freezing=on_cpu):
        _measure(variants, prompt_tokens, new_tokens, rounds)
    settings = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds, "batch": 1}
    return {name: _speed(variant, prompt_tokens, settings) for name, variant in variants.items()}


def _measure(variants: dict[str, Variant], prompt_tokens: int, new_tokens: int, rounds: int) -> None:
    length = -(-(prompt_tokens + new_tokens) // 64) * 64
    caches = {name: StaticCache(config=v.model.config, max_cache_len=length) for name, v in variants.items()}
    progress = tqdm(total=len(variants) * (rounds + 1), desc="speed", unit="run")
    for name, variant in variants.items():
        progress.set_postfix_str(f"{name}: {'compiling' if variant.compiled else 'warming up'}")
        _prepare(variant, caches[name], prompt_tokens, new_tokens)
        progress.update()
    # All graphs are there: the guards that look for changes of the model are not part of any variant's work.
    lean = all(_runs_without_guards(v, caches[name], prompt_tokens, new_tokens) for name, v in variants.items())
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=lean):
        for _ in range(rounds):
            for name, variant in variants.items():
                progress.set_postfix_str(name)
                ttft, tokens = _round(variant, caches[name], prompt_tokens, new_tokens)
                variant.ttft_s.append(ttft)
                variant.token_s.append(statistics.median(tokens))
                progress.update()
    progress.close()


def _speed(v: Variant, prompt_tokens: int, settings: dict[str, int]) -> Speed:
    decode = [1 / s for s in v.token_s]
    prefill = [prompt_tokens / s for s in v.ttft_s]
    return Speed(
        statistics.median(decode), _quartiles(decode), statistics.median(prefill), _quartiles(prefill),
        statistics.median(v.ttft_s), str(v.model.dtype).removeprefix("torch."), v.execution,
        {op: sorted(used) for op, used in v.kernels.items()}, settings,
    )  # fmt: skip


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _prepare(variant: Variant, cache: StaticCache, prompt_tokens: int, new_tokens: int) -> None:
    """Run everything once eagerly, which also makes the cache's tensors; then compiled, if that is wanted and possible."""
    variant.step = _step(variant.eager, cache)
    with recording() as variant.kernels:
        _round(variant, cache, prompt_tokens, 1)
    if not variant.compiled:
        return
    eagerly, variant.step = variant.step, torch.compile(_step(variant.model, cache), fullgraph=True, dynamic=False)
    before, graphs = counters["inductor"][_PREPACKED], counters["stats"]["unique_graphs"]
    try:
        with recording() as kernels:
            _round(variant, cache, prompt_tokens, new_tokens)
    except Exception as error:  # no compiler, or a model that it cannot take: say so, and go on without
        first = first_line(error)
        warnings.warn(f"the model does not compile, so it runs eagerly: {first}", stacklevel=2)
        variant.execution, variant.step = f"eager (does not compile: {first[:120]})", eagerly
        return
    variant.kernels = kernels
    if counters["stats"]["unique_graphs"] == graphs:  # torch.compile gave back what it got, without a word
        variant.execution, variant.step = "eager (the compiler is switched off)", eagerly
        return
    packed = (counters["inductor"][_PREPACKED] - before) // 2  # once for the prompt, once for the step
    variant.execution = "compiled" + (f", {packed} dense weights frozen and prepacked" if packed else "")


def _step(model: nn.Module, cache: StaticCache) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        logits = model(tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    step.__code__ = step.__code__.replace()  # of its own: torch.compile counts, and looks up, a code's graphs over all variants
    return step


def _runs_without_guards(variant: Variant, cache: StaticCache, prompt_tokens: int, new_tokens: int) -> bool:
    """Can the graphs be chosen without looking at the whole model? Not where a cache keeps counts in Python."""
    if not variant.execution.startswith("compiled"):
        return True
    try:
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            _round(variant, cache, prompt_tokens, new_tokens)
    except RuntimeError:
        return False
    return True


def _round(variant: Variant, cache: StaticCache, prompt_tokens: int, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and for each later one."""
    device = next(variant.model.parameters()).device
    prompt = (torch.arange(prompt_tokens) * 7919 % variant.model.get_input_embeddings().num_embeddings)[None].to(device)
    positions = torch.arange(prompt_tokens, device=device)[None]
    cache.reset()
    _wait(device)
    start = time.perf_counter()
    token = variant.step(prompt, positions)
    _wait(device)
    ttft = time.perf_counter() - start
    seconds = []
    for i in range(new_tokens):
        position = torch.tensor([[prompt_tokens + i]], device=device)
        start = time.perf_counter()
        token = variant.step(token, position)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return ttft, seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
