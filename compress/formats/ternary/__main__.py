"""Bits per weight of random ternary matrices, and the time to encode and decode them:
`python -m compress.formats.ternary`."""

import json
import time
from math import log2

import torch

from compress.formats.ternary.words import Ternary, decode, dictionary, encode

SHARES = (0.8, 0.885, 0.95, 0.99)  # shares of zeros
SHAPE = (1024, 4096)
P0 = 0.885


def main() -> None:
    generator, ones = torch.Generator().manual_seed(0), torch.ones(SHAPE[0])
    dictionary(P0, torch.device("cpu"))
    print(f"{SHAPE[0]} x {SHAPE[1]}, dictionary for {P0:g} zeros; without the 6 bytes of each row")
    print("zeros  entropy   bits  seconds to write and to read")
    rows = []
    for share in SHARES:
        place = torch.rand(SHAPE, generator=generator)
        symbols = (place > share).to(torch.uint8) + (place > (1 + share) / 2).to(torch.uint8)
        start = time.perf_counter()
        codes, counts = encode(symbols, P0)
        between = time.perf_counter()
        decode(Ternary(codes, counts, -ones, ones, SHAPE, P0))
        end = time.perf_counter()
        entropy = -share * log2(share) - (1 - share) * log2((1 - share) / 2)
        bits = 16 * len(codes) / symbols.numel()
        print(f"{share:5.1%}  {entropy:7.3f}  {bits:5.3f}  {between - start:.2f} and {end - between:.2f}")
        rows.append(
            {"zeros": share, "entropy": entropy, "bits": bits, "write_s": between - start, "read_s": end - between}
        )
    print(json.dumps({"shape": SHAPE, "dictionary": P0, "rows": rows}))


if __name__ == "__main__":
    main()
