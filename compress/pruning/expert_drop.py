"""Expert dropping (REAP, arXiv:2510.13999): remove the experts of every mixture that add least to its output."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.method import knob
from compress.smaller import Chosen, UnitDrop, of_settings
from compress.walk.blocks import find_blocks
from compress.walk.capture import advance, block_calls, device_of, on_device
from compress.walk.experts import SplitExperts, expert_count, is_fused_experts
from compress.walk.parallel.ranks import progress_bar
from kernels.linear import fast_linear

METRICS = ("reap", "frequency")
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")  # the number a token reaches
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # names in configs


class Mixture(NamedTuple):
    """The name of the experts in their block, and their number."""

    name: str
    count: int


@dataclass(frozen=True, kw_only=True)
class ExpertDrop(UnitDrop):
    """Removes as many experts from each mixture of experts, so that the model has a smaller config."""

    name: ClassVar[str] = "expert_drop"
    source: ClassVar[str] = "arXiv:2510.13999; frequency: the usual baseline there"
    kind: ClassVar[str] = "experts"
    routed: ClassVar[bool] = True
    refused: ClassVar[str] = "`model` of expert_drop"
    mistaken: ClassVar[str] = "are chosen in a way that is not known"

    ratio: float = knob(0.25, "share of the experts of each block that is removed", range=(0, 1), describes=True)
    metric: str = knob(
        "reap",
        "importance of an expert: the mean, over the tokens that reach it, of its router's weight times the norm of "
        "its output (reap), or the number of these tokens (frequency)",
        choices=METRICS,
    )

    def check(self, model: nn.Module) -> None:
        groups = getattr(model.config.get_text_config(), "n_group", None) or 1
        if groups > 1:
            raise ValueError(
                f"`model` ({type(model).__name__}) chooses among {groups} groups of experts, which {self.name} does "
                "not keep apart"
            )
        super().check(model)

    def own_passes(self) -> str:
        return "how much each expert adds"

    def importance(
        self, model: nn.Module, units: Mapping[int, Mixture], batches: Sequence[Tensor], device: torch.device
    ) -> dict[int, Tensor]:
        return _importance(model, {i: its.name for i, its in units.items()}, batches, device, self.metric)

    def masked(self, model: nn.Module, units: Mapping[int, Mixture], chosen: Chosen) -> AbstractContextManager:
        return _closed(model, of_settings(model, self._settings(model, units)), chosen)

    def left(self, model: nn.Module, count: int) -> int:
        left = round(count * (1 - self.ratio))
        config = model.config.get_text_config()
        least = max(getattr(config, key, None) or 1 for key in CHOSEN)
        if not least <= left < count:
            raise ValueError(
                f"`ratio` (={self.ratio:g}) of {self.name} would leave {left} of {count} experts: some must go, and "
                f"the {least} that each token reaches must stay"
            )
        return left

    def units(self, model: nn.Module) -> dict[int, Mixture]:
        """By number of the block, its experts; blocks without experts have none.

        Raises:
            ValueError: there are none, or they are stored in a way that is not known.
        """
        found: dict[int, Mixture] = {}
        for index, block in enumerate(find_blocks(model)[1]):
            for name, module in block.named_modules():
                if is_fused_experts(module) or isinstance(module, SplitExperts):
                    found[index] = Mixture(name, expert_count(module))
        if not found:
            raise ValueError(
                f"`model` ({type(model).__name__}) has no mixture of experts that {self.name} knows; width makes MLPs "
                "narrower"
            )
        return found

    def _settings(self, model: nn.Module, units: Mapping[int, Mixture]) -> dict[str, Any]:
        """The settings of the config that change."""
        config, count = model.config.get_text_config(), next(iter(units.values())).count
        keys = [key for key in COUNTS if getattr(config, key, None) == count]
        if not keys:
            raise ValueError(f"{self.refused}: the config of {type(model).__name__} has no setting of {count} experts")
        return {keys[0]: self.left(model, count)}

    def cut(self, model: nn.Module, smaller: nn.Module, units: Mapping[int, Mixture], chosen: Chosen) -> dict[str, Any]:
        settings = self._settings(model, units)
        theirs = dict(of_settings(model, settings).named_modules())
        prefix, blocks = find_blocks(smaller)
        for index, kept in chosen.items():
            for name, module in list(blocks[index].named_modules()):
                if isinstance(module, SplitExperts):
                    for part in (module.up_name, "down_proj"):
                        linears = getattr(module, part)
                        setattr(module, part, nn.ModuleList(linears[expert] for expert in kept.tolist()))
                    module.num_experts = len(kept)
                elif (other := theirs.get(f"{prefix}.{index}.{name}".removesuffix("."))) is not None:
                    _take(module, other, kept)
        return settings


@contextmanager
def _closed(model: nn.Module, smaller: nn.Module, chosen: Mapping[int, Tensor]) -> Iterator[None]:
    """While the context lasts, routers give -inf for the experts that are not chosen.

    Args:
        smaller: a model that has only as many experts; tensors of routers are those that are shorter in it.
    """
    theirs, (prefix, blocks) = dict(smaller.named_modules()), find_blocks(model)
    closed: dict[int, Tensor] = {}
    with ExitStack() as undo:
        for index, kept in chosen.items():
            for name, module in blocks[index].named_modules():
                other = theirs.get(f"{prefix}.{index}.{name}".removesuffix("."))
                if other is None or isinstance(module, SplitExperts) or is_fused_experts(module):
                    continue
                for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    there = getattr(other, key, None)
                    if tensor is None or not isinstance(there, Tensor) or there.shape == tensor.shape:
                        continue
                    gone = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
                    gone[kept.to(tensor.device)] = False
                    if tensor.dim() == 1:
                        undo.callback(setattr, tensor, "data", tensor.data)
                        tensor.data = tensor.data.masked_fill(gone, float("-inf"))
                    else:
                        closed[tensor.data_ptr()] = gone
        undo.enter_context(_Closed(closed))
        yield


class _Closed(TorchFunctionMode):
    """While active, products with some weights, by their addresses, are -inf at some outputs."""

    def __init__(self, closed: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.closed = closed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            gone = self.closed.get(weight.data_ptr())
            return output if gone is None else output.masked_fill(gone, float("-inf"))
        return output


def _take(module: nn.Module, other: nn.Module, kept: Tensor) -> None:
    """Keep, of a module's own tensors that are shorter in another model, these rows."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        there = getattr(other, name, None)
        if tensor is None or not isinstance(there, Tensor) or there.shape == tensor.shape:
            continue
        if there.shape != (len(kept), *tensor.shape[1:]):
            continue  # `become` tells the difference
        rows = tensor.detach()[kept.to(tensor.device)].contiguous()
        setattr(module, name, nn.Parameter(rows, tensor.requires_grad) if name in module._parameters else rows)


