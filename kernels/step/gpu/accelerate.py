"""`accelerate` on a GPU: the decoding steps of `generate` as CUDA graphs."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.step.gpu.graphs import Graphs, GraphSteps
from kernels.step.gpu.stored_steps import StoredSteps
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import ACCELERATION, STREAM, attached_to, hooked, state_of
from kernels.step.writing.generate import generate


def accelerate_by_graphs(model: nn.Module, graphs: Graphs) -> None:
    """Accelerate a model, in place, with graphs that have been made already."""
    GraphAcceleration(model, _graphs=graphs, _state=state_of(model)).take_over()


@dataclass(repr=False)
class GraphAcceleration:
    """How a model on a GPU generates; created by `accelerate`. Prompts are read by the model's own code.

    Attributes:
        why_not: why the model's own code took the last steps, without a graph; "" if a graph was replayed.
    """

    model: nn.Module
    why_not: str = ""
    _graphs: Graphs | None = None
    _state: tuple[Any, ...] | None = None  # of the model when its graphs were made

    def __repr__(self) -> str:
        if self.why_not:
            return f"the model's own code: {self.why_not}"
        if self._graphs is None:
            return "steps as a CUDA graph, captured by the first `generate`"
        why = self._graphs.why_not_fused
        return f"steps as a CUDA graph of {f'the model’s own code: {why}' if why else 'fused operations'}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphAcceleration":
        return GraphAcceleration(memo.get(id(self.model), self.model))

    def take_over(self) -> None:
        """Take the place of the model's `generate`."""
        setattr(self.model, ACCELERATION, self)
        self.model.generate = self.generate

    def remove(self) -> None:
        """Give the model its own `generate` back, and free the graphs and their caches."""
        for name in ("generate", ACCELERATION):
            self.model.__dict__.pop(name, None)
        self._graphs = self._state = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the model's `generate`; the same arguments and outputs."""
        return generate(self.model, *args, **kwargs)

    def graphs(self) -> Graphs:
        """The graphs of the model as it is now."""
        now = state_of(self.model)
        if self._graphs is None or self._state != now:
            self._graphs = None  # frees the memory of graphs that read other weights
            self._graphs, self._state = Graphs(self.model), now
        return self._graphs

    def steps(self, cache: Any, batch: int) -> GraphSteps | StoredSteps | None:
        """Steps behind a prompt that the model has read into a cache without padding; None: call the model instead."""
        return self._steps(cache, batch)

    def padded_steps(self, cache: Any, mask: Tensor | None, positions: Tensor) -> GraphSteps | StoredSteps | None:
        """Steps behind sequences of different lengths: the mask and the positions of the prompt, [batch, tokens];
        None: call the model instead."""
        batch = len(positions) if mask is None else len(mask)
        return self._steps(cache, batch, mask, positions.expand(batch, -1))

    def _steps(self, cache: Any, batch: int, *padded: Tensor | None) -> GraphSteps | StoredSteps | None:
        before, self.why_not = self.why_not, self._why_not(cache)
        if not self.why_not:
            try:
                kind = StoredSteps if StoredSteps.take(cache) else GraphSteps
                return kind(self.graphs(), cache, batch, *padded)
            except NotNative as error:
                self.why_not = str(error)
        if self.why_not != before:
            warnings.warn(f"steps are taken without a CUDA graph: {self.why_not}", stacklevel=3)
        return None

    def _why_not(self, cache: Any) -> str:
        """Why a graph would not do what the model does now; "" if it does. A graph holds neither Python nor modes."""
        stores = StoredSteps.take(cache)
        if not stores and not GraphSteps.take(cache):
            return f"the cache ({type(cache).__name__}) holds more than the keys and values of each layer"
        known = getattr(self.model, STREAM, None), attached_to(self.model) if stores else None
        if (name := hooked(self.model, *known)) is not None:
            return f"{name} has hooks"
        if self.model.training or torch.is_autocast_enabled(self.model.device.type):
            return "the model is in training mode" if self.model.training else "autocast is on"
        return "a graph of this model is in use" if self._graphs is not None and self._graphs.in_use else ""
