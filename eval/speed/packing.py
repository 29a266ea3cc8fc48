"""Products of 16-bit weights in a graph, replaced by the fastest ones on a CPU before inductor generates code.

torch's 16-bit products of a plain weight reach a quarter of the memory bandwidth on a CPU. For a few tokens the
workbench's own kernel reads the plain weights, in one call for all that multiply the same input; for more tokens, and
if a trial finds it faster, oneDNN reads weights that were laid out for it once. inductor does the latter with constants
of a graph; here weights are inputs, so that one graph serves many layers.
"""

import operator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kernels import native
from kernels.linear.onednn import lay_out, lays_out, product
from kernels.linear.rows import DTYPES, faster_than_onednn, rows_fit
from kernels.registry import ran

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_library = torch.library.Library("workbench", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", lambda x, weight, bias: product(x, weight, bias), "CPU")
torch.library.register_fake(
    "workbench::packed_linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), lib=_library
)


@cache
def _known_to_inductor() -> None:
    """Register the packed product's lowering with inductor, whose import takes a second."""
    from torch._inductor import mkldnn_ir
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.workbench.packed_linear, type_promotion_kind=None)
    def _lowered(x: TensorBox, weight: TensorBox, bias: TensorBox | None) -> TensorBox:
        return TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, "none", [], ""))


@dataclass(frozen=True)
class GraphWeight:
    """A weight among the inputs of a graph.

    index: its place among the inputs. transposed: it is stored as [in, out]. tokens: rows of the product. plain: it is
    read row by row, not laid out for oneDNN.
    """

    index: int
    transposed: bool
    tokens: int
    plain: bool


@dataclass(frozen=True)
class _Product:
    """A product in a graph: its node, its operands, and the place of its weight among the graph's inputs."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    index: int
    transposed: bool

    @property
    def tokens(self) -> int:
        return self.x.meta["val"].shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        rows, columns = self.weight.meta["val"].shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def plain(self) -> bool:
        """Does the workbench's kernel compute it?"""
        stored = self.weight.meta["val"]
        same = self.x.meta["val"].dtype == stored.dtype
        return same and rows_fit(stored, self.tokens) and faster_than_onednn(*self.shape, self.tokens, stored.dtype)


@dataclass
class Packing:
    """The weights of a model in the form for their products; a layout for oneDNN is made once per number of tokens.

    tensors: {...: (the weight, its layout)}. weights: addresses of all weights in memory, the plain ones too.
    """

    tensors: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)

    def rewrite(self, graph: GraphModule, inputs: list) -> tuple[list, list[GraphWeight]]:
        """Change the products of 16-bit CPU weights that are inputs of a graph (of aten operations) into packed ones.

        Returns:
            the graph's inputs, with one more for every weight; and a description of these.
        """
        _known_to_inductor()
        last = next((n for n in reversed(graph.graph.nodes) if n.op == "placeholder"), None)
        weights: list[GraphWeight] = []
        for several in _together(_products(graph)):
            given: list[Node] = []
            for one in several:
                plain = len(several) > 1 or one.plain
                weights.append(GraphWeight(one.index, one.transposed, one.tokens, plain))
                with graph.graph.inserting_after(last):
                    last = graph.graph.placeholder(f"packed_{len(weights)}")
                last.meta["val"] = one.weight.meta["val"].new_empty(one.shape)
                given.append(last)
                inputs = [*inputs, last.meta["val"]]
            _replace(graph, several, given, weights[-1].plain)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return inputs, weights

    def packed(self, tensor: Tensor, weight: GraphWeight) -> Tensor:
        """An input tensor of the graph, laid out for its product."""
        self.weights.add(tensor.data_ptr())
        rows = tensor.t() if weight.transposed else tensor
        if weight.plain and rows.is_contiguous():
            return rows
        tokens = 0 if weight.plain else weight.tokens
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), weight.transposed, tokens)
        if key not in self.tensors:
            self.tensors[key] = tensor, rows.contiguous() if weight.plain else lay_out(rows, tokens)
        return self.tensors[key][1]


def _products(graph: GraphModule) -> list[_Product]:
    """The products of 16-bit CPU weights that are inputs of the graph."""
    places = {node: i for i, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder")}
    products = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        bias, x, matrix = (None, *node.args) if node.target == aten.mm.default else node.args
        weight, transposed = _origin(matrix)
        if weight in places and _packable(x, weight, bias):
            products.append(_Product(node, x, weight, bias, places[weight], transposed))
    return products


def _together(products: list[_Product]) -> list[list[_Product]]:
    """The products by call: products of the workbench's kernel with the same input (queries, keys and values; gate and
    up) form one call, every other product its own."""
    calls: dict[object, list[_Product]] = {}
    for one in products:
        # Each linear may have its own view of the same input.
        same = (one.x.target, *map(str, one.x.args)) if one.x.target in VIEWS else one.x
        calls.setdefault((same, one.tokens) if one.plain and _is_input(one.bias) else one.node, []).append(one)
    return list(calls.values())


def _replace(graph: GraphModule, several: list[_Product], given: list[Node], plain: bool) -> None:
    """Replace these products by one call; `given`: their weights in the form for the call."""
    first = several[0]
    with graph.graph.inserting_before(first.node):
        ran("linear", f"cpu {native.isa(first.x.meta['val'].dtype)}" if plain else "cpu prepacked")
        if plain:
            arguments = (first.x, given, [one.bias for one in several], "auto")
            call = graph.graph.call_function(torch.ops.workbench.half_matmul.default, arguments)
            call.meta["val"] = [one.node.meta["val"] for one in several]
            results = [graph.graph.call_function(operator.getitem, (call, i)) for i in range(len(several))]
        else:
            arguments = (first.x, given[0], first.bias)
            results = [graph.graph.call_function(torch.ops.workbench.packed_linear.default, arguments)]
    for one, result in zip(several, results, strict=True):
        result.meta.update(one.node.meta)
        one.node.replace_all_uses_with(result)
        graph.graph.erase_node(one.node)


def _is_input(bias: Node | None) -> bool:
    """Is a bias available before the first of several products?"""
    return bias is None or bias.op == "placeholder"


def _origin(matrix: Node) -> tuple[Node, bool]:
    """The node of the weight from which this [in, out] matrix comes; and is it stored in this orientation?"""
    if matrix.target == aten.t.default or (matrix.target == aten.permute.default and list(matrix.args[1]) == [1, 0]):
        return matrix.args[0], False
    return matrix, True


def _packable(x: Node, weight: Node, bias: Node | None) -> bool:
    stored, on_cpu = weight.meta["val"], x.meta["val"].device.type == "cpu"
    one_bias = bias is None or bias.meta["val"].dim() == 1
    return on_cpu and stored.dim() == 2 and one_bias and stored.dtype in DTYPES and lays_out(stored.dtype)
