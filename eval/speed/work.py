"""The bytes and multiply-adds of a decoding step, counted from a model."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs


@dataclass(frozen=True)
class Experts:
    """Weights in `count` equal parts, of which each row reads `active` parts. bytes, macs: of all parts."""

    bytes: float
    macs: float
    count: int
    active: int

    def reached(self, batch: int) -> float:
        """The share of the parts that a batch reads, if rows choose at random: 1 - (1 - active/count)^batch."""
        return 1 - (1 - self.active / self.count) ** batch


@dataclass(frozen=True)
class CacheLayer:
    """A layer's cached bytes per position, and the multiply-adds of a query with them. window: largest number of
    positions, None: all. number: of the layer in the model."""

    bytes: float
    macs: float
    window: int | None
    number: int = 0


@dataclass(frozen=True)
class Work:
    """The work of a decoding step, counted from a model.

    Attributes:
        bytes_once: weights that are read as a whole. bytes_a_row: embeddings looked up for each row of a batch.
        macs: multiply-adds of a row with weights, without experts.
        dtype: of the computation.
    """

    bytes_once: float
    bytes_a_row: float
    macs: float
    experts: tuple[Experts, ...]
    cache: tuple[CacheLayer, ...]
    dtype: str

    def weight_bytes(self, batch: int) -> float:
        """Bytes of weights read in one step."""
        reached = sum(e.bytes * e.reached(batch) for e in self.experts)
        return self.bytes_once + batch * self.bytes_a_row + reached

    def cache_bytes(self, context: int, batch: int) -> float:
        """Bytes of keys and values read in one step, for `context` positions per row (limited by the window)."""
        return batch * sum(layer.bytes * min(context, layer.window or context) for layer in self.cache)

    def flops(self, context: int, batch: int) -> float:
        """Two operations for each multiply-add of one step: with weights, of queries with keys, and of probabilities
        with values."""
        attention = sum(layer.macs * min(context, layer.window or context) for layer in self.cache)
        return 2.0 * batch * (self.macs + sum(e.macs * e.active / e.count for e in self.experts) + attention)


class StoredLinear(nn.Module):
    """Stands for a linear whose weight will take `nbytes` stored bytes, in a model whose work is counted.

    macs: multiply-adds of its product with one token.
    """

    def __init__(self, out_features: int, in_features: int, nbytes: int, macs: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features, self.nbytes, self.macs = out_features, in_features, nbytes, macs
        self.register_buffer("bias", bias)


class StoredTable(nn.Module):
    """Stands for a token embedding of which all rows together will take `nbytes` stored bytes. tied: they are the
    head's."""

    def __init__(self, num_embeddings: int, nbytes: int, *, tied: bool) -> None:
        super().__init__()
        self.num_embeddings, self.nbytes, self.tied = num_embeddings, nbytes, tied


@torch.no_grad()
def work(model: nn.Module, *, cache: tuple[CacheLayer, ...] | None = None) -> Work:
    """Count the work of a decoding step.

    Args:
        model: may hold stand-ins, if the cache is known.
        cache: what the model caches; None: it reads two tokens to find that.
    """
    parts = _counted(model).values()
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = str(next(floats, torch.bfloat16)).removeprefix("torch.")
    cache = _cache_layers(model) if cache is None else cache
    once, a_row, macs = (sum(getattr(part, kind) for part in parts) for kind in ("once", "a_row", "macs"))
    return Work(once, a_row, macs, tuple(one for part in parts for one in part.experts), cache, dtype)


def work_of_modules(model: nn.Module) -> dict[str, Work]:
    """{name of a module that holds weights: the work of a decoding step with them}; their sum is `work(model)`, without
    the cache. The experts of a layer are one module."""
    return {
        name: Work(part.once, part.a_row, part.macs, tuple(part.experts), (), "")
        for name, part in _counted(model).items()
    }


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model, which may hold stand-ins; a weight that several modules share counts once."""
    tensors = list(model.state_dict(keep_vars=True).values())
    parts = (m for m in model.modules() if isinstance(m, StoredLinear | StoredTable))
    stands_for = sum(part.nbytes for part in parts if not getattr(part, "tied", False))
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values()) + stands_for


@dataclass
class _Part:
    """The work of a module's own weights, as in `Work`."""

    once: float = 0.0
    a_row: float = 0.0
    macs: float = 0.0
    experts: list[Experts] = field(default_factory=list)


def _counted(model: nn.Module) -> dict[str, _Part]:
    """The work of each module that holds weights, by its name."""
    counter = _Counter(getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None))
    counter.count(model)
    return counter.parts


