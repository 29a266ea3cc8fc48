"""Expert dropping (REAP, arXiv:2510.13999): remove the experts of every mixture that add least to its output."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.linear import compressed_linears, parameter_count, sharing_copy
from compress.method import Method, knob
from compress.smaller import become, of_settings
from compress.walk.blocks import find_blocks
from compress.walk.capture import advance, block_calls, device_of, on_device
from compress.walk.context import Context
from compress.walk.experts import SplitExperts, expert_count, is_fused_experts
from compress.walk.finite import NotFinite
from compress.walk.folds.checks import difference, logits_of, tolerance
from compress.walk.offload import is_offloaded
from compress.walk.parallel.ranks import progress_bar
from eval.record.compression import DropRecord
from kernels.linear import fast_linear

METRICS = ("reap", "frequency")
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")  # the number a token reaches
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # names in configs


@dataclass(frozen=True, kw_only=True)
class ExpertDrop(Method):
    """Removes as many experts from each mixture of experts, so that the model has a smaller config."""

    name: ClassVar[str] = "expert_drop"
    stage: ClassVar[str] = "drop"
    source: ClassVar[str] = "arXiv:2510.13999; frequency: the usual baseline there"
    needs_calibration: ClassVar[bool] = True

    ratio: float = knob(0.25, "share of the experts of each block that is removed", range=(0, 1), describes=True)
    metric: str = knob(
        "reap",
        "importance of an expert: the mean, over the tokens that reach it, of its router's weight times the norm of "
        "its output (reap), or the number of these tokens (frequency)",
        choices=METRICS,
    )

    def check(self, model: nn.Module) -> None:
        if is_offloaded(model):
            raise ValueError(f"`weights` (='disk'): {self.name} needs the model in memory: weights='memory'")
        if stored := next(iter(compressed_linears(model)), ""):
            raise ValueError(f"`model` holds {stored} compressed already, and {self.name} removes plain weights")
        groups = getattr(model.config.get_text_config(), "n_group", None) or 1
        if groups > 1:
            raise ValueError(
                f"`model` ({type(model).__name__}) chooses among {groups} groups of experts, which {self.name} does "
                "not keep apart"
            )
        self.outline(of_settings(model, {}))

    @property
    def made_twice(self) -> float:
        return 1 - self.ratio

    def own_passes(self) -> str:
        return "how much each expert adds"

    def outline(self, model: nn.Module) -> None:
        mixtures = self._mixtures(model)
        self._keep(model, {i: torch.arange(self._left(model, count)) for i, (_, count) in mixtures.items()})

    @torch.no_grad()
    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[DropRecord]:
        (prefix, blocks), mixtures = find_blocks(model), self._mixtures(model)
        scores = _importance(
            model, {i: name for i, (name, _) in mixtures.items()}, batches, context.device, self.metric
        )
        chosen = {i: own.topk(self._left(model, len(own))).indices.sort().values for i, own in scores.items()}
        if not all(own.isfinite().all() for own in scores.values()):
            raise NotFinite("the importance of an expert is NaN or infinite")
        before = [parameter_count(block) for block in blocks]
        with _closed(model, of_settings(model, self._settings(model)), chosen):
            wanted = logits_of(model)
        self._keep(model, chosen)
        error = difference(logits_of(model), wanted, routed=model.dtype != torch.float32)
        if not error <= 10 * tolerance(model):
            raise ValueError(
                f"`model` ({type(model).__name__}) chooses its experts in a way that {self.name} does not know: its "
                f"logits differ by {error:.1e} of their length from those of the model in which no token may choose "
                "the others; the model is as it was"
            )
        return [
            DropRecord(
                name=f"{prefix}.{index}.{mixtures[index][0]}",
                kind="experts",
                block=index,
                importance=1 - (scores[index][kept].sum() / scores[index].sum().clamp_min(1e-30)).item(),
                order=1,
                parameters=before[index] - parameter_count(find_blocks(model)[1][index]),
                left=len(kept),
                of=len(scores[index]),
            )
            for index, kept in chosen.items()
        ]

    def _left(self, model: nn.Module, count: int) -> int:
        """The number of experts of `count` that stay.

        Raises:
            ValueError: none is removed, or fewer stay than a token reaches.
        """
        left = round(count * (1 - self.ratio))
        config = model.config.get_text_config()
        least = max(getattr(config, key, None) or 1 for key in CHOSEN)
        if not least <= left < count:
            raise ValueError(
                f"`ratio` (={self.ratio:g}) of {self.name} would leave {left} of {count} experts: some must go, and "
                f"the {least} that each token reaches must stay"
            )
        return left

    def _mixtures(self, model: nn.Module) -> dict[int, tuple[str, int]]:
        """By number of the block, the name of its experts in it and their number; blocks without experts have none.

        Raises:
            ValueError: there are none, or they are stored in a way that is not known.
        """
        found: dict[int, tuple[str, int]] = {}
        for index, block in enumerate(find_blocks(model)[1]):
            for name, module in block.named_modules():
                if is_fused_experts(module) or isinstance(module, SplitExperts):
                    found[index] = name, expert_count(module)
        if not found:
            raise ValueError(
                f"`model` ({type(model).__name__}) has no mixture of experts that {self.name} knows; width makes MLPs "
                "narrower"
            )
        return found

    def _settings(self, model: nn.Module) -> dict[str, Any]:
        """The settings of the config that change."""
        config, (_, count) = model.config.get_text_config(), next(iter(self._mixtures(model).values()))
        keys = [key for key in COUNTS if getattr(config, key, None) == count]
        if not keys:
            raise ValueError(f"{self._refused(model)}: it has no setting of {count} experts")
        return {keys[0]: self._left(model, count)}

    def _refused(self, model: nn.Module) -> str:
        return f"`model` ({type(model).__name__}): no config describes it after {self.name}"

    def _keep(self, model: nn.Module, chosen: Mapping[int, Tensor]) -> None:
        """Keep these experts of each block, with what the router has for them. All modules are new ones."""
        smaller, settings = sharing_copy(model), self._settings(model)
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
        if problem := become(model, smaller, settings):
            raise ValueError(f"{self._refused(model)}: {problem}")


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
