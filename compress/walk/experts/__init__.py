"""Mixture-of-experts weights as linears: transformers keeps them as one 3-D parameter, which no method can take."""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from compress.linear import shape_of
from compress.walk.experts import stack
from kernels.int_matmul import Packed
from kernels.int_matmul.experts import expert_matmul


class SplitExperts(nn.Module):
    """The experts of one layer, each as two nn.Linear; same function as the module that it stands for.

    `gate_up_proj` (or `up_proj`) and `down_proj` become lists of linears of the same names, so that expert 3's second
    weight is `experts.down_proj.3`.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        self.up_name = _up_name(experts)
        for name in (self.up_name, "down_proj"):
            self.add_module(name, _linears(experts, name))
        self._stacks = {name: stack.ExpertStack() for name in (self.up_name, "down_proj")}
        self.act_fn = getattr(experts, "act_fn", None)  # some gates bring their own
        self.post_expert_norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        # Bound to this module, so that the attributes that it reads (act_fn, limits, ...) are found here.
        self._gate = type(experts)._apply_gate if experts.has_gate else None
        for name, value in vars(experts).items():
            if isinstance(value, int | float) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden]."""
        up, down = getattr(self, self.up_name), self.down_proj
        if stack.pays(hidden_states):
            weights = [held.packed(getattr(self, name), hidden_states) for name, held in self._stacks.items()]
            if all(w is not None for w in weights):
                return self._at_once(hidden_states, top_k_index, top_k_weights, *weights)
        y = torch.zeros_like(hidden_states)
        reached = [expert for expert in top_k_index.unique().tolist() if expert < self.num_experts]
        between = {}  # all first weights before all second ones: in the order in which they are registered
        for expert in reached:
            token, place = torch.where(top_k_index == expert)
            h = up[expert](hidden_states[token])
            between[expert] = token, place, self.act_fn(h) if self._gate is None else self._gate(self, h)
        for expert in reached:
            token, place, h = between.pop(expert)
            h = down[expert](h)
            if self.post_expert_norm is not None:
                h = self.post_expert_norm(h)
            y.index_add_(0, token, (h * top_k_weights[token, place, None]).to(y.dtype))
        return y

    def _at_once(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, up: Packed, down: Packed
    ) -> Tensor:
        """`forward` by one product for all experts' first weights and one for their second. The host waits for
        nothing, and every token's experts are added in their order, so that the same call gives the same bits."""
        tokens, k = top_k_index.shape
        expert, order = top_k_index.reshape(-1).sort(stable=True)  # [tokens k]
        numbers = torch.arange(self.num_experts, device=expert.device)
        ends = torch.searchsorted(expert, numbers, right=True).int()
        h = expert_matmul(hidden_states[order // k], up, ends)
        h = expert_matmul(self.act_fn(h) if self._gate is None else self._gate(self, h), down, ends)
        if self.post_expert_norm is not None:
            h = self.post_expert_norm(h)
        h = (h * top_k_weights.reshape(-1)[order, None]).to(hidden_states.dtype)
        each = torch.empty_like(h)
        each[order] = torch.where(expert[:, None] < self.num_experts, h, 0)  # rows of no expert were not computed
        return each.view(tokens, k, -1).sum(1)

    def _apply(self, fn, recurse=True):
        for held in self._stacks.values():
            held.forget()
        return super()._apply(fn, recurse)


def split_experts(model: nn.Module) -> int:
    """Replace every module that holds fused expert weights, in place; returns how many there were."""
    fused = [(name, m) for name, m in model.named_modules() if is_fused_experts(m)]
    for name, experts in fused:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SplitExperts(experts))
    return len(fused)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether this module follows transformers' experts interface, with its weights in 3-D parameters."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3 and hasattr(module, "has_gate")


def split_shapes(experts: nn.Module) -> dict[str, tuple[int, int]]:
    """Name and shape (out, in) of each linear that `SplitExperts` would make of fused experts, or has made of them."""
    if isinstance(experts, SplitExperts):
        kinds = {name: getattr(experts, name) for name in (experts.up_name, "down_proj")}
        return {f"{name}.{e}": shape_of(linear) for name, linears in kinds.items() for e, linear in enumerate(linears)}
    shapes = {}
    for name in (_up_name(experts), "down_proj"):
        count, *shape = getattr(experts, name).shape
        out_in = (shape[1], shape[0]) if experts.is_transposed else (shape[0], shape[1])
        shapes |= {f"{name}.{expert}": out_in for expert in range(count)}
    return shapes


def expert_count(module: nn.Module) -> int:
    """The number of experts that this module itself holds, split, fused or as a list of modules."""
    if isinstance(module, SplitExperts):
        return module.num_experts
    if isinstance(module, nn.ModuleList):
        return len(module) if len(module) > 1 else 0
    return max((p.shape[0] for p in _stacked(module)), default=0)


def has_experts(model: nn.Module) -> bool:
    """Whether blocks of a model hold experts. The list of the blocks counts as none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return any(expert_count(module) for blocks in lists for name, module in blocks.named_modules() if name)


def cannot_be_split(module: nn.Module) -> bool:
    """Whether one parameter holds the matrices of several experts in a layout that `SplitExperts` does not know."""
    return bool(_stacked(module)) and not is_fused_experts(module)


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    """The module's own parameters that are several matrices: [experts, rows, columns]."""
    if isinstance(module, _ConvNd):
        return []
    return [p for p in module.parameters(recurse=False) if p.dim() == 3 and min(p.shape) > 1]


def _up_name(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _linears(experts: nn.Module, name: str) -> nn.ModuleList:
    weights = getattr(experts, name).detach()
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
    linears = nn.ModuleList()
    for e in range(experts.num_experts):
        W = weights[e].t() if experts.is_transposed else weights[e]
        linear = nn.Linear(W.shape[1], W.shape[0], bias=biases is not None, device="meta", dtype=W.dtype)
        linear.weight = nn.Parameter(W.contiguous(), requires_grad=False)
        if biases is not None:
            linear.bias = nn.Parameter(biases[e].clone(), requires_grad=False)
        linears.append(linear)
    return linears
