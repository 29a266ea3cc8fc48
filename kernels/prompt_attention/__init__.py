"""`prompt_attention`: causal attention of a whole prompt on a CPU. See README.md.

From FlashAttention-2 (arXiv:2307.08691): threads divide the queries of a head among them, keys are the inner loop,
blocks of keys that no query of an item sees are skipped, and sums of values are divided by the sum of probabilities
once, at the end. Its division of work among the warps of a GPU has no counterpart here.
"""

from kernels.prompt_attention.dispatch import IMPLS, prompt_attention
from kernels.prompt_attention.trial import faster_than_torch

__all__ = ["IMPLS", "faster_than_torch", "prompt_attention"]
