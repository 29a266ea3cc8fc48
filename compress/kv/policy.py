"""Policies of the KV cache: a rule that scores cached positions, a budget, and a division of the budget.

This module also defines storages and projections; `compress.kv.reading` defines rules for sparse reading. Methods that
need a whole prompt or several layers at once change the layers' slabs in `join`: projections onto a basis that layers
share, and readings that keep a prompt in a form of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from compress.kv.precision import Precision, Projection
from compress.kv.seen import Seen
from compress.kv.support import check_model
from compress.method import Method, knob

ALLOCATIONS = ("uniform", "pyramid", "ada", "global")
MASS_ALLOCATIONS = ("prefix", "variance", "drafters")  # for policies whose scores are attention, `Policy.mass`


class Evicting(NamedTuple):
    """An eviction under way, for a policy that merges.

    Attributes:
        keys, values: [B, H_kv, T, D], rotated.
        keep, valid: bool [B, H_kv, T]: the positions that stay; the positions that are tokens of that row.
        carried: [B, H_kv] float32, kept by a policy from one eviction of a layer to the next; None at the first.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor
    valid: Tensor
    carried: Tensor | None


@dataclass(frozen=True, kw_only=True)
class CacheMethod(Method):
    """A method that changes how a model's KV cache is kept while text is generated; it does not change the weights.

    `compress.apply` attaches a recipe's cache methods to the model, all together (`compress.kv.attach`).
    """

    stage: ClassVar[str] = "cache"
    # One of the four slots of a cache: the positions that stay (policy), the channels that are kept of them
    # (projecting), their form of storage (storage), and the positions that a query reads (reading).
    slot: ClassVar[str]
    decides: ClassVar[str]  # what the methods of the slot decide, for the message that refuses two of them
    turns: ClassVar[bool] = False  # whether it turns rotated keys or queries back, which not every model permits
    joins: ClassVar[bool] = False  # whether `join` changes the layers' slabs after a prompt

    def join(self, layers: Sequence[DynamicLayer]) -> None:
        """For methods with `joins`, after every pass: change the slabs of all layers that keep positions, which are
        `compress.kv.layer.KVLayer`s."""
        raise NotImplementedError

    def apply(self, model: nn.Module, batches=(), context=None) -> list:
        return []

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for other in (*before, *after):
            if isinstance(other, CacheMethod) and other.slot == self.slot:
                raise ValueError(f"`recipe`: {self} and {other} both decide {self.decides}; keep one")
        return self

    def check(self, model: nn.Module) -> None:
        check_model(model)

    def remarks(self, device: torch.device) -> list[str]:
        return [
            f"{self.name} acts on the KV cache: timed decoding keeps a cache of its own, and only the workbench's own "
            "checkpoints carry it."
        ]


def check_budget(method: CacheMethod) -> None:
    """Raise ValueError if the `budget` of a method is neither a share nor a number of tokens."""
    budget = method.budget
    if not (budget >= 1 and budget == int(budget) if _counts(budget) else 0 < budget <= 1):
        raise ValueError(
            f"`budget` (={budget!r}) of {method.name} must be a share above 0, up to 1.0, or a number of tokens, 1 or "
            "more"
        )


def tokens_of(budget: float | int, tokens: Tensor) -> Tensor:
    """The number of `tokens` [...] that a budget allows, at least 1; a budget in tokens may exceed `tokens`."""
    if _counts(budget):
        return torch.full_like(tokens, int(budget))
    return (tokens * budget).round().long().clamp(min=1)


def _counts(budget: float | int) -> bool:
    """Whether a budget is a number of tokens: 1.0 is all tokens, 1 is one; command lines may write 256 as 256.0."""
    return type(budget) is int or 1 < budget < math.inf


def cache_method(name: str, knobs: dict[str, Any]) -> CacheMethod:
    """A method of the cache by its name; methods that users wrote are found, too.

    Raises:
        ValueError: there is no such method, or it does not have these knobs.
    """
    classes: dict[str, type[CacheMethod]] = {}
    for kind in _kinds(CacheMethod):  # a subclass that inherits the name of a method is not that method
        if hasattr(kind, "name"):
            classes.setdefault(kind.name, kind)
    if name not in classes:
        raise ValueError(f"{name!r} is not a method of the cache that is known here; there are {', '.join(classes)}")
    if unknown := sorted(set(knobs) - set(classes[name].knobs())):
        raise ValueError(f"{', '.join(unknown)} is not a knob of {name}; it has {', '.join(classes[name].knobs())}")
    return classes[name](**knobs)


def _kinds(base: type[CacheMethod]) -> list[type[CacheMethod]]:
    """All classes below this one."""
    return [kind for below in base.__subclasses__() for kind in (below, *_kinds(below))]


