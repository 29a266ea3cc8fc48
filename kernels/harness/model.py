"""Whole transformers models with random weights on a GPU: tokens per second of decoding, weights as stored and as is.

`python -m kernels.harness.model` makes a model of the shape of Llama-3.1-8B on the device, and the same one with its
weights rounded to int4, int8, fp8 and others, and times their steps of decoding in turns, within each batch size: as a
CUDA graph of fused operations (which `accelerate` gives), as a graph of the model's own code, and op by op. Every fused
step is first compared with the model's own code on the same cache of random numbers. It prints a table and writes one
JSON line for each figure:

    kind        of the stored weights: "bfloat16" (nothing is rounded), "int4" (groups of 128), "int8", "fp8", "w4a8"
    way         "fused graph", "own graph", "own code", "compiled" (torch.compile, mode reduce-overhead), "generate"
                (`accelerate`d, 512 tokens read, 128 written), "generate, transformers", "prompt"
    cache       how positions are stored: "16" (bits), or, for the way "fused graph", "int8", "int4" or "fp8": groups of
                64 in codes, and the last 32 or more in 16 bits, as `kv_int` and `kv_fp8` store them
    batch, context   sequences, and positions in the cache before the first step that is timed
    seconds, low, high   of a step: median and quartiles over the rounds; of a prompt: of all its tokens
    tokens_per_s     of all sequences together
    least_bytes      of stored weights and cache that a step reads
    roofline         the time of these bytes at the bandwidth of a copy, as a share of the step's
    difference       relative difference of the step's logits from the model's own code; null: not compared
    how              what the step is made of, or why it is not fused
    error            in place of the figures, if something failed
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.harness.model_cache import FORMS, cache_bytes, fill_random, held_positions
from kernels.harness.roofline import environment, measure
from kernels.int_matmul import Packed, int_matmul, pack
from kernels.step.cache_view import StoredForm
from kernels.step.gpu import sizes
from kernels.step.gpu.accelerate import GraphAcceleration
from kernels.step.gpu.body import OwnBody
from kernels.step.gpu.graphs import Graphs, GraphStep
from kernels.step.gpu.stored import Room
from kernels.support.errors import kind_and_first_line
from kernels.w4a8_matmul import w4a8_matmul
from kernels.w8a8_matmul import W8, quantize_weight, w8a8_matmul

GROUP = 128
KINDS = ("bfloat16", "int4", "int8", "fp8", "w4a8")
WAYS = ("fused", "own", "eager", "compiled", "prompt", "generate")
READ, WRITTEN = 512, 128  # tokens of `generate`
STEPS, ROUNDS = 16, 5
SHAPES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama-8b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
        ),
    ),
    "llama-1b": (  # Llama-3.2-1B
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-8b": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(
            num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        ),
    ),
    "qwen2.5-72b": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(
            num_hidden_layers=80, hidden_size=8192, intermediate_size=29568, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=152064, max_position_embeddings=131072, rope_theta=1000000.0,
        ),
    ),
    "llama-405b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
        ),
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config),  # whose defaults are those of the model of 671B
    "toy": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=2048,
        ),
    ),
}  # fmt: skip


class RoundedLinear(nn.Module):
    """A linear with its weight rounded to nearest, in a format of the kernels; the parts of its interface that
    `kernels.step.gpu` reads are those of `compress.linear.CompressedLinear`."""

    bias = transform = None

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        W = linear.weight.detach()
        self.kind, self.out_features, self.in_features = kind, *W.shape
        self.packed: Packed | None = None
        self.w8: W8 | None = None
        if kind in ("int4", "w4a8"):
            groups = W.float().unflatten(1, (-1, GROUP))
            scale = (groups.abs().amax(-1).clamp_min(1e-8) / 7).to(torch.bfloat16)
            codes = (groups / scale.float()[..., None]).round_().clamp_(-8, 7).add_(8).flatten(1).to(torch.uint8)
            self.packed = pack(codes, scale, None, bits=4, group_size=GROUP)
        else:
            self.w8 = quantize_weight(W, torch.int8 if kind == "int8" else torch.float8_e4m3fn)

    @property
    def parts(self) -> tuple["RoundedLinear", ...]:
        """The parts whose sum is the weight; none where x is rounded beforehand, so that weights are not joined."""
        return () if self.kind == "w4a8" else (self,)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight."""
        stored = self.packed if self.w8 is None else self.w8
        return sum(t.numel() * t.element_size() for t in stored if isinstance(t, Tensor))

    def forward(self, x: Tensor) -> Tensor:
        if self.w8 is not None:
            return w8a8_matmul(x, self.w8)
        return w4a8_matmul(x, self.packed) if self.kind == "w4a8" else int_matmul(x, self.packed)


