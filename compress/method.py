"""The base class of compression methods, which are frozen dataclasses with knobs as fields; and the rules for their
order."""

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from eval.record.compression import AllocationRecord, DropRecord, FoldRecord, LayerRecord, RecoveryRecord

# The order in which the methods of a recipe may follow one another; of the ones marked with * at most
# one for each weight. Methods of the stage RECOVER may stand anywhere between drop and cache.
STAGES = (
    "drop", "transform", "sparsify*", "quantize_weights*", "correct*", "tune*", "quantize_activations*", "recover",
    "cache",
)  # fmt: skip
RECOVER = "recover"


def knob(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] = (),
    range: tuple[float, float] | None = None,
    describes: bool = False,
) -> Any:
    """A field of a method.

    Args:
        help: what the knob does, for users.
        choices, range: the allowed values; the range is inclusive.
        describes: always write the value of this knob with the method's name, in records, tables and pages; other knobs
            are written only if they differ from their defaults.
    """
    metadata = {"help": help, "choices": tuple(choices), "range": range, "describes": describes}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method. Subclasses add knobs, set `name`, `stage` and `source`, and implement `apply`."""

    name: ClassVar[str]
    stage: ClassVar[str]
    source: ClassVar[str]  # paper or equation
    needs_calibration: ClassVar[bool] = False
    reads_originals: ClassVar[bool] = False  # `apply` reads `context.originals`, which must be held for it
    moves_inputs: ClassVar[bool] = False  # statistics of the inputs of linears are not valid after it was applied
    # The method's memory at its peak while it compresses one weight: the numbers of float32 copies of the weight
    # [out, in], and of the Gram matrix [in, in] of its inputs beside that matrix itself. They predict peak memory.
    working_set: ClassVar[tuple[float, float]] = (8.0, 0.0)

    def __new__(cls, *values: Any, **knobs: Any) -> "Method":
        check_knob_names(cls, knobs, named=not values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_knob(self.name, field, getattr(self, field.name))

    def apply(
        self, model: nn.Module, batches: Sequence[Tensor], context: Any
    ) -> list[LayerRecord | FoldRecord | DropRecord | AllocationRecord | RecoveryRecord]:
        """Compress `model` in place and return the records of each weight, or of each fold.

        Args:
            batches: calibration tokens, LongTensors [1, T]; may be empty unless `needs_calibration`.
            context: where to compute, and what is kept of the model and of this run, a `compress.walk.context.Context`.
        """
        raise NotImplementedError

    def prepare(self, model: nn.Module, batches: Sequence[Tensor], context: Any) -> Any:
        """What this method needs of the model as it is before the recipe, which `apply` finds in `context.prepared`."""
        return None

    def collects(self) -> tuple[str, ...]:
        """Statistics of the inputs of linears that this method reads, names in compress.walk.statistics.STATISTICS."""
        return ()

    def own_passes(self) -> str:
        """The purpose for which this method itself runs the model, even with saved statistics; "" if it does not."""
        return ""

    def trains(self, longest: int) -> tuple[str, int] | None:
        """The scope of gradients ("block", "model", or "model by blocks", in which a block keeps its input alone), and
        the tokens of a pass if the longest calibration batch has `longest` tokens; None if nothing is trained. Peak
        memory is predicted from this."""
        return None

    def held_copies(self, stored: bool, itemsize: int, products: int) -> float:
        """The number of float32 copies of a linear's weight that training of the whole model holds beside the weight.

        Args:
            stored: whether an earlier method stores the weight; else it is plain, of a dtype of `itemsize` bytes.
            products: bytes of a number in matrix products.
        """
        return 0.0

    def within(self, before: Sequence["Method"], after: Sequence["Method"]) -> "Method":
        """This method as it acts between these methods of a recipe: itself, or a copy with knobs that they settle.

        Raises:
            ValueError: it cannot act between them.
        """
        return self

    def remarks(self, device: torch.device) -> list[str]:
        """Remarks for readers of a result, for example that a number format is emulated on this device."""
        return []

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, before any work, if this method with its knobs cannot be applied to this model."""

    def check_run(self, model: nn.Module, batches: Sequence[Tensor], device: torch.device, processes: int) -> None:
        """Raise ValueError, before any work, if this method cannot act with these calibration batches, on this device,
        or in so many processes."""

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]] | None:
        """The `Format.spec()` of each part that this method will store for a weight [out, in]; None if it leaves
        storage to others. It is known before any work, so that unsuitable checkpoint formats are refused. If it depends
        on the data, the largest parts that the method may store."""
        return None

    def variants(self) -> "list[Method]":
        """Methods that together store every form that this one may store: itself, or those that it chooses from."""
        return [self]

    @property
    def places(self) -> frozenset[str]:
        """The weights that this method compresses: "blocks" for the linears inside them, "embedding" for the token
        embedding and the head. Methods of different places do not interact."""
        return frozenset({"blocks"})

    @property
    def zeros(self) -> float:
        """The share of each weight matrix that this method sets to 0, and that later methods of a recipe keep at 0."""
        return 0.0

    @property
    def by_position(self) -> bool:
        """Whether a knob names linears by their order, so that it is checked on the model as the methods before
        this one leave it."""
        return False

    def outline(self, model: nn.Module) -> None:
        """Remove from a model, which may be on the meta device, modules of the kind that `apply` would remove.

        It reads no weights, so that it may choose other modules than `apply` will.
        """

    @classmethod
    def knobs(cls) -> dict[str, dataclasses.Field]:
        """The knobs by name; `.default` and `.metadata` (the arguments of `knob`) describe each."""
        return {field.name: field for field in dataclasses.fields(cls)}

    def values(self) -> dict[str, Any]:
        """The knobs' values, in the form of the run record."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The method in the form of a recipe, with the knobs that describe it and those that differ from defaults."""
        knobs = self.knobs()
        written = {
            name: value
            for name, value in self.values().items()
            if knobs[name].metadata["describes"] or value != knobs[name].default
        }
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in written.items())})" if written else self.name


