"""Compile one block of a decoder, and call it for every layer.

A decoder repeats the same block. torch.compile of a whole pass traces and compiles every repetition; here the block is
compiled once, with its weights and its cache as inputs. The rest of the model (embedding, mask, rotary tables, last
norm, head) is compiled as a second, small graph, in which all blocks together are one opaque operation.

The steps:

1. `_observe`: an eager pass checks that the blocks are a chain: each gets the hidden state that the previous one
   returned, and one layer of the cache.
2. `_compile_rest`: torch.compile around the model, with the blocks as one operation.
3. `_compile_blocks`: when that operation runs for the first time, torch.compile around every block. Dynamo's guards
   decide whether an existing graph also serves the next block; blocks of another structure get their own graph.

The inputs that the model and every block pass to inductor's generated code are recorded.
From then on `RegionalStep` calls the generated code directly with the recorded inputs: no guards are evaluated, and no
Python code of the model runs. On a CPU the 16-bit weights of linears are passed in the layout of the fastest product
(`eval.speed.packing`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from transformers import Cache

from eval.speed.packing import Packing
from kernels.registry import recording

Step = Callable[[Tensor, Tensor], Tensor]  # (tokens [batch, n], positions [1, n]) -> the next tokens [batch, 1]


class NotRegional(Exception):
    """The model cannot be compiled block by block; the message says why."""


@dataclass
class _Call:
    """One call of the code that inductor generated for a graph."""

    generated: Callable[[list], Sequence]
    inputs: list
    outputs: Sequence


class _Recorder:
    """A backend of torch.compile: inductor with packed weights, which records the calls of the generated code."""

    def __init__(self, packing: Packing) -> None:
        self.packing, self.calls, self.graphs = packing, [], 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        from torch._inductor.compile_fx import compile_fx  # takes a second; imported only for timings

        # Without the cache of whole AOT artifacts, which would not call `_compile`; inductor's own cache stays. Packed
        # weights have no strides to check, and the processor's instruction sets are known without test programs.
        options = {"size_asserts": False, "cpp.vec_isa_ok": True}
        with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(options):
            return compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        inputs, weights = self.packing.rewrite(graph, inputs)
        compiled = compile_fx_inner(graph, inputs, **options)
        generated = compiled.current_callable
        self.graphs += 1

        def recorded(arguments: list) -> Sequence:
            every = [*arguments, *(self.packing.packed(arguments[w.index], w) for w in weights)]
            outputs = generated(list(every))
            self.calls.append(_Call(generated, every, outputs))
            return outputs

        compiled.current_callable = recorded
        return compiled


class _Same:
    """A list of layers for a block, in which every index gives the block's own layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, index: int) -> Any:
        return self.layer

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter((self.layer,))


class OneLayer(Cache):
    """One layer of a cache, in the form of a cache for the block that uses it.

    All blocks are then alike for the compiler: none of them indexes the cache by its own number.
    """

    def __init__(self, layer: Any, index: int) -> None:
        super().__init__(layers=[layer])
        self.layers, self.layer, self.index = _Same(layer), layer, index

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._check(layer_idx)
        return self.layer.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.layer.get_seq_length()

    def _check(self, layer_idx: int) -> None:
        # Only in eager passes: a number that compiled code reads becomes part of the graph.
        if not torch.compiler.is_compiling() and layer_idx != self.index:
            raise NotRegional(f"the block of layer {self.index} uses layer {layer_idx} of the cache")


@dataclass
class _Plan:
    """The calling scheme of generated code: constant inputs, and the places of changing inputs and of the output."""

    generated: Callable[[list], Sequence]
    constants: list
    holes: list[tuple[int, int]]  # (place among the inputs, number of the changing tensor)
    output: int

    def __call__(self, changing: Sequence[Tensor]) -> Tensor:
        inputs = self.constants.copy()
        for place, number in self.holes:
            inputs[place] = changing[number]
        return self.generated(inputs)[self.output]

    @classmethod
    def of(cls, call: _Call, changing: Sequence[Tensor], output: Tensor) -> "_Plan":
        """The plan of a recorded call with these changing inputs and this output."""
        holes = [
            (place, number)
            for place, one in enumerate(call.inputs)
            for number, tensor in enumerate(changing)
            if _same(one, tensor)
        ]
        filled = {place for place, _ in holes}
        constants = [None if place in filled else one for place, one in enumerate(call.inputs)]
        outputs = [place for place, one in enumerate(call.outputs) if _same(one, output)]
        if len(outputs) != 1:
            raise NotRegional("what the compiled code gives back is not one of its outputs")
        return cls(call.generated, constants, holes, outputs[0])


def _same(one: Any, other: Any) -> bool:
    """Are these the same tensor? Not only the same object: wrappers around generated code may make new ones."""
    if one is other:
        return True
    if not isinstance(one, Tensor) or one.layout != torch.strided or not one.numel():
        return False
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


