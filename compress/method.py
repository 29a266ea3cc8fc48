"""What a compression method is: a frozen dataclass whose fields are its knobs."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from torch import Tensor, nn

if TYPE_CHECKING:
    import torch

    from compress.formats import Format
    from compress.walk.resume import BlockStore
    from compress.walk.statistics import LayerStatistics

# The order in which the methods of a recipe may follow one another; the ones marked with * at most once each.
STAGES = ("drop", "transform", "sparsify*", "quantize_weights*", "quantize_activations*", "cache")


def knob(default: Any, help: str, *, choices: Sequence[Any] = (), range: tuple[float, float] | None = None) -> Any:
    """A field of a method: its default, what it does, and which values it takes (inclusive range)."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": tuple(choices), "range": range})


@dataclass(frozen=True)
class LayerRecord:
    """What became of one weight; a row of the run record's `layers`.

    error: ||(W - Ŵ)X||² / ||WX||² over the calibration tokens (or ||W - Ŵ||² / ||W||² where there were none, as
    `notes` says). `rtn_error`: the same for round-to-nearest on the same grid, None where the method has no such peer.
    bits_per_weight: stored, floats that are cast with the model counted as 16 bits. sparsity: the share of Ŵ that is 0.
    distortion: {ratio of this weight's entries set to 0, others as they were: KL of the model's predictions, nats per
        token}, as
    the method measured it to choose the ratio; None where it did not.
    """

    name: str
    shape: tuple[int, int]
    format: str
    bits_per_weight: float
    error: float
    rtn_error: float | None
    seconds: float
    tokens: int
    notes: tuple[str, ...] = ()
    sparsity: float = 0.0
    distortion: dict[str, float] | None = None


@dataclass(frozen=True)
class DropRecord:
    """A part of a block that was dropped, or might have been; a row of the record's `drops`.

    kind: "attention", "mlp" or "block". block: its number in the model as it was. importance: 1 - cosine of the
        residual stream
    before and after, mean over the calibration tokens, when it was measured last. order: 1 for what was dropped first;
    None: it stays. parameters: how many went with it.
    """

    name: str
    kind: str
    block: int
    importance: float
    order: int | None = None
    parameters: int = 0


