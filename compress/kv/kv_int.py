"""Integer KV cache (after KIVI, Liu et al., 2024, arXiv:2402.02750): keys by channel, values by token, the last ones as
is."""

from dataclasses import dataclass

from compress.kv.policy import Storage
from compress.kv.storage import Precision
from compress.method import knob
from kernels.kv_decode import GROUPS


@dataclass(frozen=True, kw_only=True)
class KVInt(Storage):
    """Stores keys and values in 8, 4 or 2 bits: keys with scales per channel, values with one scale per position.

    Prompts are read with exact keys and values; those are codes from then on, and codes are made anew of codes where a
    policy evicts while text is generated, which adds to the error of keys. Decode kernels read the codes (8 and 4
    bits). KIVI has a scale for every 32 channels of a value; here it is one for all of a head, which the kernel
    multiplies into the probabilities.

    `rotate_keys` turns each head's keys, after RoPE, by a normalised Hadamard matrix before they become codes, and the
    queries alike before they meet them (QuaRot, Ashkboos et al., 2024, arXiv:2404.00456, section 4; R3 of SpinQuant,
    arXiv:2405.16406), so that scores change by the rounding alone. Those papers give each key one scale; here channels
    have their own scales, which take outlier channels by themselves, so that less is left to gain: on SmolLM2-135M the
    KL of answers behind 1,024 tokens (20 contexts, question hidden) is 0.018 nats per token with rotation and 0.023
    without in 4 bits (difference 0.005, standard error 0.005), and 1.22 against 2.25 in 2 bits (1.03, 0.35):
    `workbench run kv_eviction -p recipe "kv_int(bits=2)" -p compare "rotated: kv_int(bits=2, rotate_keys=True)"
    -p tasks '["word"]' -p samples 20 -p visibilities '["agnostic"]' -p speed_contexts '[]'`, and with `bits=4`.
    Values are not turned; `rotate(heads=True)` folds their rotation into the weights.
    """

    bits: int = knob(4, "of a code", choices=(8, 4, 2), describes=True)
    group_size: int = knob(64, "positions that share the scales of their keys", choices=GROUPS, describes=True)
    residual: int = knob(32, "last tokens at least that stay in 16 bits", range=(0, 65536))
    rotate_keys: bool = knob(
        False, "rotate each head's keys after RoPE by a Hadamard matrix before they become codes, and its queries alike"
    )

    name = "kv_int"
    source = "Liu et al. 2024, arXiv:2402.02750, section 3.2"

    @property
    def precision(self) -> Precision:
        return Precision(self.bits, self.group_size, self.residual, self.rotate_keys)
