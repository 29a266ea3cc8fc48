#!/bin/sh
# The kernels' own tests with AddressSanitizer and UndefinedBehaviorSanitizer: `tests/kernels/sanitize.sh FOLDER`, in the root of the
# checkout. They run as on this processor, as on one without AVX-512, and as on one without vector instructions. The
# sanitized library lies in FOLDER, so that no other process loads it. Tests that compile with torch are left out:
# its code and its compiler would run under the sanitizers too.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
python=${PYTHON:-python3}
compiler="$folder/g++"
printf '#!/bin/sh\nexec g++ "$@" -O1 -g1 -fsanitize=address,undefined -fno-omit-frame-pointer\n' > "$compiler"
chmod +x "$compiler"
export WORKBENCH_CACHE="$folder" CXX="$compiler"
"$python" -c 'from kernels.compiler import build; from pathlib import Path; build(Path("kernels/native"))'
names="accelerate expert_matmul gram_and_linear hadamard int_matmul joined kv_decode lut_matmul page_list prompt_attention step"
names="$names trellis_matmul w4a8_matmul w8a8_matmul"
files=$(for name in $names; do echo "tests/kernels/test_$name.py"; done)
# libstdc++ comes first, too, so that the sanitizer knows what throws. The first finding ends the process with a stack, which pytest
# must not capture.
runtime="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
for isa in "" avx2 portable; do
  echo "WORKBENCH_ISA=$isa"
  WORKBENCH_ISA=$isa LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    EVERY_CASE=1 "$python" -m pytest -q -p no:cacheprovider --capture=sys -m "not slow" -k "not (frozen or compile or graph)" "$@" $files
done
