"""The models whose steps `kernels.harness.model` times: their shapes, and random weights in a stored form."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.int_matmul import Packed, int_matmul, pack
from kernels.tuning import trying
from kernels.w4a8_matmul import w4a8_matmul
from kernels.w8a8_matmul import W8, quantize_weight, w8a8_matmul

GROUP = 128
KINDS = ("bfloat16", "int4", "int8", "fp8", "w4a8")
SHAPES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama-8b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
        ),
    ),
    "llama-1b": (  # Llama-3.2-1B
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-8b": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(
            num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        ),
    ),
    "qwen2.5-72b": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(
            num_hidden_layers=80, hidden_size=8192, intermediate_size=29568, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=152064, max_position_embeddings=131072, rope_theta=1000000.0,
        ),
    ),
    "yi-34b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=60, hidden_size=7168, intermediate_size=20480, num_attention_heads=56,
            num_key_value_heads=8, vocab_size=64000, max_position_embeddings=200000, rope_theta=5000000.0,
        ),
    ),
    "llama-405b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
        ),
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config),  # whose defaults are those of the model of 671B
    "toy": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=2048,
        ),
    ),
}  # fmt: skip


class RoundedLinear(nn.Module):
    """A linear with its weight rounded to nearest, in a format of the kernels; the parts of its interface that
    `kernels.step.gpu` reads are those of `compress.linear.CompressedLinear`."""

    bias = None

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        W = linear.weight.detach()
        self.kind, self.out_features, self.in_features = kind, *W.shape
        self.packed: Packed | None = None
        self.w8: W8 | None = None
        if kind in ("int4", "w4a8"):
            groups = W.float().unflatten(1, (-1, GROUP))
            scale = (groups.abs().amax(-1).clamp_min(1e-8) / 7).to(torch.bfloat16)
            codes = (groups / scale.float()[..., None]).round_().clamp_(-8, 7).add_(8).flatten(1).to(torch.uint8)
            self.packed = pack(codes, scale, None, bits=4, group_size=GROUP)
        else:
            self.w8 = quantize_weight(W, torch.int8 if kind == "int8" else torch.float8_e4m3fn)

    @property
    def parts(self) -> tuple["RoundedLinear", ...]:
        """The parts whose sum is the weight."""
        return (self,)

    @property
    def transform(self) -> SimpleNamespace | None:
        """The rounding of x before the product, as `compress.transforms.Rounding` describes it; None: the format rounds
        it, or nothing does."""
        eight_bits = {"in_integers": True, "bits": 8, "group_size": -1, "step": None, "wide": 0}
        return SimpleNamespace(**eight_bits) if self.kind == "w4a8" else None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight."""
        stored = self.packed if self.w8 is None else self.w8
        return sum(t.numel() * t.element_size() for t in stored if isinstance(t, Tensor))

    def forward(self, x: Tensor) -> Tensor:
        if self.w8 is not None:
            return w8a8_matmul(x, self.w8)
        return w4a8_matmul(x, self.packed) if self.kind == "w4a8" else int_matmul(x, self.packed)


@torch.no_grad()
def made(shape: str, kind: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model with random weights; all but the embedding and the head stored as `kind` says."""
    torch.manual_seed(seed)
    cls, config = SHAPES[shape]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = cls(config()).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    if kind != "bfloat16":
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, linear in list(parent.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(parent, name, RoundedLinear(linear, kind))
                        linear.weight = None
    return model


@contextmanager
def in_slabs(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """While the block runs, so many tokens are multiplied by parts of int4 weights that stay in a GPU's cache, and not
    by whole weights; see `kernels.packed_matmul.launch.SLABS`."""
    from kernels.int_matmul.triton import key
    from kernels.packed_matmul.launch import DEQUANTISE

    packed = [m.packed for m in model.modules() if isinstance(m, RoundedLinear) and m.packed is not None]
    with ExitStack() as stack:
        for one in {key(w, tokens) for w in packed}:
            stack.enter_context(trying("int_matmul", one, DEQUANTISE))
        yield
