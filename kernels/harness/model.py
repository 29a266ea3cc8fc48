"""Whole transformers models with random weights on a GPU: tokens per second of decoding, weights as stored and as is.

`python -m kernels.harness.model` makes a model of the shape of Llama-3.1-8B on the device, and the same one with its
weights rounded to int4, int8, fp8 or others, and times their steps of decoding in turns, within each batch size: as a
CUDA graph of fused operations (which `accelerate` gives), as a graph of the model's own code, and op by op. Every fused
step is first compared with the model's own code on the same cache of random numbers. It prints a table and writes one
JSON line for each figure:

    kind        of the stored weights: "bfloat16" (nothing is rounded), "int4" (groups of 128), "int8", "fp8", "w4a8"
    way         "fused graph", "own graph", "own code", "compiled" (torch.compile, mode reduce-overhead), "generate"
                (`accelerate`d, 512 tokens read, 128 written), "generate, transformers", "prompt", "prompt in slabs"
                (int4 weights are dequantised in parts that stay in the cache of the GPU, and not as a whole)
    cache       how positions are stored: "16" (bits), or, for the way "fused graph", "int8", "int4" or "fp8": groups of
                64 in codes, and the last 32 or more in 16 bits, as `kv_int` and `kv_fp8` store them. "int4:0.25" holds
                this share of the positions alone, as after an eviction
    batch, context   sequences, and tokens before the first step that is timed
    seconds, low, high   of a step: median and quartiles over the rounds; of a prompt: of all its tokens
    tokens_per_s     of all sequences together
    least_bytes      of stored weights and cache that a step reads
    roofline         the time of these bytes at the bandwidth of a copy, as a share of the step's
    difference       relative difference of the step's logits from the model's own code; null: not compared
    how              what the step is made of, or why it is not fused
    turns            what was timed in turns with it, itself included. At most two models are held at a time, so that
                     80 GB suffice for 64 sequences: the first kind, and each other one beside it, in turn
    error            in place of the figures, if something failed
"""

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from transformers import PreTrainedModel

from kernels.harness.checked import lines_of, overlapped_is_green, red_ops
from kernels.harness.model_cache import FORMS, TimedCache, fill_random, held_positions, place, read_bytes
from kernels.harness.model_weights import KINDS, SHAPES, in_slabs, made
from kernels.harness.roofline import environment, measure
from kernels.packed_matmul import hopper
from kernels.step.gpu.accelerate import GraphAcceleration
from kernels.step.gpu.body import OwnBody
from kernels.step.gpu.graphs import Graphs, GraphStep
from kernels.support.errors import kind_and_first_line

OPS = {"int4": "int_matmul", "int8": "w8a8_matmul", "fp8": "w8a8_matmul", "w4a8": "w4a8_matmul"}
EVERY_STEP = {"step", "kv_decode"}  # ops of the fused steps of all kinds
WAYS = ("fused", "own", "eager", "compiled", "prompt", "generate")
READ, WRITTEN = 512, 128  # tokens of `generate`
STEPS, ROUNDS = 16, 5


