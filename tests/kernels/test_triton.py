"""Every Triton kernel without a GPU: its results in Triton's interpreter, and its machine code compiled ahead of time.

The interpreter is chosen by the environment before Python starts, so one process of its own runs this same file again.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.harness import aot
from kernels.harness.aot import committed, compiler, figures, has_triton, mnemonics_of, regressions, shipped
from kernels.harness.cases import OPS
from kernels.interpreter import PATCHES, installed, interpreting

ROOT = Path(__file__).resolve().parents[2]
NO_KERNEL = {"sparse24_matmul", "csr_matmul", "ternary_matmul"}  # of our own: of a library, or plain torch
EVERY = "WORKBENCH_EVERY_CHECK"
INSIDE = interpreting() and installed()
needs_triton = pytest.mark.skipif(not installed(), reason="triton is not installed")
inside = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INSIDE, reason="runs outside the interpreter's process")


def every_check() -> Iterator:
    """Of every op; in turns as many as $EVERY says: all of them, or the first and every third."""
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


@needs_triton
@outside
@pytest.mark.long
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_kernel_is_right_in_the_interpreter(every, monkeypatch):
    monkeypatch.setenv(EVERY, str(every))
    out = run(
        "-m", "pytest", __file__, "-q", "-rN", "--tb=short", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"
    )
    passed = int(re.search(r"(\d+) passed", out).group(1))
    assert passed > len(OPS) - len(NO_KERNEL), out


@outside
def test_every_op_has_cases_and_a_kernel():
    for op in OPS:
        assert (ROOT / "kernels" / op / "cases.py").exists(), f"{op} has no cases.py"
    assert {op for op in OPS if not has_triton(op)} == NO_KERNEL


@pytest.mark.slow
@outside
def test_ops_import_where_triton_is_not_installed():
    """And where it is, no op loads its kernels before it is called. (torch itself may import triton.)"""
    modules = ", ".join(f"kernels.{op}, kernels.{op}.cases" for op in OPS)
    run("-c", f"import sys; sys.modules['triton'] = None; import {modules}", interpret=False)
    loaded = "[m for m in sys.modules if m.startswith('kernels.') and m.endswith('.triton')]"
    run("-c", f"import sys, {modules}; assert not {loaded}, {loaded}", interpret=False)


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
@pytest.mark.parametrize("op", [op for op in OPS if op not in NO_KERNEL])
def test_machine_code_is_as_committed(op):
    """The first configuration of every kernel, and every tenth; all of them in the slow test."""
    every = shipped((op,))
    first = {id(c.kernel): name for name, c in reversed(every.items())}.values()
    compare({name: c for i, (name, c) in enumerate(every.items()) if i % 10 == 0 or name in first})


@needs_triton
@outside
@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPS if op not in NO_KERNEL])
def test_all_machine_code_is_as_committed(op):
    compare(shipped((op,)))


@needs_triton
@outside
def test_committed_figures_are_of_what_ships():
    assert set(committed()["kernels"]) == set(shipped()), "run python -m kernels.harness.aot --write"


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
    before = committed()
    wrong = []
    for name, c in compilations.items():
        assert name in before["kernels"], f"{name} is not in aot.json: run python -m kernels.harness.aot --write"
        wrong += regressions(c, figures(c), before["kernels"][name] if before["triton"] == compiler() else None)
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
