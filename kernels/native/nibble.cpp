// y = x Wᵀ on a CPU, with W in four bits: W[n, k] = scale[n, g] (table[code[n, k]] - zero[n, g]). kernels/int_matmul/README.md has
// the layout ("panels") and what it costs; panels.py packs it. One file for every instruction set, chosen when it runs.

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

constexpr const char* NAME = "nibble_matmul";
constexpr int64_t WORD_BYTES = 64;  // 16 rows by eight columns
constexpr int STRIDE = 16;
constexpr float INTEGERS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
using namespace wide;
using Words = __m512i;
using Table = __m512;
constexpr int ITEMS = 8;
INLINE Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE Table load_table(const Weight& w) { return _mm512_loadu_ps(w.table); }
INLINE Vec decode(Words w, int i, Table table) { return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * i), table); }
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
using Words = __m512i;
using Table = __m512i;
constexpr int ITEMS = 4;
INLINE Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE Table load_table(const Weight& w) {
  const __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(w.table));
  return _mm512_broadcast_i64x4(half);  // twice: the fifth bit of an index belongs to the next code
}
INLINE Vec decode(Words w, int i, Table table) {
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_srli_epi32(w, 4 * i), table));
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
struct Words { __m256i low, high; };
struct Table { __m256 low, high; };
constexpr int ITEMS = 8;
INLINE Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
INLINE Table load_table(const Weight& w) { return {_mm256_loadu_ps(w.table), _mm256_loadu_ps(w.table + 8)}; }
INLINE __m256 look_up(__m256i w, int i, Table table) {
  const __m256i index = _mm256_srli_epi32(w, 4 * i);  // three bits choose the lane, the fourth the half of the table
  const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index), _mm256_permutevar8x32_ps(table.high, index), half);
}
INLINE Vec decode(Words w, int i, Table table) { return {look_up(w.low, i, table), look_up(w.high, i, table)}; }
#include "panels_loops.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif  // x86

namespace portable {
using namespace plain;
using Words = const uint32_t*;
using Table = const float*;
constexpr int ITEMS = 8;
INLINE Words load_words(const uint32_t* p) { return p; }
INLINE Table load_table(const Weight& w) { return w.table; }
INLINE Vec decode(Words w, int i, Table table) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.lane[r] = table[(w[r] >> (4 * i)) & 15];
  return v;
}
#include "panels_loops.inc"
}  // namespace portable

#include "panels_host.inc"

at::Tensor nibble_matmul(const at::Tensor& x, const at::Tensor& words, const at::Tensor& scale,
                         const std::optional<at::Tensor>& table, const std::optional<at::Tensor>& zero, int64_t out,
                         const std::string& isa) {
  TORCH_CHECK(words.scalar_type() == at::kInt && (!table || (table->is_contiguous() && table->numel() == 16 && table->scalar_type() == at::kFloat)),
              "nibble_matmul: words ", words.scalar_type(), " or the table cannot be read");
  return matmul(x, words, scale, table ? table->const_data_ptr<float>() : INTEGERS, zero, out, isa);
}

}  // namespace

workbench::Product workbench::nibble_product(const std::string& isa) { return product_of(isa); }

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("nibble_matmul(Tensor x, Tensor words, Tensor scale, Tensor? table, Tensor? zero, int out, str isa) -> Tensor");
  m.def("nibble_isa(bool bfloat16) -> str", best_isa);
  m.def("nibble_runs(str isa) -> bool", runs);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("nibble_matmul", nibble_matmul); }
