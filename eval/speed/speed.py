"""Prefill and decode speed of several variants, measured in the same process, in turns.

Every variant uses the same code: a static cache and the fastest available attention. On a CPU a decoder of a known
kind, compressed or not, reads its prompt op by op (`kernels.step.forward`) and takes its steps in one call of C++
(`kernels.step.assemble`). On a GPU all steps, those of the 16-bit baseline too, are replayed from a CUDA graph
(`kernels.step.gpu`); the baseline is also timed with torch.compile and eagerly, and the strongest counts. Otherwise,
the pass over the prompt and the decoding step are compiled block by block (`eval.speed.regional`), and products of
16-bit linears use the fastest method in a trial (`eval.speed.packing`): torch's own products reach a quarter of the
memory bandwidth and would be too weak a baseline.
"""

import gc
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import psutil
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import StaticCache
from transformers.generation.streamers import BaseStreamer

from eval.machine.load import LoadMeter
from eval.machine.memory import return_freed_memory
from eval.record.noise import Load, spread
from eval.record.search import PROMPT
from eval.record.speed import Speed, StepPart, TimingSettings
from eval.speed.attention import fast_attention
from eval.speed.device_lock import undisturbed
from eval.speed.packing import Packing
from eval.speed.regional import NotRegional, RegionalStep, Step, compile_regional
from eval.speed.step_parts import time_parts
from eval.speed.work import work
from eval.writing.generation import write
from kernels.clock import Marks, clock
from kernels.harness.roofline import read_bandwidth
from kernels.huge_pages import in_huge_pages
from kernels.linear.prepacked import prepack
from kernels.registry import recording
from kernels.step.accelerate import accelerate_by
from kernels.step.assemble import NativeStep, native_step
from kernels.step.cache import static_cache
from kernels.step.forward import NativePrompt, native_prompt
from kernels.step.gpu.accelerate import accelerate_by_graphs
from kernels.step.gpu.compiled import CompiledGraphs
from kernels.step.gpu.graphs import Graphs
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import ACCELERATION, knows
from kernels.support.deploy import deployed
from kernels.support.errors import check_positive, first_line
from kernels.support.positions import positions


@dataclass
class TimedModel:
    """One contestant: made when it is prepared, and freed when it has been timed.

    source: the model from which it is made. make: gives the model to compile and the model to run eagerly; often the
        same. native: if it is not compiled, use the passes of `kernels.step` if they support the model. whole: on a
        GPU, torch.compile captures the steps of the whole model, in place of `kernels.step.gpu`.
    """

    source: nn.Module
    compiled: bool
    make: Callable[[nn.Module], tuple[nn.Module, nn.Module]] = lambda model: (model, model)
    model: nn.Module | None = None
    cache: StaticCache | None = None
    step: Step | None = None
    native: bool = False
    whole: bool = False
    packing: Packing = field(default_factory=Packing)  # the weights of the compiled step
    dtype: str = ""
    execution: str = "eager"
    share: float = 1.0  # of the tokens to decode that it decodes: where every token is slow, fewer give its median
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # of the step alone
    written_s: list[float] = field(default_factory=list)  # of `generate`
    twice: dict[str, list[float]] = field(default_factory=dict)  # ratios of its two timings in a turn, by phase
    bytes_a_step: float | None = None  # bytes of weights and cache read per decoded token
    kernels: dict[str, set[str]] = field(default_factory=dict)
    parts: dict[str, StepPart] = field(default_factory=dict)

    def decodes(self, new_tokens: int) -> int:
        """The number of tokens that it decodes in a round, of this number."""
        return min(new_tokens, max(LEAST_TOKENS, int(self.share * new_tokens)))


