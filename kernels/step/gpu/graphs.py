"""A step of decoding on a GPU as one CUDA graph: captured once for a batch size, replayed for every token."""

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kernels.step.decoder import Decoder, NotNative, recognise
from kernels.step.gpu.body import FusedBody, Joined, OwnBody, largest
from kernels.step.gpu.compare import check_blocks

WARMING = 2  # runs before a capture, in which kernels are compiled and weights joined
LEAST = 1024  # positions of the smallest cache
KEPT = 4  # graphs that are kept, of different batch sizes and lengths


class GraphStep:
    """Steps of decoding for a batch of sequences of equal length.

    Attributes:
        tokens: int64 [batch, 1], which the next step reads; a step overwrites them with the most probable next tokens.
        logits: of the last step, [batch, vocabulary].
        how: "fused" or "the model's own code"; captured: is it replayed from a CUDA graph?
    """

    def __init__(self, body: FusedBody | OwnBody, pool: Any = None, capture: bool = True) -> None:
        """pool: memory that several graphs share, of `torch.cuda.graph_pool_handle`; only one of them may be in use.
        capture: False: the step runs op by op on a GPU, too."""
        self.body, self.how, device = body, body.how, body.device
        self.tokens = torch.zeros(body.batch, 1, dtype=torch.int64, device=device)
        self.captured, self.logits, self._graph = capture and device.type == "cuda", torch.empty(0), None
        if not self.captured:
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), _in_use(body.positions - 1, body):
            for _ in range(WARMING):
                body.at(body.positions - 1)  # the longest attention, so that every kernel is compiled
                self._run()
        torch.cuda.current_stream(device).wait_stream(side)
        body.at(0)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(device), _no_collection(), torch.cuda.graph(graph, pool=pool):
                self._run()
        except Exception:
            _forget_capture(device)
            raise
        self._graph = graph

    def at(self, held: int) -> None:
        """The next step reads a token behind the first `held` positions."""
        self.body.at(held)

    def __call__(self) -> None:
        """One step; there must be room for one more position in the cache."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def _run(self) -> None:
        self.logits = self.body(self.tokens)
        self.tokens.copy_(largest(self.logits)[:, None])


def _forget_capture(device: torch.device) -> None:
    """Reset torch's generator after a failed capture: it would stay in capture mode, in which it draws no numbers."""
    torch.cuda.synchronize(device)
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _in_use(held: int, body: FusedBody | OwnBody):
    """Leaves the cache empty."""
    body.at(held)
    try:
        yield
    finally:
        body.at(0)


@contextmanager
def _no_collection():
    """While the block runs, Python collects no garbage: a graph that it destroyed would end the capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@dataclass
class Graphs:
    """The captured steps of a model, by batch size and number of positions.

    Attributes:
        why_not_fused: why steps are the model's own code; "" if they are fused.
        in_use: are steps being taken? Graphs share their memory, so that only one of them can be in use.
    """

    model: nn.Module
    fused: bool = True
    why_not_fused: str = ""
    in_use: bool = False
    _decoder: Decoder | None = None
    _joined: dict[int, Joined | None] = field(default_factory=dict)
    _steps: dict[tuple[int, int], GraphStep] = field(default_factory=dict)
    _pool: Any = None

    @torch.no_grad()
    def __post_init__(self) -> None:
        if not self.fused:
            self.why_not_fused = "asked for"
            return
        try:
            self._decoder = recognise(self.model, anywhere=True)
            check_blocks(self.model, self._decoder, FusedBody(self._decoder, 1, 64, self._joined))
        except NotNative as error:
            self._decoder, self.why_not_fused = None, str(error)
            self._joined.clear()

    def clear(self) -> None:
        """Free the graphs with their caches; weights stay joined."""
        self._steps.clear()
        self._pool = None  # torch forgets a pool with its last graph

    @torch.no_grad()
    def step(self, batch: int, positions: int) -> GraphStep:
        """The step for `batch` sequences, with a cache of at least `positions` places.

        Raises:
            NotNative: the model's cache cannot be captured.
        """
        places = max(LEAST, 1 << (positions - 1).bit_length())
        key = batch, places
        if key not in self._steps:
            while len(self._steps) >= KEPT:
                del self._steps[next(iter(self._steps))]
            if self._pool is None and self.model.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            body = self._body(batch, places)
            try:
                self._steps[key] = GraphStep(body, self._pool)
            except torch.OutOfMemoryError:
                self.clear()
                raise
            except RuntimeError as error:
                self.clear()
                raise NotNative(f"its step cannot be captured: {str(error).splitlines()[0]}") from error
        self._steps[key] = self._steps.pop(key)  # the last one is the one used last
        return self._steps[key]

    def _body(self, batch: int, positions: int) -> FusedBody | OwnBody:
        if self._decoder is None:
            return OwnBody(self.model, batch, positions)
        return FusedBody(self._decoder, batch, positions, self._joined)


class GraphSteps:
    """Steps behind a prompt in a cache that `generate` made: the interface of `kernels.step.writing.generate`.

    The cache's tensors are copied into those of the graph, and back by `finish`. Until then no other `GraphSteps` of
    these graphs may exist.
    """

    def __init__(self, graphs: Graphs, cache: DynamicCache, batch: int) -> None:
        self._graphs, self._cache, self._batch, self._slot = graphs, cache, batch, cache.get_seq_length()
        self._step: GraphStep | None = None
        graphs.in_use = True

    @staticmethod
    def take(cache: Any) -> bool:
        """Is this a cache whose layers hold keys and values alone?"""
        kinds = (DynamicLayer, DynamicSlidingWindowLayer)
        return (
            type(cache) is DynamicCache
            and bool(cache.layers)
            and not getattr(cache, "offloading", False)
            and all(type(layer) in kinds and layer.get_seq_length() == cache.get_seq_length() for layer in cache.layers)
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens [batch, 1]; returns those with the largest logits [batch, 1]."""
        if self._step is None or self._slot >= self._step.body.positions:
            self._give_back()
            self._step = self._graphs.step(self._batch, self._slot + 1 + LEAST // 4)
            for layer, room in zip(self._cache.layers, self._step.body.rooms(), strict=True):
                held = layer.keys.shape[2]
                for own, there in zip((layer.keys, layer.values), room, strict=True):
                    there[:, :, self._slot - held : self._slot] = own
            self._step.at(self._slot)
        self._step.tokens.copy_(tokens)
        self._step()
        self._slot += 1
        return self._step.tokens.clone()

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 [batch, vocabulary]; valid until the next step."""
        assert self._step is not None
        return self._step.logits.float()

    def finish(self) -> None:
        """Give the cache the keys and values of the steps."""
        self._give_back()
        self._graphs.in_use = False

    def _give_back(self) -> None:
        if self._step is None:
            return
        for layer, (keys, values) in zip(self._cache.layers, self._step.body.rooms(), strict=True):
            first = max(0, self._slot - layer.sliding_window + 1) if layer.is_sliding else 0
            layer.keys, layer.values = (t[:, :, first : self._slot].clone() for t in (keys, values))
            if layer.is_sliding:
                layer.cumulative_length = self._slot
        self._step = None