_running: list["RegionalStep"] = []  # the step whose blocks `run_blocks` is to run; graphs of all models share its code
_library = torch.library.Library("workbench", "FRAGMENT")
_library.define("run_blocks(Tensor[] changing, str[] names) -> Tensor")
_library.impl(
    "run_blocks", lambda changing, names: _running[-1].run_blocks(changing, names), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "workbench::run_blocks", lambda changing, names: torch.empty_like(changing[0]), lib=_library
)


class RegionalStep:
    """A decoding step, or the pass over a prompt: equivalent to the compiled function, for the same shapes.

    Attributes:
        graphs: number of compiled graphs: one for each structure of blocks, and one for the rest.
        kernels: {op: implementations that were traced}.
    """

    def __init__(self, compile_blocks: Callable[[Sequence[Tensor], Sequence[str]], Tensor]) -> None:
        self._compile_blocks = compile_blocks  # runs all blocks for the first time, and fills in `blocks`
        self.blocks: list[tuple[_Plan, list[int]]] = []  # each with the numbers of its input tensors
        self.rest: _Plan | None = None
        self.graphs = 0
        self.kernels: dict[str, set[str]] = {}

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        with self.running():
            return self.rest((tokens, positions))

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the `with` block runs, the operation for all decoder blocks runs the blocks of this step."""
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()

    def run_blocks(self, changing: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """All blocks, one after the other.

        changing: the hidden state, and then all other input tensors of blocks. names: see `_compile_blocks`.
        """
        if not self.blocks:
            return self._compile_blocks(changing, names)
        hidden = changing[0]
        for block, numbers in self.blocks:
            hidden = block([hidden, *[changing[number] for number in numbers]])
        return hidden


def compile_regional(
    model: nn.Module, cache: Cache, step: Step, tokens: Tensor, positions: Tensor, packing: Packing, restore: Callable
) -> RegionalStep:
    """Compile a step of a decoder block by block.

    Args:
        model: the decoder. cache: of fixed tensors, one layer for each block that has attention.
        step: calls the model with this cache.
        tokens, positions: example inputs of the step; all later ones must have these shapes.
        packing: keeps packed weights; share it between steps of the same model.
        restore: restores the cache to its state before the step.

    Raises:
        NotRegional: the model is not a chain of blocks, or the compiled code's result differs from the compiled pass's.
        Exception: any error of the compiler.
    """
    layers = find_layers(model)
    views = _one_layers(layers, cache)
    inside, outside = _Recorder(packing), _Recorder(packing)
    with recording() as kernels:
        restore()
        observed = _observe(layers, views, lambda: step(tokens, positions))
        compiled = RegionalStep(lambda *given: _compile_blocks(compiled, layers, views, observed, inside, *given))
        restore()
        expected = _compile_rest(compiled, layers, observed, outside, step, tokens, positions)
    restore()
    if not torch.equal(compiled(tokens, positions), expected):
        raise NotRegional("called directly, the compiled code gives other tokens")
    compiled.graphs, compiled.kernels = inside.graphs + outside.graphs, kernels
    return compiled


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The blocks of a decoder: the outermost list of modules, except the parts of a stored embedding.

    Raises:
        NotRegional: there is none.
    """
    parts = {id(module.parts) for module in model.modules() if hasattr(module, "parts")}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and id(module) not in parts:
            return module
    raise NotRegional("the model has no list of blocks")


@dataclass
class _Block:
    """One block's inputs in an eager pass, and its outputs after the hidden state (None: the output is not a tuple)."""

    args: tuple
    kwargs: dict[str, Any]
    rest: tuple | None


@contextmanager
def _forwards(layers: nn.ModuleList, forwards: Sequence[Callable]) -> Iterator[None]:
    """While the `with` block runs, every layer's forward is replaced by one of these functions."""
    with ExitStack() as stack:
        for layer, forward in zip(layers, forwards, strict=True):
            stack.callback(layer.__dict__.pop, "forward", None)
            layer.__dict__["forward"] = forward
        yield


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The input tensors of a block, the hidden state first, each named by its place: "0", "attention_mask", or
    "position_embeddings.1" for a tensor in a tuple."""
    found: list[tuple[str, Tensor]] = []
    for name, value in (*[(str(i), arg) for i, arg in enumerate(args)], *kwargs.items()):
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple | list):
            found.extend((f"{name}.{i}", one) for i, one in enumerate(value) if isinstance(one, Tensor))
    return found


def _with_tensors(block: _Block, tensors: dict[str, Tensor], view: OneLayer) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a block, with these tensors, and with one layer of the cache instead of the whole cache."""

    def fill(name: str, value: Any) -> Any:
        if name in tensors or isinstance(value, Tensor):
            return tensors.get(name)
        if isinstance(value, tuple | list):
            return type(value)(fill(f"{name}.{i}", one) for i, one in enumerate(value))
        return view if isinstance(value, Cache) else value

    args = tuple(fill(str(i), value) for i, value in enumerate(block.args))
    return args, {name: fill(name, value) for name, value in block.kwargs.items()}


