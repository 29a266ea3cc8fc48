"""`python -m kernels.native` builds the C++ kernels and prints which instructions they use."""

import torch

from kernels import native

if __name__ == "__main__":
    reason = native.why_not()
    floats = "" if reason else f"{native.isa(torch.bfloat16)} (bfloat16), {native.isa(torch.float32)} (float32)"
    tiles = f", {native.tiles()} (many tokens)" if native.tiles() else ""
    print("C++ kernels:", reason or f"{floats}, {native.integers() or 'nothing'} (products of 8-bit codes){tiles}")
