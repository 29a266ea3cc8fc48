"""llama.cpp's names and layouts of the weights of transformers' models, and the metadata that it reads.

Sources: `gguf.get_tensor_name_map` for the names; llama.cpp's `convert_hf_to_gguf.py` and `llama-model.cpp` for
permuted rows, shifted weights, metadata, and settings that are fixed in its code.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gguf
import torch
from gguf import MODEL_ARCH
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compress.dropped import dropped_parts
from compress.embedding import CompressedEmbedding
from compress.linear import CompressedLinear


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's form of a model type of transformers.

    Attributes:
        arch: the name in llama.cpp.
        activation: of the MLP, which is fixed in llama.cpp.
        interleaved: neighbouring rows of q and k are rotated together, where transformers rotates row i with i + half.
        shifted_norms: the file holds 1 + w for the weights w of norms.
        full_every: of every group of this many blocks, the last attends to all positions, the others within a window;
            None: all blocks are alike.
    names_window: the file names the window also where all blocks are alike, 0 if there is none: versions of llama.cpp
        do not load it otherwise.
    unturned_every: of every group of this many blocks, the last rotates nothing; None: all rotate.
    scales: the file names factors of embedded tokens, of what blocks add, of scores and of logits.
    own_head: the file needs a head of its own. biases: llama.cpp reads those of all linears. factors: it reads divisors
        of the rotary frequencies.
    sums_to_one: the weights of the chosen experts are divided by their sum, which is fixed in llama.cpp; None: there
        are no experts.
    """

    arch: MODEL_ARCH
    activation: str = "silu"
    interleaved: bool = False
    shifted_norms: bool = False
    full_every: int | None = None
    names_window: bool = False
    unturned_every: int | None = None
    scales: bool = False
    own_head: bool = False
    biases: bool = True
    factors: bool = False
    sums_to_one: bool | None = None


_GELU = "gelu_pytorch_tanh"
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(MODEL_ARCH.LLAMA, interleaved=True, factors=True),
    "mistral": Architecture(MODEL_ARCH.LLAMA, interleaved=True, factors=True),
    "qwen2": Architecture(MODEL_ARCH.QWEN2),
    "qwen3": Architecture(MODEL_ARCH.QWEN3),
    "gemma2": Architecture(MODEL_ARCH.GEMMA2, _GELU, shifted_norms=True, full_every=2),
    "gemma3_text": Architecture(MODEL_ARCH.GEMMA3, _GELU, shifted_norms=True, full_every=6),
    "phi3": Architecture(MODEL_ARCH.PHI3, names_window=True),
    "smollm3": Architecture(MODEL_ARCH.SMOLLM3, interleaved=True, unturned_every=4, biases=False),
    "granite": Architecture(MODEL_ARCH.GRANITE, interleaved=True, scales=True, factors=True),
    "olmo2": Architecture(MODEL_ARCH.OLMO2, own_head=True, biases=False),
    "qwen2_moe": Architecture(MODEL_ARCH.QWEN2MOE, own_head=True, sums_to_one=False),
    "qwen3_moe": Architecture(MODEL_ARCH.QWEN3MOE, biases=False, sums_to_one=True),
}
EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(?:\.(\d+)\.weight)?")  # of a layer, or one of them


@dataclass(frozen=True)
class Entry:
    """One tensor of the file.

    Attributes:
        name: the name in the file. source: the name in the model. linear: the compressed linear of this weight, or
            None.
        order: rows of the model's tensor in the order of the file; None: unchanged. shift: added to each value.
        tensor: the model's tensor if `linear` is None.
        experts: entries of the experts that this tensor holds, [experts, out, in]; their names do not count.
    """

    name: str
    source: str
    linear: CompressedLinear | CompressedEmbedding | None
    tensor: Tensor | None
    order: Tensor | None = None
    shift: float = 0.0
    experts: tuple["Entry", ...] = ()

    def values(self) -> Tensor:
        """The values that the file must represent: float32, on the CPU."""
        if self.experts:
            return torch.stack([expert.values() for expert in self.experts])
        W = (self.tensor.detach() if self.linear is None else self.linear.dequantize()).to("cpu", torch.float32)
        W = W if self.order is None else W[self.order]
        return W + self.shift if self.shift else W


def problem_of(model: nn.Module) -> str:
    """The reason why llama.cpp cannot run this model, "" if it can; no weights are read."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ARCHITECTURES:
        return (
            f"`model` is of the type {kind}, which cannot be written as GGUF here; these can: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if parts := dropped_parts(model):
        return (
            f"parts inside blocks were dropped ({', '.join(list(parts)[:3])}), which llama.cpp cannot leave out; whole "
            "blocks can be dropped"
        )
    if problem := next(filter(None, (check(config) for check in _CHECKS)), ""):
        return problem
    try:
        for _ in entries(model):
            pass
    except ValueError as error:
        return str(error)
    return ""


def read_by_transformers(config: PreTrainedConfig) -> bool:
    """Whether transformers' reader of GGUF files knows this architecture; llama.cpp does."""
    known = {name.replace("_", "") for name in GGUF_SUPPORTED_ARCHITECTURES}  # "qwen3_moe" for llama.cpp's qwen3moe
    return gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type].arch] in known


