"""Mixed precision: every layer gets one of several methods, so that the model loses least within a budget, or is the
smallest within a loss."""

import dataclasses
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.allocation.budget import bytes_beside, megabytes
from compress.allocation.candidates import Candidates, Loss, measure, takes
from compress.allocation.ends import measure_ends
from compress.allocation.importance import cosine_scores, random_scores, ranked, z_scores
from compress.allocation.predictions import PredictionLoss, ScaledLoss
from compress.allocation.program import BudgetProgram
from compress.allocation.sensitivity import FisherLoss
from compress.formats import Format, bits_of
from compress.grammar import split_recipes, variants_of
from compress.method import Method, knob
from compress.walk.blocks import end_targets, find_blocks, targets
from compress.walk.context import Context
from compress.walk.ends.solve import check_ends
from compress.walk.fisher import fisher
from compress.walk.folds.folding import FoldingMethod
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.resume import BlockStore
from compress.walk.statistics import LayerStatistics
from eval.record.compression import AllocationRecord, LayerRecord
from kernels.clock import clock

BUDGET_MB = 100.0
MEASURED = ("kl", "kl_scaled", "fisher")
WINDOW = 256  # tokens of a calibration window on which losses are measured: more, shorter windows are better
FISHER_TOKENS = 16  # factor of the number of tokens for gradients: these are noisier, and take two passes in all