class UnknownMethod(KeyError, ValueError):
    """A name that is not in `METHODS`."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show it in quotation marks


class Methods(dict[str, type[Method]]):
    """Classes of methods by their names; the error for another name says which names are near it."""

    def __missing__(self, name: object) -> type[Method]:
        shown = f"METHODS[{name!r}]: {name} is not a method"
        raise UnknownMethod(f"{shown}; {allowed(str(name), self, 'there are')}")


METHODS = Methods()  # `compress/__init__.py` names all methods in it


def allowed(name: str, names: Iterable[str], there: str, quote: str = "") -> str:
    """The end of an error's message about an unknown name: the name that looks most like it, and all names.

    Args:
        there: the words before all names, such as "there are".
    """
    every, closest = f"{there} {', '.join(names)}", difflib.get_close_matches(name, names, n=1)
    return f"did you mean {quote}{closest[0]}{quote}? {every[0].upper()}{every[1:]}" if closest else every


def check_knob_names(method: type[Method], names: Iterable[str], *, named: bool = True) -> None:
    """Raise ValueError if a method does not have a knob of one of these names, or if values came without names."""
    knobs = method.knobs()
    if not named:
        raise ValueError(f"knobs of {method.name} are given by name: {', '.join(knobs) or 'it has none'}")
    for name in names:
        if name not in knobs:
            raise ValueError(f"`{name}` is not a knob of {method.name}; {allowed(name, knobs, 'it has', '`')}")


def refuse_stored(method: Method, before: Sequence[Method], does: str) -> None:
    """Raise ValueError if one of the methods before this one stores weights; `does`: what this method does."""
    for other in before:
        if other.stage == "quantize_weights" and other.places & method.places:
            raise ValueError(f"`recipe`: {method.name} {does}: {other} before it must go")


def settle(recipe: Sequence[Method]) -> list[Method]:
    """The recipe's methods as each acts between the others.

    Raises:
        ValueError: they cannot follow one another in this order.
    """
    if not recipe:
        raise ValueError("`recipe` (=[]) must hold at least one method, such as METHODS['gptq'](bits=4)")
    order: list[str] = [stage.rstrip("*") for stage in STAGES]
    once = {stage.rstrip("*") for stage in STAGES if stage.endswith("*")}
    for method in recipe:
        if not isinstance(method, Method):
            raise ValueError(f"`recipe` holds {method!r}, which is not a method; METHODS lists them")
    settled: list[Method] = []
    for i, method in enumerate(recipe):
        settled.append(method.within(settled, recipe[i + 1 :]))
    for before, after in itertools.combinations(settled, 2):
        a, b = order.index(before.stage), order.index(after.stage)
        if a == b and before.stage in once and (both := before.places & after.places):
            raise ValueError(
                f"`recipe`: {after} cannot follow {before}: both are of the kind {before.stage!r} and store the same "
                f"weights ({' and '.join(sorted(both))}); keep one, or one for each place (`where`)"
            )
        if a > b and not (before.stage == RECOVER and after.stage != "drop"):
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
