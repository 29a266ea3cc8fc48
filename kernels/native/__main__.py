"""`python -m kernels.native`: build the C++ kernels now, and say what they will use."""

import torch

from kernels import native

if __name__ == "__main__":
    reason = native.why_not()
    print(
        f"C++ kernels: {native.isa(torch.bfloat16) + ' (bfloat16), ' + native.isa(torch.float32) if reason is None else reason}"
    )
