"""The least time of a decoded token: bytes and operations, relative to the device's measured ceilings.

A decoding step reads every weight once, for any batch size, and every row's cache; it multiplies each row by every
weight, and its query by the cache. Its least time is the longer of bytes / bandwidth and operations / peak: the
accounting of "Kinetics" (arXiv:2506.05333), in which the cache counts like the parameters, and of the peak analysis of
long contexts (arXiv:2405.08944). Deviations: compressed weights count with their stored bytes, embeddings with the rows
that are looked up, experts with the number that a batch is expected to reach, and caches with the tensors that the
model itself stores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from eval.speed.speed import Speed
from eval.speed.work import Work, work
from kernels.harness import roofline
from kernels.harness.roofline import Ceilings
from kernels.support.deploy import deployed


@dataclass(frozen=True)
class Prediction:
    """The least time of one decoding step, in which every row of the batch gets a token.

    predicted_s: seconds, the longer of bytes / bandwidth and flops / peak. bound: "memory" or "compute", whichever is
        the longer one.
    """

    batch: int
    context: int
    weight_bytes: float
    cache_bytes: float
    flops: float
    predicted_s: float
    bound: str


@dataclass
class Cost:
    """Predictions and measurements.

    Attributes:
        ceilings: read_bytes_per_s, flops_per_s (None: not measured; then only bytes count), how.
        rows: {model, the fields of `Prediction`, measured_s (of one such step, None: not measured), execution}.
    """

    ceilings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {predicted_decode_tokens_per_s, share_of_predicted_speed}} for each model's first row with a
        measurement."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row["measured_s"] is not None and row["model"] not in found:
                found[row["model"]] = {
                    "predicted_decode_tokens_per_s": row["batch"] / row["predicted_s"],
                    "share_of_predicted_speed": row["predicted_s"] / row["measured_s"],
                }
        return found

    def found(self) -> dict[str, Any]:
        """All results as JSON, in the form of the record's entry `cost`."""
        return {"ceilings": self.ceilings, "rows": self.rows}

    def _repr_html_(self) -> str:
        names = (
            "",
            "batch",
            "context",
            "weights, MB",
            "cache, MB",
            "Mflop",
            "predicted, ms",
            "bound by",
            "measured, ms",
        )
        head = "".join(f"<th>{name}</th>" for name in names)
        body = ""
        for row in self.rows:
            measured = "" if row["measured_s"] is None else f"{row['measured_s'] * 1e3:.2f}"
            cells = (
                row["batch"],
                f"{row['context']:,}",
                f"{row['weight_bytes'] / 1e6:,.1f}",
                f"{row['cache_bytes'] / 1e6:,.2f}",
                f"{row['flops'] / 1e6:,.0f}",
                f"{row['predicted_s'] * 1e3:.2f}",
                row["bound"],
                measured,
            )
            shown = "".join(f"<td>{cell}</td>" for cell in cells)
            body += f"<tr><th style='text-align:left'>{escape(row['model'])}</th>{shown}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def predict(model: nn.Module, *, context: int, batch: int = 1, ceilings: Ceilings) -> Prediction:
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
    return _predict(work(model), context, batch, ceilings)


def _predict(work: Work, context: int, batch: int, ceilings: Ceilings) -> Prediction:
    weights, cache, flops = work.weight_bytes(batch), work.cache_bytes(context, batch), work.flops(context, batch)
    moving = (weights + cache) / ceilings.bandwidth
    rate = ceilings.rates.get(work.dtype)
    computing = flops / rate if rate else 0.0
    bound = "memory" if moving >= computing else "compute"
    return Prediction(batch, context, weights, cache, flops, max(moving, computing), bound)


def cost_model(
    models: Mapping[str, nn.Module],
    speed_rows: Sequence[Mapping[str, Any]] = (),
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
        speed_rows: {model, batch, prompt_tokens, new_tokens, decode_tokens_per_s, execution}: from `speed_rows(...)`
            and `SpeedGrid.rows`; rows of other models are ignored. The context is that of the middle token.
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
    cost = Cost({"read_bytes_per_s": ceilings.bandwidth, "flops_per_s": ceilings.rates.get("bfloat16"), "how": how})
    for row in speed_rows:
        if row["model"] in done:
            context = row["prompt_tokens"] + (row["new_tokens"] + 1) // 2
            found = _predict(done[row["model"]], context, row["batch"], ceilings)
            measured = {"measured_s": row["batch"] / row["decode_tokens_per_s"], "execution": row.get("execution", "")}
            cost.rows.append({"model": row["model"], **asdict(found), **measured})
    for name, one in done.items():
        for batch in batches:
            for context in contexts:
                found = _predict(one, context, batch, ceilings)
                cost.rows.append({"model": name, **asdict(found), "measured_s": None, "execution": ""})
    return cost


def speed_rows(speeds: Mapping[str, Speed]) -> list[dict[str, Any]]:
    """The results of `measure_speed`, as rows for `cost_model`."""
    return [
        {
            "model": name,
            **{key: one.settings[key] for key in ("batch", "prompt_tokens", "new_tokens")},
            "decode_tokens_per_s": one.decode_tokens_per_s,
            "execution": one.execution,
        }
        for name, one in speeds.items()
    ]
