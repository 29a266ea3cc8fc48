"""The least time of a decoded token: bytes and operations, relative to the device's measured ceilings.

A decoding step reads every weight once, for any batch size, and every row's cache; it multiplies each row by every
weight, and its query by the cache. Its least time is the longer of bytes / bandwidth and operations / peak: the
accounting of "Kinetics" (arXiv:2506.05333), in which the cache counts like the parameters, and of the peak analysis of
long contexts (arXiv:2405.08944). Deviations: compressed weights count with their stored bytes, embeddings with the rows
that are looked up, experts with the number that a batch is expected to reach, and caches with the tensors that the
model itself stores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from tqdm.auto import tqdm

from eval.record.speed import Cost, CostCeilings, CostRow, GridRow, Speed
from eval.speed.work import Work, work
from kernels.harness import roofline
from kernels.harness.roofline import Ceilings
from kernels.support.deploy import deployed


def predict(model: nn.Module, *, context: int, batch: int = 1, ceilings: Ceilings) -> CostRow:
    """The least time of one decoding step on a device with these ceilings.

    Args:
        model: a transformers decoder in the dtype in which it is deployed (`kernels.support.deploy.deployed`),
            compressed or not.
        context: number of positions that each row's query sees, its own included.
        batch: number of rows.

    Raises:
        ValueError: numbers that are not positive.
    """
    for name, value in (("context", context), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` (={value!r}) must be a positive integer")
    return step_cost("", work(model), context, batch, ceilings)


def step_cost(name: str, work: Work, context: int, batch: int, ceilings: Ceilings) -> CostRow:
    """The least time of a step of this work, as a row that bears the model's name; see `predict`."""
    weights, cache, flops = work.weight_bytes(batch), work.cache_bytes(context, batch), work.flops(context, batch)
    moving = (weights + cache) / ceilings.bandwidth
    rate = ceilings.rates.get(work.dtype)
    computing = flops / rate if rate else 0.0
    bound = "memory" if moving >= computing else "compute"
    return CostRow(name, batch, context, weights, cache, flops, max(moving, computing), bound)


def cost_model(
    models: Mapping[str, nn.Module],
    speed_rows: Sequence[GridRow] = (),
    ceilings: Ceilings | None = None,
    *,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    how: str = "",
) -> Cost:
    """Predictions for bfloat16 copies of models, together with their measurements.

    Timed models may do more work than predicted (16-bit weights with stored zeros, masked positions of a static cache),
    or less, if weights fit into a processor's cache: the ceilings are those of main memory.

    Args:
        models: {name: model}.
        speed_rows: from `speed_rows(...)` and `SpeedGrid.rows`; rows of other models are ignored. The context is that
            of the middle token.
        ceilings: of the device; None: they are measured, in some seconds.
        contexts, batches: all combinations for which predictions without measurements are added.
        how: origin of the ceilings, if they are given.

    Raises:
        ValueError: numbers that are not positive.
    """
    for name, values in (("contexts", contexts), ("batches", batches)):
        if any(type(value) is not int or value < 1 for value in values):
            raise ValueError(f"`{name}` (={list(values)}) must be positive integers")
    if ceilings is None:
        ceilings = roofline.measure(next(next(iter(models.values())).parameters()).device)
        how = (
            "measured here by kernels.harness.roofline: the faster of a copy and a sum of far more than caches hold; "
            "dense products"
        )
    done: dict[str, Work] = {}
    for name, model in tqdm(models.items(), desc="cost model", unit="model"):
        done[name] = work(deployed(model))
    rows = []
    for row in speed_rows:
        if row.model in done:
            context = row.prompt_tokens + (row.new_tokens + 1) // 2
            found = step_cost(row.model, done[row.model], context, row.batch, ceilings)
            rows.append(replace(found, measured_s=row.batch / row.decode_tokens_per_s, execution=row.execution))
    for name, one in done.items():
        rows += [step_cost(name, one, context, batch, ceilings) for batch in batches for context in contexts]
    return Cost(CostCeilings(ceilings.bandwidth, ceilings.rates.get("bfloat16"), how), tuple(rows))


def speed_rows(speeds: Mapping[str, Speed]) -> list[GridRow]:
    """The results of `measure_speed`, as rows for `cost_model`."""
    return [
        GridRow(
            model=name,
            batch=one.settings.batch,
            prompt_tokens=one.settings.prompt_tokens,
            new_tokens=one.settings.new_tokens,
            decode_tokens_per_s=one.decode_tokens_per_s,
            execution=one.execution,
        )
        for name, one in speeds.items()
    ]
