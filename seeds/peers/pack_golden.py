"""How other tools lay out integer codes, for tests/kernels/packing_golden.json: run it in each peer's environment.

    /tmp/peers/llmc/bin/python seeds/peers/pack_golden.py compressed-tensors
    /tmp/peers/gptqmodel/bin/python seeds/peers/pack_golden.py gptqmodel

Codes are a formula that the test repeats, and scales are one, so that nothing but the order is at stake.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "kernels" / "packing_golden.json"
OUT, IN, GROUP = 32, 64, 32


def codes(bits: int) -> torch.Tensor:
    """[OUT, IN] in [0, 2^bits): no row, column or period like another."""
    n, k = torch.meshgrid(torch.arange(OUT), torch.arange(IN), indexing="ij")
    return (n * 7919 + k * 104729 + n * k * 31) % 8191 % (1 << bits)


def compressed_tensors(bits: int) -> list[list[int]]:
    """weight_packed [out, in * bits / 32]"""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    return pack_to_int32((codes(bits) - (1 << (bits - 1))).to(torch.int8), bits).tolist()


def gptqmodel(bits: int) -> list[list[int]]:
    """qweight [in * bits / 32, out]"""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    packed = TorchLinear(
        bits=bits, group_size=GROUP, sym=True, desc_act=False, in_features=IN, out_features=OUT, bias=False
    )
    middle = 1 << (bits - 1)
    dense = torch.nn.Linear(IN, OUT, bias=False)
    dense.weight.data = (codes(bits) - middle).float()
    ones = torch.ones(OUT, IN // GROUP)
    packed.pack_original(dense, ones, ones * middle, torch.arange(IN) // GROUP)
    return packed.qweight.tolist()


if __name__ == "__main__":
    peer = sys.argv[1]
    found = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    pack = {"compressed-tensors": compressed_tensors, "gptqmodel": gptqmodel}[peer]
    found[peer] = {"version": version(peer), "words": {str(bits): pack(bits) for bits in (2, 3, 4, 8)}}
    GOLDEN.write_text(json.dumps(found) + "\n")
