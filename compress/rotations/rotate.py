"""Rotations that spread the outliers of activations over all channels (QuaRot, Ashkboos et al., 2024,
arXiv:2404.00456)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.formats import Dense
from compress.linear import CompressedLinear, is_linear, replace, weight_of
from compress.method import Method, knob
from compress.rotations.folds import StreamUse, fold_heads, fold_stream, heads_of, stream_use, trial_of
from compress.rotations.learned import WINDOW, Rotations, learn
from compress.rotations.ranges import TurnedInput, dense_record, fold_record, ranges_of
from compress.transforms import Rotation
from compress.transforms.rotation import random_hadamard, random_orthogonal
from compress.transforms.stream import rotate_stream, stream_of
from compress.walk.blocks import find_blocks, shared_linears, targets
from compress.walk.capture import Call, block_calls, device_of, on_device, run_block
from compress.walk.context import Context
from compress.walk.experts import split_experts
from compress.walk.folds.checks import difference, logits_of, moved_logits, show_largest, tolerance
from compress.walk.folds.links import Link, find_links, made_up_batch
from compress.walk.offload import is_offloaded
from compress.walk.parallel.ranks import progress_bar
from eval.record.compression import FoldRecord, LayerRecord
from kernels.clock import clock

TRIED = 64  # tokens on which possible folds are tried


@dataclass(frozen=True, kw_only=True)
class Rotate(Method):
    """Rotates the inputs of the linears, so that no channel is much larger than others; the model computes the same.

    The rotation of the residual stream and those of the heads are folded into weights. Others are applied while the
    model runs, by the kernel `hadamard`. Where an architecture does not let the stream be rotated (its norms lie before
    the sums, as in Gemma 2 and 3), the inputs that it would have reached are rotated while the model runs.
    """

    name: ClassVar[str] = "rotate"
    stage: ClassVar[str] = "transform"
    source: ClassVar[str] = "arXiv:2404.00456; with steps arXiv:2405.16406"
    moves_inputs: ClassVar[bool] = True

    stream: str = knob(
        "hadamard",
        "rotation of the residual stream: random signs and a Hadamard transform (hadamard), any other (orthogonal), "
        "or none",
        choices=("hadamard", "orthogonal", "none"),
        describes=True,
    )
    heads: bool = knob(True, "rotate the outputs of each head of v, and rotate them back in o")
    online: str = knob(
        "rest",
        "inputs that are rotated while the model runs: those that no folded rotation reaches (rest), all (then nothing "
        "is folded: stream='none', heads=False), or none",
        choices=("rest", "all", "none"),
    )
    block_size: int = knob(
        0, "channels that an online rotation mixes; 0: as many as have a Hadamard matrix", range=(0, 1 << 20)
    )
    steps: int = knob(
        0,
        "training steps of the folded rotations on the calibration tokens; 0: random rotations",
        range=(0, 100000),
        describes=True,
    )
    learn_bits: int = knob(4, "bits of the activations for which the rotations are trained", choices=(8, 4))
    seed: int = knob(0, "seed of the signs and of random rotations", range=(0, 1 << 31))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.online == "all" and (self.stream != "none" or self.heads):
            raise ValueError(
                f"`online` (='all') of {self.name} rotates every input while the model runs and folds nothing: it "
                "needs stream='none' and heads=False"
            )
        if self.online == "none" and self.stream == "none" and not self.heads:
            raise ValueError(f"`stream` (='none') of {self.name}, with heads=False and online='none', rotates nothing")
        if self.steps and self.stream == "none" and not self.heads:
            raise ValueError(
                f"`steps` (={self.steps}) of {self.name} trains folded rotations, and this recipe has none: "
                "stream='hadamard' or heads=True works"
            )

    @property
    def needs_calibration(self) -> bool:
        return self.steps > 0

    def trains(self, longest: int) -> tuple[str, int] | None:
        return ("model", min(longest, WINDOW)) if self.steps else None

    def check(self, model: nn.Module) -> None:
        if is_offloaded(model):
            raise ValueError(f"`model` has its weights on disk, where {self.name} cannot fold: load it into memory")
        linears = [module for module in find_blocks(model)[1].modules() if is_linear(module)]
        if any(isinstance(module, CompressedLinear) for module in linears) or stream_of(model):
            raise ValueError(
                f"`model` holds linears of its blocks compressed or rotated already, so {self.name} cannot change "
                "them: start from the model before that"
            )
        if apart := sorted(shared_linears(model)):
            raise ValueError(
                f"`model` ({type(model).__name__}) uses the weight of {apart[0]} in several blocks, where {self.name} "
                "would rotate it several times: a recipe without it works"
            )

    def outline(self, model: nn.Module) -> None:
        model.to_be_rotated = True

    @torch.no_grad()
    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[FoldRecord | LayerRecord]:
        """Rotate a model in place, block by block.

        Returns:
            The rotated inputs, and the linears that are kept as a rotation and a dense weight.

        Raises:
            RuntimeError: the output of a block, or of the model, changed.
        """
        device = context.device
        assert context.saved is None, "statistics of the model as it was do not hold for rotated inputs"
        split_experts(model)
        before = logits_of(model)
        prefix, blocks = find_blocks(model)
        shown = batches[0] if len(batches) else made_up_batch(model)
        calls = block_calls(model, blocks, [shown])
        plan = self._plan(model, block_calls(model, blocks, [shown[:, :TRIED]])[0], device)
        if self.steps:
            online = {name: self._online(model, name).to(device_of(model)) for name in plan.left}
            plan.rotations = learn(
                model, batches, plan.rotations, plan.readers, plan.heads, online, bits=self.learn_bits,
                steps=self.steps, store=context.store,
            )  # fmt: skip
            plan.rotations.to(device)
        records: list[FoldRecord] = []
        for index in progress_bar(range(len(blocks)), desc=self.name, unit="block"):
            with on_device(blocks[index], device):
                records += self._block(model, plan, index, calls[0], device)
        if plan.rotations.stream is not None:
            rotate_stream(model, blocks, plan.rotations.stream.to(device_of(model)))
        why = "something outside the blocks reads what was rotated; load the model again"
        if problem := moved_logits(model, before, blocks[0], self.name, why):
            raise RuntimeError(problem)
        return [
            *show_largest(records),
            *(dense_record(model, name, "its input is rotated while the model runs") for name in plan.left),
        ]

    def _plan(self, model: nn.Module, call: Call, device: torch.device) -> "_RotationPlan":
        """The possible folds, and the inputs that must be rotated while the model runs."""
        prefix, blocks = find_blocks(model)
        links, _ = find_links(model)
        plan = _RotationPlan(Rotations(None))
        if self.stream != "none":
            uses = []
            for index, block in enumerate(blocks):
                inside = [_inside(link, f"{prefix}.{index}.") for link in links[index] if link.kind == "norm"]
                with on_device(block, device):
                    uses.append(stream_use(block, inside, _short(call), index, device))
            rotation = self._of_stream(blocks, uses, call.hidden.shape[-1]).to(device)
            plan.problem = _stream_problem(blocks, uses, rotation, call, device)
            if not plan.problem:
                plan.rotations.stream, plan.uses = rotation, uses
                read = {f"{prefix}.{i}.{link.producer}" for i, use in enumerate(uses) for link in use.readers}
                plan.readers = [link for block in links for link in block if link.producer in read]
        for index, block in enumerate(links if self.heads else ()):
            for link in block:
                width = _value_width(model, link.producer) if link.kind == "linear" else 0
                if width and heads_of(link, width):
                    rotation = random_hadamard(width, self.seed + 1 + index).to(device)
                    inside = _inside(link, f"{prefix}.{index}.")
                    with on_device(blocks[index], device):
                        if _heads_turn(blocks[index], inside, rotation, _short(call), index, device):
                            plan.rotations.heads[link.producer] = rotation
                            plan.heads.append(link)
        reached = {name for link in (*plan.readers, *plan.heads) for name in link.consumers}
        plan.left = [] if self.online == "none" else [name for name in targets(model) if name not in reached]
        return plan

    def _of_stream(self, blocks: nn.ModuleList, uses: Sequence[StreamUse], hidden: int) -> Rotation:
        norms = [blocks[i].get_submodule(link.producer) for i, use in enumerate(uses) for link in use.readers]
        if any(_takes_the_mean_off(norm) for norm in norms):
            return random_orthogonal(hidden, self.seed, fixes_ones=True)
        return random_hadamard(hidden, self.seed) if self.stream == "hadamard" else random_orthogonal(hidden, self.seed)

    def _online(self, model: nn.Module, name: str) -> Rotation:
        return random_hadamard(weight_of(model.get_submodule(name)).shape[1], self.seed, self.block_size)

    def _block(
        self, model: nn.Module, plan: "_RotationPlan", index: int, call: Call, device: torch.device
    ) -> list[FoldRecord]:
        """Fold and replace in one block by the plan, check it, and make its output the next input of `call`."""
        start = clock(device)
        prefix, blocks = find_blocks(model)
        block, own = blocks[index], f"{prefix}.{index}."
        turned = [TurnedInput(link.producer, "rotation of the stream", link.consumers) for link in plan.readers]
        turned += [TurnedInput(link.producer, "rotation of heads", link.consumers) for link in plan.heads]
        turned += [TurnedInput(name, "online rotation", (name,)) for name in plan.left]
        turned = [turn for turn in turned if turn.name.startswith(own)]
        y, ranges = ranges_of(model, block, turned, call, index, device)
        rotation = plan.rotations.stream
        if rotation is not None:
            fold_stream(block, plan.uses[index], rotation)
        for link in plan.heads:
            if link.producer.startswith(own):
                fold_heads(block, _inside(link, own), plan.rotations.heads[link.producer])
        for name in (name for name in plan.left if name.startswith(own)):
            _rotate_online(model, name, self._online(model, name).to(device))
        entering = call if rotation is None else Call(rotation(call.hidden.to(device)), call.arguments)
        now, after = ranges_of(model, block, turned, entering, index, device)
        moved = difference(now if rotation is None else rotation.back(now), y)
        if not moved <= 5 * tolerance(block):
            raise RuntimeError(
                f"{self.name}: the output of block {index} changes by a share of {moved:.1e} when it is rotated (at "
                f"most {5 * tolerance(block):.0e}); load the model again"
            )
        call.hidden = y
        notes = (f"the residual stream is not rotated: {plan.problem}",) if plan.problem else ()
        seconds = (clock(device) - start) / max(len(turned), 1)
        return [
            fold_record(turn, was, is_now, difference=moved, seconds=seconds, notes=notes)
            for turn, was, is_now in zip(turned, ranges, after, strict=True)
        ]


@dataclass
class _RotationPlan:
    """The plan of the folds.

    problem: the reason why the stream cannot be rotated, or "". uses: for each block, if it can. left: linears whose
    inputs are rotated while the model runs.
    """

    rotations: Rotations
    problem: str = ""
    uses: list[StreamUse] = field(default_factory=list)
    readers: list[Link] = field(default_factory=list)
    heads: list[Link] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def _rotate_online(model: nn.Module, name: str, rotation: Rotation) -> None:
    linear = model.get_submodule(name)
    W = rotation(weight_of(linear)).to(linear.weight.dtype)
    replace(model, name, CompressedLinear([Dense(W)], linear.bias, dtype=linear.weight.dtype, transform=rotation))


def _stream_problem(
    blocks: nn.ModuleList, uses: Sequence[StreamUse], rotation: Rotation, call: Call, device: torch.device
) -> str:
    """Why the residual stream cannot be rotated, found by a trial of each block on a few tokens; "" if it can."""
    short = _short(call)
    for index, use in enumerate(uses):
        if not use.writers:
            return f"block {index} adds no output of a linear to it directly (a norm may lie between)"
        with on_device(blocks[index], device):
            y = run_block(blocks[index], short, index, device)
            trial = trial_of(blocks[index])
            if problem := fold_stream(trial, use, rotation):
                return f"block {index}: {problem}"
            turned = Call(rotation(short.hidden.to(device)), short.arguments)
            moved = difference(rotation.back(run_block(trial, turned, index, device)), y)
        if not moved <= tolerance(blocks[index]):
            return f"the output of block {index} would change by {moved:.1e}, because not only linears read it"
        short.hidden = y
    return ""


def _heads_turn(block: nn.Module, link: Link, rotation: Rotation, call: Call, index: int, device: torch.device) -> bool:
    """Whether rotating the heads of a link does not change a block's output (it does behind an activation)."""
    y = run_block(block, call, index, device)
    trial = trial_of(block)
    fold_heads(trial, link, rotation)
    return difference(run_block(trial, call, index, device), y) <= tolerance(block)


def _value_width(model: nn.Module, producer: str) -> int:
    """The width of a head of the values that a linear gives, which may differ from layer to layer; 0: no heads."""
    attention, config = model.get_submodule(producer.rpartition(".")[0]), model.config.get_text_config()
    for width in (getattr(attention, name, None) for name in ("v_head_dim", "head_dim")):
        if width:
            return width
    heads = getattr(config, "num_attention_heads", None)
    return config.hidden_size // heads if heads else 0


def _takes_the_mean_off(norm: nn.Module) -> bool:
    """Whether adding a constant to a norm's input does not change its output, as for a LayerNorm."""
    x = torch.linspace(-1, 2, len(norm.weight)).sin()[None].to(norm.weight)
    return torch.allclose(norm(x), norm(x + 1), atol=1e-2 * norm(x).abs().max().item())


def _short(call: Call) -> Call:
    """A copy of a micro-batch whose inputs can change separately."""
    return copy.copy(call)


def _inside(link: Link, prefix: str) -> Link:
    """A link with the names of its modules in their block."""
    consumers = tuple(name.removeprefix(prefix) for name in link.consumers)
    return Link(link.producer.removeprefix(prefix), link.kind, consumers, link.channels)
