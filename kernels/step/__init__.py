"""`DecodeStep`: one step of decoding of a whole decoder on a CPU, in one call of C++. See README.md."""

from kernels.step.native import DecodeStep, why_not
from kernels.step.program import Attention, InputChange, Norm, Products, Program, Weight

__all__ = ["Attention", "InputChange", "DecodeStep", "Norm", "Products", "Program", "Weight", "why_not"]
