"""The bytes and multiply-adds of a decoding step, counted from a model."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

STACKED = "moe_num_experts"  # of modules that hold the weights of all experts in one matrix, one below the other (DBRX)
ATTACHED = "compress.kv."  # of the caches of attached methods
# Modules of caches and layers that keep keys, values and states alone.
CACHE_CLASSES = ("transformers.cache_utils", ATTACHED, __name__)
CACHES = ("past_key_values", "cache_params")  # names of the cache among the outputs and the arguments of models


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
    """What a layer keeps of a sequence, and what a step does with it.

    bytes: kept for each position. macs: multiply-adds of a step's query with a position. window: largest number of
        positions, None: all. number: of the layer in the model.
    readers: layers that attend to these positions: this one, and later ones that have no keys and values of their own.
    state: bytes of states whose size does not grow (linear attention, state spaces, convolutions), which every step
        reads and writes. state_macs: multiply-adds of a step with them.
    prompt_macs: multiply-adds of a prompt's query with a position, if they differ from those of a step: keys and values
        of latent attention are made once for all queries of a prompt.
    chosen: largest number of positions that a query attends to, which an indexer chooses among all; None: all.
    """

    bytes: float
    macs: float
    window: int | None
    number: int = 0
    readers: int = 1
    state: float = 0.0
    state_macs: float = 0.0
    prompt_macs: float | None = None
    chosen: int | None = None

    def positions(self, context: int) -> int:
        """How many of `context` positions are kept."""
        return min(context, self.window or context)

    def attended(self, context: int) -> int:
        """How many of `context` positions a query attends to."""
        return min(self.positions(context), self.chosen or context)

    def attended_by(self, tokens: int) -> int:
        """The sum of `attended` over all queries of a prompt, of which the first sees one position."""
        most = self.attended(tokens)
        return most * (most + 1) // 2 + (tokens - most) * most

    def read(self, context: int) -> float:
        """Bytes that a step reads behind `context` positions, and those of states that it writes."""
        return self.readers * self.bytes * self.attended(context) + 2 * self.state


@dataclass(frozen=True)
class Work:
    """The work of a decoding step, counted from a model.

    Attributes:
        bytes_once: weights that are read as a whole. bytes_a_row: embeddings looked up for each row of a batch.
        macs: multiply-adds of a row with weights, without experts.
        dtype: of the computation.
        repeats: how often a step runs each module that holds weights, by its name, where that is not once.
    """

    bytes_once: float
    bytes_a_row: float
    macs: float
    experts: tuple[Experts, ...]
    cache: tuple[CacheLayer, ...]
    dtype: str
    repeats: Mapping[str, int] = field(default_factory=dict)

    def weight_bytes(self, batch: int) -> float:
        """Bytes of weights read in one step."""
        reached = sum(e.bytes * e.reached(batch) for e in self.experts)
        return self.bytes_once + batch * self.bytes_a_row + reached

    def cache_bytes(self, context: int, batch: int) -> float:
        """Bytes of keys, values and states that one step reads, and of states that it writes, behind `context`
        positions of each row."""
        return batch * sum(layer.read(context) for layer in self.cache)

    def kept_bytes(self, context: int) -> float:
        """Bytes of the cache of one sequence of `context` positions."""
        return sum(layer.bytes * layer.positions(context) + layer.state for layer in self.cache)

    def flops(self, context: int, batch: int) -> float:
        """Two operations for each multiply-add of one step: with weights, of queries with keys, of probabilities with
        values, and with states."""
        attention = sum(layer.readers * layer.macs * layer.attended(context) + layer.state_macs for layer in self.cache)
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
def work(model: nn.Module, *, like: Work | None = None) -> Work:
    """Count the work of a decoding step.

    Args:
        model: may hold stand-ins, if `like` is given.
        like: the work of the same model with other weights, for what it caches and how often it runs its modules;
            None: the model reads two tokens to find both.
    """
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = str(next(floats, torch.bfloat16)).removeprefix("torch.")
    cache, repeats = _passed(model) if like is None else (like.cache, like.repeats)
    parts = _counted(model, repeats).values()
    once, a_row, macs = (sum(getattr(part, kind) for part in parts) for kind in ("once", "a_row", "macs"))
    return Work(once, a_row, macs, tuple(one for part in parts for one in part.experts), cache, dtype, repeats)


def work_of_modules(model: nn.Module, repeats: Mapping[str, int]) -> dict[str, Work]:
    """{name of a module that holds weights: the work of a decoding step with them}; their sum is the `work` with these
    repeats, without the cache. The experts of a layer are one module."""
    return {
        name: Work(part.once, part.a_row, part.macs, tuple(part.experts), (), "")
        for name, part in _counted(model, repeats).items()
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


def _counted(model: nn.Module, repeats: Mapping[str, int]) -> dict[str, _Part]:
    """The work of each module that holds weights, by its name."""
    counter = _Counter(getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None))
    counter.count(model)
    for name, count in repeats.items():
        part = counter.parts.get(name)
        if part and not count:
            del counter.parts[name]
        elif part and not part.experts:  # these may run once for each expert
            part.once, part.a_row, part.macs = count * part.once, count * part.a_row, count * part.macs
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
            # Routers have bare matrices, like linears; kernels of convolutions are multiplied once a token, too.
            rows = isinstance(module, nn.Linear)  # not a bias of a router [1, experts]
            matrices = [t for t in tensors.values() if t.dim() > 2 or (t.dim() == 2 and (rows or len(t) > 1))]
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
    own, without = _numbers_of_experts(module)
    for name in routed:
        part = getattr(module, name)
        if isinstance(part, Tensor):
            used = own / (own + without) if without and len(part) == own + without else 1.0
            size += part.nbytes * used
            macs += 0 if part.dim() == 2 and len(part) == own else part.numel() * used  # biases are added
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
    return Experts(size, macs, own + without, min(active, own + without))


def _stored(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters, and buffers that are saved in a checkpoint (not computed ones: rotary frequencies, masks)."""
    if recurse:
        return module.state_dict()
    computed = module._non_persistent_buffers_set
    tensors = {**module._parameters, **{name: t for name, t in module._buffers.items() if name not in computed}}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _routed(module: nn.Module) -> set[str]:
    """Names of the parameters and lists of a module from which each token uses the parts of some experts."""
    count, without = _numbers_of_experts(module)
    if count < 2:
        return set()
    lists = {
        name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) == count
    }
    own = {name: p for name, p in module._parameters.items() if p is not None}
    fused = {name for name, p in own.items() if p.dim() == 3 and len(p) in (count, count + without)}
    biases = {name for name, p in own.items() if fused and p.dim() == 2 and len(p) == count}
    stacked = {name for name, p in own.items() if hasattr(module, STACKED) and p.dim() == 2}
    return lists | fused | biases | stacked