@dataclass(frozen=True, kw_only=True)
class Mixed(LayerwiseMethod):
    """Shares out a budget of bytes: each layer gets one of `choices`, so that the sum of losses is least.

    The losses of all choices are measured on the model as it is, layer by layer; dynamic programming finds the choices
    of least total loss within the budget; then every linear is solved by the method that was chosen for it.
    """

    name: ClassVar[str] = "mixed"
    stage: ClassVar[str] = "quantize_weights"
    source: ClassVar[str] = "arXiv:2308.10438"  # section 4, with bits instead of zeros
    needs_calibration: ClassVar[bool] = True

    budget_mb: float = knob(
        BUDGET_MB,
        "megabytes of the whole model as it is stored, including the weights that stay in 16 bits",
        range=(0, 1e9),
    )
    choices: str = knob(
        "",
        "methods to choose among, with their knobs, separated by semicolons; braces hold several values of a knob",
        describes=True,
    )
    loss: str = knob(
        "kl",
        "what is minimised: the divergence of the predictions, measured for every choice (kl), or measured for the "
        "middle choice of each layer and scaled by output errors for the others (kl_scaled); its estimate from "
        "squared gradients (fisher); or nothing: more bits go to the blocks that turn the residual stream most "
        "(cosine), to those with the fewest large weights (zscore), or to blocks drawn at random (shuffled)",
        choices=(*MEASURED, "cosine", "zscore", "shuffled"),
    )
    tokens: int = knob(
        512, "calibration tokens on which the loss is measured; 16 times as many for fisher", range=(2, 1 << 30)
    )
    max_loss: float = knob(
        0.0,
        "if above 0, the smallest model whose layers lose at most this together (nats per token) takes the place of a "
        "budget; losses are measured layer by layer, and those of whole models with few bits are larger",
        range=(0, 1e3),
    )
    together: bool = knob(
        True, "linears that read the same input (q, k and v; gate and up) get the same choice, as fused kernels want"
    )
    chosen: str = knob(
        "",
        "the choice of every linear, as `workbench fit` writes it, so that nothing is measured: a letter for the "
        "number of the choice (a is the first) and how many linears in a row have it, such as a7b2a",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        places = frozenset().union(*(method.places for method in self.methods.values()))
        where = "all" if len(places) > 1 else next(iter(places), "blocks")
        if self.where not in ("blocks", where):
            raise ValueError(
                f"`where` (={self.where!r}) of {self.name} must be {where!r}, which is `where` of its choices"
            )
        object.__setattr__(self, "where", where)
        if self.max_loss and self.loss not in MEASURED:
            raise ValueError(
                f"`max_loss` (={self.max_loss:g}) of {self.name} needs a `loss` that is one, {', '.join(MEASURED)}; "
                f"{self.loss!r} gives none"
            )
        if self.max_loss and self.budget_mb != BUDGET_MB:
            raise ValueError(
                f"`max_loss` (={self.max_loss:g}) and `budget_mb` (={self.budget_mb:g}) of {self.name} are two ways to "
                "say how small the model becomes: give one"
            )
        if self.chosen and not re.fullmatch(r"([a-zA-Z]([1-9]\d*)?)+", self.chosen):
            raise ValueError(
                f"`chosen` (={self.chosen!r}) of {self.name} must be letters of choices, each with the number of "
                "linears in a row that have it, such as a7b2a"
            )
        if where != "blocks" and self.loss not in MEASURED:
            raise ValueError(
                f"`loss` (={self.loss!r}) of {self.name} orders blocks, not the embedding: "
                f"one of {', '.join(MEASURED)} works, or choices for the blocks alone"
            )

    @cached_property
    def methods(self) -> dict[str, LayerwiseMethod]:
        """The choices by their texts."""
        storing = {cls.name: cls for cls in _subclasses(LayerwiseMethod) if hasattr(cls, "name")}
        made = [
            variant.methods
            for part in split_recipes(self.choices)
            for variant in variants_of(part, storing, f"choices` of `{self.name}")[1]
        ]
        for methods in made:
            first = methods[0]
            no_storing = isinstance(first, Mixed | FoldingMethod) or first.adds or first.stores((4096, 4096)) is None
            if len(methods) > 1 or no_storing or first.own_passes():
                raise ValueError(
                    f"`choices` (={self.choices!r}) of {self.name}: each must be one method that stores a weight by "
                    f"itself, and {', '.join(map(str, methods))} is not; semicolons separate choices"
                )
        if len(made) > len(string.ascii_letters):
            raise ValueError(
                f"`choices` (={self.choices!r}) of {self.name} must be at most {len(string.ascii_letters)} methods, "
                f"not {len(made)}"
            )
        return {str(method): method for (method,) in made}

    @property
    def statistics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(need for method in self.methods.values() for need in method.statistics))

    @property
    def working_set(self) -> tuple[float, float]:
        sets = [method.working_set for method in self.methods.values()] or [LayerwiseMethod.working_set]
        return max(one[0] for one in sets), max(one[1] for one in sets)

    @property
    def by_position(self) -> bool:
        return bool(self.chosen)

    def own_passes(self) -> str:
        return "" if self.chosen else "the losses by which the budget is shared out"

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> "Mixed":
        for other in before:
            if self.loss == "fisher" and other.stage == "sparsify":
                raise ValueError(
                    f"`loss` (='fisher') of {self.name} needs gradients of uncompressed weights, and {other} has "
                    "stored them already; loss='kl' works"
                )
        for method in self.methods.values():
            method.within(before, after)
        return self

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]]:
        return max((method.stores(shape) for method in self._taking("", shape).values()), key=bits_of)

    def variants(self) -> list[Method]:
        return list(self.methods.values())

    def check(self, model: nn.Module) -> None:
        if not self.methods:
            raise ValueError(
                f"`choices` (={self.choices!r}) of {self.name} must name the methods to choose among, apart by "
                "semicolons, with braces for several values of a knob"
            )
        super().check(model)
        for method in self._of("embedding").values():
            check_ends(model, method)
        if self.chosen:
            self._chosen(model)
            return
        sizes = self._predicted(model)
        shapes = targets(model, self.skip, self.where)
        if missing := next((name for name in shapes if not sizes.get(name)), ""):
            raise ValueError(f"`choices` (={self.choices!r}) of {self.name}: none can store {missing}")
        self._check_budget(self.smallest_size(model))

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        if not self._taking(name, shape):
            for method in self.methods.values():
                method.check_layer(name, shape)
            raise ValueError(f"`choices` (={self.choices!r}) of {self.name}: all of them leave out {name}")

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        return statistics.measured["choice"].solve(W, statistics)

    def peer(self, W: Tensor, statistics: LayerStatistics) -> list[Format] | None:
        return statistics.measured["choice"].peer(W, statistics)

    def apply(
        self, model: nn.Module, batches: Sequence[Tensor], context: Context
    ) -> list[LayerRecord | AllocationRecord]:
        if self.chosen:
            choices = self._chosen(model)
            records = LayerwiseMethod.apply(self, model, batches, context.with_measured(choice=choices))
            return [dataclasses.replace(one, choice=str(choices[one.name])) for one in records]
        start = clock(context.device)
        layers = self.candidates(model, batches, context)
        program = BudgetProgram({name: list(layer.choices.values()) for name, layer in layers.items()})
        beside = bytes_beside(model, targets(model, self.skip, self.where))
        self._check_budget(program.smallest + beside)
        numbers = self._smallest(program) if self.max_loss else program.within(self.budget_mb * 1e6 - beside)
        texts = {name: list(layer.choices)[numbers[name]] for name, layer in layers.items()}
        by_member = {member: name for name, layer in layers.items() for member in layer.members}
        choices = {member: self.methods[texts[name]] for member, name in by_member.items()}
        best = program.of(numbers)
        allocation = AllocationRecord(
            loss=self.loss,
            budget_bytes=None if self.max_loss else int(self.budget_mb * 1e6),
            beside_bytes=beside,
            chosen=(best.cost + beside, best.loss),
            curve=tuple((choice.cost + beside, choice.loss) for choice in program.curve()),
            layers=len(layers),
            seconds=clock(context.device) - start,
            max_loss=self.max_loss or None,
        )
        records = LayerwiseMethod.apply(self, model, batches, context.with_measured(choice=choices))
        shown = {name: {text: choice.loss for text, choice in layer.choices.items()} for name, layer in layers.items()}
        told = [
            dataclasses.replace(one, choice=texts[by_member[one.name]], choices=shown[by_member[one.name]])
            for one in records
        ]
        return [*told, allocation]

    def _chosen(self, model: nn.Module) -> dict[str, LayerwiseMethod]:
        """The method of every linear, as `chosen` says.

        Raises:
            ValueError: `chosen` is for another number of linears or of choices, or a choice cannot store its linear.
        """
        shapes, methods = targets(model, self.skip, self.where), list(self.methods.values())
        numbers = [
            string.ascii_letters.index(letter)
            for letter, count in re.findall(r"([a-zA-Z])(\d*)", self.chosen)
            for _ in range(int(count or 1))
        ]
        if len(numbers) != len(shapes) or max(numbers) >= len(methods):
            raise ValueError(
                f"`chosen` (={self.chosen!r}) of {self.name} is for {len(numbers)} linears and at least "
                f"{max(numbers) + 1} choices; this model has {len(shapes)} linears, and `choices` names {len(methods)}"
            )
        found = {name: methods[number] for name, number in zip(shapes, numbers, strict=True)}
        ends = {} if self.where == "blocks" else end_targets(model, self.skip)
        for name, method in found.items():
            place = "embedding" if name in ends else "blocks"
            if place not in method.places:
                raise ValueError(
                    f"`chosen` (={self.chosen!r}) of {self.name} gives {name} the choice {method}, whose `where` "
                    f"(={method.where!r}) is not {place!r}"
                )
            method.check_layer(name, shapes[name])
        return found

    def choosing(self, model: nn.Module, texts: Mapping[str, str]) -> "Mixed":
        """The same, with the choice of every linear given: texts {linear: one of `methods`}. Linears without a text
        are those that methods before this one drop."""
        order, named = list(self.methods), [n for n in targets(model, self.skip, self.where) if n in texts]
        letters = [string.ascii_letters[order.index(texts[n])] for n in named]
        runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
        chosen = "".join(letter if count == 1 else f"{letter}{count}" for letter, count in runs)
        return type(self)(choices=self.choices, skip=self.skip, sequential=self.sequential, chosen=chosen)

    def candidates(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> dict[str, Candidates]:
        """The layers with their choices, bytes and losses."""
        device, store = context.device, context.store
        probes = windows(batches, self.tokens * (FISHER_TOKENS if self.loss == "fisher" else 1))
        if self.loss not in MEASURED:
            sizes = self._predicted(model)
            prefix, blocks = find_blocks(model)
            own = [
                {name: size for name, size in sizes.items() if name.startswith(f"{prefix}.{index}.")}
                for index in range(len(blocks))
            ]
            rules = {
                "cosine": lambda: cosine_scores(model, probes, device),
                "zscore": lambda: z_scores(model, list(sizes), device),
                "shuffled": lambda: random_scores(model),
            }
            return ranked(rules[self.loss](), own)
        kept = store and store.beside("losses", without=("budget_mb", "max_loss"))
        with torch.no_grad():
            loss = self._loss(model, probes, device, kept)
        how = {"device": device, "store": kept, "saved": context.saved}
        found: dict[str, Candidates] = {}
        if self.where != "blocks":
            found = measure_ends(model, self._of("embedding"), batches, loss, skip=self.skip, **how)
        names = [] if self.where == "embedding" else list(targets(model, self.skip))
        if names:
            title = f"{self.name}: losses ({self.loss})"
            found |= measure(
                model, self._of("blocks"), batches, loss, names=names, together=self.together, title=title, **how
            )
        return found

    def _loss(self, model: nn.Module, probes: list[Tensor], device: torch.device, kept: BlockStore | None) -> Loss:
        if self.loss == "fisher":
            return FisherLoss(fisher(model, probes, device=device, folder=kept and kept.folder.parent))
        measured = PredictionLoss(model, probes, device)
        return ScaledLoss(measured) if self.loss == "kl_scaled" else measured

    def _of(self, place: str) -> dict[str, LayerwiseMethod]:
        """The choices for this place, from the smallest to the largest; before them the middle one, if the loss is
        measured for the first and scaled for the others."""
        own = [(text, method) for text, method in self.methods.items() if place in method.places]
        own.sort(key=lambda one: bits_of(one[1].stores((4096, 4096))))
        middle = own[(len(own) - 1) // 2 :][:1] if self.loss == "kl_scaled" else []
        return dict([*middle, *own])

    def _taking(self, name: str, shape: tuple[int, int]) -> dict[str, LayerwiseMethod]:
        """The choices that can store this linear."""
        return {text: method for text, method in self.methods.items() if takes(method, name, shape)}

    def _predicted(self, model: nn.Module) -> dict[str, dict[str, int]]:
        """For each linear the bytes of its choices, by their specifications."""
        ends = {} if self.where == "blocks" else end_targets(model, self.skip)
        return {
            name: {
                text: round(bits_of(method.stores(shape)) * shape[0] * shape[1] / 8)
                for text, method in self._of("embedding" if name in ends else "blocks").items()
                if takes(method, name, shape)
            }
            for name, shape in targets(model, self.skip, self.where).items()
        }

    def smallest_size(self, model: nn.Module) -> int:
        """Bytes of the whole model, as it is stored, with the smallest choice for every linear."""
        shapes = targets(model, self.skip, self.where)
        return bytes_beside(model, shapes) + sum(min(own.values()) for own in self._predicted(model).values())

    def _smallest(self, program: BudgetProgram) -> dict[str, int]:
        """The choices of the smallest model within `max_loss`."""
        try:
            return program.losing(self.max_loss)
        except ValueError as error:
            raise ValueError(
                f"`max_loss` (={self.max_loss:g}) of {self.name} cannot be reached: {error}; more bits among "
                "`choices`, or a larger loss, works"
            ) from error

    def _check_budget(self, smallest: int) -> None:
        if not self.max_loss and smallest > self.budget_mb * 1e6:
            raise ValueError(
                f"`budget_mb` (={self.budget_mb:g}) of {self.name} cannot be reached: with the smallest of `choices` "
                f"the whole model takes {megabytes(smallest)}; fewer bits among `choices`, or a larger budget, works"
            )


def windows(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """About `tokens` tokens, in windows [1, T] from the beginnings of batches that are spread over all."""
    length = min(WINDOW, tokens, min(batch.shape[1] for batch in batches))
    count = min(max(tokens // length, 1), len(batches))
    if count * length < tokens:
        length = min(tokens // count, min(batch.shape[1] for batch in batches))
    return [batches[number * len(batches) // count][:, :length] for number in range(count)]


def _subclasses(cls: type) -> list[type]:
    """All subclasses of this class at any depth: every method that was imported."""
    return [below for direct in cls.__subclasses__() for below in (direct, *_subclasses(direct))]
