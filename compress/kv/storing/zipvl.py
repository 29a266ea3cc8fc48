"""ZipVL (He et al., 2024, arXiv:2410.08584): more bits for the tokens that make up most of a layer's attention."""

from dataclasses import dataclass

from torch import Tensor

from compress.kv.allocation import kept
from compress.kv.policy import Storage
from compress.kv.precision import Precision
from compress.kv.seen import Seen
from compress.method import knob
from kernels.kv_decode import GROUPS


@dataclass(frozen=True, kw_only=True)
class ZipVL(Storage):
    """Stores the tokens that get most of a layer's attention in more bits, and the other tokens in fewer.

    After a prompt, the attention of its last tokens (probes) is summed up. The number of important tokens of a layer is
    the smallest number of tokens that together get the share `mass` of this attention, as the mean over kv heads, so
    that layers of concentrated attention keep few. Each kv head then takes that many tokens, by the mean attention from
    the probes that see the token. New tokens are stored in more bits, and the last ones in 16 bits. Keys have scales
    per channel and group of positions, values per position, as in `kv_int`; positions of either part that fill no group
    stay in 16 bits.

    Deviations: the paper also leaves unimportant tokens out of the attention of the prompt, which saves time there; its
    second version drops them instead of storing them in 2 bits. Its probes are the last tokens and random ones; here
    they are the last tokens. If a prompt is read in pieces of more than 8 tokens, each piece is divided when it
    arrives: tokens in fewer bits stay so, and the codes of the others are computed again from their codes, which adds
    to their error. Attention reads both parts and adds them up exactly. The method can be combined with a projection,
    but not with policies or readings.
    """

    bits: int = knob(4, "bits of a code of important tokens", choices=(8, 4), describes=True)
    low_bits: int = knob(2, "bits of a code of the other tokens", choices=(4, 2), describes=True)
    mass: float = knob(
        0.975, "share of a layer's attention that important tokens make up", range=(0.0, 1.0), describes=True
    )
    probes: int = knob(64, "tokens at the end of a prompt whose attention counts", range=(1, 4096))
    group_size: int = knob(32, "positions that share the scales of their keys", choices=GROUPS)
    residual: int = knob(32, "least number of last tokens that stay in 16 bits", range=(0, 65536))
    rotate_keys: bool = knob(
        False,
        "rotate each head's keys after RoPE by a Hadamard matrix before they become codes, and its queries too",
    )

    name = "zipvl"
    source = "He et al. 2024, arXiv:2410.08584, version 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_bits >= self.bits:
            raise ValueError(f"`low_bits` (={self.low_bits}) of {self.name} must be below `bits` (={self.bits})")

    @property
    def precision(self) -> Precision:
        return Precision(self.bits, self.group_size, self.residual, self.rotate_keys)

    @property
    def lesser(self) -> Precision:
        return Precision(self.low_bits, self.group_size, 0, self.rotate_keys)

    def important(self, seen: Seen) -> Tensor:
        got = seen.attention(self.probes).sum((2, 3))  # [B, H, T]
        count = fewest(got, self.mass)[:, None].expand(got.shape[:2])
        per_probe = got / seen.probes(self.probes).clamp(min=1)
        return kept(per_probe, seen.valid, count)


def fewest(got: Tensor, mass: float) -> Tensor:
    """[B]: the least n for which the n largest of attention [B, H, T] are this share of it, in the mean over heads."""
    ranked = got.sort(-1, descending=True).values
    share = (ranked / ranked.sum(-1, keepdim=True).clamp(min=1e-30)).mean(1).cumsum(-1)  # [B, T]
    return ((share < mass - 1e-6).sum(-1) + 1).clamp(max=got.shape[-1])