def entries(model: nn.Module) -> Iterator[Entry]:
    """Every tensor of the file.

    Raises:
        ValueError: the model has a weight without a name in this architecture.
    """
    config = model.config
    how = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(how.arch, config.num_hidden_layers)
    embedding = model.get_input_embeddings()
    table = None if isinstance(embedding, CompressedEmbedding) else embedding.weight
    experts: dict[str, list[Entry]] = {}
    for source, linear, tensor in _weights(model):
        if how.sums_to_one is not None and (found := EXPERTS.fullmatch(source)):
            for name, entry in _of_experts(*found.groups(), source, linear, tensor):
                experts.setdefault(name, []).append(entry)
            continue
        tied = tensor is not None and source != _name_of(model, embedding) and tensor is table
        if tied:
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(
                f"`model`: llama.cpp's {gguf.MODEL_ARCH_NAMES[how.arch]} has no place for the weight {source}"
            )
        if name.endswith("ffn_gate_inp_shexp.weight"):
            tensor = tensor[0]  # a single row is a vector
        order = _rotary_order(config, name) if how.interleaved else None
        shift = 1.0 if how.shifted_norms and name.endswith("norm.weight") else 0.0
        yield Entry(name, source, linear, tensor, order, shift)
    for source, own in experts.items():
        yield Entry(names.get_name(source, try_suffixes=(".weight",)), source, None, None, experts=tuple(own))
    if (factors := rope_factors(config)) is not None:
        yield Entry("rope_freqs.weight", "", None, factors)


