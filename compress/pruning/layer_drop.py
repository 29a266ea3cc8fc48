"""Layer dropping (He et al., 2024, arXiv:2406.15786): remove the attention layers, MLPs or blocks that change the
residual stream, or the predictions, least."""

import dataclasses
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.allocation.predictions import PredictionLoss
from compress.allocation.sparsity import first_tokens
from compress.dropped import decoding_error, drop_block, drop_part, parts_of
from compress.linear import parameter_count, replace
from compress.method import Method, knob
from compress.smaller import without_blocks
from compress.transforms.stream import stream_of
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, block_calls, on_device, run_block
from compress.walk.context import Context
from eval.record.compression import DropRecord
from kernels.linear import fast_linear
from kernels.support.errors import first_line

KINDS = {"attention": ("attention",), "mlp": ("mlp",), "joint": ("attention", "mlp"), "block": ("block",)}
METRICS = ("cosine", "block_influence", "output")
TOKENS = 8  # of the prompt behind which a model decodes with its cache before and after
EXACT, ROUNDED = 1e-3, 0.1  # allowed share by which logits from the cache differ, in float32 and in 16 bits


@dataclass(frozen=True, kw_only=True)
class LayerDrop(Method):
    """Removes the attention layers, MLPs or whole blocks that change the residual stream, or the predictions, least.

    `metric=output` is the additive criterion of LAPTOP-Diff (arXiv:2404.11098): what the model's output loses without
    each layer alone, summed over the dropped layers. Of all sets of `count` layers, the one of the least losses has the
    least sum, so that no program is needed; `compress.search` solves one where parts differ in bytes.
    Deviation: the loss is KL(original || without), in nats per token, in place of the squared error of the output.
    """

    name: ClassVar[str] = "layer_drop"
    stage: ClassVar[str] = "drop"
    source: ClassVar[str] = (
        "arXiv:2406.15786, equations 1 to 6; block influence: arXiv:2403.03853, equation 1; output: arXiv:2404.11098"
    )
    needs_calibration: ClassVar[bool] = True

    target: str = knob(
        "attention",
        "what is dropped: attention, mlp, whichever of the two matters less (joint), or whole blocks",
        choices=tuple(KINDS),
        describes=True,
    )
    count: int = knob(4, "number of layers or blocks to drop", range=(1, 1 << 16), describes=True)
    metric: str = knob(
        "cosine",
        "importance of a layer: 1 - cosine between the residual stream before and after the layer (cosine), or before "
        "and after the whole block that holds it (block_influence, from ShortGPT; the same for target='block'); or "
        "what the predictions lose without this layer alone, KL in nats per token (output, from LAPTOP-Diff)",
        choices=METRICS,
    )
    tokens: int = knob(512, "calibration tokens on which metric='output' compares predictions", range=(1, 1 << 30))
    iterative: bool = knob(False, "measure the importance again after each dropped layer; False: measure it once")
    layers: str = knob(
        "", "numbers of the blocks in which the target is dropped, such as 20, 21, 25; empty: the least important ones"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers:
            return
        given = self.layers.split(",")
        if self.target == "joint":
            raise ValueError(
                f"`layers` (={self.layers!r}) of layer_drop names blocks, and `target` (='joint') does not say what to "
                "drop in them: attention, mlp or block works"
            )
        if not all(part.strip().isdecimal() for part in given) or len({int(part) for part in given}) < len(given):
            raise ValueError(
                f"`layers` (={self.layers!r}) of layer_drop must be different numbers of blocks, such as 20, 21, 25"
            )

    def check(self, model: nn.Module) -> None:
        _, blocks = find_blocks(model)
        kinds = KINDS[self.target]
        if "block" in kinds and stream_of(model) is not None:
            raise ValueError(
                f"`model` has a residual stream that its first and last block rotate, so `target` (={self.target!r}) "
                "of layer_drop cannot drop blocks: target attention or mlp, or the model before the rotation, works"
            )
        there = sum(_has(block, kind) for block in blocks for kind in kinds)
        if self.layers:
            for index in self.chosen():
                if index >= len(blocks) or not _has(blocks[index], self.target):
                    raise ValueError(
                        f"`layers` (={self.layers!r}) of layer_drop: block {index} has no {self.target} to drop; this "
                        f"model's blocks are 0 to {len(blocks) - 1}"
                    )
        count = len(self.chosen()) if self.layers else self.count
        if count >= there:
            knob = "layers" if self.layers else "count"
            what = " and ".join(kinds)
            if there < 2:
                raise ValueError(
                    f"`target` (={self.target!r}) of layer_drop: this model has {there or 'no'} {what} layer"
                    f"{'' if there else 's'} to drop, and one must stay"
                )
            raise ValueError(
                f"`{knob}` (={getattr(self, knob)!r}) of layer_drop must leave some of the {there} {what} layers of "
                f"this model: at most {there - 1}"
            )
        if "block" in kinds:
            self._check_config(model, len(blocks))

    def _check_config(self, model: nn.Module, depth: int) -> None:
        """Raise ValueError unless the model's config can describe it without the chosen blocks, or without some."""
        if self.layers:
            without_blocks(model, set(self.chosen()))
        else:
            first_block_to_drop(model, depth)

    def own_passes(self) -> str:
        if self.metric == "output":
            return "what the predictions lose without each layer"
        return "how much each layer turns the residual stream"

    def chosen(self) -> list[int]:
        """The numbers that `layers` gives."""
        return [int(part) for part in self.layers.split(",")] if self.layers else []

    def outline(self, model: nn.Module) -> None:
        kind = KINDS[self.target][0]
        _, blocks = find_blocks(model)
        if self.layers and kind != "block":
            for index in self.chosen():
                if index < len(blocks):  # `check` refuses others
                    drop_part(blocks[index], kind, {})
            return
        for number in range(len(self.chosen()) or self.count):
            _, blocks = find_blocks(model)
            parts = blocks if kind == "block" else [block for block in blocks if _has(block, kind)]
            if number and len(parts) < 2:  # what is left shows the kind of the result
                break
            if kind == "block":
                drop_block(model, first_block_to_drop(model, len(blocks)))
            else:
                drop_part(parts[0], kind, {})

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[DropRecord]:
        prompt = batches[0][:, :TOKENS]
        try:
            before = decoding_error(model, prompt)
        except Exception:  # this model cannot decode, whole or not; whether it runs shows below
            before = float("inf")
        records = self._drop(model, batches, context.device)
        if before < float("inf"):
            self._check_decoding(model, prompt, before)
        return records

    @torch.no_grad()
    def _drop(self, model: nn.Module, batches: Sequence[Tensor], device: torch.device) -> list[DropRecord]:
        prefix, blocks = find_blocks(model)
        numbers = list(range(len(blocks)))  # original numbers of the remaining blocks
        count = len(self.chosen()) or self.count
        records: list[DropRecord] = []
        measured: list[DropRecord] = []
        expected: list[Tensor] | None = None  # predictions of the whole model
        settings = {"kinds": KINDS[self.target], "prefix": prefix, "numbers": numbers}
        for step in range(count):
            if (step == 0 or self.iterative) and self.metric == "output":
                loss = PredictionLoss(model, first_tokens(batches, self.tokens), device, expected)
                calls, expected = loss.probes, loss.expected
                measured = output_losses(loss, **settings)
            elif step == 0 or self.iterative:
                calls = block_calls(model, blocks, batches)
                measured = importance(blocks, calls, device, metric=self.metric, **settings)
            if self.layers:
                least = next(r for r in measured if r.block == self.chosen()[step])
            else:
                least = min(measured, key=lambda r: r.importance)
            measured.remove(least)
            index = numbers.index(least.block)
            if least.kind == "block":
                size = parameter_count(blocks[index])
                drop_block(model, index)
                del numbers[index]
            else:
                names = parts_of(blocks[index])[least.kind]
                size = sum(parameter_count(blocks[index].get_submodule(name)) for name in names)
                with on_device(blocks[index], device):
                    outputs = outputs_of(blocks[index], calls[0], index, device)
                    drop_part(blocks[index], least.kind, outputs)
            records.append(dataclasses.replace(least, order=step + 1, parameters=size))
        return sorted([*records, *measured], key=lambda r: (r.block, r.kind))

    def _check_decoding(self, model: nn.Module, ids: Tensor, before: float) -> None:
        """Raise ValueError unless the model without its dropped parts decodes with its cache as it does without.

        Args:
            before: the difference of the whole model.
        """
        try:
            error = decoding_error(model, ids)
        except Exception as reason:  # other parts of the model need what was dropped
            error, why = float("inf"), f"{type(reason).__name__}: {first_line(reason)}"
        else:
            why = f"with its cache, its logits differ by {error:.1e} of their length from those without"
        if not error <= max(10 * before, EXACT if model.dtype == torch.float32 else ROUNDED):
            raise ValueError(
                f"`target` (={self.target!r}) of layer_drop: {type(model).__name__} does not run without what would be "
                f"dropped ({why}); the model is as it was"
            )


def first_block_to_drop(model: nn.Module, depth: int) -> int:
    """The first block without which the model's config can still describe it.

    Raises:
        ValueError: there is none; the message gives the reason for the first one.
    """
    reasons = []
    for index in range(depth):
        try:
            without_blocks(model, {index})
        except ValueError as error:
            reasons.append(error)
        else:
            return index
    raise reasons[0]


@torch.no_grad()
def importance(
    blocks: nn.ModuleList,
    calls: list[Call],
    device: torch.device,
    *,
    kinds: Sequence[str] = ("attention", "mlp", "block"),
    metric: str = "cosine",
    prefix: str = "",
    numbers: Sequence[int] | None = None,
) -> list[DropRecord]:
    """The change of direction of the residual stream by each part of each block: mean 1 - cos(before, after).

    Args:
        calls: micro-batches at the first block (`compress.walk.capture.block_calls`).
        kinds: the parts to measure, of "attention", "mlp" and "block".
        metric: "cosine": before and after the part itself; "block_influence": before and after the block that holds it.
        numbers: the blocks' numbers in the records; 0, 1, ... unless given.

    The output of attention is measured by running the block without its MLP, so that norms belong to their part.

    Raises:
        ValueError: a block without both is not the identity, so that dropping one would do more than leave it out.
    """
    records = []
    by_block = metric == "block_influence"
    progress = tqdm(blocks, desc="importance", unit="block")
    for index, block in enumerate(progress):
        with on_device(block, device):
            there = [kind for kind in ("attention", "mlp") if parts_of(block)[kind]]
            outputs = outputs_of(block, calls[0], index, device)
            if there and set(kinds) & set(there):
                check_residual(block, calls[0], index, device, outputs, there, f"{prefix}.{index}")
            apart = len(there) == 2 and not by_block and set(kinds) != {"block"}
            total, tokens = _turned_by(block, calls, index, device, outputs, apart=apart)
        if by_block or len(there) < 2:  # a block with one part is that part
            total |= dict.fromkeys(there, total["block"])
        number = index if numbers is None else numbers[index]
        for kind in kinds:
            if kind == "block" or kind in there:
                records.append(_candidate(block, kind, f"{prefix}.{number}", number, total[kind] / tokens, metric))
    return records


def output_losses(
    loss: PredictionLoss, *, kinds: Sequence[str], prefix: str = "", numbers: Sequence[int] | None = None
) -> list[DropRecord]:
    """What the predictions lose without each part of each block alone: KL in nats per token; arguments and errors as of
    `importance`."""
    records = []
    with fast_linear():
        for index, block in enumerate(tqdm(loss.blocks, desc="losses without parts", unit="block")):
            number = index if numbers is None else numbers[index]
            with on_device(block, loss.device):
                own = losses_without(loss, index, kinds, f"{prefix}.{number}")
                records += [
                    _candidate(block, k, f"{prefix}.{number}", number, own[k], "output") for k in kinds if k in own
                ]
                loss.leave(index)
    return records


def losses_without(loss: PredictionLoss, index: int, kinds: Sequence[str], name: str) -> dict[str, float]:
    """{kind: the loss without this part of block `index` alone}, for those of the kinds that the block has.

    Args:
        loss: its probes lie before this block, which is on their device. name: the block's, for errors.
    """
    block, call = loss.blocks[index], loss.probes[0]
    found = {"block": loss.now(index + 1)} if "block" in kinds else {}
    there = [kind for kind in ("attention", "mlp") if parts_of(block)[kind]]
    if set(kinds) & set(there):
        outputs = outputs_of(block, call, index, loss.device)
        check_residual(block, call, index, loss.device, outputs, there, name)
        for kind in set(kinds) & set(there):
            with without(block, [kind], outputs):
                found[kind] = loss.now(index)
    return found


def _candidate(block: nn.Module, kind: str, name: str, number: int, importance: float, metric: str) -> DropRecord:
    part = "" if kind == "block" else "." + ", ".join(parts_of(block)[kind])
    return DropRecord(name=name + part, kind=kind, block=number, importance=importance, metric=metric)


def _turned_by(
    block: nn.Module, calls: list[Call], index: int, device: torch.device, outputs: dict[str, int], *, apart: bool
) -> tuple[dict[str, float], int]:
    """By kind of part, Σ 1 - cos over all tokens, and the number of tokens; the calls pass through the block.

    Args:
        apart: measure attention and MLP by themselves, too.
    """
    total, tokens = dict.fromkeys(("attention", "mlp", "block"), 0.0), 0
    with fast_linear():
        for call in calls:
            before, middle = call.hidden, None
            if apart:
                with without(block, ["mlp"], outputs):
                    middle = run_block(block, call, index, device).to(before.device)
            after = run_block(block, call, index, device).to(before.device)
            tokens += before[..., 0].numel()
            total["block"] += turned(before, after)
            if middle is not None:
                total["attention"] += turned(before, middle)
                total["mlp"] += turned(middle, after)
            call.hidden = after
    return total, tokens


def outputs_of(block: nn.Module, call: Call, index: int, device: torch.device) -> dict[str, int]:
    """By child of the block, the number of values that it returns as a tuple; 0: no tuple. The block lies on the
    device."""
    found: dict[str, int] = {}
    handles = [
        child.register_forward_hook(
            lambda _, args, out, name=name: found.update({name: len(out) if type(out) is tuple else 0})
        )
        for name, child in block.named_children()
    ]
    try:
        run_block(block, call, index, device)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def without(block: nn.Module, kinds: Sequence[str], outputs: dict[str, int]):
    kept = {name: block.get_submodule(name) for kind in kinds for name in parts_of(block)[kind]}
    for kind in kinds:
        drop_part(block, kind, outputs)
    try:
        yield
    finally:
        for name, module in kept.items():
            replace(block, name, module)


def check_residual(
    block: nn.Module, call: Call, index: int, device: torch.device, outputs: dict[str, int], there: list[str], name: str
) -> None:
    """Raise ValueError unless the block without its parts `there` runs, and gives its input."""
    try:
        with without(block, there, outputs):
            rest = run_block(block, call, index, device).to(call.hidden.device)
    except Exception as error:  # what is left needs what its attention and MLP give
        raise ValueError(
            f"`target` of layer_drop: {name} does not run without attention and MLP ({first_line(error)}), so neither "
            "can be left out; target='block' works"
        ) from error
    moved = ((rest - call.hidden).norm() / call.hidden.norm()).item()
    if not moved < 1e-3:
        raise ValueError(
            f"`target` of layer_drop: {name} without attention and MLP is not the identity (it changes its input by "
            f"{moved:.1e} of itself), so neither can be left out; target='block' works"
        )


def turned(before: Tensor, after: Tensor) -> float:
    """Σ 1 - cos over the tokens; before, after: [..., hidden]."""
    return float((1 - nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)).double().sum())


def _has(block: nn.Module, kind: str) -> bool:
    return kind == "block" or bool(parts_of(block)[kind])
