"""Every Triton kernel without a GPU: its results in Triton's interpreter, and its machine code compiled ahead of time.

The interpreter is chosen by the environment before Python starts, so one process of its own runs this same file again.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.hadamard import hadamard
from kernels.hadamard.codes import hadamard_codes
from kernels.harness import aot
from kernels.harness.aot import committed, compiler, figures, mnemonics_of, regressions, shipped
from kernels.harness.hazards import mixed_rows, rewritten_in_flight
from kernels.harness.verify import OpVerdict, verify
from kernels.int_matmul import Packed
from kernels.interpreter import PATCHES, installed, interpreting
from kernels.step.codes import Coding
from kernels.support.declarations import OPS, OWN
from kernels.tuning import early_launches, trying
from kernels.w4a8_matmul import w4a8_matmul
from kernels.w4a8_matmul.codes import even_first
from kernels.w4a8_matmul.reference import rounded
from kernels.w8a8_matmul.layout import int_mm_is_exact

ROOT = Path(__file__).resolve().parents[2]
EVERY = "WORKBENCH_EVERY_CHECK"
INSIDE = interpreting() and installed()
READERS = dict.fromkeys(("int_matmul", "lut_matmul"), "kernels.packed_matmul.launch")  # where configurations are read
needs_triton = pytest.mark.skipif(not installed(), reason="triton is not installed")
inside = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INSIDE, reason="runs outside the interpreter's process")


def every_check() -> Iterator:
    """Of every op; in turns as many as $EVERY says: all of them, or the first and every n-th."""
    every = int(os.environ.get(EVERY, "1"))
    for op in OPS if INSIDE else ():
        if (ROOT / "kernels" / op / "cases.py").exists():
            for i, check in enumerate(importlib.import_module(f"kernels.{op}.cases").checks(torch.device("cpu"))):
                for impl in ("reference", *check.impls) if i % every == 0 else ():
                    yield pytest.param(check, impl, id=f"{op}: {check.name} ({impl})")


@inside
@pytest.mark.parametrize("check, impl", every_check())
def test_check(check, impl):
    error = check.error(impl)
    assert error == error, "an element was never written, or two runs of the same call differ"
    assert error <= check.tolerance


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "columns, block, group",
    [(576, 576, None), (512, 256, 64), (1024, 1024, 128), (128, 64, 64), (14336, 14336, 128)],
)
def test_codes_of_a_transform_are_those_of_what_it_would_have_stored(dtype, columns, block, group):
    x, signs = torch.randn(5, columns).to(dtype), (torch.randint(2, (columns,)) * 2 - 1).to(torch.int8)
    x[3, 7] = float("nan")
    codes, step = hadamard_codes(x, signs, block=block, bits=4, group=group, wide=1, impl="triton")
    stored = hadamard((x * signs).unflatten(-1, (-1, block)), impl="triton").flatten(-2)
    expected, steps = rounded(stored, 4, group, None, 1)
    assert torch.equal(step.nan_to_num(-1), steps.nan_to_num(-1)) and step[3].isnan().any()
    finite = [0, 1, 2, 4]
    assert torch.equal(codes[finite], even_first(expected)[finite])


class Read(Exception):
    """A configuration was looked up."""


@inside
@pytest.mark.parametrize("op", [op for op in OPS if op != "step"])
def test_what_tuning_finds_is_read(op, monkeypatch):
    """Each candidate has exactly the fields of the heuristic's configuration, and is stored under the key that a call
    looks up; otherwise a winner would be written and never read."""

    def looked_up(*found):
        raise Read(*found)

    contests = list(importlib.import_module(f"kernels.{op}.cases").contests(torch.device("cpu"), True, OWN))
    monkeypatch.setattr(importlib.import_module(READERS.get(op, f"kernels.{op}.triton")), "configuration", looked_up)
    tuned = [contest for contest in contests if contest.tune_key]
    assert tuned
    for contest in tuned:
        with pytest.raises(Read) as read:
            contest.contestants[contest.ours](0)
        name, key, heuristic = read.value.args
        assert (name, key) == (op, contest.tune_key)
        every = [*contest.candidates, *contest.configurations.values()]
        assert {frozenset(configuration) for configuration in every} == {frozenset(heuristic)}
        assert len(contest.candidates) <= 8


class TorchOps(TorchDispatchMode):
    """The names of the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@inside