class ModelTiming:
    """Steps of several contestants, in turns."""

    def __init__(self, device: torch.device, steps: int, rounds: int) -> None:
        self.device, self.steps, self.rounds = device, steps, rounds

    def seconds(self, contestants: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
        """name -> seconds of one call, over the rounds. Each call makes `steps` steps."""
        took: dict[Any, list[float]] = {name: [] for name in contestants}
        for number in range(self.rounds + 1):
            for name, call in contestants.items():
                self._wait()
                start = time.perf_counter()
                call()
                self._wait()
                if number:  # the first round warms up
                    took[name].append(time.perf_counter() - start)
        return took

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ModelRun:
    """The measurements that were asked for; every line is written when it is known."""

    def __init__(self, options: argparse.Namespace, out: TextIO) -> None:
        self.options, self.out, self.device = options, out, torch.device(options.device)
        self.timing = ModelTiming(self.device, STEPS, 2 if options.toy else ROUNDS)
        self.lines: list[dict[str, Any]] = []
        self.models: dict[str, PreTrainedModel] = {}  # at most two at a time
        self.new: list[str] = []  # kinds of those that were not timed before
        self.graphs: dict[tuple[str, bool], Graphs] = {}
        self.until = time.monotonic() + options.budget

    def write(self, **line: Any) -> None:
        """Write one line."""
        line = {"shape": self.options.shape, **line}
        self.lines.append(line)
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()
        print(_sentence(line), flush=True)

    @torch.no_grad()
    def run(self) -> None:
        """All measurements: the first kind beside each other one in turn, which is freed before the next."""
        options = self.options
        self.bandwidth = measure(self.device, toy=options.toy).bandwidth if options.roofline else None
        about = {"transformers": transformers.__version__, "steps": STEPS, "rounds": self.timing.rounds}
        self.write(environment=environment(self.device), bandwidth=self.bandwidth, **about)
        checks = lines_of(options.checked) if options.checked else []
        with hopper.left_out(bool(options.checked) and not overlapped_is_green(checks)):
            self._all_kinds([kind for kind in options.kinds if self._sound(kind, red_ops(checks))])

    def _sound(self, kind: str, red: set[str]) -> bool:
        """Whether no op of the steps of this kind is red; a line says so where one is."""
        if ops := sorted(red & {OPS.get(kind), *EVERY_STEP}):
            self.write(kind=kind, error=f"not timed: the checks of {', '.join(ops)} are red")
        return not ops

    def _all_kinds(self, kinds: list[str]) -> None:
        options = self.options
        first, others = kinds[:1], kinds[1:]
        for pair in [(*first, other) for other in others] or [tuple(first)][: len(first)]:
            if time.monotonic() < self.until:
                self._hold(pair)
            for context in options.context:
                for batch in options.batch:
                    self._guarded(self._steps, batch=batch, context=context)
            if "prompt" in options.ways:
                self._guarded(self._prompts, batch=1, context=options.prompt)
            if "generate" in options.ways:
                self._guarded(self._generate, batch=1, context=READ)

    def _hold(self, kinds: tuple[str, ...]) -> None:
        """Hold the models of these kinds and no others: two of 8B parameters, with their joined weights and caches of
        64 sequences, take 64 to 75 GB (computed, not measured), and four of them more than the 80 GB of an H100."""
        self.models = {kind: model for kind, model in self.models.items() if kind in kinds}
        self.graphs = {key: graphs for key, graphs in self.graphs.items() if key[0] in kinds}
        self.new = [kind for kind in kinds if kind not in self.models]
        if "compiled" in self.options.ways:
            torch.compiler.reset()  # which holds them, too
        gc.collect()
        self._free()
        for kind in self.new:
            began = time.monotonic()
            self.models[kind] = made(self.options.shape, kind, self.device)
            self._free()
            print(f"{kind}: made in {time.monotonic() - began:.1f} s, {self._memory()}", flush=True)

    def _free(self) -> None:
        """Give the device back what torch keeps of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _guarded(self, measurement: Callable[..., None], **where: int) -> None:
        if time.monotonic() > self.until:
            self.write(way=measurement.__name__.strip("_"), **where, error="skipped: budget")
            return
        try:
            measurement(**where)
        except Exception as error:
            self.write(way=measurement.__name__.strip("_"), **where, error=kind_and_first_line(error))
        self._free()

    def _graphs(self, kind: str, fused: bool) -> Graphs:
        key = kind, fused
        if key not in self.graphs:
            self.graphs[key] = Graphs(self.models[kind], fused)
        return self.graphs[key]

    def _steps(self, batch: int, context: int) -> None:
        """Steps behind `context` tokens, of which the cache holds random keys and values."""
        contestants, about = {}, {}
        for kind, way, cache in self._contestants():
            try:
                name = {"fused": "fused graph", "own": "own graph", "eager": "own code"}.get(way, way)
                behind = TimedCache.named(cache)
                step, difference = self._step(kind, way, behind, batch, context)
                contestants[kind, name, cache] = partial(_several, step, context, behind.kept(context))
                about[kind, name, cache] = difference, self._how(kind, way)
            except Exception as error:
                where = {"kind": kind, "way": way, "cache": cache, "batch": batch, "context": context}
                self.write(**where, error=kind_and_first_line(error))
        for key, times in self.timing.seconds(contestants).items():
            (kind, name, cache), (difference, how) = key, about[key]
            least = read_bytes(self.models[kind], batch, context, TimedCache.named(cache))
            self._line(kind, name, batch, context, [t / STEPS for t in times], batch, least, contestants,
                       cache=cache, difference=difference, how=how)  # fmt: skip
        for graphs in self.graphs.values():
            graphs.clear()

    def _contestants(self) -> Iterator[tuple[str, str, str]]:
        """Kind of weights, way, and cache."""
        for kind in self.models:
            if "fused" in self.options.ways:
                yield from ((kind, "fused", cache) for cache in self.options.cache)
            if kind in self.options.others and kind in self.new:
                yield from ((kind, way, "16") for way in ("own", "eager", "compiled") if way in self.options.ways)

    def _step(self, kind: str, way: str, cache: TimedCache, batch: int, context: int) -> tuple[Any, float | None]:
        """A step, and the relative difference of its logits from the model's own code."""
        places = context + STEPS + 1
        if way in ("fused", "own"):
            step = self._graphs(kind, way == "fused").step(batch, places, cache.room(context, STEPS))
            fill_random(step.body)
            return step, self._difference(step, kind, context, cache.kept(context))
        body = OwnBody(self.models[kind], batch, places)
        fill_random(body)
        if way == "compiled":
            body.model = torch.compile(body.model, mode="reduce-overhead", dynamic=False)
        return GraphStep(body, capture=False), None

    def _difference(self, step: GraphStep, kind: str, context: int, kept: int) -> float:
        own = OwnBody(self.models[kind], step.body.batch, kept + STEPS)
        place(step.body, context, kept), place(own, context, kept)
        for number, there in enumerate(own.rooms()):
            for a, b in zip(there, held_positions(step.body, number, kept), strict=True):
                a[:, :, :kept] = b
        tokens = torch.randint(0, own.model.config.vocab_size, (own.batch, 1), device=self.device)
        step.tokens.copy_(tokens)
        step()
        found, wanted = step.logits.float(), own(tokens).float()
        return float((found - wanted).norm() / wanted.norm())

    def _how(self, kind: str, way: str) -> str:
        if way not in ("fused", "own"):
            return way
        graphs = self.graphs[kind, way == "fused"]
        return graphs.why_not_fused or "fused"

    def _prompts(self, batch: int, context: int) -> None:
        contestants = {}
        for kind, model in self.models.items():
            ids = torch.randint(0, model.config.vocab_size, (batch, context), device=self.device)
            contestants[kind, "prompt"] = read = partial(model, ids, use_cache=True, logits_to_keep=1)
            if kind == "int4" and self.device.type == "cuda":  # elsewhere the reference reads both
                contestants[kind, "prompt in slabs"] = partial(_in_slabs, read, model, batch * context)
        for (kind, way), times in self.timing.seconds(contestants).items():
            self._line(kind, way, batch, context, times, batch * context, None, contestants)

    def _generate(self, batch: int, context: int) -> None:
        """What `generate` writes per second, the prompt not counted: the time of many tokens less that of one."""
        for kind in self.new:
            if kind == self.options.kinds[0]:
                self._writing(kind, "generate, transformers", batch, context)
            acceleration = GraphAcceleration(self.models[kind])  # as `accelerate` does it on a GPU
            acceleration.take_over()
            try:
                self._writing(kind, "generate", batch, context)
            finally:
                acceleration.remove()

    def _writing(self, kind: str, way: str, batch: int, context: int) -> None:
        write, written = _writes(self.models[kind], batch, context), WRITTEN if not self.options.toy else 8
        calls = {"many": lambda: write(written + 1), "one": lambda: write(1)}
        took = ModelTiming(self.device, 1, min(3, self.timing.rounds)).seconds(calls)
        times = [(many - one) / written for many, one in zip(took["many"], took["one"], strict=True)]
        self._line(kind, way, batch, context, times, batch, None, [(kind, way)])

    def _line(self, kind: str, way: str, batch: int, context: int, times: list[float], tokens: int,
              least: int | None, turns: Iterable[tuple[str, ...]], **more: Any) -> None:  # fmt: skip
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        roofline = None if least is None or self.bandwidth is None else least / self.bandwidth / median
        self.write(kind=kind, way=way, batch=batch, context=context, seconds=median, low=low, high=high,
                   tokens_per_s=tokens / median, least_bytes=least, roofline=roofline,
                   turns=[", ".join(one) for one in turns], **more)  # fmt: skip

    def _memory(self) -> str:
        if self.device.type != "cuda":
            return "on a CPU"
        return f"{torch.cuda.memory_allocated() / 1e9:.1f} GB in use"


def _several(step: GraphStep, context: int, kept: int) -> None:
    place(step.body, context, kept)
    for _ in range(STEPS):
        step()


def _in_slabs(read: Callable[[], Any], model: PreTrainedModel, tokens: int) -> None:
    with in_slabs(model, tokens):
        read()


def _writes(model: PreTrainedModel, batch: int, context: int) -> Callable[[int], None]:
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=model.device)

    def write(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    return write


def _sentence(line: dict[str, Any]) -> str:
    if "environment" in line:
        gpu = line["environment"]["gpu"]
        return f"{gpu['name'] if gpu else line['environment']['cpu']}, transformers {line['transformers']}"
    stored = "" if line.get("cache") in (None, "16") else f", {line['cache']} cache"
    way = line.get("way", "") + stored
    where = f"batch {line.get('batch', '-'):<3} context {line.get('context', '-'):<6}"
    head = f"{line.get('kind', ''):<9} {way:<28} {where}"
    if "error" in line:
        return f"{head} {line['error']}"
    roofline = f"{line['roofline']:.0%} of a copy's rate" if line["roofline"] else ""
    apart = "" if line.get("difference") is None else f"logits differ by {line['difference']:.1g}"
    how = "" if line.get("how") in (None, "fused", "eager", "asked for") else line["how"]
    return f"{head} {line['seconds'] * 1e3:9.3f} ms {line['tokens_per_s']:10,.0f} tokens/s  {roofline} {apart} {how}"


def _named(text: str, allowed: tuple[str, ...], flag: str, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if odd := [name for name in names if name not in allowed] or (not names and ["nothing"]):
        parser.error(f"`--{flag}` (={', '.join(odd)}) must be among {', '.join(allowed)}")
    return names


def _caches(text: str, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        try:
            TimedCache.named(name)
        except ValueError as error:
            parser.error(str(error))
    return names


def _numbers(text: str, flag: str, parser: argparse.ArgumentParser) -> tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        parser.error(f"`--{flag}` (={text}) must be positive numbers, separated by commas")
    return numbers


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.harness.model", description=(__doc__ or "").partition("\n\n")[0]
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    of_kinds = f"of stored weights: {', '.join(KINDS)}; each is timed beside the first"
    parser.add_argument("--kinds", default="bfloat16,int4", help=of_kinds)
    parser.add_argument("--checked", type=Path, help="as for kernels.harness.validate: red ops there are not timed")
    parser.add_argument("--ways", default="fused,own,prompt,generate", help=f"{', '.join(WAYS)}")
    parser.add_argument("--others", default="bfloat16", help="kinds that are also timed in other ways than fused")
    of_caches = f"of the way `fused`: {', '.join(FORMS)}; int4:0.25 holds this share of the positions"
    parser.add_argument("--cache", default="16", help=of_caches)
    parser.add_argument("--batch", default="1,16,64", help="numbers of sequences")
    parser.add_argument("--context", default="960", help="positions in the cache")
    parser.add_argument("--prompt", default="2048", help="tokens of the prompt that is timed")
    parser.add_argument("--budget", type=float, default=200, help="seconds after which no measurement is begun")
    parser.add_argument("--toy", action="store_true", help="a tiny model, only to see that everything runs")
    parser.add_argument("--no-roofline", dest="roofline", action="store_false", help="do not measure the bandwidth")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/model.jsonl"), help="file of JSON lines; replaced")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda:
        parser.error("`--device` (=cuda) needs a GPU that torch can see; cpu works")
    if options.device == "cpu" and options.shape != "toy" and not options.toy:
        parser.error(f"`--shape` (={options.shape}) is too large for a CPU; --toy works")
    options.shape = "toy" if options.toy else options.shape
    options.toy = options.shape == "toy"
    options.kinds = _named(options.kinds, KINDS, "kinds", parser)
    options.ways = _named(options.ways, WAYS, "ways", parser)
    options.others = _named(options.others, KINDS, "others", parser)
    options.cache = _caches(options.cache, parser)
    options.batch = _numbers(options.batch, "batch", parser)
    contexts, (prompt, *_) = (_numbers(getattr(options, name), name, parser) for name in ("context", "prompt"))
    options.context, options.prompt = ((160,), 64) if options.toy else (contexts, prompt)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    warnings.filterwarnings("ignore", message=".*logical operators.*")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w") as out:
        ModelRun(options, out).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