@torch.no_grad()
def made(shape: str, kind: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model with random weights; all but the embedding and the head stored as `kind` says."""
    torch.manual_seed(seed)
    cls, config = SHAPES[shape]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = cls(config()).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    if kind != "bfloat16":
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, linear in list(parent.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(parent, name, RoundedLinear(linear, kind))
                        linear.weight = None
    return model


def read_bytes(model: PreTrainedModel, batch: int, context: int, form: StoredForm) -> int:
    """Bytes of weights, without the embedding's, and of stored keys and values that a step reads."""
    weights = sum(m.nbytes for m in model.modules() if isinstance(m, RoundedLinear))
    weights += sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    config = model.config
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = batch * config.num_hidden_layers * config.num_key_value_heads
    return weights + heads * cache_bytes(form, context, channels)


class ModelTiming:
    """Steps of several contestants, in turns."""

    def __init__(self, device: torch.device, steps: int, rounds: int) -> None:
        self.device, self.steps, self.rounds = device, steps, rounds

    def seconds(self, contestants: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """name -> seconds of one call, over the rounds. Each call makes `steps` steps."""
        took: dict[str, list[float]] = {name: [] for name in contestants}
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
        self.models: dict[str, PreTrainedModel] = {}
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
        """All measurements, by value: steps of batch 1 of all kinds first."""
        options = self.options
        self.bandwidth = measure(self.device, toy=options.toy).bandwidth if options.roofline else None
        about = {"transformers": transformers.__version__, "steps": STEPS, "rounds": self.timing.rounds}
        self.write(environment=environment(self.device), bandwidth=self.bandwidth, **about)
        for kind in options.kinds:
            began = time.monotonic()
            self.models[kind] = made(options.shape, kind, self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            print(f"{kind}: made in {time.monotonic() - began:.1f} s, {self._memory()}", flush=True)
        for context in options.context:
            for batch in options.batch:
                self._guarded(self._steps, batch=batch, context=context)
        if "prompt" in options.ways:
            self._guarded(self._prompts, batch=1, context=options.prompt)
        if "generate" in options.ways:
            self._guarded(self._generate, batch=1, context=READ)

    def _guarded(self, measurement: Callable[..., None], **where: int) -> None:
        if time.monotonic() > self.until:
            self.write(way=measurement.__name__.strip("_"), **where, error="skipped: budget")
            return
        try:
            measurement(**where)
        except Exception as error:
            self.write(way=measurement.__name__.strip("_"), **where, error=kind_and_first_line(error))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _graphs(self, kind: str, fused: bool) -> Graphs:
        key = kind, fused
        if key not in self.graphs:
            self.graphs[key] = Graphs(self.models[kind], fused)
        return self.graphs[key]

    def _steps(self, batch: int, context: int) -> None:
        """Steps behind `context` positions of random keys and values."""
        places, contestants, about = context + STEPS + 1, {}, {}
        for kind, way, cache in self._contestants():
            try:
                name = {"fused": "fused graph", "own": "own graph", "eager": "own code"}.get(way, way)
                step, difference = self._step(kind, way, cache, batch, places, context)
                contestants[f"{kind}|{name}|{cache}"] = self._several(step, context)
                about[f"{kind}|{name}|{cache}"] = difference, self._how(kind, way)
            except Exception as error:
                where = {"kind": kind, "way": way, "cache": cache, "batch": batch, "context": context}
                self.write(**where, error=kind_and_first_line(error))
        for key, times in self.timing.seconds(contestants).items():
            kind, name, cache = key.split("|")
            least = read_bytes(self.models[kind], batch, context, FORMS[cache])
            self._line(kind, name, batch, context, [t / STEPS for t in times], batch, least,
                       cache=cache, difference=about[key][0], how=about[key][1])  # fmt: skip
        for graphs in self.graphs.values():
            graphs.clear()

    def _contestants(self) -> Iterator[tuple[str, str, str]]:
        """Kind of weights, way, and cache."""
        for kind in self.options.kinds:
            if "fused" in self.options.ways:
                yield from ((kind, "fused", cache) for cache in self.options.cache)
            if kind in self.options.others:
                yield from ((kind, way, "16") for way in ("own", "eager", "compiled") if way in self.options.ways)

    def _step(self, kind: str, way: str, cache: str, batch: int, places: int, context: int) -> tuple[Any, float | None]:
        """A step, and the relative difference of its logits from the model's own code."""
        if way in ("fused", "own"):
            form, room = FORMS[cache], None
            if form.bits < 16:
                room = Room(form, sizes.closer_places(places), form.tail + STEPS)
            step = self._graphs(kind, way == "fused").step(batch, places, room)
            fill_random(step.body)
            return step, self._difference(step, kind, context)
        body = OwnBody(self.models[kind], batch, places)
        fill_random(body)
        if way == "compiled":
            body.model = torch.compile(body.model, mode="reduce-overhead", dynamic=False)
        return GraphStep(body, capture=False), None

    def _difference(self, step: GraphStep, kind: str, context: int) -> float:
        own = OwnBody(self.models[kind], step.body.batch, step.body.positions)
        step.at(context), own.at(context)
        for number, there in enumerate(own.rooms()):
            for a, b in zip(there, held_positions(step.body, number, context), strict=True):
                a[:, :, :context] = b
        tokens = torch.randint(0, own.model.config.vocab_size, (own.batch, 1), device=self.device)
        step.tokens.copy_(tokens)
        step()
        found, wanted = step.logits.float(), own(tokens).float()
        return float((found - wanted).norm() / wanted.norm())

    def _several(self, step: GraphStep, context: int) -> Callable[[], None]:
        def call() -> None:
            step.at(context)
            for _ in range(STEPS):
                step()

        return call

    def _how(self, kind: str, way: str) -> str:
        if way not in ("fused", "own"):
            return way
        graphs = self.graphs[kind, way == "fused"]
        return graphs.why_not_fused or "fused"

    def _prompts(self, batch: int, context: int) -> None:
        contestants = {}
        for kind, model in self.models.items():
            ids = torch.randint(0, model.config.vocab_size, (batch, context), device=self.device)
            contestants[kind] = lambda model=model, ids=ids: model(ids, use_cache=True, logits_to_keep=1)
        for kind, times in self.timing.seconds(contestants).items():
            self._line(kind, "prompt", batch, context, times, batch * context, None)

    def _generate(self, batch: int, context: int) -> None:
        """What `generate` writes per second, the prompt not counted: the time of many tokens less that of one."""
        contestants = {}
        for kind, model in self.models.items():
            if kind == self.options.kinds[0]:
                contestants[kind, "generate, transformers"] = _writes(model, batch, context)
            contestants[kind, "generate"] = _writes(model, batch, context)
        written = WRITTEN if not self.options.toy else 8
        for (kind, way), write in contestants.items():
            if way == "generate":  # as `accelerate` does it on a GPU
                GraphAcceleration(self.models[kind]).take_over()
            calls = {"many": lambda w=write: w(written + 1), "one": lambda w=write: w(1)}
            took = ModelTiming(self.device, 1, min(3, self.timing.rounds)).seconds(calls)
            times = [(many - one) / written for many, one in zip(took["many"], took["one"], strict=True)]
            self._line(kind, way, batch, context, times, batch, None)

    def _line(self, kind: str, way: str, batch: int, context: int, times: list[float], tokens: int,
              least: int | None, **more: Any) -> None:  # fmt: skip
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        roofline = None if least is None or self.bandwidth is None else least / self.bandwidth / median
        self.write(kind=kind, way=way, batch=batch, context=context, seconds=median, low=low, high=high,
                   tokens_per_s=tokens / median, least_bytes=least, roofline=roofline, **more)  # fmt: skip

    def _memory(self) -> str:
        if self.device.type != "cuda":
            return "on a CPU"
        return f"{torch.cuda.memory_allocated() / 1e9:.1f} GB in use"


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
    head = f"{line.get('kind', ''):<9} {way:<23} batch {line['batch']:<3} context {line['context']:<6}"
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
    parser.add_argument("--kinds", default="bfloat16,int4", help=f"of stored weights: {', '.join(KINDS)}")
    parser.add_argument("--ways", default="fused,own,generate", help=f"{', '.join(WAYS)}")
    parser.add_argument("--others", default="bfloat16", help="kinds that are also timed in other ways than fused")
    parser.add_argument("--cache", default="16", help=f"of the way `fused`: {', '.join(FORMS)}")
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
    options.cache = _named(options.cache, tuple(FORMS), "cache", parser)
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