def _one_layers(layers: nn.ModuleList, cache: Cache) -> list[OneLayer]:
    """For each block, the layer of the cache with its keys and values."""
    views = []
    for place, block in enumerate(layers):
        index = next((m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)), place)
        layer = cache.layers[min(index, len(cache.layers) - 1)]
        views.append(OneLayer(layer, index))
    return views


def _unpin(view: OneLayer) -> None:
    """Make the tensors of a layer inputs of a graph; transformers pins them to the graph that first uses them."""
    for name in ("keys", "values", "cumulative_length"):
        if hasattr(getattr(view.layer, name, None), "_dynamo_static_input_type"):
            del getattr(view.layer, name)._dynamo_static_input_type


def _observe(layers: nn.ModuleList, views: list[OneLayer], run: Callable[[], Any]) -> list[_Block]:
    """Run eagerly, and record the inputs and outputs of every block."""
    seen: list[_Block] = []
    previous: Any = None

    def forward_of(block: nn.Module, view: OneLayer) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal previous
            tensors = dict(_tensors(args, kwargs))
            hidden = next(iter(tensors.values()))
            if seen and hidden is not previous:
                raise NotRegional(f"block {len(seen)} does not get what the block before it gave")
            one = _Block(args, kwargs, None)
            args, kwargs = _with_tensors(one, tensors, view)
            output = type(block).forward(block, *args, **kwargs)
            previous, *more = output if isinstance(output, tuple) else (output,)
            if not isinstance(previous, Tensor) or previous.shape != hidden.shape or any(m is not None for m in more):
                raise NotRegional("blocks give more than a hidden state")
            one.rest = tuple(more) if isinstance(output, tuple) else None
            seen.append(one)
            return output

        return forward

    with _forwards(layers, [forward_of(block, view) for block, view in zip(layers, views, strict=True)]):
        run()
    if len(seen) != len(layers):
        raise NotRegional(f"{len(seen)} of {len(layers)} blocks ran")
    return seen


def _compile_blocks(
    compiled: RegionalStep,
    layers: nn.ModuleList,
    views: list[OneLayer],
    observed: list[_Block],
    recorder: _Recorder,
    changing: Sequence[Tensor],
    names: Sequence[str],
) -> Tensor:
    """Compile each structure of blocks once, and run all blocks; returns the hidden state.

    names: for each block, the names of its input tensors and their numbers among `changing`: "name=1 name=2".
    """

    def region(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return type(block).forward(block, *args, **kwargs)

    region.__code__ = region.__code__.replace()  # of its own: torch.compile looks graphs up by the code
    region = torch.compile(region, backend=recorder, fullgraph=True, dynamic=False)
    hidden, plans = changing[0], []
    for block, view, one, text in zip(layers, views, observed, names, strict=True):
        numbers = {name: int(number) for name, number in (pair.split("=") for pair in text.split())}
        first, *others = numbers
        tensors = {first: hidden} | {name: changing[numbers[name]] for name in others}
        args, kwargs = _with_tensors(one, tensors, view)
        _unpin(view)
        recorder.calls.clear()
        output = region(block, args, kwargs)
        if len(recorder.calls) != 1:
            raise NotRegional("the compiler is switched off")
        hidden = output[0] if isinstance(output, tuple) else output
        plans.append(
            (_Plan.of(recorder.calls.pop(), list(tensors.values()), hidden), [numbers[name] for name in others])
        )
    compiled.blocks = plans
    return hidden


def _compile_rest(
    compiled: RegionalStep,
    layers: nn.ModuleList,
    observed: list[_Block],
    recorder: _Recorder,
    step: Step,
    tokens: Tensor,
    positions: Tensor,
) -> Tensor:
    """Compile the model around the blocks, and run it; returns the tokens."""
    gathered: list[Tensor] = []
    names: list[str] = []

    def forward_of(place: int) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, *others = _tensors(args, kwargs)
            text = f"{hidden[0]}=0"
            for name, tensor in others:
                number = next((i for i, other in enumerate(gathered) if other is tensor), len(gathered))
                if number == len(gathered):
                    gathered.append(tensor)
                text += f" {name}={number + 1}"
            names.append(text)
            result = hidden[1]
            if place == len(layers) - 1:
                result = torch.ops.workbench.run_blocks([result, *gathered], list(names))
                gathered.clear()
                names.clear()
            rest = observed[place].rest
            return result if rest is None else (result, *rest)

        return forward

    def outer(tokens: Tensor, positions: Tensor) -> Tensor:
        return step(tokens, positions)

    outer.__code__ = outer.__code__.replace()
    around = torch.compile(outer, backend=recorder, fullgraph=True, dynamic=False)
    with compiled.running(), _forwards(layers, [forward_of(place) for place in range(len(layers))]):
        output = around(tokens, positions)
    if len(recorder.calls) != 1:
        raise NotRegional("the compiler is switched off")
    compiled.rest = _Plan.of(recorder.calls.pop(), (tokens, positions), output)
    return output
