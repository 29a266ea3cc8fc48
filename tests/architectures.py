"""Tiny configurations of every decoder of transformers: the one table that all tests build their models from.

A configuration has the sizes of SIZES that its class knows, and what its own row gives besides. A tuple is a pattern,
which is repeated over the layers; a function is called with the number of layers; None leaves a size out. A name with a
colon is another variant of the architecture before the colon.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": 8,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    # gated delta rule, state space models
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "state_size": 8, "mamba_dt_rank": 8,
    # other names of the same
    "n_embd": 64, "n_head": 4, "n_positions": 128, "n_ctx": 128, "n_inner": 96, "d_model": 64, "n_heads": 4,
    "num_heads": 4, "ffn_dim": 96, "attention_heads": 4, "rotary_dim": 8,
    # indices of sparse attention, hyper-connections
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "o_groups": 2, "o_lora_rank": 16,
    "shared_intermediate_size": 64, "dense_intermediate_size": 96,
}  # fmt: skip
# These stand for the others where a test takes many architectures: of every kind a few, and some that are built alike.
KINDS = (("llama", "qwen3", "gemma2", "gemma3_text"), ("gpt2", "opt", "phi"), ("qwen2_moe", "gpt_oss"))
ALIKE = ("mistral", "qwen2", "phi3", "gpt_neox", "qwen3_moe", "mixtral")
USUAL = (*sum(KINDS, ()), *ALIKE)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # the first one that a class knows
_MLA = {"num_key_value_heads": 4}
_WINDOWS = {"layer_types": ("sliding_attention", "full_attention")}
_DELTA = {"layer_types": ("linear_attention", "full_attention")}
_MAMBA = {"layer_types": ("mamba", "attention")}
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 8,
            "d_rel": 8, "rel_extent": 16}  # fmt: skip
_HEADLESS = {"head_dim": None}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # rotary attention, RMS norms, gated MLP
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": None},
    "qwen3": {"head_dim": 32},
    "arcee": {},
    "apertus": {},
    "bitnet": {},
    "cwm": {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")},
    "ernie4_5": {},
    "exaone4": _WINDOWS,
    "flint": {},
    "gemma": {},
    "gemma2": {},
    "gemma2:scaled": {"query_pre_attn_scalar": 16},
    "gemma3_text": _WINDOWS,
    "glm": {},
    "glm4": {},
    "granite": {  # the factors of its smallest model
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 8.0,
    },
    "granite_swa": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "jais2": {},
    "ministral": _WINDOWS,
    "ministral3": {},
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "phi3": {"sliding_window": None},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": (1, 1, 1, 0)},
    "vaultgemma": _WINDOWS,
    "gemma4_unified_text": {
        "layer_types": ("sliding_attention",) * 3 + ("full_attention",),
        "per_layer_config": {"03": {"head_dim": 32}},
    },
    "kolibri1": {},
    "lfm3": {"layer_types": ("conv", "full_attention")},
    "beam": {},
    # parallel or interleaved parts, layer norms, other positions
    "bloom": {},
    "codegen": {},
    "cohere": {},
    "cohere2": _WINDOWS,
    "ctrl": {"dff": 96},
    "diffllama": {},
    "doge": {},
    "falcon": _HEADLESS,
    "falcon:new": {**_HEADLESS, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon:alibi": {**_HEADLESS, "alibi": True, "multi_query": False},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": lambda layers: [[["global", "local"], layers // 2]], "window_size": 8},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gptj": {},
    "modernbert-decoder": {"local_attention": 8},
    "mpt": {"expansion_ratio": 2, "max_seq_len": 128},
    "nemotron": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 64},
    "opt:projected": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "persimmon": {},
    "phi": {},
    "stablelm": {},
    "starcoder2": {},
    "biogpt": {},
    "xglm": {},
    # mixtures of experts
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 6, "norm_topk_prob": True},
    "qwen2_moe": {},
    "gpt_oss": _WINDOWS,
    "afmoe": {},
    "aria_text": {"moe_num_experts": 4, "moe_num_shared_experts": 1},
    "cohere2_moe": _WINDOWS,
    "dbrx": {
        "max_seq_len": 128,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "dots1": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jetmoe": {"kv_channels": 16},
    "laguna": {},
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": (1, 0),
    },
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "olmoe": {},
    "phimoe": {},
    "solar_open": {},
    # latent attention
    "axk1": _MLA,
    "axk2": _MLA,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "deepseek_v4": {},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "hy_v4": _MLA,
    "kimi_linear": {**_MLA, **_DELTA, "linear_head_dim": 16, "linear_num_heads": 4},
    "longcat_flash": {
        **_MLA,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "moe_topk": 2,
        "head_dim": 8,
    },
    "minicpm3": _MLA,
    "youtu": _MLA,
    "dots3_note_text": {**_MLA, "head_dim": 24, "shared_experts_intermediate_size": 32, "per_layer_config": {}},
    # shared keys and values, extra inputs of layers
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": (0.5, 0.0),
        "intermediate_size": (96,),
        **_WINDOWS,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        **_WINDOWS,
    },
    # short convolutions, linear attention, state spaces
    "bailing_hybrid": {**_MLA, **_DELTA, "linear_head_dim": 16, "linear_num_heads": 4},
    "bamba": {"attn_layer_indices": lambda layers: list(range(1, layers, 2))},
    "falcon_h1": {"mamba_d_ssm": 128},
    "falcon_mamba": {},
    "granitemoehybrid": _MAMBA,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ("conv", "full_attention")},
    "lfm2_moe": {"layer_types": ("conv", "full_attention"), "num_dense_layers": 1},
    "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": {**_DELTA, "block_size": 16},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "layers_block_type": ("mamba", "attention", "mlp", "attention"),
    },
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": 64, "context_length": 128},
    "zamba2": {
        "layers_block_type": ("mamba", "hybrid"),
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "chunk_size": 8,
        "use_shared_mlp_adapter": True,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "zamba": {
        "mamba_dt_rank": 8,
        "n_mamba_heads": 2,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": ("linear_attention", "linear_attention", "hybrid", "hybrid"),
    },
    "xlstm": {"v_head_dim": None, "hidden_size": 128, "embedding_dim": 128},
    "hrm_text": {"H_cycles": 1, "L_cycles": 2, "L_bp_cycles": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "inkling_text": _INKLING,
    "inkling2_text": {**_INKLING, "unpadded_vocab_size": VOCABULARY},
    "moshi": {},
    "qwen4_exp_text": {
        **_DELTA,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 96,
    },
}


# Names of AutoModelForCausalLM without a row, by the reason.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "the decoder half of a model with an encoder": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen", "musicgen_melody",
        "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper",
    ),
    "a BERT or another encoder with a head, which no checkpoint for text generation has": (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
        "xlm-roberta-xl", "xlnet", "xmod",
    ),
    "a model of images or sound, whose decoder has a row of its own": (
        "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4",
        "mllama", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
    ),
    "the classes of GPT-2 under another name": ("gpt-sw3",),
    "the classes of Llama under another name": ("internlm3", "iquestcoder"),
    "reads bytes in patches, or tokens behind prompts of its own": ("blt", "cpmant"),
    "a drafting model, which reads the keys and values of another": ("gemma4_assistant", "gemma4_unified_assistant"),
}  # fmt: skip


def tiny_config(architecture: str, layers: int = 2, **more: Any) -> PreTrainedConfig:
    """The configuration of a row with this many layers, and with these settings besides."""
    kind = CONFIG_MAPPING[architecture.partition(":")[0]]
    known = {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
    depth = next(name for name in LAYERS if name in known)
    given = {depth: layers, **{name: value for name, value in SIZES.items() if name in known}}
    given |= ARCHITECTURES[architecture] | more
    settings = {name: _for_layers(value, given[depth]) for name, value in given.items() if value is not None}
    return kind(**_tokens(kind) | settings)


def depth_of(architecture: str) -> int:
    """The number of layers of a model that has each of its kinds of layers twice."""
    config = tiny_config(architecture, 4)
    kinds = (getattr(config, name, None) or () for name in ("layer_types", "layers_block_type"))
    alike = all(len(set(one)) < 2 for one in kinds) and not any(map(_is_pattern, ARCHITECTURES[architecture].values()))
    return 2 if alike else 4


def _is_pattern(value: Any) -> bool:
    return isinstance(value, tuple) or callable(value)


def _for_layers(value: Any, layers: int) -> Any:
    if isinstance(value, tuple):
        return [value[i % len(value)] for i in range(layers)]
    return value(layers) if callable(value) else value


def _tokens(kind: type[PreTrainedConfig]) -> dict[str, int | None]:
    """Numbers for the special tokens that the class has outside the vocabulary; nothing ends a text then."""
    own = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return {name: new for name, new in own.items() if _largest(getattr(kind, name, None)) >= VOCABULARY}


def _largest(token: int | list[int] | None) -> int:
    return max(token, default=0) if isinstance(token, list) else token or 0


def tiny_model(architecture: str, seed: int = 0, layers: int = 2, **more: Any) -> nn.Module:
    """A random model of some ten thousand weights, in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, layers, **more)).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.is_meta:
            continue
        if not p.isfinite().all() or p.abs().max() > 1e6:  # not initialised by transformers
            p.normal_(std=0.05)
        elif p.dim() > 1 and not name.endswith("A_log"):  # so small at first that attention and experts hardly differ
            p.mul_(4)
    return model
