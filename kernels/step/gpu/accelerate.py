"""`accelerate` on a GPU: the decoding steps of `generate` as CUDA graphs."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.step.decoder import ACCELERATION, NotNative
from kernels.step.gpu.graphs import LEAST, Graphs, GraphSteps
from kernels.step.writing.generate import generate


def accelerate_by_graphs(model: nn.Module, graphs: Graphs) -> None:
    """Accelerate a model, in place, with graphs that have been made already."""
    GraphAcceleration(model, _graphs=graphs, _state=_state(model)).take_over()


@dataclass(repr=False)
class GraphAcceleration:
    """How a model on a GPU generates; created by `accelerate`. Prompts are read by the model's own code.

    Attributes:
        why_not: why the model's own code takes the steps, without a graph; "" if graphs are replayed.
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
        now = _state(self.model)
        if self._graphs is None or self._state != now:
            self._graphs = None  # frees the memory of graphs that read other weights
            self._graphs, self._state, self.why_not = Graphs(self.model), now, ""
        return self._graphs

    def steps(self, cache: Any, batch: int) -> GraphSteps | None:
        """Steps behind a prompt that the model has read into a cache without padding; None: call the model instead."""
        if self.model._forward_hooks or self.model._forward_pre_hooks or not GraphSteps.take(cache):
            return None
        try:
            graphs = self.graphs()
            if self.why_not or graphs.in_use:  # by another thread, or a generation within a generation
                return None
            graphs.step(batch, cache.get_seq_length() + LEAST // 4)
        except (NotNative, torch.OutOfMemoryError) as error:
            self.why_not = str(error).splitlines()[0]
            warnings.warn(f"the steps are not captured as a CUDA graph: {self.why_not}", stacklevel=2)
            return None
        return GraphSteps(graphs, cache, batch)


def _state(model: nn.Module) -> tuple[Any, ...]:
    """Values that differ once a model has been changed: its kind of attention, its tensors' addresses and versions."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return getattr(model.config, "_attn_implementation", None), *(
        (t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version) for t in tensors
    )