@pytest.mark.skipif(not int_mm_is_exact(), reason="torch's int8 products saturate on this processor")
def test_the_rival_in_int8_is_one_product_between_two_kernels():
    """A rival whose tokens are padded, and whose sums are scaled, by launches of torch would be a weak one."""
    made = importlib.import_module("kernels.w8a8_matmul.cases").contests(torch.device("cpu"), True, OWN)
    contest, rival = next(made), "_int_mm, rounding and scaling fused"
    assert contest.tokens == 1, "which cuBLAS does not multiply"
    alone = replace(contest, contestants={rival: contest.contestants[rival]})
    assert verify(alone, torch.device("cpu")) == OpVerdict({}, ())
    with TorchOps() as ran:
        contest.contestants[rival](0)
    memory = {"empty", "new_empty", "set_", "copy_", "alias", "t", "slice", "unsqueeze"}  # also the interpreter's own
    assert ran.names - memory == {"_int_mm"}


@inside
def test_prompts_dequantise_whole_weights_where_they_are_not_too_large(monkeypatch):
    """And fewer tokens, if they must, a part that stays in the cache; the products are the same."""
    from kernels.int_matmul import int_matmul, pack
    from kernels.int_matmul.triton import candidates, key
    from kernels.packed_matmul import launch

    monkeypatch.setattr(launch, "SLABS", {"dequantise": 1 << 14, "dequantise_whole": 1 << 16})
    launches, right = [], launch.dequantise_rows
    monkeypatch.setattr(launch, "dequantise_rows", lambda w, first, out: (launches.append(first), right(w, first, out)))
    codes, scale = torch.randint(16, (200, 256)), torch.rand(200, 2).to(torch.float16)
    w, x = pack(codes, scale, None, bits=4, group_size=128), torch.randn(512, 256).to(torch.float16)
    exact = x.double() @ ((codes - 8) * scale.double().repeat_interleave(128, 1)).t()

    def product(plan: dict | None) -> list[int]:
        launches.clear()
        with trying("int_matmul", key(w, len(x)), plan):
            assert float((int_matmul(x, w, impl="triton") - exact).norm() / exact.norm()) < 1e-3
        return launches.copy()

    assert product(None) == [0, 128] and product(launch.DEQUANTISE) == [0, 64, 128, 192]
    found = candidates(w, 512, x.dtype)
    assert launch.DEQUANTISE in found and found[0] == launch.DEQUANTISE_WHOLE
    assert candidates(w, 511, x.dtype)[0] != launch.DEQUANTISE_WHOLE
    wide = pack(codes, scale, None, bits=5, group_size=128)
    kinds = [candidates(wide, tokens, x.dtype)[0]["kind"] for tokens in (1, 511, 512)]
    assert kinds == ["dequantise", "dequantise", "dequantise_whole"]


@inside
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind, bits, even", [("int8", 8, False), ("fp8", 8, False), ("int8", 8, True), ("fp8", 8, True),
                                              ("int8", 4, True)])  # fmt: skip
def test_codes_of_norms_and_gates_are_those_of_separate_launches(kind, bits, even, static):
    """To the last bit, for products with weights in 8 bits (`quantized`) and in 4 bits (`round_tokens`)."""
    from kernels.step.gpu import between
    from kernels.step.program import Norm

    dtype, step = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind], torch.tensor(0.03) if static else None
    coding = Coding(dtype, bits, step, even)
    residual, added = torch.randn(3, 576), torch.randn(3, 576).bfloat16()
    residual[1, 5] = float("nan")
    norm, stream = Norm(torch.rand(576), 1e-5), residual.clone()
    y = between.add_norm(stream, added, None, norm, torch.empty_like(added), "triton")
    found = between.add_norm_codes(residual, added, None, norm, torch.bfloat16, coding, "triton")
    assert torch.equal(stream.nan_to_num(7), residual.nan_to_num(7))
    gate, up = torch.randn(3, 2 * 1088).bfloat16().split(1088, 1)
    z, gates = between.gated(gate, up, "silu", "triton"), between.gated_codes(gate, up, "silu", coding, "triton")
    for x, (codes, steps, _), rows in ((y, found, [0, 2]), (z, gates, [0, 1, 2])):
        expected, sizes = rounded_apart(x, coding)
        assert torch.equal(codes[rows].float(), expected[rows].float())
        assert torch.equal(steps.nan_to_num(-1), sizes.nan_to_num(-1)) and steps.isnan().sum() == 3 - len(rows)