def _of_experts(
    layer: str, part: str, number: str | None, source: str, linear: CompressedLinear | None, tensor: Tensor | None
) -> Iterator[tuple[str, Entry]]:
    """The matrices of one expert, or of all experts of a layer if they are one tensor, with their names in transformers
    if gates and the rest were apart, as llama.cpp has them."""
    for one in tensor if number is None else [tensor]:
        out = (linear.out_features if one is None else len(one)) if part == "gate_up_proj" else 0
        halves = {"gate_proj": torch.arange(out // 2), "up_proj": torch.arange(out // 2, out)}
        for name, rows in halves.items() if out else [("down_proj", None)]:
            yield f"{layer}{name}.weight", Entry("", source, linear, one, rows)


def write_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """The architecture's keys: sizes, norms, rotary positions, windows, soft caps."""
    heads, size = config.num_attention_heads, head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(int(size * (_rope(config).get("partial_rotary_factor") or 1)))
    _write_rope(writer, config)
    if (window := _window(config)) is not None:
        writer.add_sliding_window(window)
    for value, add in (
        (getattr(config, "attn_logit_softcapping", None), writer.add_attn_logit_softcapping),
        (getattr(config, "final_logit_softcapping", None), writer.add_final_logit_softcapping),
    ):
        if value:
            add(value)
    if ARCHITECTURES[config.model_type].sums_to_one is not None:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if shared := getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(shared)
    if ARCHITECTURES[config.model_type].scales:
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def remarks(config: PreTrainedConfig) -> list[str]:
    """Differences between llama.cpp and transformers for this model."""
    slides = getattr(config, "layer_types", None) is None or "sliding_attention" in config.layer_types
    window = getattr(config, "sliding_window", None) if slides else None
    if window and ARCHITECTURES[config.model_type].full_every is None and config.max_position_embeddings > window:
        return [f"beyond {window:,} tokens llama.cpp attends to everything, where this model has a sliding window"]
    return []


def head_size(config: PreTrainedConfig) -> int:
    """The number of channels of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """The divisors of the frequencies ("llama3" scaling), float32 [head / 2]; None: no such scaling."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_size(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return plain / scaled.float()


def _weights(model: nn.Module) -> Iterator[tuple[str, CompressedLinear | CompressedEmbedding | None, Tensor | None]]:
    """Name, and the compressed linear (or embedding) or the tensor, of every weight and bias, in the modules' order."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, CompressedEmbedding):
            inside += (f"{name}.",)
            yield f"{name}.weight", module, None
            continue
        if isinstance(module, CompressedLinear):
            inside += (f"{name}.",)
            if not module.looked_up:  # else the file has it as the embedding
                yield f"{name}.weight", module, None
            if module.bias is not None:
                yield f"{name}.bias", None, module.bias
            continue
        stored = {key: b for key, b in module.named_buffers(recurse=False) if key in module.state_dict()}
        for key, tensor in dict(module.named_parameters(recurse=False, remove_duplicate=False), **stored).items():
            yield f"{name}.{key}".removeprefix("."), None, tensor


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(f"{name}.weight" for name, one in model.named_modules() if one is module)


def _rotary_order(config: PreTrainedConfig, name: str) -> Tensor | None:
    """Order of the rows of q and k in which row i and i + half of each head become neighbours."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    size = head_size(config)
    return torch.arange(heads * size).view(heads, 2, size // 2).transpose(1, 2).reshape(-1)


def _rope(config: PreTrainedConfig) -> dict:
    """The parameters of the rotary embedding; if there are two kinds, those of blocks with full attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _window(config: PreTrainedConfig) -> int | None:
    how = ARCHITECTURES[config.model_type]
    if how.names_window:
        return config.sliding_window or 0
    return config.sliding_window if how.full_every else None


def _write_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings") or config.max_position_embeddings
        )


def _activation_problem(config: PreTrainedConfig) -> str:
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    needed = ARCHITECTURES[config.model_type].activation
    if activation == needed:
        return ""
    return f"`model`: llama.cpp computes {config.model_type} with the activation {needed}, not {activation}"


def _rope_problem(config: PreTrainedConfig) -> str:
    kind, part = _rope(config).get("rope_type", "default"), _rope(config).get("partial_rotary_factor") or 1
    how = ARCHITECTURES[config.model_type]
    if how.interleaved and part != 1:
        return f"`model`: llama.cpp rotates whole heads of {config.model_type}, not a part of them (={part})"
    possible = ("default", "linear", "yarn", *(("llama3",) if how.factors else ()))
    if kind in possible:
        return ""
    return f"`model`: rotary positions of the kind {kind} cannot be written; these can: {', '.join(possible)}"


def _unturned_problem(config: PreTrainedConfig) -> str:
    every, turned = ARCHITECTURES[config.model_type].unturned_every, getattr(config, "no_rope_layers", None)
    if every is None or [bool(one) for one in turned] == [bool((i + 1) % every) for i in range(len(turned))]:
        return ""
    return (
        f"`model`: llama.cpp rotates the keys of every block of {config.model_type} but each {every}th; in this model "
        f"that is otherwise (were blocks dropped?): `no_rope_layers` is {list(turned)}"
    )


def _weights_problem(config: PreTrainedConfig) -> str:
    how, kind = ARCHITECTURES[config.model_type], config.model_type
    if how.own_head and config.tie_word_embeddings:
        return f"`model`: llama.cpp reads a head of its own for {kind}, and here it is the embedding"
    for name in ("attention_bias", "mlp_bias"):
        if not how.biases and getattr(config, name, False):
            return f"`model`: llama.cpp computes {kind} without the biases of `{name}`"
    if kind == "olmo2" and head_size(config) * config.num_attention_heads != config.hidden_size:
        return f"`model`: llama.cpp computes {kind} with heads that are as wide together as the stream"
    return ""


def _experts_problem(config: PreTrainedConfig) -> str:
    needed = ARCHITECTURES[config.model_type].sums_to_one
    if needed is None:
        return ""
    if config.norm_topk_prob != needed:
        return f"`model`: llama.cpp computes {config.model_type} with `norm_topk_prob` {needed}, not {not needed}"
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return f"`model`: llama.cpp expects experts in every block of {config.model_type}, and some have none here"
    return ""


def _window_problem(config: PreTrainedConfig) -> str:
    every, kinds = ARCHITECTURES[config.model_type].full_every, getattr(config, "layer_types", None) or []
    if every is None:
        slides = "sliding_attention" in kinds and not ARCHITECTURES[config.model_type].names_window
        return "`model`: llama.cpp computes this architecture without sliding windows, which this one has" * slides
    needed = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(len(kinds))]
    if kinds != needed:
        return (
            f"`model`: llama.cpp takes every block of {config.model_type} but each {every}th for one with a sliding "
            f"window; in this model that is otherwise (were blocks dropped?): {', '.join(kinds[:every])}, ..."
        )
    local = config.rope_parameters.get("sliding_attention", {})
    if local and (local.get("rope_theta"), local.get("rope_type", "default")) != (10000.0, "default"):
        return f"`model`: llama.cpp rotates within sliding windows with the base 10,000, not as here: {local}"
    return ""


def _attention_scale_problem(config: PreTrainedConfig) -> str:
    given = getattr(config, "query_pre_attn_scalar", None)
    if given is None:
        return ""
    largest = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type) == config.num_hidden_layers
    needed = config.hidden_size // config.num_attention_heads if largest else head_size(config)
    if math.isclose(given, needed):
        return ""
    return f"`model`: llama.cpp scales attention by 1 / sqrt({needed}), not by 1 / sqrt({given})"


_CHECKS: tuple[Callable[[PreTrainedConfig], str], ...] = (
    _activation_problem, _rope_problem, _unturned_problem, _weights_problem, _experts_problem, _window_problem,
    _attention_scale_problem,
)  # fmt: skip
