"""The C++ kernels on aarch64, which no machine of ours has: what the cross compiler builds runs in an emulator.

Debian has all that the first test needs: `apt-get install g++-aarch64-linux-gnu qemu-user`. The second one needs an
aarch64 Python with torch besides, which `tests/kernels/aarch64.sh` puts together; `make aarch64` does both.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.compiler import openmp

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("AARCH64_PYTHON", "")  # a command that runs it, in an emulator or not
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
# Without the later instructions, with dot products of int8, and with all that the emulator knows, of bfloat16 too.
# The first is no older one, as Cortex-A72, because torch does not load there.
CPUS = {"a64fx": "neon", "neoverse-n1": "neon", "max": "neon bf16"}

INSTRUCTIONS = """
#include "neon.inc"
#include <cstdio>
using namespace workbench::neon;
int main() {
  int8_t a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = int8_t(37 * i - 128), b[i] = int8_t(91 * i + 5);
  const int8x16_t x = vld1q_s8(a), y = vld1q_s8(b);
  int wrong = 0;
  if (workbench::arm().dotprod) {
    int32x4_t sums = vdupq_n_s32(7);
    sdot(sums, x, y);
    for (int lane = 0; lane < 4; lane++) {
      int expected = 7;
      for (int i = 4 * lane; i < 4 * lane + 4; i++) expected += a[i] * b[i];
      wrong += sums[lane] != expected;
    }
  }
  if (workbench::arm().i8mm) {
    int32x4_t sums = vdupq_n_s32(7);
    smmla(sums, x, y);
    for (int lane = 0; lane < 4; lane++) {
      int expected = 7;
      for (int i = 0; i < 8; i++) expected += a[lane / 2 * 8 + i] * b[lane % 2 * 8 + i];
      wrong += sums[lane] != expected;
    }
  }
  if (workbench::arm().bf16) {
    const float numbers[8] = {1, -2, 0.5f, 3, 100, -7, 0.25f, 9};
    const float32x4_t low = vld1q_f32(numbers), high = vld1q_f32(numbers + 4);
    const uint16x8_t pairs = vcombine_u16(to_bfloat16(low), to_bfloat16(high));
    float32x4_t sums = vdupq_n_f32(0);
    bfdot(sums, pairs, vcombine_u16(to_bfloat16(high), to_bfloat16(low)));
    for (int lane = 0; lane < 4; lane++) {
      const int i = 2 * lane;
      wrong += sums[lane] != numbers[i] * numbers[(i + 4) % 8] + numbers[i + 1] * numbers[(i + 5) % 8];
    }
  }
  const workbench::Arm found = workbench::arm();
  printf("%d dotprod %d bf16 %d i8mm %d", wrong, found.dotprod, found.bf16, found.i8mm);
}
"""


@pytest.mark.skipif(not (COMPILER and EMULATOR), reason="needs aarch64-linux-gnu-g++ and qemu-aarch64")
def test_instructions_that_not_every_processor_has_are_found_and_right(tmp_path):
    """They are written as numbers, which no assembler checks."""
    (tmp_path / "main.cpp").write_text(INSTRUCTIONS)
    program = tmp_path / "main"
    include = f"-I{ROOT / 'kernels' / 'native'}"
    subprocess.run(
        [COMPILER, "-O2", "-std=c++20", include, tmp_path / "main.cpp", "-static", "-o", program], check=True
    )
    for cpu, found in {"cortex-a72": (0, 0, 0), "neoverse-n1": (1, 0, 0), "max": (1, 1, 1)}.items():
        said = subprocess.run([EMULATOR, "-cpu", cpu, program], check=True, capture_output=True, text=True).stdout
        assert said == "0 dotprod {} bf16 {} i8mm {}".format(*found), cpu


def test_openmp_is_torchs_where_the_compiler_has_none(tmp_path):
    """As for Apple's clang, whose preprocessor knows it; where torch brings no library either, there is one thread."""
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n[ $1 = -Xpreprocessor ] || { echo error: no such option $1 >&2; exit 1; }\n")
    compiler.chmod(0o755)
    assert openmp([str(compiler)], [], [tmp_path], tmp_path) is None
    (tmp_path / "libomp.dylib").touch()
    compiling, linking = openmp([str(compiler)], [], [tmp_path], tmp_path)
    assert compiling == ["-Xpreprocessor", "-fopenmp"] and {f"-L{tmp_path}", "-lomp"} < set(linking)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs AARCH64_PYTHON, an aarch64 Python with torch: tests/kernels/aarch64.sh")
@pytest.mark.parametrize("cpu", CPUS)
def test_kernels_pass_their_tests_on_aarch64(cpu):
    """Their own tests, in an emulator: minutes."""
    run = {"cwd": ROOT, "env": {**os.environ, "QEMU_CPU": cpu, "OMP_NUM_THREADS": "1", "EVERY_CASE": "1"}, "text": True}
    asked = [*shlex.split(PYTHON), "-m", "kernels.native"]
    said = subprocess.run(asked, check=True, stdout=subprocess.PIPE, **run).stdout
    assert f"{CPUS[cpu]} (bfloat16), neon (float32)" in said
    assert ("neon dotprod" in said) == (cpu != "a64fx")
    names = "gram_and_linear int_matmul kv_decode lut_matmul prompt_attention step trellis_matmul"
    names += " w4a8_matmul w8a8_matmul"
    files = [f"tests/kernels/test_{name}.py" for name in names.split()]
    wanted = "(instruction_set or few_tokens or panels_lose or integer_products or two_bits or lists_are or changed"
    wanted += " or w4a8 or w8a8 or float64 or windows) and not (frozen or compile)"  # inductor asks the cross compiler for its own processor
    asked = [
        *shlex.split(PYTHON),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        wanted,
        *files,
    ]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **run)
    assert done.returncode == 0, done.stdout[-3000:]