@dataclass(frozen=True)
class FoldRecord:
    """What was moved from a producer (a norm, or a linear) into the linears that read it; a row of the record's
    `folds`.

    alpha: strength of the migration, None where all scales stayed 1. x_*, w_*: the largest magnitudes, channel by
        channel, of
    the consumers' input over the calibration tokens and of their weights' columns, as {"max", "p99", "median"} over the
    channels. error_*: ||WX - Q(W)Q(X)||² / ||WX||² over all consumers, rounded to nearest as the method aims at,
    without and with the scales; None where it was not measured. difference: ||y - y'|| / ||y|| of the block's output y
    without quantisation. channels: the magnitudes themselves, {"x_before": [...], "x_after", "w_before", "w_after"},
    for a few.
    """

    name: str
    kind: str  # "norm" or "linear"
    consumers: tuple[str, ...]
    alpha: float | None
    x_before: dict[str, float]
    x_after: dict[str, float]
    w_before: dict[str, float]
    w_after: dict[str, float]
    error_before: float | None
    error_after: float | None
    difference: float
    seconds: float
    notes: tuple[str, ...] = ()
    channels: dict[str, list[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method. Subclasses add knobs, set `name`, `stage` and `source`, and implement `apply`."""

    name: ClassVar[str]
    stage: ClassVar[str]
    source: ClassVar[str]  # paper or equation
    needs_calibration: ClassVar[bool] = False
    strength: ClassVar[str] = ""  # the knob that says how much, if there is one

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_knob(self.name, field, getattr(self, field.name))

    def apply(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        *,
        device: "torch.device",
        store: "BlockStore | None" = None,
        originals: Mapping[str, nn.Module] | None = None,
    ) -> list[LayerRecord | FoldRecord | DropRecord]:
        """Compress `model` in place and say what became of each weight, or what was folded into what.

        Args:
            batches: calibration tokens, LongTensors [1, T]; may be empty unless `needs_calibration`.
            device: where to compute.
            store: where finished blocks are kept, so that a run that is killed goes on where it was.
            originals: linears by name as they were before an earlier method of the recipe stored them, to measure
                errors against; None: as they are.
        """
        raise NotImplementedError

    def within(self, before: Sequence["Method"], after: Sequence["Method"]) -> "Method":
        """This method as it acts between these others of a recipe: itself, or one with knobs settled by them.

        Raises:
            ValueError: it cannot act between them.
        """
        return self

    def remarks(self, device: "torch.device") -> list[str]:
        """What the reader of a result must know, such as that a number format is emulated on this device."""
        return []

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, before any work, if this method cannot do what its knobs ask of this model."""

    @classmethod
    def knobs(cls) -> dict[str, dataclasses.Field]:
        """The knobs by name; `.default` and `.metadata` ("help", "choices", "range") describe each."""
        return {field.name: field for field in dataclasses.fields(cls)}

    def values(self) -> dict[str, Any]:
        """The knobs' values, as the run record keeps them."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        changed = {k: v for k, v in self.values().items() if v != self.knobs()[k].default}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


@dataclass(frozen=True, kw_only=True)
class LayerwiseMethod(Method):
    """A method that turns each weight matrix inside the blocks, by itself, into stored parts."""

    skip: str = knob("", "comma-separated name patterns (* and ?) of linears to leave as they are")
    sequential: bool = knob(
        True,
        "inside a block, each linear is solved on what the solved ones before it give, in one pass "
        "over the block; False: all on what the original ones give, in two passes that hold "
        "less memory",
    )

    statistics: ClassVar[tuple[str, ...]] = ()  # names in compress.walk.statistics.STATISTICS

    def apply(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        *,
        device: "torch.device",
        store: "BlockStore | None" = None,
        originals: Mapping[str, nn.Module] | None = None,
    ) -> list[LayerRecord]:
        from compress.walk.walk import walk

        return walk(model, self, batches, device=device, store=store, originals=originals)

    def solve(self, W: Tensor, statistics: "LayerStatistics") -> "list[Format]":
        """Parts that stand for W.

        Args:
            W: [out, in] float32, on the compute device.
            statistics: what was collected from this linear's inputs; `statistics.note(...)` adds to the record.
        """
        raise NotImplementedError

    def peer(self, W: Tensor, statistics: "LayerStatistics") -> "list[Format] | None":
        """Round-to-nearest on this method's own grid, to compare with; None if there is no such thing."""
        return None

    def check(self, model: nn.Module) -> None:
        from compress.walk.experts import split_experts
        from compress.walk.walk import targets

        split_experts(model)  # changes no output, and gives the experts shapes to check
        shapes = targets(model, self)
        if not shapes:
            raise ValueError(f"`skip` (={self.skip!r}) of {self.name} leaves no linear of this model to compress")
        for name, shape in shapes.items():
            self.check_layer(name, shape)

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        """Raise ValueError, before any work, if a weight [out, in] cannot be stored as the knobs ask."""


def refuse_stored(method: Method, before: Sequence[Method], does: str) -> None:
    """Raise ValueError if one of the methods before this one stores weights, as this one `does` itself."""
    for other in before:
        if other.stage == "quantize_weights":
            raise ValueError(f"`recipe`: {method.name} {does}: {other} before it must go")


def settle(recipe: Sequence[Method]) -> list[Method]:
    """The recipe's methods as each acts between the others.

    Raises:
        ValueError: they cannot follow one another in this order.
    """
    if not recipe:
        raise ValueError("`recipe` (=[]) must hold at least one method, such as METHODS['gptq'](bits=4)")
    order = [stage.rstrip("*") for stage in STAGES]
    once = {stage.rstrip("*") for stage in STAGES if stage.endswith("*")}
    for method in recipe:
        if not isinstance(method, Method):
            raise ValueError(f"`recipe` holds {method!r}, which is not a method; METHODS lists them")
    settled: list[Method] = []
    for i, method in enumerate(recipe):
        settled.append(method.within(settled, recipe[i + 1 :]))
    for before, after in zip(settled, settled[1:], strict=False):
        a, b = order.index(before.stage), order.index(after.stage)
        if a == b and before.stage in once:
            raise ValueError(
                f"`recipe`: {after} cannot follow {before}: both are of the kind {before.stage!r}; keep one"
            )
        if a > b:
            raise ValueError(f"`recipe`: {after} ({after.stage}) must come before {before} ({before.stage})")
    return settled


def _check_knob(method: str, field: dataclasses.Field, value: Any) -> None:
    wanted = get_args(field.type) or (field.type,)
    fits = type(value) in wanted or (float in wanted and type(value) is int)
    shown = f"`{field.name}` (={value!r}) of {method}"
    if not fits:
        raise ValueError(f"{shown} must be {' or '.join(getattr(t, '__name__', str(t)) for t in wanted)}")
    choices, limits = field.metadata["choices"], field.metadata["range"]
    if choices and value not in choices:
        raise ValueError(f"{shown} must be one of {', '.join(map(str, choices))}")
    if limits and not limits[0] <= value <= limits[1]:
        raise ValueError(f"{shown} must lie between {limits[0]} and {limits[1]}")