@dataclass(frozen=True, kw_only=True)
class Storage(CacheMethod):
    """How the positions that stay are stored."""

    slot: ClassVar[str] = "storage"
    decides: ClassVar[str] = "how positions are stored"

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for other in (*before, *after):
            if self.lesser is not None and other.stage == self.stage and other.slot in ("policy", "reading"):
                raise ValueError(
                    f"`recipe`: {self} stores positions apart, by the attention that they get, and {other} needs all "
                    "positions in one tensor; leave one out"
                )
        return super().within(before, after)

    @property
    def precision(self) -> Precision:
        """The precision of kept positions that are not `lesser` ones."""
        raise NotImplementedError

    @property
    def lesser(self) -> Precision | None:
        """The precision of positions that are not `important`; None: all have the same precision."""
        return None

    def important(self, seen: Seen) -> Tensor:
        """For storages with `lesser`, after a prompt: which positions are kept in `precision`, bool [B, H_kv, T]. Those
        of earlier prompts that are lesser ones stay so."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Projecting(CacheMethod):
    """Chooses the channels in which keys and values are kept."""

    slot: ClassVar[str] = "projecting"
    decides: ClassVar[str] = "which channels are kept"

    def projection(self, layer: int) -> Projection | None:
        """The projection of the layer with this number; None for a layer that keeps no keys."""
        raise NotImplementedError


def precisions_of(layer: int, storage: Storage | None, projecting: Projecting | None) -> dict[str, Precision | None]:
    """The final precisions of a layer's kept positions: `precision`, and `lesser` of lesser positions, or None."""
    both = {"precision": Precision(), "lesser": None}
    if storage is not None:
        both = {"precision": storage.precision, "lesser": storage.lesser}
    if projecting is None:
        return both
    own = projecting.projection(layer)
    return {name: one and one._replace(projection=own) for name, one in both.items()}


@dataclass(frozen=True, kw_only=True)
class Policy(CacheMethod):
    """Chooses which positions stay. Subclasses implement `scores` and, where it needs them, `remember` and
    `read_again`."""

    budget: float | int = knob(
        0.5, "what stays: a share of the tokens (a float up to 1), or a number of tokens per head", describes=True
    )
    allocation: str = knob(
        "uniform",
        "how the budget is shared out: as much for every head; more for early layers (pyramid); "
        "to the highest scores of a layer (ada) or of all (global); for policies of attention also to the same share "
        "of every layer's attention (prefix), or more for layers of even attention (variance), or half as much for the "
        "half of the layers whose attention is most concentrated (drafters)",
        choices=(*ALLOCATIONS, *MASS_ALLOCATIONS),
    )
    decoding: bool = knob(False, "evict while text is generated too, every eighth of the budget (8 tokens at least)")

    slot: ClassVar[str] = "policy"
    decides: ClassVar[str] = "which positions stay"
    reference: ClassVar[bool] = False  # whether it is a baseline that other policies must beat
    window: ClassVar[int] = 0  # number of queries that `scores` (while text is generated) or `read_again` reads
    remembers: ClassVar[bool] = False  # whether the policy keeps a number for each position
    memory_dtype: ClassVar[torch.dtype] = torch.float32  # of these numbers after an eviction
    runs_model: ClassVar[bool] = False  # whether scoring needs passes of the whole model
    replaces: ClassVar[bool] = False  # whether `read_again` replaces the prompt by a shorter one
    reads_hidden: ClassVar[bool] = False  # whether `remember` reads `seen.hidden`
    at_every_pass: ClassVar[bool] = False  # whether `remember` is called for every new token, also if none is evicted
    mass: ClassVar[bool] = False  # whether scores are sums of attention: finite scores are not negative
    budget_free: ClassVar[bool] = False  # whether `scores` are the same for every budget and allocation
    merges: ClassVar[bool] = False  # whether `merge` changes the kept positions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self)
        if self.allocation in MASS_ALLOCATIONS and not self.mass:
            raise ValueError(
                f"`allocation` (={self.allocation!r}) shares out attention, and the scores of {self.name} are not "
                f"attention; one of {', '.join(ALLOCATIONS)} works"
            )
        if self.decoding and self.runs_model:
            raise ValueError(
                f"`decoding` (=True): {self.name} reads the prompt again for its scores, which is not possible at "
                "every token; leave `decoding` out"
            )

    def scores(self, seen: Seen) -> Tensor:
        """The importance of each position.

        Returns:
            [B, H_kv, T] float32, finite or inf; the highest stay, inf before all others. Allocations
            that compare heads need scores that are comparable between heads.
        """
        raise NotImplementedError

    def remember(self, seen: Seen) -> Tensor:
        """For policies with `remembers`, at every pass: the new `seen.memory`, before `scores` is called. It must not
        depend on the knobs of the budget."""
        raise NotImplementedError

    def read_again(self, model: nn.Module, cache: Cache) -> None:
        """For policies with `runs_model`, after a prompt: fill the `memory` of every layer with passes over it.

        With `replaces`, read a shorter prompt and let the cache hold it (`replace_by`), with its tokens in `ids` and
        `masks`.

        Args:
            cache: the `compress.kv.cache.CompressedCache` that holds the prompt; its layers have the last `window`
                queries.
        """
        raise NotImplementedError

    def shortened(self, model: nn.Module, cache: Cache, given: dict[str, Any]) -> dict[str, Any]:
        """For policies with `replaces`, before a pass over a prompt: the arguments by name of the pass that is made, so
        that a shorter prompt can be read in place of this one, whose tokens are the last of the cache's `ids`."""
        return given

    def merge(self, evicting: Evicting) -> Evicting:
        """For policies with `merges`: the kept keys and values, with the evicted ones merged into them; `keys`,
        `values` and `carried` may change."""
        raise NotImplementedError

    def target(self, tokens: Tensor) -> Tensor:
        """The number of positions of a row that stay, given the number of `tokens` [B] that it has seen."""
        return tokens_of(self.budget, tokens)