def _numbers_of_experts(module: nn.Module) -> tuple[int, int]:
    """How many experts with weights a module holds, 0 if none; and how many without, which give back their input."""
    names = ("num_experts", "num_routed_experts", STACKED)
    found = next((count for name in names if isinstance(count := getattr(module, name, None), int)), 0)
    return found, getattr(module, "zero_expert_num", None) or 0


def cache_bytes_per_token(config: PreTrainedConfig) -> int:
    """Bytes in 16 bits by which a model's cache grows with each token, from its configuration alone, so for models of
    any size.

    Layers with a window do not grow and are not counted. Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)
    keeps one compressed vector and one rotated key for all heads; an indexer keeps one key more.
    """
    config = config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    numbers = 0
    for number, kind in enumerate(kinds):
        if kind not in ("full_attention", "indexed_attention", "hybrid"):
            continue
        own = config_of_layer(config, number)
        numbers += own.index_head_dim if kind == "indexed_attention" else 0
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


def _passed(model: nn.Module) -> tuple[tuple[CacheLayer, ...], dict[str, int]]:
    """An entry for every layer that keeps something, found by reading two tokens; and how often a step after them runs
    each module with weights, where that is not once."""
    ids, argument, cache = read_two(model)
    parts = (cache, *cache.layers)
    if own := next((one for one in parts if not type(one).__module__.startswith(CACHE_CLASSES)), None):
        raise ValueError(
            f"`model` ({type(model).__name__}): its own {type(own).__name__} keeps more than keys, values and states, "
            "so that the work of a step cannot be counted"
        )
    config, layers = model.config.get_text_config(decoder=True), []
    indexed = any(getattr(one, "indexer_keys", None) is not None for one in cache.layers)
    if indexed and not hasattr(config, "index_topk"):
        raise ValueError(
            f"`model` ({type(model).__name__}): its config does not say how many positions its indexer chooses "
            "(index_topk), so that the work of a step cannot be counted"
        )
    readers = _readers(config)
    for number, layer in enumerate(cache.layers):
        state, state_macs = _state_of(layer)
        keys = getattr(layer, "keys", None)
        positions = keys is not None and keys.numel()
        if positions or state:
            about = _of_a_position(config_of_layer(config, number), layer) if positions else (0.0, 0.0, None)
            kept, macs, prompt_macs = about
            window, count = getattr(layer, "sliding_window", None), 1 + readers[number]
            chosen = getattr(config, "index_topk", None) if hasattr(layer, "indexer_keys") else None
            layers.append(CacheLayer(kept, macs, window, number, count, state, state_macs, prompt_macs, chosen))
        if (index := getattr(layer, "indexer_keys", None)) is not None:
            layers.append(CacheLayer(index[..., :1, :].nbytes, config.index_n_heads * index.shape[-1], None, number))
    calls = Counter[str]()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda _, args, name=name: calls.update([name]))
            stack.callback(hook.remove)
        model(ids[:, :1], use_cache=True, **{argument: cache})
    return tuple(layers), _repeats(model, calls)


