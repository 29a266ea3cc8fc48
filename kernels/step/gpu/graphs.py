"""A step of decoding on a GPU as one CUDA graph: captured once for a batch size, replayed for every token."""

import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kernels.step.gpu import sizes
from kernels.step.gpu.body import FusedBody, OwnBody, largest
from kernels.step.gpu.compare import check_fused
from kernels.step.gpu.products import Products
from kernels.step.gpu.stored import Room, StoredBody
from kernels.step.recognition.decoder import Decoder
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import recognise
from kernels.step.writing.generate import Calls
from kernels.support.capture import capturing
from kernels.support.errors import kind_and_first_line
from kernels.tuning import early_launches

WARMING = 2  # runs before a capture, in which kernels are compiled and weights joined
KEPT = 4  # graphs that are kept, of different batch sizes and lengths


class GraphStep:
    """Steps of decoding for a batch of sequences of equal length.

    Attributes:
        tokens: int64 [batch, 1], which the next step reads; a step overwrites them with the most probable next tokens.
        logits: of the last step, [batch, vocabulary].
        how: "fused" or "the model's own code"; captured: is it replayed from a CUDA graph?
    """

    def __init__(self, body: FusedBody | OwnBody, pool: Any = None, capture: bool = True, early: bool = False) -> None:
        """pool: memory that several graphs share, of `torch.cuda.graph_pool_handle`; only one of them may be in use.
        capture: False: the step runs op by op on a GPU, too. early: see `Graphs`."""
        self.body, self.how, self.early, device = body, body.how, early, body.device
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
        with torch.cuda.device(device), capturing(graph, pool):
            self._run()
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
        with early_launches(self.early):
            self.logits = self.body(self.tokens)
        largest(self.logits, out=self.tokens)  # a copy would be a node of another kind


@contextmanager
def _in_use(held: int, body: FusedBody | OwnBody):
    """Leaves the cache empty."""
    body.at(held)
    try:
        yield
    finally:
        body.at(0)


@dataclass
class Graphs:
    """The captured steps of a model, by batch size, number of positions and form of the cache.

    Attributes:
        capture: False: steps run op by op, on a GPU, too.
        early: launch each Triton kernel of a step while the kernel before it ends (`kernels.launch_order`): by default
            only if $WORKBENCH_EARLY_LAUNCHES is 1, because no GPU has timed this yet.
        why_not_fused: why steps are the model's own code; "" if they are fused.
        in_use: are steps being taken? Graphs share their memory, so that only one of them can be in use.
    """

    model: nn.Module
    fused: bool = True
    capture: bool = True
    early: bool = field(default_factory=lambda: os.environ.get("WORKBENCH_EARLY_LAUNCHES") == "1")
    why_not_fused: str = ""
    in_use: bool = False
    _decoder: Decoder | None = None
    _products: dict[int, Products] = field(default_factory=dict)
    _steps: dict[tuple[int, int, Room | None], GraphStep] = field(default_factory=dict)
    _refused: dict[tuple[int, int, Room | None], str] = field(default_factory=dict)
    _pool: Any = None

    @torch.no_grad()
    def __post_init__(self) -> None:
        if not self.fused:
            self.why_not_fused = "asked for"
            return
        try:
            self._decoder = recognise(self.model, anywhere=True)
            check_fused(self.model, self._decoder, self._products)
        except (NotNative, torch.OutOfMemoryError) as error:
            self._decoder, self.why_not_fused = None, str(error).splitlines()[0]
            self._products.clear()

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The index in the cache and the window (0: none) of each fused layer."""
        return [] if self._decoder is None else [(block.index, block.window) for block in self._decoder.blocks]

    def clear(self) -> None:
        """Free the graphs with their caches; weights stay joined."""
        self._steps.clear()
        self._pool = None  # torch forgets a pool with its last graph

    @torch.no_grad()
    def step(self, batch: int, positions: int, room: Room | None = None) -> GraphStep:
        """The step for `batch` sequences, with a cache of at least `positions` places.

        Args:
            room: of a cache that stores its positions in another form; `positions` are then those of the text.

        Raises:
            NotNative: a step of this size cannot be captured, or memory does not hold its cache.
        """
        places = sizes.places(positions)
        key = batch, places, room
        if key not in self._steps:
            while len(self._steps) >= KEPT:
                del self._steps[next(iter(self._steps))]
            for smaller in [k for k in self._steps if room and k[2] and k[0] == batch and k[1] <= places]:
                del self._steps[smaller]  # such caches grow in small paces, and each graph holds a copy of all codes
            if self._pool is None and self.capture and self.model.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            if key in self._refused:
                raise NotNative(self._refused[key])
            try:
                self._steps[key] = self._made(batch, places, room)
            except Exception as error:  # of the model's own code on a static cache, of a capture, or of memory
                self.clear()
                why = str(error) if isinstance(error, NotNative) else kind_and_first_line(error)
                if not isinstance(error, torch.OutOfMemoryError):  # there may be more memory the next time
                    self._refused[key] = why
                raise NotNative(why) from error
        self._steps[key] = self._steps.pop(key)  # the last one is the one used last
        return self._steps[key]

    def _made(self, batch: int, places: int, room: Room | None) -> GraphStep:
        """A new step. If memory lacks, the other graphs are freed, and it is tried once more."""
        try:
            return GraphStep(self._body(batch, places, room), self._pool, self.capture, self.early)
        except torch.OutOfMemoryError:
            if not self._steps:
                raise
        self.clear()
        if self.capture and self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        return GraphStep(self._body(batch, places, room), self._pool, self.capture, self.early)

    def _body(self, batch: int, positions: int, room: Room | None) -> FusedBody | OwnBody:
        if room is not None:
            if self._decoder is None:
                raise NotNative(f"only fused steps read a compressed cache, and {self.why_not_fused}")
            return StoredBody(self._decoder, batch, positions, self._products, room)
        if self._decoder is None:
            return OwnBody(self.model, batch, positions)
        return FusedBody(self._decoder, batch, positions, self._products)


class GraphSteps:
    """Steps behind a prompt in a cache that `generate` made: the interface of `kernels.step.writing.generate`.

    The cache's tensors are copied into those of the graph, and back by `finish`. Until then no other `GraphSteps` of
    these graphs may exist.
    """

    def __init__(
        self,
        graphs: Graphs,
        cache: DynamicCache,
        batch: int,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """mask, positions: those of the prompt, [batch, tokens], if its sequences begin at different positions.

        Raises:
            NotNative: there is no graph of this size, or none for padding, or for padding behind the first tokens.
        """
        self._graphs, self._cache, self._batch, self._slot = graphs, cache, batch, cache.get_seq_length()
        self._read = self._slot  # by the prompt
        self._padding = None if positions is None else padding_of(positions, self._slot)
        if self._padding is not None:
            check_padding(self._padding, mask, self._slot)
            if graphs.why_not_fused:
                raise NotNative(f"only fused steps read padded sequences: {graphs.why_not_fused}")
        self._step: GraphStep | None = None
        self._calls = Calls(graphs.model, cache, mask, positions)
        self._fill()
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

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """Read tokens [batch, 1]; returns those with the largest logits [batch, 1], or None where the model's own code
        has read them, because no larger graph could be captured."""
        if self._step is not None and self._slot >= self._step.body.positions:
            self._give_back()
            try:
                self._fill()
            except NotNative as error:
                warnings.warn(f"the rest is written by the model's own code, without a graph: {error}", stacklevel=2)
                self._calls.advance(self._slot - self._read)
        if self._step is None:
            self._calls(tokens)
            return None
        self._step.tokens.copy_(tokens)
        self._step()
        self._slot += 1
        return self._step.tokens.clone()

    def _fill(self) -> None:
        """Copy the cache into a graph that has room for more positions."""
        step = self._graphs.step(self._batch, self._slot + sizes.SPARE)
        for layer, room in zip(self._cache.layers, step.body.rooms(), strict=True):
            copy_in(layer, room, self._slot, self._padding)
        step.at(self._slot)
        if self._padding is not None:
            step.body.leave_out(self._padding)
        self._step = step

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 [batch, vocabulary]; valid until the next step."""
        return self._calls.logits if self._step is None else self._step.logits.float()

    def finish(self) -> None:
        """Give the cache the keys and values of the steps."""
        try:
            self._give_back()
        finally:
            self._graphs.in_use = False

    def _give_back(self) -> None:
        if self._step is None:
            return
        for layer, room in zip(self._cache.layers, self._step.body.rooms(), strict=True):
            copy_out(layer, room, self._slot, self._padding)
        self._step = None


