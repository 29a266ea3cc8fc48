"""A script for test_triton.py: is each thing that `kernels.interpreter.prepare` replaces still wrong without it?

Run in the interpreter; prints {what was undone ("nothing", "everything" or a name): {probe: is its result right?}} as
JSON.
"""

import json

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps

from kernels import interpreter

OWNERS = {name: ReduceOps if name == "sum" else InterpreterBuilder for name in interpreter.PATCHES}
upstream = {name: getattr(owner, name, None) for name, owner in OWNERS.items()}


@triton.jit
def elementwise(x, y, out, PROBE: tl.constexpr):
    i = tl.arange(0, 256)
    a, b = tl.load(x + i), tl.load(y + i)
    if PROBE == "binary_op":
        z = a + b
    elif PROBE == "create_fma":
        z = tl.fma(a, b, a)
    elif PROBE == "get_bf16":
        z = a + tl.full((256,), 1.5, tl.bfloat16)
    else:
        z = a.to(out.dtype.element_ty)
    tl.store(out + i, z)


@triton.jit
def matrices(x, y, out, PROBE: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    if PROBE == "create_dot":
        tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))
    else:
        tl.store(out + i, tl.sum(tl.load(x + at), 1))


def probes() -> dict[str, bool]:
    """Each result against torch's, bit by bit."""
    torch.manual_seed(0)
    bf16, f8 = torch.bfloat16, torch.float8_e4m3fn
    x, y = torch.randn(256).to(bf16), torch.randn(256).to(bf16)
    integers = torch.randint(-1000, 1000, (256,), dtype=torch.int32)
    everyone = torch.arange(256, dtype=torch.uint8).view(f8)
    wide = torch.randn(256) * 200
    A, B = torch.randint(-8, 8, (2, 16, 16)).to(bf16)
    cases = {
        "binary_op": (elementwise, x, y, x + y),
        "create_fma": (elementwise, x, y, (x.double() * y.double() + x.double()).to(bf16)),
        "get_bf16": (elementwise, x, y, x + 1.5),
        "cast_impl": (elementwise, integers, y, integers.to(bf16)),
        "cast_impl, rounding": (elementwise, wide, y, wide.to(bf16)),
        "create_fp_to_fp": (elementwise, wide, y, wide.clamp(-448, 448).to(f8)),
        "create_fp_to_fp, up": (elementwise, everyone, y, everyone.float()),
        "create_dot": (matrices, A, B, A.float() @ B.float()),
        "sum": (matrices, A, B, A.float().sum(1).to(bf16)),
    }
    right = {}
    for name, (kernel, a, b, expected) in cases.items():
        out = torch.zeros_like(expected)
        try:
            kernel[(1,)](a, b, out, PROBE=name)
        except Exception:
            right[name] = False
            continue
        right[name] = torch.equal(out.float().nan_to_num(nan=-1e9), expected.float().nan_to_num(nan=-1e9))
    return right


def probed_without(names: tuple[str, ...]) -> dict[str, bool]:
    """`probes()` while these replacements are undone."""
    replaced = {name: getattr(OWNERS[name], name) for name in names}
    try:
        for name in names:
            if upstream[name] is None:
                delattr(OWNERS[name], name)
            else:
                setattr(OWNERS[name], name, upstream[name])
        return probes()
    finally:
        for name, member in replaced.items():
            setattr(OWNERS[name], name, member)


if __name__ == "__main__":
    interpreter.prepare()
    interpreter.prepare()  # twice is once
    undone = {"nothing": (), "everything": interpreter.PATCHES, **{name: (name,) for name in interpreter.PATCHES}}
    print(json.dumps({what: probed_without(names) for what, names in undone.items()}))
