"""The effect of a transform of inputs: ranges of inputs and weights before and after, as rows of the record."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.linear import met_by, weight_of
from compress.walk.capture import Call, run_block
from compress.walk.folds.checks import binned, column_absmax, summary
from eval.record.compression import Channels, FoldRecord, LayerRecord, Magnitudes


@dataclass(frozen=True)
class TurnedInput:
    """One place where a transform acts: a row of the record."""

    name: str
    kind: str
    consumers: tuple[str, ...]


def ranges_of(
    model: nn.Module, block: nn.Module, turns: Sequence[TurnedInput], call: Call, index: int, device: torch.device
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The output of a block, and for each place the inputs of its linears [tokens, in] and their columns [in]."""
    read: dict[str, Tensor] = {}
    handles = []
    for turn in turns:
        module = model.get_submodule(turn.consumers[0])

        def keep(linear: nn.Module, args: tuple, name: str = turn.name) -> None:
            read[name] = met_by(linear, args[0]).reshape(-1, args[0].shape[-1]).float()

        handles.append(module.register_forward_pre_hook(keep))
    try:
        y = run_block(block, call, index, device)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for turn in turns:
        columns = column_absmax([weight_of(model.get_submodule(name)) for name in turn.consumers])
        found.append((read.get(turn.name, columns.new_zeros(1, len(columns))), columns))
    return y, found


def fold_record(
    turn: TurnedInput,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    *,
    difference: float,
    seconds: float,
    notes: tuple[str, ...] = (),
    errors: tuple[float | None, float | None] = (None, None),
) -> FoldRecord:
    """The row of one place.

    Args:
        before, after: results of `ranges_of`.
        errors: of the rounded product, before and after.
    """
    return FoldRecord(
        name=turn.name,
        kind=turn.kind,
        consumers=turn.consumers,
        alpha=None,
        x_before=summary_of(before[0]),
        x_after=summary_of(after[0]),
        w_before=summary(before[1]),
        w_after=summary(after[1]),
        error_before=errors[0],
        error_after=errors[1],
        difference=difference,
        seconds=seconds,
        notes=notes,
        channels=Channels(
            *(binned(x.abs().amax(0)) for x in (before[0], after[0])), *(binned(w) for w in (before[1], after[1]))
        ),
    )


def summary_of(x: Tensor) -> Magnitudes:
    """Ranges of the channels of inputs x [tokens, in], and the mean kurtosis of a token's values (3: normal)."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1).clamp_min(1e-30)
    return summary(x.abs().amax(0), (centred.pow(4).mean(-1) / variance.square()).mean().item())


def dense_record(model: nn.Module, name: str, note: str) -> LayerRecord:
    """The row of a linear that is kept as a transform and a dense weight; `note` gives the reason."""
    linear = model.get_submodule(name)
    return LayerRecord(
        name=name,
        shape=(linear.out_features, linear.in_features),
        format=linear.parts[0].name,
        bits_per_weight=linear.bits_per_weight,
        error=0.0,
        rtn_error=None,
        seconds=0.0,
        tokens=0,
        notes=(note,),
    )
