"""Compile every shipped Triton kernel for sm_90 without a GPU, and read the figures of its machine code.

`python -m kernels.harness.aot` prints a table, `--write` commits its figures to `kernels/harness/aot.json`, with which
the tests compare every later compilation by the same triton. It needs triton (3.6 or later), whose wheel includes
ptxas, cuobjdump and nvdisasm. `--triton 3.6.0` uses that triton instead of the installed one; pip installs it in its
own folder in the user's cache. A GPU machine's torch 2.11 has 3.6.0, torch 2.13 has 3.7.1, and both must work.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels.harness.hazards import mixed_rows, overwritten_in_flight, rewritten_in_flight
from kernels.interpreter import interpreting
from kernels.support.declarations import OPS
from kernels.support.user_cache import cache_folder
from kernels.tuning import Compilation

COMMITTED = Path(__file__).with_name("aot.json")
# Bytes of shared memory available to one block, by compute capability; Triton compiles beyond them without a warning.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
SHARED_LIMIT = SHARED[90]
PLAIN_SHARED = 48 << 10  # bytes of shared memory, static and dynamic, that a block gets without being asked for
RESERVED = 1 << 10  # bytes that CUDA keeps in every block; they are listed as static, and do not count
# wgmma in 16 bits, int8 and fp8; mma.sync in 16 bits and int8; dp4a, the dot product of four bytes
MATRIX = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "IDP")
MARGIN = 1.03  # instructions may grow by this factor before it counts as a regression; other figures may not grow


def shipped(ops: tuple[str, ...] = OPS) -> dict[str, Compilation]:
    """Every shipped configuration by name; each name begins with the name of the op."""
    found: dict[str, Compilation] = {}
    for op in ops:
        for c in importlib.import_module(f"kernels.{op}.triton").shipped():
            assert c.name not in found and c.name.startswith(op), f"{c.name!r} is no new name of a compilation of {op}"
            found[c.name] = c
    return found


def compiled(c: Compilation, capability: int = 90) -> Any:
    """Triton's kernel: `asm` has the machine code "cubin", "ptx" and "ttgir"; `metadata.shared` is the bytes of shared
    memory that a launch requests."""
    if interpreting():
        raise ValueError("`TRITON_INTERPRET` (=1) keeps Triton from compiling; unset it before Python starts")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if c.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    names, constants = c.kernel.arg_names, c.constants
    if "EARLY" in names:  # see `kernels.launch_order`
        constants = {"EARLY": False, **constants}
    assert set(names) == set(c.arguments) | set(constants), f"{c.name}: {set(names) ^ {*c.arguments, *constants}}"
    aligned = [n for n, kind in c.arguments.items() if kind.startswith("*") or n in c.multiple_of_16]
    source = ASTSource(
        fn=c.kernel,
        signature={n: c.arguments.get(n, "constexpr") for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": c.num_warps, "num_stages": c.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def figures(c: Compilation) -> dict[str, int]:
    """The figures of one compiled kernel.

    Returns:
        registers:    per thread.
        stack:        bytes of local memory per thread.
        spills:       instructions that load from or store to local memory.
        shared:       bytes of shared memory per block, static and dynamic.
        instructions: machine instructions without padding.
        and how many of them are matrix instructions, by mnemonic, if there are any.
        in_flight:    registers rewritten while a product still reads them, if there are any.
        mixing:   reductions that mix rows, if there are any.
        outstanding:  waits for products that leave one product pending, if the kernel is expected to have such waits.
    """
    kernel = compiled(c)
    hazards, wrong = rewritten_in_flight(kernel.asm["ptx"]), mixed_rows(kernel.asm["ttgir"])
    pending = "outstanding" in c.expects
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(path))
        listing = _tool("nvdisasm", "-c", str(path))
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    if pending:
        hazards += overwritten_in_flight(listing)
    outstanding = len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[1-9]", listing)) if pending else 0
    mnemonics = mnemonics_of(listing)
    tf32 = sorted({m for m in mnemonics if "TF32" in m})
    assert not tf32, f"{c.name} computes in TF32: {tf32}"
    plain, static, dynamic = PLAIN_SHARED, found["SHARED"], kernel.metadata.shared
    assert not dynamic <= plain < static - RESERVED + dynamic, (
        f"{c.name} cannot be launched: {static} bytes of static and {dynamic} of dynamic shared memory; Triton asks "
        f"for more than {plain} only if the dynamic part alone needs them"
    )
    count = Counter(m.partition(".")[0] for m in mnemonics)
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": count["LDL"] + count["STL"],
        "shared": static + dynamic,
        "instructions": len(mnemonics) - count["NOP"],
        **{m: count[m] for m in MATRIX if count[m]},
        **({"in_flight": len(hazards)} if hazards else {}),
        **({"mixing": len(wrong)} if wrong else {}),
        **({"outstanding": outstanding} if outstanding else {}),
    }


def why_not(c: Compilation, capability: int) -> str | None:
    """The reason why a kernel does not run on GPUs of this capability (89: 8.9): it does not compile, or needs too much
    shared memory. None if it runs."""
    try:
        shared = compiled(c, capability).metadata.shared
    except Exception as error:  # errors of Triton's compiler, whose types differ between versions
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return f"shared memory {shared} > {SHARED[capability]}" if shared > SHARED[capability] else None


def mnemonics_of(listing: str) -> list[str]:
    """Mnemonics with suffixes in the output of nvdisasm: `/*0a10*/  @!P0 LDG.E.128 R4, ...`."""
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)", listing, re.M)


def regressions(c: Compilation, now: dict[str, int], before: dict[str, int] | None) -> list[str]:
    """The faults in a kernel's figures by themselves, and in comparison with the committed ones (None: those are from
    another compiler)."""
    wrong = [f"no {m}" for m in c.expects if not any(found.startswith(m) for found in now)]
    if now["shared"] > SHARED_LIMIT:
        wrong.append(f"shared memory {now['shared']} > {SHARED_LIMIT}")
    if now.get("in_flight"):
        wrong.append(f"{now['in_flight']} registers are rewritten while a product reads them: see hazards.py")
    if now.get("mixing"):
        wrong.append(f"{now['mixing']} reductions mix rows: see hazards.py")
    if before is not None:
        for key in ("registers", "stack", "spills", "shared"):
            if now[key] > before[key]:
                wrong.append(f"{key} {now[key]} > {before[key]}")
        if now["instructions"] > before["instructions"] * MARGIN:
            wrong.append(f"instructions {now['instructions']} > {before['instructions']} + {MARGIN - 1:.0%}")
        wrong += [f"{m} {now.get(m, 0)} < {before[m]}" for m in MATRIX if m in before and not now.get(m)]
    return [f"{c.name}: {w}" for w in wrong]


def committed() -> dict[str, dict[str, dict[str, int]]]:
    """The committed figures: {version of triton: {name: figures}}."""
    return json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}


def compiler() -> str:
    """Version of Triton, which also determines the version of its ptxas."""
    import triton

    return triton.__version__


def table(compilations: dict[str, Compilation]) -> Iterator[tuple[str, dict[str, int], str]]:
    """Name, figures and one printable line of each kernel, as it is compiled."""
    width = max(map(len, compilations), default=0)
    for name, c in compilations.items():
        now = figures(c)
        line = (
            f"{name:<{width}}  {now['registers']:>3} registers  {now['stack']:>4} B stack  {now['spills']:>3} spills  "
            f"{now['shared']:>6} B shared  {now['instructions']:>5} instructions  "
        )
        yield name, now, line + " ".join(f"{m} {now[m]}" for m in MATRIX if m in now)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compile every shipped Triton kernel for sm_90 and print the figures of the compiled code."
    )
    parser.add_argument("--write", action="store_true", help="write the figures to kernels/harness/aot.json")
    parser.add_argument("--ops", nargs="*", default=OPS, choices=OPS, help="these ops only")
    parser.add_argument("--triton", help="compile with this version of triton: 3.6.0")
    parser.add_argument(
        "--capability",
        type=int,
        choices=SHARED,
        default=90,
        help="list the kernels that do not run on GPUs of this capability: 89 is 8.9",
    )
    options = parser.parse_args()
    if options.triton and options.triton != compiler():
        sys.exit(elsewhere(options.triton, sys.argv[1:]))
    compilations, every = shipped(tuple(options.ops)), committed()
    if options.capability != 90:
        lacking = {name: why_not(c, options.capability) for name, c in compilations.items()}
        print(*(f"{name}: {why}" for name, why in lacking.items() if why), sep="\n")
        print(f"{sum(why is None for why in lacking.values())} of {len(lacking)} kernels run on {options.capability}")
        sys.exit()
    before = every.get(compiler(), {})
    found, wrong = {}, []
    for name, now, line in table(compilations):
        print(line, flush=True)
        found[name] = now
        if options.write or not before:
            wrong += regressions(compilations[name], now, None)
        elif name in before:
            wrong += regressions(compilations[name], now, before[name])
        else:
            wrong.append(f"{name}: not in {COMMITTED.name}; --write puts it there")
    print(
        f"{len(found)} kernels, triton {compiler()}"
        + ("" if before else f" (committed figures are of {', '.join(every) or 'none'})")
    )
    if options.write and not wrong:
        kept = {n: f for n, f in before.items() if not n.startswith(tuple(options.ops))}
        write({**every, compiler(): {**kept, **found}})
    sys.exit("\n".join(wrong) or None)


def write(every: dict[str, dict[str, dict[str, int]]]) -> None:
    """Write these figures to aot.json, one kernel per line."""
    parts = []
    for version, kernels in sorted(every.items()):
        rows = ",\n".join(f"    {json.dumps(n)}: {json.dumps(f)}" for n, f in sorted(kernels.items()))
        parts.append(f"  {json.dumps(version)}: {{\n{rows}\n  }}")
    COMMITTED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def elsewhere(version: str, arguments: list[str]) -> int:
    """Run this module with another triton, which is installed on first use; return the exit status."""
    folder = cache_folder(f"triton-{version}")
    if not (folder / "triton").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), f"triton=={version}"], check=True)
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "kernels.harness.aot", *arguments]
    return subprocess.run(command, env=environment).returncode


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the disassemblers in triton's wheel."""
    import triton

    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
