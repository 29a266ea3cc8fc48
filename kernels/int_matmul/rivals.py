"""Other libraries' kernels for 4-bit weights on a GPU, as contestants of `int_matmul`.

They are timed where they can be imported: tinygemm, which is in torch, gemlite and Humming (`make rivals`), and Marlin
(`seeds/peers/marlin.sh` compiles it). A library that cannot run here is left out, and standard error says why. Marlin
and Humming are tried in a process of their own first (`python -m kernels.int_matmul.rivals NAME`), because after a
fault in one kernel no other one runs in the same process. $RIVALS may name those that are timed, apart by commas: they
are known to run, and are not tried.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from kernels.int_matmul import Packed, pack
from kernels.int_matmul.layout import unpack_bits
from kernels.int_matmul.reference import dequantize
from kernels.support.declarations import Expected, times
from kernels.support.errors import kind_and_first_line

Call = Callable[[int], object]
BF16, FP16 = torch.bfloat16, torch.float16
PROBED = ("marlin", "humming")  # compiled code of others; the rest is torch's and Triton's
ROUNDED = 0.15  # allowed error where a library rounds the weights itself: 4 bits in groups of 128 cost about 0.1


def contestants(
    x: Tensor, weights: list[Packed], expected: dict[str, Expected], tolerance: dict[str, float]
) -> dict[str, Call]:
    """name -> a call with the index of a weight, for x [tokens, in] in bfloat16; adds what is expected of each."""
    calls: dict[str, Call] = {}
    for name, make in MAKERS.items():
        if not _runs(name):
            continue
        try:
            call, right = make(x, weights)
            call(0)
        except Exception as error:  # other versions may raise anything
            print(f"{name} is left out: {kind_and_first_line(error)}", file=sys.stderr)
            continue
        calls[name], expected[name] = call, right
    if "humming" in calls:
        tolerance["humming"] = ROUNDED
    return calls


def _tinygemm(x: Tensor, weights: list[Packed]) -> tuple[Call, Expected]:
    """torch's own int4 kernel, which torchao calls too, on the same bytes in its order: even columns in high halves."""
    first = weights[0]
    out, columns = first.shape
    pair = torch.rand(columns // first.group_size, out, 2, device=x.device, dtype=x.dtype)
    packed = [torch.ops.aten._convert_weight_to_int4pack(w.codes, 8) for w in weights]

    def W() -> Tensor:
        codes = unpack_bits(first.codes, 4, columns).view(out, -1, 2).flip(-1).reshape(out, -1, first.group_size)
        scale, zero = (t.t()[..., None].float() for t in pair.unbind(-1))  # [out, groups, 1]
        return ((codes.float() - 8) * scale + zero).view(out, columns)

    return lambda i: torch.ops.aten._weight_int4pack_mm(x, packed[i], first.group_size, pair), times(x, W)


def _gemlite(x: Tensor, weights: list[Packed]) -> tuple[Call, Expected]:
    from gemlite.core import DType, GemLiteLinearTriton

    def layer(w: Packed) -> GemLiteLinearTriton:
        made = GemLiteLinearTriton(
            4, w.group_size, w.shape[1], w.shape[0], input_dtype=DType.BF16, output_dtype=DType.BF16
        )
        codes = unpack_bits(w.codes, 4, w.shape[1])
        made.pack(codes, w.scale.view(-1, 1), torch.full_like(w.scale, 8).view(-1, 1), bias=None)
        return made

    layers = [layer(w) for w in weights]
    return lambda i: layers[i](x), times(x, lambda: dequantize(weights[0]))


def _marlin(x: Tensor, weights: list[Packed]) -> tuple[Call, Expected]:
    """Marlin as published (arXiv:2408.11743): float16, groups of 128. All copies hold the first weight's values."""
    from marlin import Layer

    first, x = weights[0], x.to(FP16)
    codes, scale = unpack_bits(first.codes, 4, first.shape[1]), first.scale.to(FP16)

    def W() -> Tensor:
        grouped = codes.unflatten(1, (-1, first.group_size)).float() - 8
        return (grouped * scale.float()[..., None]).flatten(1)

    linear = nn.Linear(first.shape[1], first.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(W().to(FP16), requires_grad=False)
    layers = [Layer(first.shape[1], first.shape[0], first.group_size).to(x.device) for _ in weights]
    layers[0].pack(linear, scale)
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    return lambda i: layers[i](x), times(x, W)


def _humming(x: Tensor, weights: list[Packed]) -> tuple[Call, Expected]:
    """Humming rounds the weight by itself, so that its product is compared with that of the unrounded weight."""
    from humming.layer import HummingLayer

    out, columns = weights[0].shape
    W = torch.randn(out, columns, device=x.device, dtype=BF16)

    def layer() -> nn.Module:
        config = {"dtype": "int4", "group_size": weights[0].group_size}
        made = HummingLayer(shape_n=out, shape_k=columns, weight_config=config, torch_dtype=BF16).to(x.device)
        made.load_from_unquantized(W)
        made.transform()
        return made

    layers = [layer() for _ in weights]
    return lambda i: layers[i](x), times(x, lambda: W)


MAKERS = {"tinygemm": _tinygemm, "gemlite": _gemlite, "marlin": _marlin, "humming": _humming}


def _runs(name: str) -> bool:
    """Does this library's kernel run on this GPU without an error?"""
    if (named := os.environ.get("RIVALS")) is not None:
        return name in named.split(",")
    if name == "tinygemm":
        return True
    return find_spec(name) is not None and (name not in PROBED or name in _sound())


@cache
def _sound() -> set[str]:
    """Those of PROBED that run without an error, each in a process of its own, side by side."""
    command = [sys.executable, "-m", "kernels.int_matmul.rivals"]
    tried = {
        name: subprocess.Popen([*command, name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for name in PROBED
        if find_spec(name) is not None
    }
    sound = set()
    for name, process in tried.items():
        try:
            said = process.communicate(timeout=45)[1].strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            said = ["no result within 45 s"]
        if process.poll() == 0:
            sound.add(name)
        else:
            print(f"{name} is left out: {said[-1] if said else process.poll()}", file=sys.stderr)
    return sound


def main() -> None:
    """Run one library's kernel once, for one token."""
    x = torch.randn(1, 512, device="cuda", dtype=BF16)
    codes = torch.randint(0, 16, (1024, 512), device="cuda", dtype=torch.uint8)
    scale = torch.rand(1024, 4, device="cuda", dtype=BF16)
    call, _ = MAKERS[sys.argv[1]](x, [pack(codes, scale, None, bits=4, group_size=128)])
    call(0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