class _Counter:
    """Walks over a model's modules and keeps their counts."""

    def __init__(self, active: int | None) -> None:
        self.active = active  # experts per token, if routers do not tell it
        self.parts: dict[str, _Part] = {}

    def count(self, module: nn.Module, name: str = "", active: int | None = None) -> None:
        """Count a module of this name and its children. active: experts per token, according to a router beside it."""
        if isinstance(module, nn.Embedding):
            self.parts[name] = _Part(a_row=module.weight[0].nbytes)
            return
        if hasattr(module, "num_embeddings"):  # stored compressed, and looked up row by row
            self.parts[name] = _Part(a_row=module.nbytes / module.num_embeddings)
            return
        if isinstance(getattr(module, "nbytes", None), int) and hasattr(
            module, "out_features"
        ):  # stored compressed, with its own counts
            beside = sum(t.nbytes for own, t in _stored(module).items() if not own.startswith("parts."))
            macs = getattr(module, "macs", module.out_features * module.in_features)
            self.parts[name] = _Part(once=module.nbytes + beside, macs=macs)
            return
        routed = _routed(module)
        tensors = {own: t for own, t in _stored(module, recurse=False).items() if own not in routed}
        if tensors:
            matrices = [t for t in tensors.values() if t.dim() == 2]  # routers have bare ones, like linears
            self.parts[name] = _Part(sum(t.nbytes for t in tensors.values()), macs=sum(t.numel() for t in matrices))
        top_k = next(
            (m.top_k for m in (module, *module.children()) if isinstance(getattr(m, "top_k", None), int)), active
        )
        for own, child in module.named_children():
            if own not in routed:
                self.count(child, f"{name}.{own}" if name else own, top_k)
        if routed:
            experts = _experts(module, routed, top_k or self.active)
            self.parts.setdefault(name, _Part()).experts.append(experts)


def _experts(module: nn.Module, routed: set[str], active: int | None) -> Experts:
    """The work of the experts in these parameters and lists of a module."""
    counter, size, macs = _Counter(None), 0.0, 0.0
    for name in routed:
        part = getattr(module, name)
        if isinstance(part, Tensor):
            size += part.nbytes
            macs += part.numel() if part.dim() == 3 else 0
        else:
            counter.count(part, name)
    if not active:
        raise ValueError(
            f"`model`: neither a router beside its {type(module).__name__} nor its config (num_experts_per_tok) says "
            "how many experts a token takes"
        )
    size, macs = (
        sum((getattr(part, kind) for part in counter.parts.values()), start)
        for kind, start in (("once", size), ("macs", macs))
    )
    return Experts(size, macs, module.num_experts, min(active, module.num_experts))


def _stored(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters, and buffers that are saved in a checkpoint (not computed ones: rotary frequencies, masks)."""
    if recurse:
        return module.state_dict()
    computed = module._non_persistent_buffers_set
    tensors = {**module._parameters, **{name: t for name, t in module._buffers.items() if name not in computed}}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _routed(module: nn.Module) -> set[str]:
    """Names of the parameters and lists of a module from which each token uses the parts of some experts."""
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


def cache_bytes_per_token(config: PreTrainedConfig) -> int:
    """Bytes in 16 bits by which a model's cache grows with each token, from its configuration alone, so for models of
    any size.

    Layers with a window do not grow and are not counted. Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)
    keeps one compressed vector and one rotated key for all heads.
    """
    config = config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    numbers = 0
    for number, kind in enumerate(kinds):
        if kind != "full_attention":
            continue
        own = config_of_layer(config, number)
        if getattr(own, "kv_lora_rank", None):
            numbers += own.kv_lora_rank + own.qk_rope_head_dim
        else:
            numbers += 2 * (getattr(own, "num_key_value_heads", None) or own.num_attention_heads) * head_width(own)
    return 2 * numbers


def config_of_layer(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    """The settings of one layer of a decoder; those of the whole decoder unless its layers differ (Gemma 4)."""
    own = getattr(config, "per_layer_config", None)
    return config if own is None else own[number]


def head_width(config: PreTrainedConfig) -> int:
    """Channels of an attention head, by the settings of a layer."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _cache_layers(model: nn.Module) -> tuple[CacheLayer, ...]:
    """An entry for every layer with keys and values, found from the cache after a pass over two tokens."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    cache = model(ids, use_cache=True).past_key_values
    config, layers = model.config.get_text_config(decoder=True), []
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or not keys.numel():
            continue
        kept = keys[:, :, 0].nbytes + values[:, :, 0].nbytes
        heads = config_of_layer(config, number).num_attention_heads
        attends = keys.shape[-1] > 1  # if attention was dropped, the layer stores a single number per position
        layers.append(
            CacheLayer(
                kept,
                heads * (keys.shape[-1] + values.shape[-1]) * attends,
                getattr(layer, "sliding_window", None),
                number,
            )
        )
    return tuple(layers)