def padding_of(positions: Tensor, slot: int) -> Tensor:
    """The number of padded places of each sequence, int32 [batch], behind `slot` places with these positions.

    Raises:
        NotNative: the positions are beyond the places.
    """
    padding = (slot - 1 - positions[:, -1]).to(torch.int32)
    if int(padding.min()) < 0:
        raise NotNative("positions lie behind the tokens of the cache")
    return padding


def check_padding(padding: Tensor, mask: Tensor | None, slot: int) -> None:
    """Check that a mask [batch, slot] hides so many places at the beginning of each sequence, and no others.

    Raises:
        NotNative: it does not.
    """
    seen = torch.arange(slot, device=padding.device) >= padding[:, None]
    if mask is None or mask.shape != seen.shape or not torch.equal(mask.bool(), seen):
        raise NotNative("the mask and the positions are not those of sequences with padding at the beginning")


def copy_in(layer: DynamicLayer, room: tuple[Tensor, Tensor], slot: int, padding: Tensor | None = None) -> None:
    """Copy a layer's keys and values to where they end at `slot` in larger tensors, or, in sequences with padding,
    int32 [batch], as many places before it."""
    held = layer.keys.shape[2]
    for own, there in zip((layer.keys, layer.values), room, strict=True):
        if padding is None:
            there[:, :, slot - held : slot] = own
        else:
            there[:, :, :slot] = _shifted(own, 0, slot, padding + (held - slot))


def copy_out(layer: DynamicLayer, room: tuple[Tensor, Tensor], slot: int, padding: Tensor | None = None) -> None:
    """Give a layer its keys and values back, which end as in `copy_in`. Any numbers take the places of padding."""
    first = max(0, slot - layer.sliding_window + 1) if layer.is_sliding else 0
    layer.keys, layer.values = (
        t[:, :, first:slot].clone() if padding is None else _shifted(t, first, slot, -padding) for t in room
    )
    if layer.is_sliding:
        layer.cumulative_length = slot


def _shifted(x: Tensor, first: int, end: int, by: Tensor) -> Tensor:
    """The positions first + by .. end + by of x [batch, heads, positions, channels], where by [batch] differs between
    sequences; where x has none, its first or last position."""
    at = (torch.arange(first, end, device=x.device) + by[:, None]).clamp_(0, x.shape[2] - 1)
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