def rounded_apart(x: torch.Tensor, coding: Coding) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and steps of x by the kernels of the products, in a launch of their own."""
    if not coding.even_first:
        return triton_of("w8a8_matmul").quantized(x, coding.dtype, coding.step, False)
    return triton_of("w4a8_matmul").rounded(
        x, coding.bits, None, coding.step, x_float=coding.dtype == torch.float8_e4m3fn
    )


def triton_of(op: str) -> ModuleType:
    return importlib.import_module(f"kernels.{op}.triton")


@inside
@pytest.mark.parametrize("how", [{}, {"x_bits": 4}, {"x_float": True}, {"x_scale": torch.tensor(0.02)}])
def test_one_token_is_rounded_in_the_product_to_the_same_codes(how):
    """As beside another token, where rounding is a launch of its own; with sums of several splits, too."""
    scale, codes = torch.rand(70, 12) * 0.01, torch.randint(0, 256, (70, 768), dtype=torch.uint8)
    x, w = torch.randn(2, 1536).bfloat16(), Packed("rows", codes, scale, None, 4, 128, (70, 1536))
    with launches() as two:
        y = w4a8_matmul(x, w, impl="triton", **how)
    with launches() as one:
        first, second = (w4a8_matmul(token, w, impl="triton", **how) for token in x.split(1))
    assert torch.equal(torch.cat([first, second]), y)
    assert two == {"round_tokens": 1, "product": 1, "gather": 1} and one == {"product": 2, "gather": 2}


@inside
@pytest.mark.skipif(os.environ.get(EVERY) != "1", reason="the import of transformers takes seconds")
@pytest.mark.parametrize(
    "kind, rounding, product", [("int8", "quantize", "narrow"), ("w4a8", "round_tokens", "product")]
)
@torch.no_grad()
def test_steps_with_codes_have_the_bits_of_steps_without_in_fewer_launches(kind, rounding, product, monkeypatch):
    """Of one block: q, k and v, and gate and up, read the codes that a norm writes, and down those of a gate."""
    from kernels import launch_order
    from kernels.harness.model_weights import made
    from kernels.step.gpu import between, products
    from kernels.step.gpu.body import FusedBody
    from kernels.step.recognition.recognise import recognise

    monkeypatch.setattr(between, "_by_triton", lambda x, impl: True)
    for op in ("w8a8_matmul", "w4a8_matmul"):
        monkeypatch.setattr(importlib.import_module(f"kernels.{op}"), "_implementation", lambda *_: "triton")
        by_codes = partial(getattr(products, f"{op[:4]}_codes_matmul"), impl="triton")
        monkeypatch.setattr(products, f"{op[:4]}_codes_matmul", by_codes)
    model, tokens = made("toy", kind, torch.device("cpu")), torch.tensor([[3], [5]])
    del model.model.layers[1]
    decoder = recognise(model, anywhere=True)
    with launches() as with_codes:
        logits = FusedBody(decoder, 2, 4)(tokens)
    waits: list[None] = []
    monkeypatch.setattr(launch_order, "gdc_wait", lambda: waits.append(None))
    with early_launches(True), launches() as early:
        assert torch.equal(FusedBody(decoder, 2, 4)(tokens), logits)
    assert early == with_codes and len(waits) > early.total(), "each program of each kernel waits"
    monkeypatch.setattr(products.StoredLinear, "of", lambda linear: None)
    with launches() as without:
        assert torch.equal(FusedBody(decoder, 2, 4)(tokens), logits)
    between_products = {"add_norm_kernel": 3, "turn_kernel": 1, "gate_kernel": 1}
    assert with_codes == between_products | {rounding: 1, product: 4}
    assert without == between_products | {rounding: 7, product: 7}


@contextmanager
def launches() -> Iterator[Counter]:
    """The number of launches of each kernel while the block runs."""
    from triton.runtime.interpreter import GridExecutor

    found, launch = Counter(), GridExecutor.__call__

    def counted(self, *arguments, **more):
        found[self.fn.__name__] += 1
        return launch(self, *arguments, **more)

    GridExecutor.__call__ = counted
    try:
        yield found
    finally:
        GridExecutor.__call__ = launch


@needs_triton
@outside
@pytest.mark.long
@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_every_kernel_is_right_in_the_interpreter(every, monkeypatch):
    monkeypatch.setenv(EVERY, str(every))
    out = run(
        "-m", "pytest", __file__, "-q", "-rN", "--tb=short", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"
    )
    passed = int(re.search(r"(\d+) passed", out).group(1))
    assert passed > len(OPS), out


@outside
def test_every_op_has_cases_and_a_kernel():
    for op in OPS:
        for name in ("cases.py", "triton.py"):
            assert (ROOT / "kernels" / op / name).exists(), f"{op} has no {name}"


@pytest.mark.slow
@outside
def test_ops_import_where_triton_and_transformers_are_not_installed():
    """And where it is, no op loads its kernels before it is called. (torch itself may import triton.)"""
    modules = ", ".join(f"kernels.{op}, kernels.{op}.cases" for op in OPS)
    run(
        "-c",
        f"import sys; sys.modules['triton'] = sys.modules['transformers'] = None; import {modules}",
        interpret=False,
    )
    loaded = "[m for m in sys.modules if m.startswith('kernels.') and m.endswith('.triton')]"
    run("-c", f"import sys, {modules}; assert not {loaded}, {loaded}", interpret=False)


@pytest.mark.slow
@needs_triton
@outside
def test_each_shim_of_the_interpreter_is_needed_and_enough():
    right = json.loads(run(str(Path(__file__).with_name("interpreter_shims.py"))))
    assert all(right["nothing"].values()), f"wrong in spite of the shims: {right['nothing']}"
    assert not any(right["everything"].values()), f"right without any shim: {right['everything']}"
    for name in PATCHES:
        assert not all(right[name].values()), (
            f"triton {compiler()} does {name} right: remove the shim from kernels/interpreter.py"
        )


@needs_triton
@outside
@pytest.mark.parametrize("op", ["int_matmul", "kv_decode", "w4a8_matmul"])
def test_machine_code_is_as_committed(op):
    """The first configuration of each kernel of some operations; all of them in the slow test."""
    every = shipped((op,))
    first = {id(c.kernel): name for name, c in reversed(every.items())}.values()
    compare({name: every[name] for name in first})


@needs_triton
@outside
@pytest.mark.parametrize("op", [
    "step", *(pytest.param(op, marks=pytest.mark.slow) for op in ("int_matmul", "kv_decode", "w8a8_matmul", "w4a8_matmul"))
])  # fmt: skip
def test_kernels_that_start_early_wait_before_they_read_or_write(op):
    """Except for weights, which they fetch into the L2 cache."""
    known = [c for c in shipped((op,)).values() if "EARLY" in c.kernel.arg_names]
    every = {(id(c.kernel), c.arguments.get("ends")): c for c in known}
    for c in every.values():
        kernel = aot.compiled(replace(c, constants={**c.constants, "EARLY": True}))
        before, _, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in before and "st.global" in after
        assert not re.search(r"\b(ld|st)\.global|cp\.async|\bred\.|\batom\.", before), c.name
    assert every


@needs_triton
@outside
@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_all_machine_code_is_as_committed(op):
    compare(shipped((op,)))


@needs_triton
@outside
def test_committed_figures_are_of_what_ships():
    """Of the compilers that a GPU machine has: torch 2.11 brings triton 3.6.0, torch 2.13 brings 3.7.1."""
    assert set(committed()) == {"3.6.0", "3.7.1"}
    for version, kernels in committed().items():
        assert set(kernels) == set(shipped()), f"run python -m kernels.harness.aot --write --triton {version}"
        assert not [name for name, figures in kernels.items() if {"in_flight", "mixing"} & set(figures)]


@outside
def test_regressions_are_told():
    c = aot.Compilation("k", None, {}, {}, expects=("HGMMA",))
    good = {"registers": 100, "stack": 0, "spills": 0, "shared": 1000, "instructions": 100, "HGMMA": 4}
    assert regressions(c, good, good) == [] == regressions(c, {**good, "instructions": 103}, good)
    assert regressions(c, {**good, "registers": 128}, None) == []
    assert regressions(c, {**good, "registers": 101}, good) == ["k: registers 101 > 100"]
    assert regressions(c, {**good, "spills": 1}, good) == ["k: spills 1 > 0"]
    assert regressions(c, {**good, "instructions": 104}, good) == ["k: instructions 104 > 100 + 3%"]
    assert regressions(c, {**good, "shared": 232_449}, None) == ["k: shared memory 232449 > 232448"]
    no_matrix = {key: value for key, value in good.items() if key != "HGMMA"}
    assert regressions(c, no_matrix, None) == ["k: no HGMMA"]


@needs_triton
@outside
def test_kernels_that_another_gpu_cannot_run_are_named():
    every = shipped(("w8a8_matmul", "hadamard"))
    assert "fp8e4nv" in aot.why_not(every["w8a8_matmul fp8 quantize by 128 bf16"], 80)
    assert aot.why_not(every["w8a8_matmul int8 quantize by 128 bf16"], 80) is None
    assert "shared memory" in aot.why_not(every["hadamard 28672 bf16"], 89)


@needs_triton
@outside
@pytest.mark.slow
def test_all_machine_code_of_the_other_compiler_is_as_committed():
    """Slow: it installs triton 3.6.0 beside the installed one, and every kernel takes some seconds."""
    run("-m", "kernels.harness.aot", "--triton", "3.6.0", interpret=False)


LOOP = """
$L__BB0_3:
    prmt.b32 %r1, %r9, %r8, %r7;
    {wait}
    cvt.rn.bf16x2.f32 %r2, %f1, %f2;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f10,%f11}}, {{%r1,%r2,%r3,%r4}}, %rd1, %p1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned {pending};
    @%p2 bra $L__BB0_3;
    wgmma.wait_group.sync.aligned 0;
