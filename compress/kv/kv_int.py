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
    """

    bits: int = knob(4, "of a code", choices=(8, 4, 2), describes=True)
    group_size: int = knob(64, "positions that share the scales of their keys", choices=GROUPS, describes=True)
    residual: int = knob(32, "last tokens at least that stay in 16 bits", range=(0, 65536))

    name = "kv_int"
    source = "Liu et al. 2024, arXiv:2402.02750, section 3.2"

    @property
    def precision(self) -> Precision:
        return Precision(self.bits, self.group_size, self.residual)