PHASES = ("prefill", "step", "decode")
PLAIN = ("bfloat16", "float32")  # variants of the baseline as run by plain transformers
BY_GRAPH, BY_COMPILER = "baseline by CUDA graph", "baseline by torch.compile"  # on a GPU, if another one is faster
PLAIN_SHARE, LEAST_TOKENS = 0.25, 4  # of the tokens that the others decode, and their least number
SLOW, SLOW_ROUNDS = 3.0, 2  # a variant that takes so many times as long as the fastest is timed in so many rounds
ROOM = 1.5  # free memory needed for another variant, as a multiple of the largest variant's so far


def standard_variants(
    baseline: nn.Module | None, compressed: nn.Module, others: Mapping[str, nn.Module] | None = None
) -> dict[str, TimedModel]:
    """Compressed models in bfloat16, and the baseline, if any, in float32, in bfloat16, and in its fastest form.

    "baseline" is the strongest: compiled, and on a CPU with the fastest 16-bit products. "float32" and "bfloat16" are
    the results of plain transformers. Each of `others` is prepared like "compressed". On a GPU, where which way is the
    strongest is not known beforehand, the baseline is there in torch.compile, too (`measure_speed` chooses).
    """

    def plain(dtype: torch.dtype) -> Callable[[nn.Module], tuple[nn.Module, nn.Module]]:
        return lambda model: (deployed(model, dtype),) * 2

    models = {"compressed": compressed, **(others or {})}
    if baseline is None:
        return contestants(models, baseline="")
    variants = contestants({"baseline": baseline, **models})
    if next(baseline.parameters()).is_cuda:
        variants[BY_COMPILER] = TimedModel(baseline, True, variants["baseline"].make, whole=True)
    return variants | {
        name: TimedModel(baseline, False, plain(getattr(torch, name)), share=PLAIN_SHARE) for name in PLAIN
    }


def contestants(
    models: Mapping[str, nn.Module], compiled: bool = True, baseline: str | None = None
) -> dict[str, TimedModel]:
    """Every model in bfloat16, in its fastest form, compiled or without the compiler; the baseline, the first unless
    another is named, is prepacked on a CPU if no other form is faster."""

    def best(model: nn.Module) -> tuple[nn.Module, nn.Module]:
        half = fast_attention(deployed(model))
        prepacked = next(model.parameters()).device.type == "cpu" and (compiled or not knows(half))
        return half, prepack(half, tokens=512) if prepacked else half

    def fast(model: nn.Module) -> tuple[nn.Module, nn.Module]:
        return (fast_attention(deployed(model)),) * 2

    baseline = next(iter(models), "") if baseline is None else baseline
    ways = {name: best if name == baseline else fast for name in models}
    return {name: TimedModel(model, compiled, ways[name], native=not compiled) for name, model in models.items()}


