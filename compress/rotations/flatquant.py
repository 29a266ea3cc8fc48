"""FlatQuant (Sun et al., 2024, arXiv:2410.09426): the inputs of linears go through invertible maps, balanced or trained
block by block, so that rounding weights and inputs costs less accuracy."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.formats import Dense
from compress.linear import CompressedLinear, is_linear, weight_of
from compress.linear import replace as put
from compress.method import Method, knob
from compress.rotations.flattening import Aim, Flat, FlatLinear, balance, errors_of, start_of, train
from compress.rotations.ranges import TurnedInput, dense_record, fold_record, ranges_of
from compress.transforms import Kronecker
from compress.walk.blocks import check_experts, find_blocks, targets
from compress.walk.capture import Call, advance, block_calls, on_device
from compress.walk.context import Context
from compress.walk.experts import split_experts
from compress.walk.folds.checks import difference, logits_of, moved_logits, show_largest, tolerance
from compress.walk.folds.links import made_up_batch
from compress.walk.groups import input_groups
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.resume import BlockStore
from eval.record.compression import FoldRecord, LayerRecord
from kernels.clock import clock
from kernels.linear import fast_linear

WINDOW = 512  # number of tokens of an update
AUTO = "auto"
PARTS = ("left", "right", "scale")  # buffers of a map


@dataclass(frozen=True, kw_only=True)
class FlatQuant(Method):
    """Applies small invertible maps to the inputs of linears, which lowers the rounding error; without rounding the
    model computes the same.

    The map of an input of n = n1 n2 channels is a factor for each channel and a Kronecker product of two matrices, n1 ×
    n1 and n2 × n2; it is applied while the model runs, and its inverse is folded into the weights. Linears that read
    the same input share a map. `steps=0` keeps the start of training: factors for the channels, then a rotation. The
    factors are those of least rounding error for a rotation that mixes all channels evenly (`balance`, which is ours;
    the paper trains its factors); with scales=False there is a rotation alone. The paper's learned clipping is left
    out. The paper trains far longer: 15 times over 128 windows. A short training has shown no gain over that start here
    (seeds/log.md).
    """

    name: ClassVar[str] = "flatquant"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "arXiv:2410.09426"
    moves_inputs: ClassVar[bool] = True

    steps: int = knob(
        0, "training updates of each block's maps; 0: maps without training", range=(0, 100000), describes=True
    )
    rate: float = knob(0.01, "size of the first updates, which fall to 0", range=(0, 1))
    left: int = knob(
        0, "size n1 of the left matrix, a divisor of the channels; 0: the largest divisor up to their square root",
        range=(0, 1 << 20),
    )  # fmt: skip
    scales: bool = knob(
        True,
        "also use a factor for each channel; it starts at the value with the least rounding error after a perfect "
        "rotation",
    )
    learn_bits: int | str = knob(
        AUTO,
        "bits of the inputs in training; auto: those of the recipe's method for activations, or 4 without one",
        choices=(AUTO, 8, 4),
    )
    learn_columns: int | str = knob(
        AUTO, "columns of a token that share a step in training; -1: all; auto: as the recipe's method for activations"
    )
    weight_bits: int | str = knob(
        AUTO,
        "bits of the weights in training; 0: they are not rounded; auto: those of the recipe's weight quantiser, or 4 "
        "without one",
        choices=(AUTO, 0, 2, 3, 4, 5, 6, 8),
    )
    weight_columns: int | str = knob(
        AUTO, "columns of a weight's row that share a step in training; -1: all; auto: as the recipe's weight quantiser"
    )
    skip: str = knob("", "comma-separated name patterns (* and ?) of linears whose inputs stay as they are")
    seed: int = knob(0, "seed of the rotations from which training starts", range=(0, 1 << 31))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learn_columns", "weight_columns"):
            value = getattr(self, name)
            if value != AUTO and (isinstance(value, str) or value == 0 or value < -1):
                raise ValueError(f"`{name}` (={value!r}) of {self.name} must be 'auto', -1 (all columns) or at least 1")

    @property
    def needs_calibration(self) -> bool:
        return self.steps > 0 or self.scales

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        """Training aims at the rounding of the methods behind this one, if these knobs of theirs describe it."""
        inputs = next((m for m in after if m.stage == "quantize_activations"), None)
        weights = next((m for m in after if m.stage == "quantize_weights"), None)
        found = {
            "learn_bits": getattr(inputs, "code_bits", 8 if inputs else 4),
            "learn_columns": getattr(inputs, "group_size", -1),
            "weight_bits": getattr(weights, "bits", 4),
            "weight_columns": getattr(weights, "group_size", -1),
        }
        defaults = {"learn_bits": 8, "learn_columns": -1, "weight_bits": 4, "weight_columns": -1}
        choices = {k: self.knobs()[k].metadata["choices"] or (v,) for k, v in found.items()}
        fitting = {k: v if type(v) is int and v in choices[k] else defaults[k] for k, v in found.items()}
        return replace(self, **{k: v for k, v in fitting.items() if getattr(self, k) == AUTO})

    @property
    def aim(self) -> Aim:
        """The aim of training, after `within` has settled it."""
        return Aim(
            bits=self.learn_bits, group_size=self.learn_columns, weight_bits=self.weight_bits,
            weight_group_size=self.weight_columns, steps=self.steps, rate=self.rate, scales=self.scales,
        )  # fmt: skip

    def own_passes(self) -> str:
        return "the training of each block"

    def trains(self, longest: int) -> tuple[str, int] | None:
        return ("block", min(longest, WINDOW)) if self.steps else None

    def check(self, model: nn.Module) -> None:
        check_experts(model, self.skip, self.name)
        linears = [module for module in find_blocks(model)[1].modules() if is_linear(module)]
        if any(isinstance(module, CompressedLinear) for module in linears):
            raise ValueError(
                f"`model` holds linears of its blocks compressed or rotated already, so {self.name} cannot change "
                "them: start from the model before that"
            )
        shapes = targets(model, self.skip)
        if not shapes:
            raise ValueError(f"`skip` (={self.skip!r}) of {self.name} leaves no linear of this model")
        for name, (_, columns) in shapes.items():
            for key in ("left", "learn_columns", "weight_columns"):
                self._check_divides(key, name, columns)

    def _check_divides(self, key: str, name: str, columns: int) -> None:
        value = getattr(self, key)
        if value in (0, -1, AUTO) or columns % value == 0:
            return
        near = sorted((d for d in range(1, columns + 1) if columns % d == 0), key=lambda d: abs(d - value))[:3]
        raise ValueError(
            f"`{key}` (={value}) of {self.name} must divide in_features (={columns}) of {name}; divisors near it: "
            f"{', '.join(map(str, sorted(near)))}"
        )

    def outline(self, model: nn.Module) -> None:
        model.to_be_rotated = True

    @torch.no_grad()
    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[FoldRecord | LayerRecord]:
        """Train and fold the maps, block by block.

        Returns:
            The ranges of each input before and after, and the linears, which are kept as a map and a dense weight.

        Raises:
            RuntimeError: the output of a block, or of the model, changed.
        """
        assert context.saved is None, "statistics of the model as it was do not hold for transformed inputs"
        split_experts(model)
        before = logits_of(model)
        prefix, blocks = find_blocks(model)
        windows = [w for batch in batches for w in batch.split(WINDOW, 1)] or [made_up_batch(model)]
        calls = block_calls(model, blocks, windows, stacked=False)
        folds: list[FoldRecord] = []
        layers: list[LayerRecord] = []
        note = "its input is transformed by a map while the model runs"
        names = list(targets(model, self.skip))
        inside_of = [[name for name in names if name.startswith(f"{prefix}.{i}.")] for i in range(len(blocks))]
        count = max(i for i, inside in enumerate(inside_of) if inside) + 1
        progress = progress_bar(range(count), desc=self.name, unit="block")
        for index in progress:
            inside = inside_of[index]
            with on_device(blocks[index], context.device):
                folds += _FlattenedBlock(self, model, index, inside, context.device).flattened(calls, context.store)
                layers += [dense_record(model, name, note) for name in inside]
            progress.set_postfix_str(folds[-1].notes[-1] if folds and folds[-1].notes else "")
        why = "something outside the blocks uses a weight that was changed; load the model again"
        if problem := moved_logits(model, before, blocks[0], self.name, why):
            raise RuntimeError(problem)
        return [*show_largest(folds), *layers]


@dataclass(frozen=True)
class _FlattenedBlock:
    """The work on one block, which lies on `device`: `names` are the linears whose inputs are to be transformed."""

    method: FlatQuant
    model: nn.Module
    index: int
    names: list[str]
    device: torch.device

    def flattened(self, calls: list[Call], store: BlockStore | None) -> list[FoldRecord]:
        """Train, fold and check the block, and give the calls the outputs of the original block as next inputs."""
        start = clock(self.device)
        block = find_blocks(self.model)[1][self.index]
        linears = {name: self.model.get_submodule(name) for name in self.names}
        if not linears:
            advance(block, calls, self.index, self.device)
            return []
        groups, _ = input_groups(block, linears, calls, self.index, self.device)
        passed = [copy.copy(call) for call in calls]
        with fast_linear():
            advance(block, passed, self.index, self.device)
        turns = [TurnedInput(group[0], "online map", tuple(group)) for group in groups]
        _, was = ranges_of(self.model, block, turns, calls[0], self.index, self.device)
        weights = [torch.cat([weight_of(linears[name]) for name in group]) for group in groups]
        pairs = zip(was, weights, strict=True)
        factors = [balance(x, W) if self.method.scales else torch.ones_like(x[0]) for (x, _), W in pairs]
        starts = [start_of(scale, self.method.left, self.method.seed) for scale in factors]
        maps, losses = self._maps(groups, starts, calls, passed, store)
        for group, transform in zip(groups, maps, strict=True):
            for name in group:
                put(self.model, name, _transformed(linears[name], transform))
        y, now = ranges_of(self.model, block, turns, calls[0], self.index, self.device)
        moved, most = difference(y, passed[0].hidden.to(self.device)), 5 * tolerance(block)
        if not moved <= most:
            raise RuntimeError(
                f"{self.method.name}: the output of block {self.index} changes by a share of {moved:.1e} when its "
                f"inputs are transformed (at most {most:.0e}); load the model again, and try a smaller `rate`"
            )
        calls[:] = passed
        notes = (_note(*losses),) if self.method.steps else ()
        seconds = (clock(self.device) - start) / max(len(turns), 1)
        return [
            fold_record(turns[i], was[i], now[i], difference=moved, seconds=seconds, notes=notes,
                        errors=errors_of(was[i][0], weights[i], maps[i], self.method.aim))
            for i in range(len(turns))
        ]  # fmt: skip

    def _maps(
        self,
        groups: list[list[str]],
        starts: Sequence[Kronecker],
        calls: Sequence[Call],
        wanted: Sequence[Call],
        store: BlockStore | None,
    ) -> tuple[list[Kronecker], tuple[float, float]]:
        """The map of each group, from the store or trained by the first of several processes, and the losses."""
        ranks, made = current(), None
        if ranks.rank == 0:
            kept = store.get(self.index) if store else None
            made = kept or self._trained(groups, starts, calls, wanted)
            if store and kept is None:
                store.put(self.index, *made)
        tensors, losses = ranks.from_first(made)
        maps = [Kronecker(*(tensors[f"{i}.{part}"] for part in PARTS)).to(self.device) for i in range(len(groups))]
        return maps, tuple(losses)

    def _trained(
        self, groups: list[list[str]], starts: Sequence[Kronecker], calls: Sequence[Call], wanted: Sequence[Call]
    ) -> tuple[dict[str, Tensor], list[float]]:
        """Tensors of the maps by number of the group, and the losses."""
        aim, block = self.method.aim, find_blocks(self.model)[1][self.index]
        originals = {name: self.model.get_submodule(name) for group in groups for name in group}
        flats = [Flat(start) for start in starts]
        standing = {
            name: FlatLinear(originals[name], weight_of(originals[name]), flat, aim)
            for flat, group in zip(flats, groups, strict=True)
            for name in group
        }
        try:
            for name, one in standing.items():
                put(self.model, name, one)
            losses = train(block, self.index, standing, calls, wanted, aim, self.device)
        finally:
            for name, one in originals.items():
                put(self.model, name, one)
        results = [flat.result() for flat in flats] if losses[1] < losses[0] else starts
        return {f"{i}.{part}": getattr(one, part) for i, one in enumerate(results) for part in PARTS}, list(losses)


def _note(first: float, last: float) -> str:
    went = "went" if last < first else "would have gone (so that its maps stay as they were at the start)"
    return f"its block's loss with rounding {went} from {first:.4g} to {last:.4g}"


def _transformed(linear: nn.Module, transform: Kronecker) -> CompressedLinear:
    """A linear with the same outputs, with its inputs transformed and its weight W P⁻ᵀ."""
    dtype = linear.weight.dtype
    W = transform.fold(weight_of(linear)).to(dtype)
    return CompressedLinear([Dense(W)], linear.bias, dtype=dtype, transform=copy.deepcopy(transform))
