"""`python -m kernels.trellis_matmul` prints the distortion of normal sequences, in words and as JSON lines."""

import json

import torch

from kernels.trellis_matmul import BITS, STATES, UNIT, values, viterbi, walk_states

LENGTH = 192


def distortion(bits: int, states: int, walks: int) -> tuple[float, float]:
    """Mean squared error of the encoder on standard normal sequences, and its standard error."""
    x = torch.randn(walks, LENGTH, generator=torch.Generator().manual_seed(0))
    table = values(states) / UNIT
    symbols = viterbi(x, table, bits=bits)
    errors = (x - table[walk_states(symbols, bits, states)]).square().double().mean(1)
    return errors.mean().item(), errors.std().item() / walks**0.5


if __name__ == "__main__":
    for bits in BITS:
        for states in STATES:
            walks = 240 if states < 16 else 120
            mean, stderr = distortion(bits, states, walks)
            print(f"{bits} bits, states of {states}: {mean:.4f} ± {stderr:.4f}")
            print(
                json.dumps({"key": f"{bits} bits, {states}", "walks": walks, "mse": mean, "stderr": stderr}), flush=True
            )
