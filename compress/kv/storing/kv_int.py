"""Integer KV cache (after KIVI, Liu et al., 2024, arXiv:2402.02750): keys by channel, values by token, the last ones as
is."""

from dataclasses import dataclass

from compress.kv.policy import Storage
from compress.kv.precision import Precision
from compress.method import knob
from kernels.kv_decode import GROUPS, VALUE_BITS


@dataclass(frozen=True, kw_only=True)
class KVInt(Storage):
    """Stores keys and values in 8, 4 or 2 bits: keys with scales per channel, values with one scale per position.

    Prompts are read with exact keys and values, which are stored as codes afterwards. Codes are computed again from
    codes where a policy evicts while text is generated, which adds to the error of keys. Decode kernels read the codes
    (on a GPU 8 and 4 bits). KIVI has a scale for every 32 channels of a value; here it is one for all of a head, which
    the kernel multiplies into the probabilities.

    `rotate_keys` rotates each head's keys, after RoPE, by a normalised Hadamard matrix before they become codes, and
    rotates the queries by the same matrix (QuaRot, Ashkboos et al., 2024, arXiv:2404.00456, section 4; R3 of SpinQuant,
    arXiv:2405.16406), so that scores change by the rounding alone. Those papers give each key one scale; here each
    channel has its own scale, which handles outlier channels by itself, so a rotation gains less: on SmolLM2-135M the
    KL of answers behind 1,024 tokens (20 contexts, question hidden) is 0.018 nats per token with rotation and 0.023
    without in 4 bits (difference 0.005, standard error 0.005), and 1.22 against 2.25 in 2 bits (1.03, 0.35): `workbench
    run kv_eviction -p recipe "kv_int(bits=2)" -p compare "rotated: kv_int(bits=2, rotate_keys=True)" -p tasks
    '["word"]' -p samples 20 -p visibilities '["agnostic"]' -p speed_contexts '[]'`, and with `bits=4`.

    `value_bits` gives values fewer bits than keys, and `rotate_values` rotates them by the same matrix before they
    become codes; the output of attention is rotated back. With rotated keys in 4 bits SmolLM2-135M loses 0.0050 nats
    per token (standard error 0.0005) with values in 4 bits and 0.0045 (0.0003) if they are rotated, 0.0100 (0.0008) and
    0.0069 (0.0005) in 3 bits, and 0.0215 (0.0005) in 2 bits if they are rotated: `python seeds/bytes_and_loss.py
    "kv_int(bits=4, rotate_keys=True, value_bits=3, rotate_values=True)" --model smollm2-135m --samples 1 --seqlen 64
    --texts wikitext2 --window 512 --windows 4`, with one recipe after the other. The C++ kernel reads values of any of
    these widths. The kernel for GPUs reads values of the keys' width alone; the reference reads the others.
    `rotate(heads=True)` folds a rotation of values into the weights instead.

    `keys="token"` gives each key one scale for all channels of its head, as QuaRot, SpinQuant and FireQ do. One large
    channel then makes the step too large for all others. There are two remedies: `rotate_keys`, or the two scalings of
    FireQ (Baek et al., 2025, arXiv:2505.20839): `smooth_keys` before RoPE, and `outlier_channels` after it, whose
    factors are undone in the queries. FireQ finds these factors on the calibration tokens, for the largest channels and
    those that RoPE rotates with them. Here they are found when the first codes of a sequence are made, for the largest
    channels, and they are powers of two, so that keys that are not codes yet are not rounded. The codes of FireQ are
    symmetric around 0 (`symmetric`). No kernel reads scales by token yet: decoding dequantises all keys at every step.
    On SmolLM2-135M in 4 bits either scaling loses less than neither, and both together do not lose less than either (KL
    in nats per token on 2 windows of 512 of wikitext-2, read in pieces of 64): symmetric codes as they are 0.0145
    (standard error 0.0010), `smooth_keys` 0.0122 (0.0001), `outlier_channels=4` 0.0111 (0.0001), `smooth_keys(leave=2)`
    with it 0.0160 (0.0031); codes that are not symmetric lose less without any scaling, 0.0073 (0.0001), and rotated
    ones 0.0043 (0.0001).
    """

    bits: int = knob(4, "bits of a code", choices=(8, 4, 2), describes=True)
    group_size: int = knob(64, "positions that share the scales of their keys", choices=GROUPS, describes=True)
    residual: int = knob(32, "least number of last tokens that stay in 16 bits", range=(0, 65536))
    rotate_keys: bool = knob(
        False,
        "rotate each head's keys after RoPE by a Hadamard matrix before they become codes, and its queries too",
    )
    value_bits: int = knob(0, "bits of a code of a value; 0: as many as for keys", choices=(0, *VALUE_BITS))
    rotate_values: bool = knob(
        False,
        "rotate each head's values in the same way before they become codes, and rotate the output of attention back",
    )
    keys: str = knob(
        "channel",
        "keys have a scale per channel for a group of positions (channel), or one per position (token)",
        choices=("channel", "token"),
    )
    symmetric: bool = knob(
        False,
        "with keys='token', the grid of keys is symmetric around 0, as in FireQ; False: from the smallest to the "
        "largest",
    )
    outlier_channels: int = knob(
        0,
        "number of the largest channels of each head that are scaled down to the next largest after RoPE; for "
        "keys='token'",
        range=(0, 256),
    )

    name = "kv_int"
    source = "Liu et al. 2024, arXiv:2402.02750, section 3.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symmetric and self.keys != "token":
            raise ValueError(
                f"`symmetric` (=True) of {self.name} is for keys with a scale per token: it needs keys='token'"
            )
        if self.outlier_channels and (self.rotate_keys or self.keys != "token"):
            raise ValueError(
                f"`outlier_channels` (={self.outlier_channels}) of {self.name} scales channels that share a scale and "
                "are not mixed by a rotation: it needs keys='token' and rotate_keys=False"
            )

    @property
    def precision(self) -> Precision:
        by_token = self.keys == "token"
        how = (self.rotate_keys, by_token, self.symmetric, self.outlier_channels)
        more = {"value_bits": self.value_bits, "rotates_values": self.rotate_values}
        return Precision(self.bits, self.group_size, self.residual, *how, **more)
