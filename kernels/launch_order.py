"""What Triton kernels do before they read the results of the kernel before them, with and without an early launch.

With `kernels.tuning.early_launches` a kernel is launched while the one before it in the stream ends (CUDA: programmatic
dependent launch, for compute capability 9.0 and later). Every program of such a kernel must call `await_inputs` before
it reads or writes what other kernels of the step write or read, and may fetch weights before that.
"""

from kernels.interpreter import interpreting, prepare

prepare()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: E402

if interpreting():  # which runs one kernel after the other
    gdc_launch_dependents = gdc_wait = lambda: None


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Allow the next kernel to start when every program of this one has come here, and wait until the kernel before
    this one has ended and its results are visible; without EARLY nothing."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(at):
    """Load what lies at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