@torch.no_grad()
def measure_speed(
    variants: dict[str, TimedModel], *, prompt_tokens: int = 512, new_tokens: int = 32, rounds: int = 5, batch: int = 1
) -> dict[str, Speed]:
    """Time every variant, round by round in turns, after warming each up; the first one twice in each turn.

    If they do not all fit into memory at once, they are timed in groups, the first (the baseline) in every group. If
    the baseline is there in torch.compile, the result "baseline" is its fastest way of decoding in 16 bits (`execution`
    says which), and the others have names of their own.

    Args:
        prompt_tokens: length of the prompt.
        new_tokens: number of tokens decoded after it, greedily, one at a time; each is timed. Plain transformers
            decode a quarter of them.
        rounds: rounds of prefill and decode per variant.
        batch: number of prompts at a time, all of this length.

    Raises:
        ValueError: lengths that are not positive, or beyond the model's positions.
    """
    counts = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds, "batch": batch}
    check_positive(**counts)
    longest = min(positions(v.source) for v in variants.values())
    if prompt_tokens + new_tokens > longest:
        raise ValueError(f"`prompt_tokens` (={prompt_tokens}) + `new_tokens` (={new_tokens}) must be at most {longest}")
    progress = tqdm(total=len(variants) * (rounds + 1) + rounds, desc="speed", unit="run")
    groups, meter = 0, LoadMeter()

    def prepare(name: str, variant: TimedModel) -> None:
        progress.set_postfix_str(f"{name}: {'compiling' if variant.compiled else 'warming up'}")
        make_ready(variant, make(variant), prompt_tokens, new_tokens, batch)
        variant.bytes_a_step = _bytes_a_step(variant.model, prompt_tokens + new_tokens // 2, batch)
        progress.update()

    device = next(next(iter(variants.values())).source.parameters()).device
    with undisturbed(device):
        for held in in_groups(variants, prepare):
            progress.total += 2 * rounds * (groups > 0)  # the first once more
            groups += 1
            in_turns(held, prompt_tokens, new_tokens, rounds, batch, progress, meter)
            for variant in held.values():
                _time_parts(variant, prompt_tokens, variant.decodes(new_tokens), batch)
        bandwidth = read_bandwidth(device)
    progress.close()
    noise = spreads(next(iter(variants.values())).twice, rounds), meter.load
    speeds = {}
    for name, variant in variants.items():
        own = {"new_tokens": variant.decodes(new_tokens), "rounds": min(rounds, len(variant.ttft_s))}
        settings = TimingSettings(**counts | own, groups=groups)
        speeds[name] = _speed(variant, settings, bandwidth, *noise)
    return _strongest_as_baseline(speeds) if BY_COMPILER in speeds else speeds


def _strongest_as_baseline(speeds: dict[str, Speed]) -> dict[str, Speed]:
    """The speeds with the baseline's fastest way of decoding in 16 bits as "baseline"; the graph then has another
    name."""
    ways = {"baseline": speeds["baseline"], BY_COMPILER: speeds[BY_COMPILER], PLAIN[0]: speeds[PLAIN[0]]}
    best = max(ways, key=lambda name: ways[name].decode_tokens_per_s)
    if best == "baseline":
        return speeds
    rest = {name: one for name, one in speeds.items() if name != "baseline" and (name != best or name in PLAIN)}
    return {"baseline": speeds[best], **rest, BY_GRAPH: speeds["baseline"]}


def rates_in_turns(
    models: Mapping[str, nn.Module], *, prompt_tokens: int = PROMPT, new_tokens: int = 24, rounds: int = 3
) -> dict[str, tuple[float, float]]:
    """Tokens per second of decoding and of reading a prompt of several models in 16 bits, timed in turns as
    `standard_variants` are, the first one in its strongest form. A model with few positions gets a shorter prompt than
    the standard one.

    Raises:
        ValueError: a longer prompt than the standard one has no room in the positions of a model.
    """
    room = min(map(positions, models.values())) - new_tokens
    if prompt_tokens > max(room, PROMPT):
        raise ValueError(
            f"`prompt` (={prompt_tokens}) must be at most {max(room, PROMPT)}: the model has {room + new_tokens} "
            f"positions, and {new_tokens} tokens are decoded"
        )
    how = {"prompt_tokens": max(1, min(prompt_tokens, room)), "new_tokens": new_tokens, "rounds": rounds}
    speeds = measure_speed(contestants(models), **how)
    return {name: (one.decode_tokens_per_s, one.prefill_tokens_per_s) for name, one in speeds.items()}


def timer(rounds: int, prompt: int = PROMPT) -> Callable[[Mapping[str, nn.Module]], dict[str, tuple[float, float]]]:
    """`rates_in_turns` with this number of rounds and prompts of so many tokens, for `compress.fit`.

    Raises:
        ValueError: a number is below 1.
    """
    check_positive(search_rounds=rounds, prompt=prompt)
    return partial(rates_in_turns, rounds=rounds, prompt_tokens=prompt)


def in_groups(
    variants: Mapping[str, TimedModel], prepare: Callable[[str, TimedModel], None]
) -> Iterator[dict[str, TimedModel]]:
    """Groups of as many prepared variants as fit into memory; the first variant is in every group, the others are freed
    after theirs."""
    held: dict[str, TimedModel] = {}
    most = 0
    for i, (name, variant) in enumerate(variants.items(), start=1):
        before = _free_bytes(variant)
        prepare(name, variant)
        held[name] = variant
        most = max(most, before - _free_bytes(variant))
        if i < len(variants) and (len(held) == 1 or _free_bytes(variant) > ROOM * most):
            continue
        yield held
        first, *others = held
        for other in others if i < len(variants) else held:
            let_go(variants[other])
        held = {first: held[first]}


def in_turns(
    held: Mapping[str, TimedModel],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    batch: int,
    progress: tqdm,
    meter: LoadMeter,
    repeats: int | None = None,
) -> None:
    """Time prepared variants, round by round; the results go into their `ttft_s`, `token_s` and `written_s`. A variant
    that is far slower than the others (SLOW) is left out of later rounds, which would take most of the time.

    Args:
        meter: measures the load of the machine meanwhile.
        repeats: number of rounds in which the first variant is timed a second time, between others, so that noise is
            known; the ratios go into its `twice`. None: all rounds.
    """
    first, size = next(iter(held.values())), (prompt_tokens, new_tokens, batch)
    took: dict[str, float] = {}
    with meter:
        for turn in range(rounds):
            meter.look()
            for place, (name, variant) in enumerate(held.items()):
                progress.set_postfix_str(name)
                if turn >= SLOW_ROUNDS and variant is not first and took[name] > SLOW * min(took.values()):
                    progress.update()
                    continue
                times = _times(variant, *size)
                took[name] = 2 * times[0] + variant.decodes(new_tokens) * sum(times[1:])  # it reads the prompt twice
                for into, seconds in zip((variant.ttft_s, variant.token_s, variant.written_s), times, strict=True):
                    into.append(seconds)
                progress.update()
                if place == len(held) // 2 and (repeats is None or turn < repeats):
                    before = first.ttft_s[-1], first.token_s[-1], first.written_s[-1]
                    for phase, one, again in zip(PHASES, before, _times(first, *size), strict=True):
                        first.twice.setdefault(phase, []).append(one / again)
                    progress.update()


def _time_parts(variant: TimedModel, prompt_tokens: int, new_tokens: int, batch: int) -> None:
    """Time the parts of a step that runs in one call of C++, in steps of their own. A prompt of one token is read by
    such a step, too, which would count: behind it, no parts are timed."""
    if prompt_tokens > 1 and isinstance(variant.step, FastDecoder) and isinstance(variant.step.step, NativeStep):
        step, size = variant.step.step.step, (prompt_tokens, new_tokens, batch)
        context, usual = prompt_tokens + new_tokens // 2, 1 / statistics.median(1 / s for s in variant.token_s)
        variant.parts = time_parts(step, context, usual, lambda: _round(variant, *size)[1])


def _times(variant: TimedModel, prompt_tokens: int, new_tokens: int, batch: int) -> tuple[float, float, float]:
    """Seconds to the first token, of a step alone, and from one token of `generate` to the next."""
    new_tokens = variant.decodes(new_tokens)
    ttft, tokens = _round(variant, prompt_tokens, new_tokens, batch)
    written = _written(variant, prompt_tokens, new_tokens, batch)
    return ttft, statistics.median(tokens), statistics.median(written)


def spreads(twice: Mapping[str, list[float]], rounds: int) -> dict[str, float]:
    """The spread of every phase (`eval.record.noise.spread`) for medians over this number of rounds."""
    found = {phase: spread(ratios, rounds) for phase, ratios in twice.items()}
    return {phase: share for phase, share in found.items() if share is not None}


def let_go(variant: TimedModel) -> None:
    """Free the model, its cache and its graphs."""
    clear(variant)
    variant.model = None
    gc.collect()
    return_freed_memory()


def clear(variant: TimedModel) -> None:
    """Free the cache and the timed step with its packed weights; the model can then be prepared for another one."""
    if (acceleration := getattr(variant.model, ACCELERATION, None)) is not None:
        acceleration.remove()  # it refers to the step's weights
    variant.step = variant.cache = None
    if variant.whole:
        torch._dynamo.reset()  # the compiler keeps graphs with their memory, and gives up on code after a few of them
    variant.packing.tensors.clear()  # the compiler keeps compiled code, which refers to the packing
    variant.packing.weights.clear()


def _free_bytes(variant: TimedModel) -> int:
    """Free bytes of memory on this variant's device."""
    device = next(variant.source.parameters()).device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _bytes_a_step(model: nn.Module, context: int, batch: int) -> float | None:
    """Bytes of weights and cache read in one decoding step; None if they cannot be counted."""
    try:
        done = work(model)
    except ValueError:  # unknown number of experts per token
        return None
    return done.weight_bytes(batch) + done.cache_bytes(context, batch)


def _speed(v: TimedModel, settings: TimingSettings, bandwidth: float, spread_of: dict[str, float], load: Load) -> Speed:
    batch, prompt = settings.batch or 1, settings.prompt_tokens or 1
    decode, step = ([batch / s for s in seconds] for seconds in (v.written_s, v.token_s))
    prefill = [batch * prompt / s for s in v.ttft_s]
    return Speed(
        statistics.median(decode),
        quartiles(decode),
        statistics.median(prefill),
        quartiles(prefill),
        statistics.median(v.ttft_s),
        v.dtype,
        v.execution,
        {op: tuple(sorted(used)) for op, used in v.kernels.items()},
        settings,
        batch * bandwidth / v.bytes_a_step if v.bytes_a_step else None,
        statistics.median(step),
        quartiles(step),
        spread_of,
        load,
        {name: replace(part, least=part.bytes / bandwidth) for name, part in v.parts.items()},
    )


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and third quartile; for a single value, that value."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def make(variant: TimedModel) -> nn.Module:
    """Make the model of a variant; returns the form for eager execution."""
    variant.model, eager = variant.make(variant.source)
    variant.dtype = str(variant.model.dtype).removeprefix("torch.")
    return eager


def make_ready(variant: TimedModel, eager: nn.Module, prompt_tokens: int, new_tokens: int, batch: int = 1) -> None:
    """Make the cache by a short pass, and the fast passes if requested and possible; else run all once eagerly."""
    length = -(-(prompt_tokens + new_tokens) // 64) * 64
    cache = variant.cache = static_cache(variant.model, length)
    variant.step, variant.execution = _step(eager, cache), "eager"
    step = None
    if variant.compiled or variant.native:
        _round(variant, 1, 1, batch)
        try:
            step = fast_decoder(variant, prompt_tokens, batch)
        except NotNative:
            pass
        except NotRegional as error:
            variant.execution = f"eager ({error})"
        except Exception as error:  # no compiler, or an unsupported model: report it, and continue eagerly
            first = first_line(error)
            warnings.warn(f"the model does not compile, so it runs eagerly: {first}", stacklevel=2)
            variant.execution = f"eager (does not compile: {first[:120]})"
    if step is None:
        with recording() as variant.kernels:
            _round(variant, prompt_tokens, 1, batch)
        return
    variant.step, variant.kernels = step, step.kernels
    variant.execution = step.how(len(variant.packing.weights))
    if isinstance(step, GraphDecoder):
        accelerate_by_graphs(variant.model, step.graphs)
    elif isinstance(getattr(step, "prompt", None), NativePrompt):
        accelerate_by(variant.model, step.prompt, step.why_compiled or ("" if step.in_one_call else "no native step"))
    if variant.compiled and in_huge_pages(_read_tensors(variant)):
        variant.execution += "; huge pages"


def _read_tensors(variant: TimedModel) -> Iterator[Tensor]:
    """The tensors that decoding reads: weights, in the model's or the packing's form, and the cache."""
    yield from variant.model.parameters()
    yield from variant.model.buffers()
    yield from (packed for _, packed in variant.packing.tensors.values())
    if isinstance(prompt := getattr(variant.step, "prompt", None), NativePrompt):
        yield from prompt.forward.tensors
    yield from (x for layer in variant.cache.layers for x in (layer.keys, layer.values))


@dataclass
class FastDecoder:
    """A decoder's pass over a prompt and its decoding step: from `kernels.step` if it supports the decoder, else
    compiled for their shapes.

    Attributes:
        why_compiled: why the step is not native; "" if it is.
    """

    prompt: NativePrompt | RegionalStep
    step: NativePrompt | NativeStep | RegionalStep
    why_compiled: str = ""

    def how(self, dense: int) -> str:
        """A description of how the two are executed; dense: number of weights with fast products in compiled passes."""
        compiled = "compiled" + (f", {dense} dense weights in fast products" if dense else "")
        if isinstance(self.prompt, NativePrompt):
            prompt, step = "native prompt", compiled + " step"
        else:
            prompt, step = compiled, ""
        if self.in_one_call:
            step = "native step"
        elif isinstance(self.step, NativePrompt):
            step = "steps op by op"
        elif self.why_compiled:
            step = f"{step}; no native step: {self.why_compiled}".removeprefix("; ")
        return f"{prompt}; {step}" if step else prompt

    @property
    def in_one_call(self) -> bool:
        """Does a step run in one call of C++?"""
        return isinstance(self.step, NativeStep)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return (self.step if tokens.shape[1] == 1 else self.prompt)(tokens, positions)

    @property
    def kernels(self) -> dict[str, set[str]]:
        """{op: implementations that were traced}."""
        ops = self.prompt.kernels.keys() | self.step.kernels.keys()
        return {op: self.prompt.kernels.get(op, set()) | self.step.kernels.get(op, set()) for op in ops}


class GraphDecoder:
    """A decoder on a GPU: its pass over a prompt, and steps that are replayed from a CUDA graph.

    Args:
        variant: its model and its cache. prompt: the pass over a prompt, which fills this cache.
        positions: room for the prompt and the steps.

    Raises:
        NotNative: the step cannot be captured.
    """

    def __init__(self, variant: TimedModel, prompt: Step, positions: int, batch: int) -> None:
        self.prompt, self.cache = prompt, variant.cache
        with recording() as self.kernels:
            self.graphs = CompiledGraphs(variant.model) if variant.whole else Graphs(variant.model)
            self.step = self.graphs.step(batch, positions)
        for op, used in getattr(prompt, "kernels", {}).items():
            self.kernels.setdefault(op, set()).update(used)

    def how(self, dense: int) -> str:
        """A description of how the two are executed; dense: number of weights with fast products in compiled passes."""
        prompt = "compiled prompt" if isinstance(self.prompt, RegionalStep) else "eager prompt"
        if isinstance(self.graphs, CompiledGraphs):
            return f"{prompt}; steps by {self.graphs.how}"
        own = f" of the model's own code ({why})" if (why := self.graphs.why_not_fused) else ", fused"
        return f"{prompt}; steps as a CUDA graph{own}" if self.step.captured else f"{prompt}; steps op by op{own}"

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        held = tokens.shape[1]
        if held == 1:
            self.step.tokens.copy_(tokens)
            self.step()
            return self.step.tokens.clone()
        largest = self.prompt(tokens, positions)
        for layer, room in zip(self.cache.layers, self.step.body.rooms(), strict=True):
            for read, own in zip((layer.keys, layer.values), room, strict=True):
                own[:, :, :held] = read[:, :, :held]
        self.step.at(held)
        return largest


def fast_decoder(variant: TimedModel, prompt_tokens: int, batch: int = 1) -> FastDecoder | GraphDecoder:
    """Prepare a variant's model for prompts of this length and for single tokens; passes that are not native are
    compiled, or run op by op if the variant must not be compiled. On a GPU, steps are replayed from a CUDA graph.

    Raises:
        NotNative: the variant must not be compiled, and its model is unknown.
        NotRegional, and any error of the compiler: it cannot be compiled.
    """
    cache, eager = variant.cache, _step(variant.model, variant.cache)
    tokens, positions = _prompt(variant, prompt_tokens, batch)
    prompt: NativePrompt | RegionalStep | Step
    try:
        prompt = native_prompt(variant.model, cache, tokens)
    except NotNative:
        if not variant.compiled and tokens.device.type == "cpu":
            raise
        compiles = (variant.model, cache, eager, tokens, positions, variant.packing, cache.reset)
        prompt = compile_regional(*compiles) if variant.compiled else eager

    def after_prompt() -> None:
        cache.reset()
        prompt(tokens, positions)

    one, position = torch.zeros_like(tokens[:, :1]), torch.full_like(positions[:, :1], prompt_tokens)
    reason = ""
    if one.device.type == "cuda":
        try:
            return GraphDecoder(variant, prompt, variant.cache.layers[0].max_cache_len, batch)
        except NotNative as error:
            if variant.whole:
                raise NotRegional(str(error)) from error
            reason = str(error)
    if one.device.type == "cpu":
        try:
            decoder = prompt.forward.decoder if isinstance(prompt, NativePrompt) else None
            return FastDecoder(prompt, native_step(variant.model, cache, one, position, after_prompt, decoder))
        except NotNative as error:
            reason = str(error)
    if not variant.compiled:
        return FastDecoder(prompt, prompt)
    step = compile_regional(variant.model, cache, eager, one, position, variant.packing, after_prompt)
    return FastDecoder(prompt, step, reason)


def _step(model: nn.Module, cache: StaticCache) -> Step:
    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        logits = model(tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    return step


def _prompt(variant: TimedModel, prompt_tokens: int, batch: int) -> tuple[Tensor, Tensor]:
    """A prompt [batch, tokens] for every row, all of them different, and its positions [1, tokens]."""
    device = next(variant.source.parameters()).device
    ids = torch.arange(batch * prompt_tokens) * 7919 % variant.source.get_input_embeddings().num_embeddings
    return ids.view(batch, prompt_tokens).to(device), torch.arange(prompt_tokens, device=device)[None]


def _round(variant: TimedModel, prompt_tokens: int, new_tokens: int, batch: int = 1) -> tuple[float, list[float]]:
    """Seconds to the first token of every row, and for each later one."""
    device = next(variant.source.parameters()).device
    prompt, positions = _prompt(variant, prompt_tokens, batch)
    variant.cache.reset()
    start = clock(device)
    token = variant.step(prompt, positions)
    ttft = clock(device) - start
    marks = Marks(device)
    for i in range(new_tokens):
        position = torch.full((1, 1), prompt_tokens + i, device=device)
        marks.mark()
        token = variant.step(token, position)
        marks.mark()
    return ttft, marks.seconds()[::2]


class _Stamps(BaseStreamer):
    """The times at which `generate` gives tokens, each from the one before; the first is the prompt's."""

    on_device = True  # our own loop need not read a token for it

    def __init__(self, device: torch.device) -> None:
        self.marks = Marks(device)

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt, and then with the tokens of each step."""
        self.marks.mark()

    def end(self) -> None:
        """Called by `generate` at the end."""


def _written(variant: TimedModel, prompt_tokens: int, new_tokens: int, batch: int = 1) -> list[float]:
    """Seconds from each token of `generate` behind a prompt to the next one."""
    prompt, _ = _prompt(variant, prompt_tokens, batch)
    stamps = _Stamps(prompt.device)
    write(variant.model, prompt, ends=(), new_tokens=new_tokens + 1, streamer=stamps)
    return stamps.marks.seconds()[1:]


def serve(variant: TimedModel, prompt_tokens: int, new_tokens: int, batch: int = 1) -> tuple[float, list[float]]:
    """One request to a prepared variant: seconds to its first tokens, and for each later token of every row."""
    return _round(variant, prompt_tokens, new_tokens, batch)