"""


def test_registers_rewritten_in_flight_are_found():
    """Written again in the next round, before or after a wait for the product that reads them."""
    assert rewritten_in_flight(LOOP.format(wait="", pending=0)) == []
    assert rewritten_in_flight(LOOP.format(wait="", pending=1)) == ["%r1"]
    late = LOOP.format(wait="wgmma.wait_group.sync.aligned 0;", pending=1)
    assert rewritten_in_flight(late) == ["%r1"], "the wait comes after the first of them is written"
    shared = LOOP.replace("{{%r1,%r2,%r3,%r4}}", "%rd2").format(wait="", pending=1)
    assert rewritten_in_flight(shared) == [], "a left operand in shared memory has no registers"
    assert rewritten_in_flight(LOOP.format(wait="", pending=1).replace("@%p2 bra", "// bra")) == [], "no other round"


LAYOUTS = """
#blocked = #ttg.blocked<{{sizePerThread = [1, 8], threadsPerWarp = [32, 1], warpsPerCTA = [4, 1], order = [1, 0]}}>
#linear = #ttg.linear<{{register = [[0, 16], [32, 0]], lane = {lane}, warp = [[4, 0], [8, 0]], block = []}}>
    %16 = "tt.reduce"(%15) <{{axis = {axis} : i32}}> ({{
    ^bb0(%arg11: i32, %arg12: i32):
      tt.reduce.return %38 : i32
    }}) : (tensor<64x64xi32, {layout}>) -> tensor<64xi32, #ttg.slice<{{dim = 1, parent = #linear}}>>
