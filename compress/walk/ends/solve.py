"""The token embedding and the head, solved by a method like linears, in portions of rows, with own statistics."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.embedding import CompressedEmbedding, find_ends, problem_of_table, store_end
from compress.formats import FORMATS, Format
from compress.linear import CompressedLinear, shape_of
from compress.walk.blocks import end_targets, find_blocks
from compress.walk.capture import Call, device_of
from compress.walk.context import Context
from compress.walk.ends.inputs import ERROR_TOKENS, first_tokens, head_statistics, lookup_statistics, token_weights
from compress.walk.finite import check_error
from compress.walk.parallel.ranks import current
from compress.walk.statistics import LayerStatistics
from compress.walk.walk import Solver, energy_of, error_of, with_errors
from eval.record.compression import LayerRecord
from kernels.clock import clock

ROWS = 1 << 14  # rows of a weight that are solved at once, if its format can be stacked


class EndSolver(Solver, Protocol):
    """The attributes and functions of a method that this module uses."""

    where: str

    def stores(self, shape: tuple[int, int]) -> list[dict[str, Any]] | None: ...
    def variants(self) -> Sequence["EndSolver"]: ...


def check_ends(model: nn.Module, method: EndSolver) -> None:
    """Raise ValueError, before any work, if this method cannot store the embedding or the head of this model."""
    shown = f"`where` (={method.where!r}) of {method.name}"
    ends = find_ends(model)
    table = model.get_submodule(ends.embedding)
    if any(hasattr(module, "_offloaded") for module in model.modules()):
        raise ValueError(f"{shown} needs the model in memory, and its weights lie on disk: where='blocks' works")
    for name, shape in end_targets(model, method.skip).items():
        looked_up = ends.tied or name == ends.embedding
        if looked_up and (problem := problem_of_table(table)):
            raise ValueError(
                f"{shown} cannot store {ends.embedding}: {problem}; naming it in `skip` leaves it as it is"
            )
        parts = method.stores(shape) or []
        stored = [part["format"] for part in parts if not FORMATS[part["format"]].looks_up]
        if looked_up and stored:
            raise ValueError(
                f"{shown}: {ends.embedding} is looked up row by row, which what this method stores ({stored[0]}) does "
                "not allow; a method that rounds weights alone, or where='blocks', works"
            )


@torch.no_grad()
def solve_ends(
    model: nn.Module,
    method: EndSolver,
    batches: Sequence[Tensor],
    reached: Sequence[Sequence[Call]],
    context: Context,
) -> list[LayerRecord]:
    """Let `method` solve the embedding and the head, and replace them by the stored ones.

    Source: contract of the workbench. A tied weight is solved as a head, by the Gram matrix of the final norm's output,
    because errors of logits matter more than errors of looked-up rows; the error in its record is that of the head. The
    error of a table that is only looked up is ||W - Ŵ||², with each row weighted by the count of its token in the
    calibration plus one.

    Args:
        reached: a list whose one element is the micro-batches of this process with the outputs of the last block;
            empty: they are not available.
        context: its saved statistics, if it has them, are those from which the head is solved.
    """
    index = len(find_blocks(model)[1])  # in the store, behind the blocks
    store = context.store
    found = store.load(index) if store else None
    if all(current().gathered(found is not None)):
        note = "solved by an earlier, interrupted run"
        made, records = found[0], [dataclasses.replace(r, notes=(*r.notes, note)) for r in found[1]]
    else:
        made, records = _solve(model, method, batches, reached, context)
        if store:
            store.save(index, made, records)
    for name, linear in made.items():
        store_end(model, name, linear.to(device_of(model)))
    return records


def _solve(
    model: nn.Module,
    method: EndSolver,
    batches: Sequence[Tensor],
    reached: Sequence[Sequence[Call]],
    context: Context,
) -> tuple[dict[str, CompressedLinear], list[LayerRecord]]:
    """The stored replacement of each of the ends, and their records; every process solves its share."""
    device = context.device
    ends, shapes = find_ends(model), end_targets(model, method.skip)
    needs = with_errors(method.statistics) if batches else ()
    counts = token_weights(batches, model.get_input_embeddings().num_embeddings)
    tokens = sum(batch.numel() for batch in batches)
    statistics: dict[str, LayerStatistics] = {}
    for name, (_, columns) in shapes.items():
        if name != ends.head:
            statistics[name] = lookup_statistics(columns, tokens, needs, device)
        elif context.saved is not None:
            statistics[name] = context.saved.of_head(needs, device)
        else:
            part = batches if method.statistics or reached else first_tokens(batches, ERROR_TOKENS)
            statistics[name] = head_statistics(model, part, needs, device=device, reached=reached)
    made: dict[str, tuple[CompressedLinear, LayerRecord]] = {}
    for name in current().share(list(shapes)):
        statistics[name].measured = context.of(name)
        made[name] = solve_end(
            model.get_submodule(name), name, context.originals.get(name), statistics[name], method, device
        )
        if ends.tied or name == ends.embedding:
            made[name] = _with_lookup(made[name], model.get_submodule(name), counts, ends.embedding, tied=ends.tied)
    every = {name: one for part in current().gathered(made) for name, one in part.items()}
    return {name: every[name][0] for name in shapes}, [every[name][1] for name in shapes]


def solve_end(
    module: nn.Module,
    name: str,
    original: nn.Module | None,
    statistics: LayerStatistics,
    method: EndSolver,
    device: torch.device,
) -> tuple[CompressedLinear, LayerRecord]:
    """The stored replacement for the weight of one of the ends, and its record.

    Args:
        original: the module whose weight the error is measured against; None: `module` itself.
    """
    statistics.name, statistics.dtype = name, _dtype_of(module)
    out, columns = shape = shape_of(module)
    specifications = [part for one in method.variants() for part in one.stores(shape) or []]
    in_portions = all(FORMATS[part["format"]].stacks(part) for part in specifications)
    step = min(ROWS, out) if in_portions else out
    pieces: list[list[Format]] = []
    error = peer_error = reference = seconds = 0.0
    zeros, has_peer = 0, True
    portions = range(0, out, step)
    for first in tqdm(portions, desc=f"{method.name}: {name}", unit="row", disable=len(portions) == 1):
        rows = slice(first, first + step)
        W = _rows_of(module, rows, device)
        target = W if original is None else _rows_of(original, rows, device)
        start = clock(device)
        parts = method.solve(W, statistics)
        seconds += clock(device) - start
        peer = method.peer(W, statistics)
        has_peer = has_peer and peer is not None
        error += error_of(target, parts, statistics)
        peer_error += error_of(target, peer, statistics) if has_peer else 0.0
        reference += energy_of(target, statistics)
        zeros += int((sum(part.dequantize() for part in parts) == 0).sum())
        pieces.append(parts)
    stored = [
        several[0] if len(several) == 1 else type(several[0]).stacked(several) for several in zip(*pieces, strict=True)
    ]
    stored = [part.to(statistics.dtype) for part in stored]  # in the model's dtype; codes and scales keep theirs
    new = CompressedLinear(stored, getattr(module, "bias", None), dtype=statistics.dtype)
    if not statistics.tokens:
        statistics.note("no calibration tokens: the error is that of the weights")
    reference = max(reference, 1e-30)
    check_error(name, error)
    record = LayerRecord(
        name=name,
        shape=shape,
        format="+".join(part.name for part in stored),
        bits_per_weight=new.bits_per_weight,
        error=error / reference,
        rtn_error=peer_error / reference if has_peer else None,
        seconds=seconds,
        tokens=statistics.tokens,
        notes=tuple(dict.fromkeys(statistics.notes)),
        sparsity=zeros / (out * columns),
    )
    return new, record


def lookup_error(module: nn.Module, stored: CompressedLinear, counts: Tensor) -> float:
    """||W - Ŵ||² / ||W||² with the row of each token weighted by `counts` [vocabulary]."""
    error = reference = 0.0
    device = next(stored.parts[0].buffers()).device
    for first in range(0, len(counts), ROWS):
        ids = torch.arange(first, min(first + ROWS, len(counts)), device=device)
        W, weights = _rows_of(module, slice(first, first + ROWS), device), counts[first : first + ROWS].to(device)
        D = W - sum(part.look_up(ids) for part in stored.parts)
        error += (D.square().sum(1) * weights).sum().item()
        reference += (W.square().sum(1) * weights).sum().item()
    return error / max(reference, 1e-30)


def _with_lookup(
    made: tuple[CompressedLinear, LayerRecord], module: nn.Module, counts: Tensor, embedding: str, *, tied: bool
) -> tuple[CompressedLinear, LayerRecord]:
    """Record the error of looked-up rows: as the error of the weight, or, for a tied weight, as a note."""
    stored, record = made
    error = lookup_error(module, stored, counts)
    if tied:
        note = f"one weight with {embedding}, whose rows, weighted by their tokens, have an error of {error:.2e}"
        return stored, dataclasses.replace(record, notes=(*record.notes, note))
    return stored, dataclasses.replace(record, error=error, rtn_error=None)


def _rows_of(module: nn.Module, rows: slice, device: torch.device) -> Tensor:
    """These rows of a weight, float32, on the compute device."""
    if isinstance(module, CompressedLinear | CompressedEmbedding):
        return module.dequantize()[rows].to(device)
    return module.weight[rows].detach().to(device).float()


def _dtype_of(module: nn.Module) -> torch.dtype:
    return module.dtype if isinstance(module, CompressedLinear | CompressedEmbedding) else module.weight.dtype