@torch.no_grad()
def _importance(
    model: nn.Module, mixtures: Mapping[int, str], batches: Sequence[Tensor], device: torch.device, metric: str
) -> dict[int, Tensor]:
    """By number of the block, the importance of each of its experts."""
    _, blocks = find_blocks(model)
    calls, scores = block_calls(model, blocks, batches), {}
    with fast_linear():
        for index, block in enumerate(progress_bar(blocks, desc="importance of experts", unit="block")):
            with on_device(block, device):
                if index not in mixtures:
                    advance(block, calls, index, device)
                    continue
                with _watched(block, mixtures[index]) as (added, tokens):
                    advance(block, calls, index, device)
            added, tokens = added.cpu(), tokens.cpu()
            scores[index] = tokens if metric == "frequency" else added / tokens.clamp_min(1)
    return scores


@contextmanager
def _watched(block: nn.Module, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """While the context lasts, two sums over tokens grow, for each expert [experts]: of the router's weight times the
    norm of its output, and of the tokens that reach it. Fused experts are split meanwhile."""
    own, (parent, _, child) = block.get_submodule(name), name.rpartition(".")
    experts = own if isinstance(own, SplitExperts) else SplitExperts(own)
    home = device_of(own)
    added, tokens = (torch.zeros(experts.num_experts, dtype=torch.float64, device=home) for _ in range(2))
    routed: dict[str, Tensor] = {}

    def route(_, args):
        routed["index"], routed["weights"] = args[1], args[2]

    def add(expert: int, output: Tensor):
        token, place = torch.where(routed["index"] == expert)
        added[expert] += (routed["weights"][token, place].double().abs() * output.double().norm(dim=-1)).sum()
        tokens[expert] += len(token)

    hooks = [experts.register_forward_pre_hook(route)]
    for i, linear in enumerate(experts.down_proj):
        hooks.append(linear.register_forward_hook(lambda _, __, output, i=i: add(i, output)))
    setattr(block.get_submodule(parent), child, experts)
    try:
        yield added, tokens
    finally:
        setattr(block.get_submodule(parent), child, own)
        for hook in hooks:
            hook.remove()