"""


def test_reductions_that_mix_rows_are_found():
    """An H100 mixed the second layout's rows: lane bit 1 is a row, and bits 0, 2, 3 and 4 are columns."""
    neighbours, apart = "[[1, 0], [0, 1], [0, 2], [0, 4], [0, 8]]", "[[0, 32], [1, 0], [0, 1], [0, 2], [0, 4]]"
    assert mixed_rows(LAYOUTS.format(lane=neighbours, axis=1, layout="#linear")) == []
    assert mixed_rows(LAYOUTS.format(lane=apart, axis=1, layout="#linear")) == ["axis 1 of #linear: lanes 0, 2, 3, 4"]
    assert mixed_rows(LAYOUTS.format(lane=apart, axis=0, layout="#linear")) == [], "the rows are in one lane bit"
    assert mixed_rows(LAYOUTS.format(lane=apart, axis=1, layout="#blocked")) == []
    deep = "[[0, 0, 1], [0, 1, 0], [0, 0, 2], [1, 0, 0], [0, 2, 0]]"
    inside = "#ttg.slice<{dim = 0, parent = #linear}>"
    assert mixed_rows(LAYOUTS.format(lane=deep, axis=1, layout=inside)) == ["axis 1 of #linear: lanes 0, 2"]


def test_mnemonics_are_read_off_a_listing():
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;
        /*10020*/            @!UPT UIADD3 URZ, URZ, URZ, URZ ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/                   NOP;
    """
    assert mnemonics_of(listing) == ["LDC", "LDG.E.128", "UIADD3", "HGMMA.64x128x16.F32.BF16", "NOP"]


def compare(compilations: dict[str, aot.Compilation]) -> None:
    before = committed().get(compiler(), {})
    wrong = []
    for name, c in compilations.items():
        wrong += regressions(c, figures(c), before.get(name))
    assert not wrong, "\n".join(wrong)


def run(*arguments: str, interpret: bool = True) -> str:
    """Standard output of a Python of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
