// y = x Wᵀ on a CPU, with W in a byte: W[n, k] = scale[n, g] (code[n, k] - zero[n, g]), for integers of 5, 6 and 8 bits. The
// layout ("panels") is described in kernels/int_matmul/README.md; panels.py packs it.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "step_parts.inc"

namespace {

#include "panels.inc"

constexpr const char* NAME = "byte_matmul";
constexpr int64_t WORD_BYTES = 128;  // 16 rows by eight columns: 0 2 4 6 1 3 5 7
constexpr int STRIDE = 32;
using Words = const uint32_t*;
using Table = int;  // there is none
INLINE Words load_words(const uint32_t* p) { return p; }
INLINE Table load_table(const Weight&) { return 0; }

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
using namespace wide;
constexpr int ITEMS = 8;
INLINE Vec decode(Words w, int i, Table) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w) + i)));
}
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  return _mm512_fmadd_ps(weights, _mm512_set1_ps(*reinterpret_cast<const float*>(item)), acc);
}
#include "panels_loops.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace avx512bf16 {
using namespace wide;
constexpr int ITEMS = 4;
INLINE __m512i floats(Words w, int i) {  // integers up to 256 are bfloat16: the lower half of each float is 0
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w) + i);
  return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
}
INLINE Vec decode(Words w, int i, Table) {  // columns 2 i and 2 i + 1, side by side in each lane
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(floats(w, i), 16), floats(w, 4 + i)));
}
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(*item)));
}
#include "panels_loops.inc"
}  // namespace avx512bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
using namespace narrow;
constexpr int ITEMS = 8;
INLINE __m256 floats(Words w, int i) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w + 2 * i))));
}
INLINE Vec decode(Words w, int i, Table) { return {floats(w, 2 * i), floats(w, 2 * i + 1)}; }
#include "panels_loops.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif  // x86

namespace portable {
using namespace plain;
constexpr int ITEMS = 8;
INLINE Vec decode(Words w, int i, Table) {
  const int8_t* codes = reinterpret_cast<const int8_t*>(w) + i * ROWS;
  Vec v;
  for (int r = 0; r < ROWS; r++) v.lane[r] = codes[r];
  return v;
}
#include "panels_loops.inc"
}  // namespace portable

#include "panels_host.inc"

at::Tensor byte_matmul(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale,
                       const std::optional<at::Tensor>& zero, int64_t out, const std::string& isa) {
  TORCH_CHECK(codes.scalar_type() == at::kChar, "byte_matmul: codes ", codes.scalar_type(), " cannot be read");
  return matmul(x, codes, scale, nullptr, zero, out, isa);
}

}  // namespace

workbench::Product workbench::byte_product(const std::string& isa) { return product_of(isa); }

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("byte_matmul(Tensor x, Tensor codes, Tensor scale, Tensor? zero, int out, str isa) -> Tensor");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("byte_matmul", byte_matmul); }
