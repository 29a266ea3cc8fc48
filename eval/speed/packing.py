"""Weights of linears in a graph, laid out for oneDNN before they are passed to the code that inductor generates.

On a CPU, torch's 16-bit products of a plain weight reach a quarter of the memory bandwidth. inductor packs weights that
are constants of a graph; here weights are inputs, so that one graph serves many layers, and are packed all the same.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._inductor import mkldnn_ir
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import register_lowering
from torch.fx import GraphModule, Node

from kernels.linear.onednn import lay_out, product

aten = torch.ops.aten
_library = torch.library.Library("workbench", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", lambda x, weight, bias: product(x, weight, bias), "CPU")
torch.library.register_fake(
    "workbench::packed_linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), lib=_library
)


@register_lowering(torch.ops.workbench.packed_linear, type_promotion_kind=None)
def _lowered(x: TensorBox, weight: TensorBox, bias: TensorBox | None) -> TensorBox:
    return TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, "none", [], ""))


@dataclass(frozen=True)
class Weight:
    """A weight among the inputs of a graph.

    index: its place among them. transposed: it is stored as [in, out]. tokens: rows of the product.
    """

    index: int
    transposed: bool
    tokens: int


@dataclass
class Packing:
    """Packs the weights of a model, each once for a number of tokens."""

    tensors: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)  # {...: (the weight, packed)}

    @property
    def weights(self) -> int:
        """How many weights are packed."""
        return len({key[0] for key in self.tensors})

    def rewrite(self, graph: GraphModule, inputs: list) -> tuple[list, list[Weight]]:
        """Change the products of 16-bit CPU weights that are inputs of a graph (of aten operations) into packed ones.

        Returns:
            the graph's inputs, with one more for every weight; and which these are.
        """
        places = {node: i for i, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder")}
        last = next(reversed(places), None)
        weights: list[Weight] = []
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
                continue
            bias, x, matrix = (None, *node.args) if node.target == aten.mm.default else node.args
            weight, transposed = _origin(matrix)
            if weight not in places or node.kwargs or not _packable(x, weight, bias):
                continue
            shape = weight.meta["val"].shape
            weights.append(Weight(places[weight], transposed, x.meta["val"].shape[0]))
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"packed_{len(weights)}")
            stored = weight.meta["val"]
            last.meta["val"] = stored.new_empty(tuple(reversed(shape)) if transposed else tuple(shape))
            with graph.graph.inserting_before(node):
                product = graph.graph.call_function(torch.ops.workbench.packed_linear.default, (x, last, bias))
            product.meta.update(node.meta)
            node.replace_all_uses_with(product)
            graph.graph.erase_node(node)
            inputs = [*inputs, last.meta["val"]]
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return inputs, weights

    def packed(self, tensor: Tensor, weight: Weight) -> Tensor:
        """The tensor that an input of the graph is, laid out for its product."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), weight.transposed, weight.tokens)
        if key not in self.tensors:
            self.tensors[key] = tensor, lay_out(tensor.t() if weight.transposed else tensor, weight.tokens)
        return self.tensors[key][1]


def _origin(matrix: Node) -> tuple[Node, bool]:
    """The node of a weight whose product is taken with this [in, out] matrix; and whether it is stored like this."""
    if matrix.target == aten.t.default or (matrix.target == aten.permute.default and list(matrix.args[1]) == [1, 0]):
        return matrix.args[0], False
    return matrix, True


def _packable(x: Node, weight: Node, bias: Node | None) -> bool:
    stored, on_cpu = weight.meta["val"], x.meta["val"].device.type == "cpu"
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    one_bias = bias is None or bias.meta["val"].dim() == 1
    return on_cpu and stored.dim() == 2 and one_bias and stored.dtype in supported and supported[stored.dtype]()
