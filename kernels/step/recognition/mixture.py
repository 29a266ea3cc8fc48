"""Mixtures of experts: their parts, and the rule by which a router chooses, found by what a module makes of tokens."""

import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.step.program import Choice
from kernels.step.recognition.parts import MLP, NotNative, activation_of, children_of, expect, split

ROUTERS = ("gate", "router")  # names of the module of a mixture that chooses its experts
SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # of an MLP beside them, for all tokens
SHARED_GATE = "shared_expert_gate"
BIAS, FACTOR = "e_score_correction_bias", "routed_scaling_factor"  # attributes of a router or a mixture
PROBED = 3  # tokens for which a mixture is compared with its module
ALIKE = 0.05  # largest relative difference of a mixture from its module, whose results are rounded to 16 bits


@dataclass(frozen=True)
class MixtureOfExperts:
    """MLPs of which a router chooses some for each token; their results are added up with the experts' shares.

    module: the model's own, which does all of it. router: [experts, hidden], in the model's dtype. choice: its rule.
    gates, ups, downs: linears of the experts. shared: gate, up and down of an MLP that is added for all tokens, or
    None. shared_gate: a linear of one output, whose sigmoid is the share of that MLP; None: 1.
    """

    module: nn.Module
    router: Tensor
    choice: Choice
    gates: tuple[nn.Module, ...]
    ups: tuple[nn.Module, ...]
    downs: tuple[nn.Module, ...]
    shared: tuple[nn.Module, nn.Module, nn.Module] | None = None
    shared_gate: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The result [..., hidden] of the model's own module."""
        y = self.module(x)
        return y[0] if isinstance(y, tuple) else y

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens x [tokens, hidden] and their shares, [tokens, chosen]."""
        return self.choice(F.linear(x.float(), self.router.float()), x.dtype)


def mixture_of(mlp: nn.Module, name: str, dtype: torch.dtype) -> MixtureOfExperts:
    """The parts of a mixture, compared with what its module makes of a few tokens."""
    children, experts = children_of(mlp), mlp.experts
    router = next((getattr(mlp, n) for n in ROUTERS if n in children), None)
    beside = next((getattr(mlp, n) for n in SHARED if n in children), None)
    if router is None or children - {*ROUTERS, *SHARED, SHARED_GATE, "experts"}:
        raise NotNative(f"{name} has {', '.join(sorted(children))}")
    W = getattr(router, "weight", None)
    if not isinstance(W, Tensor) or W.dim() != 2 or W.device.type != "cpu":
        raise NotNative(f"{name} has a router of another kind, or is not on a CPU")
    if any((getattr(router, n, None) or 1) > 1 for n in ("num_group", "n_group")):
        raise NotNative(f"{name} chooses groups of experts")
    if getattr(experts, "has_post_expert_norm", False) or not hasattr(experts, "act_fn"):
        raise NotNative(f"{name} has experts of another kind")
    firsts, downs = (_linears_of_experts(experts, n, name) for n in ("gate_up_proj", "down_proj"))
    halves = [split(first, (first.out_features // 2,) * 2) for first in firsts]
    shared = None
    if beside is not None:
        expect(beside, MLP, f"{name}'s shared MLP")
        shared = beside.gate_proj, beside.up_proj, beside.down_proj
        if activation_of(beside.act_fn) != activation_of(experts.act_fn):
            raise NotNative(f"{name}'s shared MLP has another activation")
    tensors = itertools.chain(mlp.named_parameters(), mlp.named_buffers())
    bias = next((tensor.detach().float().flatten() for n, tensor in tensors if n.rpartition(".")[2] == BIAS), None)
    gates, ups = zip(*halves, strict=True)
    made = MixtureOfExperts(
        mlp, W.detach(), Choice(1, bias=bias), gates, ups, tuple(downs), shared, getattr(mlp, SHARED_GATE, None)
    )
    return _as_its_module_chooses(made, experts, name, dtype)


def _linears_of_experts(experts: nn.Module, which: str, name: str) -> list[nn.Module]:
    """A linear of each expert, whose memory is shared if one parameter holds all."""
    held = getattr(experts, which, None)
    if isinstance(held, nn.ModuleList):
        return list(held)
    if not isinstance(held, nn.Parameter) or held.dim() != 3 or experts.is_transposed or experts.has_bias:
        raise NotNative(f"{name} has experts of another kind")
    linears = []
    for W in held.detach():
        linear = nn.Linear(W.shape[1], W.shape[0], bias=False, device="meta", dtype=W.dtype)
        linear.weight = nn.Parameter(W, requires_grad=False)
        linears.append(linear)
    return linears


def _as_its_module_chooses(
    mixture: MixtureOfExperts, experts: nn.Module, name: str, dtype: torch.dtype
) -> MixtureOfExperts:
    """The mixture with the rule by which its module chooses experts, found by what the module gives them."""
    hidden, given = mixture.router.shape[1], []
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBED, hidden, generator=generator).to(dtype)
    hook = experts.register_forward_pre_hook(lambda module, args: given.append(args))
    try:
        wanted = mixture(x[None])[0]
    except Exception as error:
        raise NotNative(f"{name} cannot be run by itself: {str(error).splitlines()[0]}") from error
    finally:
        hook.remove()
    if len(given) != 1 or len(given[0]) != 3:
        raise NotNative(f"{name} calls its experts in another way")
    _, chosen, shares = given[0]
    factors = {1.0, *(float(getattr(m, FACTOR, 1.0) or 1.0) for m in mixture.module.modules())}
    biases = {id(bias): bias for bias in (mixture.choice.bias, None)}.values()
    values = itertools.product((False, True), (True, False), (True, False), factors, biases)
    rules = [replace(mixture, choice=Choice(chosen.shape[1], *one)) for one in values]
    apart = [_apart(rule.choose(x), (chosen, shares.float())) for rule in rules]
    found = rules[apart.index(min(apart))]
    if not (min(apart) < ALIKE and _relative(_mixed(found, x), wanted) < ALIKE):
        raise NotNative(f"{name} chooses or adds up experts by another rule")
    return found


def _apart(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The largest relative difference of shares; infinite if other experts are chosen."""
    (chosen, order), (also, other) = (choice[0].sort(-1) for choice in (found, wanted))
    shares, its = found[1].gather(-1, order), wanted[1].gather(-1, other)
    if not torch.equal(chosen, also.to(chosen.dtype)):
        return torch.inf
    return float(((shares - its).abs() / its.abs().clamp(min=1e-20)).max())


def _mixed(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """The result for tokens x [tokens, hidden], part by part."""
    function = mixture.module.experts.act_fn
    y = torch.zeros(x.shape, dtype=torch.float32)
    for token, (chosen, shares) in enumerate(zip(*mixture.choose(x), strict=True)):
        for i, share in zip(chosen.tolist(), shares, strict=True):
            inner = function(mixture.gates[i](x[[token]])) * mixture.ups[i](x[[token]])
            y[token] += share * mixture.downs[i](inner)[0].float()
    if mixture.shared is not None:
        gate, up, down = mixture.shared
        part = 1.0 if mixture.shared_gate is None else mixture.shared_gate(x).float().sigmoid()
        y += part * down(function(gate(x)) * up(x)).float()
    return y


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20))
