"""The least time of a decoded token: bytes and operations, relative to the device's measured ceilings.

A decoding step reads every weight once, for any batch size, and every row's cache; it multiplies each row by every
weight, and its query by the cache. Its least time is the longer of bytes / bandwidth and operations / peak: the
accounting of "Kinetics" (arXiv:2506.05333), in which the cache counts like the parameters, and of the peak analysis of
long contexts (arXiv:2405.08944). Deviations: compressed weights count with their stored bytes, embeddings with the rows
that are looked up, experts with the number that a batch is expected to reach, and caches with the tensors that the
model itself stores.

Weights that a device's memory does not hold lie in its host's memory or on a disk, and are read for every token, ahead
of their use (`Tiers`): Superpipeline (arXiv:2410.08791), TPI-LLM (arXiv:2410.00531).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from eval.record.serving import Combination
from eval.record.speed import Cost, CostCeilings, CostRow, GridRow, Speed
from eval.record.steps import ATTENTION, BESIDE, PredictedPart, PredictedStep, Prediction
from eval.speed.work import Work, read_two, work, work_of_modules
from kernels.harness.roofline import Ceilings
from kernels.support.deploy import deployed

# Seconds of Python for each kernel that a model's own code starts, and of the shortest kernels in a graph, on the
# machine of the first H100 in reports/published/gpu.md: 36 tokens/s of a model of which `_launches` counts 1,653, and
# 2.3 us for a norm.
LAUNCH, SHORTEST = 17e-6, 2.3e-6


def predict(name: str, work: Work, *, context: int, batch: int = 1, ceilings: Ceilings) -> CostRow:
    """The least time of one decoding step on a device with these ceilings.

    Args:
        name: of the model in the row. work: of the model in the dtype in which it is deployed.
        context: number of positions that each row's query sees, its own included.
        batch: number of rows.
    """
    weights, cache, flops = work.weight_bytes(batch), work.cache_bytes(context, batch), work.flops(context, batch)
    moving = (weights + cache) / ceilings.bandwidth
    rate = ceilings.rates.get(work.dtype)
    computing = flops / rate if rate else 0.0
    bound = "memory" if moving >= computing else "compute"
    return CostRow(name, batch, context, weights, cache, flops, max(moving, computing), bound)


def predict_prompt(name: str, model: nn.Module, like: Work, *, tokens: int, ceilings: Ceilings) -> CostRow:
    """The least time in which a device with these ceilings reads a prompt of one sequence, in one pass.

    Args:
        name: of the model in the row. model: may hold stand-ins (`eval.speed.work.StoredLinear`).
        like: its work, with the cache in the form in which a prompt's queries read it.
        tokens: of the prompt; only the last one needs logits.
    """
    parts = _predicted_parts(model, like, context=tokens, batch=1, tokens=tokens, ceilings=ceilings)
    size, flops = (sum(getattr(part, kind) for part in parts.values()) for kind in ("bytes", "operations"))
    cache = parts[ATTENTION].bytes if ATTENTION in parts else 0.0
    rate = ceilings.rates.get("bfloat16")
    moving, computing = size / ceilings.bandwidth, flops / rate if rate else 0.0
    bound = "memory" if moving >= computing else "compute"
    return CostRow(name, 1, tokens, size - cache, cache, flops, max(moving, computing), bound)


@dataclass(frozen=True)
class Tiers:
    """Weights split over the memory of a device, that of its host, and a disk.

    Attributes:
        held_bytes: stay in the device's memory.
        host_bytes, disk_bytes: are read for every token, from the host's memory over the link between host and device,
            or from the disk and then over the link.
        rest_bytes: of norms behind the blocks, and of an embedding of its own, whose rows are looked up in its tier.
    """

    held_bytes: int
    host_bytes: int
    disk_bytes: int
    rest_bytes: int

    @property
    def streamed_bytes(self) -> int:
        """Bytes that come over the link for every token."""
        return self.host_bytes + self.disk_bytes

    def seconds(self, row: CostRow, *, link: float | None, disk: float | None) -> dict[str, float]:
        """{what limits a pass: its seconds}. All work at once, so that a pass takes the longest.

        Args:
            row: of a pass whose weights are all in the device's memory.
            link, disk: bytes per second; None: no such tier, or a link that does not limit.
        """
        return {
            row.bound: row.predicted_s or 0.0,
            "link": self.streamed_bytes / link if link else 0.0,
            "disk": self.disk_bytes / disk if disk else 0.0,
        }


def combine(
    weights: str,
    cache: str,
    work: Work,
    *,
    weight_bytes: int,
    prompt_room: int,
    step_room: int,
    memory: int,
    context: int,
    ceilings: Ceilings,
    batch: int | None = None,
    cache_bytes: int | None = None,
    loss: float | None = None,
) -> Combination:
    """How many sequences of this context fit into a memory, and how fast they decode together at best.

    They fit if weights, all caches and the room for a step do, and if weights, all caches and the room in which the
    prompt of one is read do.

    Args:
        weights, cache: names of the recipes. work: of a step with both.
        weight_bytes: of all weights. prompt_room: bytes, while one prompt is read. step_room: bytes for each sequence
            of a step. memory: bytes of the device.
        context: number of positions that each query sees, its own included.
        batch: sequences that decode together; None: as many as fit.
        cache_bytes: of each sequence, as measured; None: as counted. loss: of the combination, if it is known.
    """
    each = math.ceil(work.kept_bytes(context)) if cache_bytes is None else cache_bytes
    left = memory - weight_bytes
    most = max(min((left - prompt_room) // max(each, 1), left // (each + step_room)), 0)
    chosen = most if batch is None else batch if batch <= most else 0
    alone = predict("", work, context=context, batch=1, ceilings=ceilings)
    together = predict("", work, context=context, batch=max(chosen, 1), ceilings=ceilings)
    return Combination(
        weights=weights,
        cache=cache,
        weight_bytes=weight_bytes,
        cache_bytes=each,
        room=max(prompt_room, step_room * max(chosen, 1)),
        sequences=most,
        batch=chosen,
        alone=1 / alone.predicted_s,
        tokens_per_s=chosen / together.predicted_s,
        bound=together.bound,
        least=weight_bytes + each + max(prompt_room, step_room),
        loss=loss,
    )


def cost_model(models: Mapping[str, nn.Module], speed_rows: Sequence[GridRow], ceilings: Ceilings, how: str) -> Cost:
    """Predictions for bfloat16 copies of models, together with their measurements.

    Timed models may do more work than predicted (16-bit weights with stored zeros, masked positions of a static cache),
    or less, if weights fit into a processor's cache: the ceilings are those of main memory. Steps are timed with
    a cache in 16 bits that no method compresses, and this cache is counted.

    Args:
        models: {name: model}.
        speed_rows: from `speed_rows(...)` and `SpeedGrid.rows`; rows of other models are ignored. The context is that
            of the middle token.
        ceilings: of the device. how: their origin.
    """
    done: dict[str, Work] = {}
    for name, model in tqdm(models.items(), desc="cost model", unit="model"):
        done[name] = work(deployed(model))
    rows = []
    for row in speed_rows:
        if row.model in done:
            context = row.prompt_tokens + (row.new_tokens + 1) // 2
            found = predict(row.model, done[row.model], context=context, batch=row.batch, ceilings=ceilings)
            rows.append(replace(found, measured_s=row.batch / row.decode_tokens_per_s, execution=row.execution))
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


def predict_step(
    models: Mapping[str, nn.Module],
    like: Work,
    *,
    context: int,
    batch: int = 1,
    prompt_tokens: int = 0,
    ceilings: Ceilings,
    device: str,
    launch: float = LAUNCH,
) -> Prediction:
    """The least time of a decoding step, or of a pass over a prompt, and of its parts, from shapes alone.

    Args:
        models: the first one is that in 16 bits, and may be on the meta device; the others may hold stand-ins
            (`eval.speed.work.StoredLinear`).
        like: the work of one of them, for what all of them cache and how often they run their modules.
        context: cached tokens of each sequence that a step sees, with its own. batch: sequences.
        prompt_tokens: if above 0, a pass over so many tokens of one sequence, instead of a step.
        ceilings: of the device of this name. launch: seconds of Python for each kernel that a model's own code starts.
    """
    plain = next(iter(models.values()))
    how = {"context": context, "batch": batch, "tokens": prompt_tokens, "ceilings": ceilings}
    steps = {name: PredictedStep(_predicted_parts(model, like, **how)) for name, model in models.items()}
    return Prediction(steps, device, _launches(plain), launch, max(prompt_tokens, 1))


def _predicted_parts(
    model: nn.Module, like: Work, *, context: int, batch: int, tokens: int, ceilings: Ceilings
) -> dict[str, PredictedPart]:
    """{name of a linear inside its block, or other part: what it takes}."""
    rows = tokens or batch
    found: dict[str, list[float]] = {}  # bytes, operations, kernels
    head = next((name for name, one in model.named_modules() if one is model.get_output_embeddings()), "")
    for name, one in work_of_modules(model, like.repeats).items():
        multiplied = one.macs or one.experts
        part = re.sub(r"^.*?\.\d+\.", "", name) if multiplied else BESIDE
        its_rows = batch if name == head else rows  # only the last token of a prompt needs logits
        for place, more in enumerate((one.weight_bytes(its_rows), one.flops(0, its_rows), like.repeats.get(name, 1))):
            found.setdefault(part, [0.0, 0.0, 0])[place] += more
    for layer in like.cache:
        positions = layer.attended_by(tokens) if tokens else batch * layer.attended(context)
        # A prompt is read in one piece, and its states are written once.
        read = layer.readers * layer.bytes * (tokens or positions) + 2 * layer.state * (1 if tokens else batch)
        macs = layer.macs if layer.prompt_macs is None or not tokens else layer.prompt_macs
        operations = 2.0 * (layer.readers * macs * positions + layer.state_macs * rows)
        for place, more in enumerate((read, operations, 1 + layer.readers)):  # one stores what is new
            found.setdefault(ATTENTION, [0.0, 0.0, 0])[place] += more
    rest = found.pop(BESIDE, None)
    found |= {BESIDE: rest} if rest else {}
    rate = ceilings.rates.get("bfloat16")
    return {name: _longest(*numbers, rate=rate, bandwidth=ceilings.bandwidth) for name, numbers in found.items()}


def _longest(size: float, operations: float, launches: int, *, rate: float | None, bandwidth: float) -> PredictedPart:
    times = {
        "memory": size / bandwidth,
        "arithmetic": operations / rate if rate else 0.0,
        "launches": launches * SHORTEST,
    }
    bound = max(times, key=times.__getitem__)
    return PredictedPart(size, operations, launches, times[bound], bound)


class _Launches(TorchDispatchMode):
    """Counts the ops that compute something, and are not views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = func.is_view or func is torch.ops.aten._unsafe_view.default
        self.count += not views
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _launches(model: nn.Module) -> int:
    """Kernels that a model's own code starts for one decoding step, on a device on which every op is one."""
    ids, argument, cache = read_two(model)
    with _Launches() as counter:
        model(ids[:, :1], use_cache=True, **{argument: cache})
    return counter.count