class _OwnCache(DynamicCache):
    """What attached methods leave alone, without a warning."""

    is_trial = True


def read_two(model: nn.Module) -> tuple[Tensor, str, Cache]:
    """Two tokens [1, 2] that a model has read, the name of its cache among its arguments, and the cache: its own, with
    which steps are timed, also if a method that compresses caches is attached.

    Raises:
        ValueError: what it keeps is no cache of transformers.
    """
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    output = model(ids, use_cache=True)
    argument = next((name for name in CACHES if isinstance(output.get(name), Cache)), None)
    if argument and type(output[argument]).__module__.startswith(ATTACHED):
        own = _OwnCache(config=model.config.get_text_config(decoder=True))
        output = model(ids, use_cache=True, **{argument: own})
    if argument is None:
        raise ValueError(
            f"`model` ({type(model).__name__}): what it keeps of the tokens before is no cache of transformers, so "
            "that the work of a step cannot be counted"
        )
    return ids, argument, output[argument]


def _repeats(model: nn.Module, calls: Mapping[str, int]) -> dict[str, int]:
    """How often each module with weights ran, where that is not once; 0 if neither it nor the module that holds it did,
    as the towers for images of a model that reads text."""
    modules = dict(model.named_modules())
    if (base := model.base_model_prefix) in modules and not calls.get(base):  # it runs in another way than by modules
        return {}

    def ran(name: str) -> int:
        above = name.rpartition(".")[0]
        while above and isinstance(modules[above], nn.ModuleList):
            above = above.rpartition(".")[0]
        return calls.get(name, 0) or min(calls.get(above, 0), 1)

    counts = {name: ran(name) for name, module in modules.items() if module._parameters or module._buffers}
    return {name: count for name, count in counts.items() if count != 1}


def _of_a_position(config: PreTrainedConfig, layer: CacheLayerMixin) -> tuple[float, float, float | None]:
    """The bytes that a layer keeps of a position, and the multiply-adds of a query with it: of a step, and of a prompt
    where these differ.

    Latent attention keeps one vector for all heads, with which a step's query is multiplied, and then the
    probabilities: its projection to keys and values is applied to the query and to the result (arXiv:2405.04434,
    section 2.1.2).
    """
    size, heads = sum(t[..., :1, :].nbytes for t in (layer.keys, layer.values)), config.num_attention_heads
    if layer.keys.shape[-1] == 1:  # attention was dropped: the layer stores a single number per position
        return size, 0.0, None
    latent, widths = getattr(config, "kv_lora_rank", None), (layer.keys.shape[-1], layer.values.shape[-1])
    if latent in widths and layer.keys.shape[1] == 1:
        rotated = config.qk_rope_head_dim
        return size, heads * (2.0 * latent + rotated), heads * (config.qk_nope_head_dim + rotated + config.v_head_dim)
    return size, float(heads * sum(widths)), None


def _state_of(layer: CacheLayerMixin) -> tuple[float, float]:
    """The bytes of a layer's states, and the multiply-adds of a step with them: each number of a recurrent state is
    updated, and multiplied by a query."""
    convolved, recurrent = (
        [state for state in (getattr(layer, name, None) or {}).values() if state is not None]
        for name in ("conv_states", "recurrent_states")
    )
    size = sum(state.nbytes for state in (*convolved, *recurrent))
    return float(size), 2.0 * sum(state.numel() for state in recurrent)


def _readers(config: PreTrainedConfig) -> Counter[int]:
    """How many further layers attend to the keys and values of a layer, by its number (Gemma 3n, Gemma 4)."""
    modes = getattr(config, "kv_sharing_modes", None) or []
    kinds = getattr(config, "layer_types", None) or [None] * len(modes)
    stored: dict[str | None, int] = {}
    readers = Counter[int]()
    for number, mode in enumerate(modes):
        if mode == "store":
            stored[kinds[number]] = number
        elif (mode or "").startswith("reuse"):
            readers[stored[kinds[number]]] += 1
    return readers
