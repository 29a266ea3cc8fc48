"""Our roundings to small floats beside those of the library pychop: how many of 200,000 values differ.

    python -m venv /tmp/peers/pychop && /tmp/peers/pychop/bin/pip install pychop==0.6.2 torch==2.13.0 transformers
    PYTHONPATH=. /tmp/peers/pychop/bin/python seeds/peers/compare_pychop.py

Values are those of a log-normal distribution over the whole range of each format, subnormal numbers included, in
float64, in which pychop takes logarithms without error. Its formats keep their largest exponent for infinities, as IEEE
754 does, so that ours are made to do the same; what is larger than the largest number is left out.
"""

import json
from importlib.metadata import version

import torch
from pychop import Chop

from compress.floats import Float

ROUNDINGS = {"nearest": 1, "up": 2, "down": 3, "zero": 4}  # as pychop numbers them
FORMATS = ((2, 1), (2, 3), (3, 2), (4, 3), (5, 2), (5, 10), (8, 7))


def differing(exponent: int, mantissa: int, rounding: str, x: torch.Tensor) -> tuple[int, int]:
    """The number of values that differ, and the number of all values."""
    ours = Float(exponent, mantissa, specials=True)
    inside = x[x.abs() <= ours.largest]
    theirs = Chop(exp_bits=exponent, sig_bits=mantissa, rmode=ROUNDINGS[rounding])(inside)
    return int((ours.round(inside, rounding) != theirs).sum()), len(inside)


def main() -> None:
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
