"""C++ kernels whose scratch memory holds NaN where nothing was written: no NaN may reach a result, even times zero."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native

HERE = Path(__file__).parent
# The cases of a kernel for every instruction set, in odd sizes.
CASES = {
    "test_kv_decode.py": "integer_products and 2- or lists_are_read and dtype0",
    "test_int_matmul.py": "every_instruction_set",
    "test_gram_and_linear.py": "few_tokens",
    "test_step.py": "every_instruction_set or changed_inputs",
}
ALLOCATOR = """
#include <stddef.h>
#include <string.h>
void *__libc_malloc(size_t);
void *__libc_memalign(size_t, size_t);
static void *filled(void *p, size_t n) { return p && n >= 128 && n < (64u << 20) ? memset(p, 0xFF, n) : p; }
void *malloc(size_t n) { return filled(__libc_malloc(n), n); }
void *aligned_alloc(size_t a, size_t n) { return filled(__libc_memalign(a, n), n); }
int posix_memalign(void **to, size_t a, size_t n) { return (*to = filled(__libc_memalign(a, n), n)) ? 0 : 12; }
"""


@pytest.mark.long
@pytest.mark.skipif(native.why_not() is not None, reason=f"no C++ kernels here: {native.why_not()}")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is replaced as Linux does it")
def test_no_result_depends_on_it(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc") or pytest.skip("no C compiler for the allocator")
    source, library = tmp_path / "allocator.c", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    if subprocess.run([sys.executable, "-c", ""], env={**os.environ, "LD_PRELOAD": str(library)}).returncode:
        pytest.skip("this C library has no allocator to put in front of")
    names = " or ".join(f"({file} and ({which}))" for file, which in CASES.items())
    files = [HERE / file for file in CASES]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", names, *files],
        env={**os.environ, "LD_PRELOAD": str(library), "EVERY_CASE": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
