"""`prompt_attention`: causal attention of a whole prompt on a CPU. See README.md."""

from kernels.prompt_attention.dispatch import IMPLS, prompt_attention
from kernels.prompt_attention.trial import faster_than_torch

__all__ = ["IMPLS", "faster_than_torch", "prompt_attention"]
