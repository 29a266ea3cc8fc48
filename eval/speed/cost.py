"""The least time of a decoded token: bytes and operations, against the device's measured ceilings.

A step of decoding reads every weight once, whatever the batch, and every row's cache; it multiplies each row by every
weight, and its query by the cache. It can take no less than the longer of bytes / bandwidth and operations / peak: the
accounting of "Kinetics" (arXiv:2506.05333), in which the cache weighs as much as the parameters, and of the peak
analysis of long contexts (arXiv:2405.08944). Deviations: of compressed weights the stored bytes are counted, of
embeddings the rows that are looked up, of experts as many as a batch is expected to reach, and of caches what the model
itself puts into one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from eval.speed.deploy import deployed
from eval.speed.speed import Speed
from kernels.harness import roofline
from kernels.harness.roofline import Ceilings


@dataclass(frozen=True)
class Experts:
    """Some weights of which each row reads `active` of `count` equal parts. bytes, macs: of all parts."""

    bytes: float
    macs: float
    count: int
    active: int

    def reached(self, batch: int) -> float:
        """The share of the parts that a batch reads, if rows choose at random: 1 - (1 - active/count)^batch."""
        return 1 - (1 - self.active / self.count) ** batch


@dataclass(frozen=True)
class CacheLayer:
    """What a layer keeps of each position: bytes; and multiply-adds of a query with it. window: positions at most,
    None: all."""

    bytes: int
    macs: int
    window: int | None


@dataclass(frozen=True)
class Work:
    """What a step of decoding does, counted from a model.

    Attributes:
        bytes_once: weights that are read whole. bytes_a_row: embeddings that are looked up for each row of a batch.
        macs: multiply-adds of a row with weights, experts left out.
        dtype: in which it computes.
    """

    bytes_once: float
    bytes_a_row: float
    macs: float
    experts: tuple[Experts, ...]
    cache: tuple[CacheLayer, ...]
    dtype: str

    def weight_bytes(self, batch: int) -> float:
        """Read of the weights in one step."""
        reached = sum(e.bytes * e.reached(batch) for e in self.experts)
        return self.bytes_once + batch * self.bytes_a_row + reached

    def cache_bytes(self, context: int, batch: int) -> float:
        """Read of keys and values in one step, `context` positions a row (a window's at most)."""
        return batch * sum(layer.bytes * min(context, layer.window or context) for layer in self.cache)

    def flops(self, context: int, batch: int) -> float:
        """Two for each multiply-add of one step: of weights, and of queries with keys and of what they weigh with
        values."""
        attention = sum(layer.macs * min(context, layer.window or context) for layer in self.cache)
        return 2.0 * batch * (self.macs + sum(e.macs * e.active / e.count for e in self.experts) + attention)


@dataclass(frozen=True)
class Prediction:
    """One step of decoding, in which every row of the batch gets a token: the least that it can take.

    predicted_s: seconds, the longer of bytes / bandwidth and flops / peak. bound: "memory" or "compute", which of them
        it is.
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
    """Predictions beside measurements.

    Attributes:
        ceilings: read_bytes_per_s, flops_per_s (None: not measured; then bytes alone count), how.
        rows: {model, and the fields of `Prediction`, measured_s (of one such step, None: not measured), execution}.
    """

    ceilings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {predicted_decode_tokens_per_s, share_of_predicted_speed}} of the first row of each that was
        measured."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row["measured_s"] is not None and row["model"] not in found:
                found[row["model"]] = {
                    "predicted_decode_tokens_per_s": row["batch"] / row["predicted_s"],
                    "share_of_predicted_speed": row["predicted_s"] / row["measured_s"],
                }
        return found

    def found(self) -> dict[str, Any]:
        """Everything as JSON, as the record keeps it under `cost`."""
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
    """The least that one step of decoding can take on a device with these ceilings.

    Args:
        model: a transformers decoder in the dtype in which it is deployed (`eval.speed.deploy.deployed`), compressed or
            not.
        context: positions that each row's query sees, its own among them.
        batch: rows.

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
    """Predictions for bfloat16 copies of models, beside what was measured of them.

    What is timed may do more than it must (16-bit weights with their zeros in place, masked positions of a static
    cache), and less where weights fit into a processor's cache: the ceilings are those of main memory.

    Args:
        models: {name: model}.
        speed_rows: {model, batch, prompt_tokens, new_tokens, decode_tokens_per_s, execution}: of `speed_rows(...)` and
            of `SpeedGrid.rows`; those of other models are passed over. The context is that of the middle token.
        ceilings: of the device; measured, in some seconds, where there are none.
        contexts, batches: for which there are predictions without a measurement, each with each.
        how: by which the ceilings came about, where they are given.

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
    """What `measure_speed` found, as rows for `cost_model`."""
    return [
        {
            "model": name,
            **{key: one.settings[key] for key in ("batch", "prompt_tokens", "new_tokens")},
            "decode_tokens_per_s": one.decode_tokens_per_s,
            "execution": one.execution,
        }
        for name, one in speeds.items()
    ]


@torch.no_grad()
def work(model: nn.Module) -> Work:
    """Count what a step of decoding reads and multiplies; the model reads two tokens to show what it caches."""
    counter = _Counter(getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None))
    counter.count(model)
    dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    return Work(counter.once, counter.a_row, counter.macs, tuple(counter.experts), _cache_layers(model), dtype)


class _Counter:
    """Walks over a model's modules; what it finds adds up in its attributes."""

    def __init__(self, active: int | None) -> None:
        self.active = active  # experts of a token, where routers do not say
        self.once = self.a_row = self.macs = 0.0
        self.experts: list[Experts] = []

    def count(self, module: nn.Module, active: int | None = None) -> None:
        """Of a module and what it holds. active: experts of a token, as a router beside it says."""
        if isinstance(module, nn.Embedding):
            self.a_row += module.weight[0].nbytes
            return
        if hasattr(module, "num_embeddings"):  # stored compressed, and looked up row by row
            self.a_row += module.nbytes / module.num_embeddings
            return
        if isinstance(getattr(module, "nbytes", None), int) and hasattr(
            module, "out_features"
        ):  # stored compressed, it says itself
            beside = sum(t.nbytes for name, t in _stored(module).items() if not name.startswith("parts."))
            self.once += module.nbytes + beside
            self.macs += module.out_features * module.in_features
            return
        routed = _routed(module)
        tensors = {name: t for name, t in _stored(module, recurse=False).items() if name not in routed}
        self.once += sum(t.nbytes for t in tensors.values())
        self.macs += sum(
            t.numel() for t in tensors.values() if t.dim() == 2
        )  # routers keep bare matrices, as linears do
        top_k = next(
            (m.top_k for m in (module, *module.children()) if isinstance(getattr(m, "top_k", None), int)), active
        )
        for name, child in module.named_children():
            if name not in routed:
                self.count(child, top_k)
        if routed:
            self._count_experts(module, routed, top_k or self.active)

    def _count_experts(self, module: nn.Module, routed: set[str], active: int | None) -> None:
        parts = _Counter(None)
        for name in routed:
            part = getattr(module, name)
            if isinstance(part, Tensor):
                parts.once += part.nbytes
                parts.macs += part.numel() if part.dim() == 3 else 0
            else:
                parts.count(part)
        if not active:
            raise ValueError(
                f"`model`: neither a router beside its {type(module).__name__} nor its config (num_experts_per_tok) "
                "says how many experts a token takes"
            )
        self.experts.append(Experts(parts.once, parts.macs, module.num_experts, min(active, module.num_experts)))


def _stored(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters, and buffers that a checkpoint holds (not those that are computed: rotary frequencies, masks)."""
    if recurse:
        return module.state_dict()
    computed = module._non_persistent_buffers_set
    tensors = {**module._parameters, **{name: t for name, t in module._buffers.items() if name not in computed}}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _routed(module: nn.Module) -> set[str]:
    """Names of the parameters and lists of a module of which each token takes some experts' parts."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count < 2:
        return set()
    lists = {
        name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) == count
    }
    fused = {name for name, p in module._parameters.items() if p is not None and p.dim() == 3 and len(p) == count}
    biases = {
        name for name, p in module._parameters.items() if fused and p is not None and p.dim() == 2 and len(p) == count
    }
    return lists | fused | biases


def cache_bytes_per_token(config: PreTrainedConfig, *, bits: float = 16, kept: float = 1.0) -> float:
    """Bytes by which a model's cache grows with each token, from its configuration alone, so for models of any size.

    Layers with a window do not grow and are not counted. Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)
    keeps one compressed vector and one rotated key for all heads.

    Args:
        config: of a transformers decoder.
        bits: of a number, scales included (`kv_int` in 4 bits with groups of 64: 4.5 for keys and, with 64 channels,
            for values).
        kept: share of the positions that an eviction leaves.
    """
    config = config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    if getattr(config, "kv_lora_rank", None):
        numbers = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        numbers = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return kinds.count("full_attention") * numbers * bits / 8 * kept


def _cache_layers(model: nn.Module) -> tuple[CacheLayer, ...]:
    """Of every layer that keeps keys and values, as a pass over two tokens leaves them."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    cache = model(ids, use_cache=True).past_key_values
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or not keys.numel():
            continue
        kept = keys[:, :, 0].nbytes + values[:, :, 0].nbytes
        attends = keys.shape[-1] > 1  # where attention was dropped, a single number holds a position's place
        layers.append(
            CacheLayer(
                kept, heads * (keys.shape[-1] + values.shape[-1]) * attends, getattr(layer, "sliding_window", None)
            )
        )
    return tuple(layers)
