"""KV cache in float8 (e4m3; Micikevicius et al., 2022, arXiv:2209.05433): a byte for each number, with its own
exponent."""

from dataclasses import dataclass

from compress.kv.policy import Storage
from compress.kv.precision import Precision
from compress.method import knob
from kernels.kv_decode import GROUPS


@dataclass(frozen=True, kw_only=True)
class KVFloat8(Storage):
    """Stores keys and values in float8 (e4m3), with one scale for each group of positions of a head, or with none.

    Prompts are read with exact keys and values, which are stored as codes afterwards. Codes are computed again from
    codes where a policy evicts while text is generated. vLLM and TensorRT-LLM store caches in e4m3 with one scale per
    tensor, which is found by calibration or is 1. `scales="one"` is the latter: values beyond 448 are clamped, and
    values below 2^-10 become 0. With `scales="group"` a group of positions takes its scale when it is full, so that no
    calibration is needed and nothing is clamped; the last positions stay in 16 bits until then.

    e4m3 has three bits of mantissa: the error of a number is at most a sixteenth of it, whatever the other channels
    hold. `kv_int` in 8 bits has a scale for each channel of its keys and for each value, and its error is at most a
    510th of the range that a scale covers. It loses far less, in 5 % more bytes (128 channels, groups of 64). KL in
    nats per token on 4 windows of 512 of wikitext-2, read in pieces of 64, on SmolLM2-135M and gemma3-270m: 0.0010
    (standard error 0.0001) and 0.0007 (0.0001), with `scales="one"` 0.0011 (0.0001) and 0.0008 (0.0001); `kv_int`
    0.00002 and 0.00001 in 8 bits, 0.0050 (0.0002) and 0.0026 (0.0004) in 4: `python seeds/bytes_and_loss.py --model
    smollm2-135m --samples 1 --seqlen 64 --texts wikitext2 --window 512 --windows 4 kv_fp8 "kv_fp8(scales=one)"
    "kv_int(bits=8)" "kv_int(bits=4)"`, and with `--model gemma3-270m`.

    float8 may save time on GPUs that support it (compute capability 8.9 and later): the loop of its kernel has 30 %
    fewer instructions than that for 8-bit integers. The instructions were counted, but not timed on a GPU
    (`kernels/kv_decode/README.md`). CPUs read it in plain torch, which is slow.
    """

    group_size: int = knob(64, "positions that become codes together, and share a scale", choices=GROUPS)
    residual: int = knob(32, "least number of last tokens that stay in 16 bits", range=(0, 65536))
    scales: str = knob(
        "group",
        "scale of each group of positions of a head: the one that its largest number needs (group), or always 1, as in "
        "vLLM without calibration (one)",
        choices=("group", "one"),
        describes=True,
    )

    name = "kv_fp8"
    source = "Micikevicius et al. 2022, arXiv:2209.05433, section 3"

    @property
    def precision(self) -> Precision:
        scale = None if self.scales == "group" else 1.0
        return Precision(8, self.group_size, self.residual, float8=True, scale=scale)
