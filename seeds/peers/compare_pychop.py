"""Our roundings to small floats beside those of the library pychop: how many of 200,000 values differ.

    python -m venv /tmp/peers/pychop && /tmp/peers/pychop/bin/pip install pychop==0.6.2 torch==2.13.0 transformers
    PYTHONPATH=. /tmp/peers/pychop/bin/python seeds/peers/compare_pychop.py

`--golden tests/compress/pychop_golden.json` writes a small table of values and pychop's results instead, which
tests/compress/test_emulate.py compares with ours.

Values are those of a log-normal distribution over the whole range of each format, subnormal numbers included, in
float64, in which pychop takes logarithms without error. Its formats keep their largest exponent for infinities, as IEEE
754 does, so that ours are made to do the same; what is larger than the largest number is left out.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from pychop import Chop

from compress.floats import Float

ROUNDINGS = {"nearest": 1, "up": 2, "down": 3, "zero": 4}  # as pychop numbers them
FORMATS = ((2, 1), (2, 3), (3, 2), (4, 3), (5, 2), (5, 10), (8, 7))


def differing(exponent: int, mantissa: int, rounding: str, x: torch.Tensor) -> tuple[int, int]:
    """The number of values that differ, and the number of all values."""
    ours = Float(exponent, mantissa, specials=True)
    inside = x[x.abs() <= ours.largest]
    return int((ours.round(inside, rounding) != chopped(exponent, mantissa, rounding, inside)).sum()), len(inside)


def chopped(exponent: int, mantissa: int, rounding: str, x: torch.Tensor) -> torch.Tensor:
    """Values, rounded by pychop."""
    return Chop(exp_bits=exponent, sig_bits=mantissa, rmode=ROUNDINGS[rounding])(x)


def golden() -> dict:
    """For each format, values on and between its numbers, and pychop's result of each rounding."""
    formats = {}
    for exponent, mantissa in FORMATS:
        x = between(exponent, mantissa)
        rounded = {name: chopped(exponent, mantissa, name, x).tolist() for name in ROUNDINGS}
        formats[f"e{exponent}m{mantissa}"] = {"x": x.tolist()} | rounded
    command = "python seeds/peers/compare_pychop.py --golden tests/compress/pychop_golden.json"
    return {"pychop": version("pychop"), "command": command, "formats": formats}


def between(exponent: int, mantissa: int) -> torch.Tensor:
    """Numbers at both ends of the subnormal ones, in the middle and at the top; the middle between each and the next;
    and a 256th of a step below and above it. Both signs, without zeros."""
    numbers = Float(exponent, mantissa, specials=True).values().double()
    numbers = numbers[numbers >= 0]
    normal = 1 << mantissa  # place of the smallest normal number
    low = torch.tensor(sorted({0, 1, normal - 1, normal, len(numbers) // 2, len(numbers) - 2}))
    shares = torch.tensor([0, 1 / 2 - 1 / 256, 1 / 2, 1 / 2 + 1 / 256], dtype=torch.float64)
    x = torch.lerp(numbers[low, None], numbers[low + 1, None], shares).flatten()
    return torch.cat([x[x > 0], -x[x > 0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, help="write a small table of pychop's results into this file")
    if file := parser.parse_args().golden:
        file.write_text(json.dumps(golden()) + "\n")
        return
    torch.manual_seed(0)
    rows = []
    for exponent, mantissa in FORMATS:
        reach = 1 << (exponent - 1)
        x = (
            torch.randn(200_000, dtype=torch.float64)
            * torch.rand(200_000, dtype=torch.float64).mul(2).sub(1).mul(reach + mantissa).exp2()
        )
        for rounding in ROUNDINGS:
            wrong, count = differing(exponent, mantissa, rounding, x)
            print(f"e{exponent}m{mantissa} {rounding:8} {wrong} of {count} differ")
            rows.append({"format": f"e{exponent}m{mantissa}", "rounding": rounding, "differ": wrong, "of": count})
    differ, compared = (sum(row[key] for row in rows) for key in ("differ", "of"))
    print(json.dumps({"pychop": version("pychop"), "differ": differ, "of": compared, "rows": rows}))


if __name__ == "__main__":
    main()
