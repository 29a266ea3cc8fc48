#!/bin/sh
# Marlin (https://github.com/IST-DASLab/marlin, arXiv:2408.11743) compiled for Hopper into .rivals, where `make gpu` finds it.
# It needs nvcc, and neither a GPU nor torch's CUDA headers: a library of one function takes the place of its extension.
#
#   sh seeds/peers/marlin.sh [FOLDER OF A CLONE]
set -eu
cd "$(dirname "$0")/../.."
CLONE=${1:-.rivals/marlin-source}
[ -d "$CLONE" ] || git clone --depth 1 https://github.com/IST-DASLab/marlin "$CLONE"
mkdir -p .rivals
cat >.rivals/marlin_one_function.cu <<'CUDA'
#include "marlin_kernel.cu"
extern "C" int marlin_mul(const void* A, const void* B, void* C, void* s, int m, int n, int k, void* workspace, int group,
                          int device, void* stream) {
  return marlin_cuda(A, B, C, s, m, n, k, workspace, group, device, static_cast<cudaStream_t>(stream), -1, -1, -1, 16);
}
CUDA
# A copy with a cache hint (`createpolicy` ... `L2::cache_hint`) is an illegal instruction on Hopper; the plain copy does the same.
sed 's/cp\.async\.cg\.shared\.global\.L2::cache_hint \[%0\], \[%1\], %2, p;/cp.async.cg.shared.global [%0], [%1], %2;/; /createpolicy/d' \
    "$CLONE/marlin/marlin_cuda_kernel.cu" >.rivals/marlin_kernel.cu
nvcc -O3 -std=c++17 -arch=sm_90 --expt-relaxed-constexpr -w -Xcompiler -fPIC -shared -cudart static -I .rivals \
    .rivals/marlin_one_function.cu -o .rivals/libmarlin.so
rm -rf .rivals/marlin && cp -r "$CLONE/marlin" .rivals/marlin
cat >.rivals/marlin_cuda.py <<'PYTHON'
"""In place of Marlin's extension: its product, called without torch's headers."""
import ctypes
from pathlib import Path

import torch

_product = ctypes.CDLL(str(Path(__file__).with_name("libmarlin.so"))).marlin_mul


def mul(A, B, C, s, workspace, *_):
    (m, k), n = A.shape, C.shape[1]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (A, B, C, s, workspace)]
    stream = ctypes.c_void_p(torch.cuda.current_stream(A.device).cuda_stream)
    code = _product(*pointers[:4], m, n, k, pointers[4], k // s.shape[0], A.device.index or 0, stream)
    if code:
        raise RuntimeError(f"Marlin does not take {m} x {n} x {k} (code {code})")
PYTHON
rm -f .rivals/marlin_one_function.cu .rivals/marlin_kernel.cu
