// y = x Wᵀ + bias on a CPU for a few tokens, with W in 16 bits as it is stored, row by row, with its zeros or without. A step of
// decoding reads every weight once, so that memory is the limit. kernels/linear/README.md and kernels/sparse_matmul/README.md say
// what it costs. One file for every instruction set, chosen when it runs.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "neon.inc"
#include "step_parts.inc"

namespace {

#include "amx.inc"

constexpr int ROWS = 4;          // of W in a share of a thread
constexpr int TOKENS = 4;        // that share one load of W
constexpr int64_t GRAIN = 32768;  // weights worth a thread
// Bytes ahead of the loops for which memory is asked. The processor by itself does not look far enough ahead: least where zeros are
// skipped, because a line of memory then takes several times as many instructions.
constexpr int AHEAD = 4096;
// For groups of so many tokens, memory is asked for further ahead, and into L2: L1 supports too few outstanding lines.
constexpr int FAR_TOKENS = 3, FAR_AHEAD = 8192;

struct Matrix {
  const uint16_t* w;  // [out, in]; or the weights that are kept, row by row
  int64_t out, in;
  const uint8_t* mask = nullptr;    // [out, in / 8], a bit for each place, 1 where a weight is kept; null if all are
  const int64_t* starts = nullptr;  // [out + 1], the first kept weight of each row
};

// The tokens' layout for the loops: the items of `step` columns each, and plain values for the columns left over.
struct Tokens {
  const void* items;
  const float* values;  // [tokens, in]
  int64_t stride;       // bytes from token to token
};

// sums[ROWS][TOKENS] of `rows` rows from `row` on and of `tokens` tokens.
using Loop = void (*)(const Matrix&, const Tokens&, int64_t row, int rows, int64_t token, int tokens, float* sums);

inline float widened(uint16_t bits, bool bfloat16) {
  if (!bfloat16) return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

#define INLINED inline __attribute__((always_inline))
#define INLINE static INLINED
#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f")
// The sums of the lanes of four vectors: lanes eight apart are added first, then four, two and one apart.
INLINE void totals_512(const __m512* x, float* y) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xEE));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xEE));
  const __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  const __m512 twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4E));
  const __m512 ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0xB1));
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, ones)));
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace bf16_avx512bf16 {
constexpr int STEP = 32, BYTES = 64;  // columns of a step, and their bytes in a token
constexpr bool BFLOAT16 = true;
using Acc = __m512;
using Word = __m512bh;
INLINE Acc zero() { return _mm512_setzero_ps(); }
INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
INLINE Word load(const uint16_t* w) { return (__m512bh)_mm512_loadu_si512(w); }
INLINE Acc madd(Acc acc, Word w, const char* x) { return _mm512_dpbf16_ps(acc, w, (__m512bh)_mm512_loadu_si512(x)); }
INLINE void totals(const Acc* x, float* y) { totals_512(x, y); }
#define TWO_ROWS
#include "half.inc"
#undef TWO_ROWS
}  // namespace bf16_avx512bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace bf16_avx512 {  // a token's even columns of a step come first, then its odd ones
constexpr int STEP = 32, BYTES = 128;
constexpr bool BFLOAT16 = true;
using Acc = __m512;
using Word = __m512i;
INLINE Acc zero() { return _mm512_setzero_ps(); }
INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
INLINE Word load(const uint16_t* w) { return _mm512_loadu_si512(w); }
INLINE Acc madd(Acc acc, Word w, const char* x) {
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xFFFF0000))));
  acc = _mm512_fmadd_ps(even, _mm512_loadu_ps(x), acc);
  return _mm512_fmadd_ps(odd, _mm512_loadu_ps(x + 64), acc);
}
INLINE void totals(const Acc* x, float* y) { totals_512(x, y); }
#include "half.inc"
}  // namespace bf16_avx512
namespace fp16_avx512 {
constexpr int STEP = 16, BYTES = 64;
constexpr bool BFLOAT16 = false;
using Acc = __m512;
using Word = __m512;
INLINE Acc zero() { return _mm512_setzero_ps(); }
INLINE Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
INLINE Word load(const uint16_t* w) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w))); }
INLINE Acc madd(Acc acc, Word w, const char* x) { return _mm512_fmadd_ps(w, _mm512_loadu_ps(x), acc); }
INLINE void totals(const Acc* x, float* y) { totals_512(x, y); }
#include "half.inc"
}  // namespace fp16_avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace bf16_avx2 {
constexpr int STEP = 16, BYTES = 64;
constexpr bool BFLOAT16 = true;
using Acc = __m256;
using Word = __m256i;
INLINE Acc zero() { return _mm256_setzero_ps(); }
INLINE Acc add(Acc a, Acc b) { return _mm256_add_ps(a, b); }
INLINE Word load(const uint16_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
INLINE Acc madd(Acc acc, Word w, const char* x) {
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xFFFF0000))));
  acc = _mm256_fmadd_ps(even, _mm256_loadu_ps(reinterpret_cast<const float*>(x)), acc);
  return _mm256_fmadd_ps(odd, _mm256_loadu_ps(reinterpret_cast<const float*>(x) + 8), acc);
}
INLINE float total(Acc acc) {
  float lanes[8];
  _mm256_storeu_ps(lanes, acc);
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}
INLINE void totals(const Acc* x, float* y) {
  for (int i = 0; i < 4; i++) y[i] = total(x[i]);
}
#include "half.inc"
}  // namespace bf16_avx2
namespace fp16_avx2 {
constexpr int STEP = 8, BYTES = 32;
constexpr bool BFLOAT16 = false;
using Acc = __m256;
using Word = __m256;
INLINE Acc zero() { return _mm256_setzero_ps(); }
INLINE Acc add(Acc a, Acc b) { return _mm256_add_ps(a, b); }
INLINE Word load(const uint16_t* w) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))); }
INLINE Acc madd(Acc acc, Word w, const char* x) {
  return _mm256_fmadd_ps(w, _mm256_loadu_ps(reinterpret_cast<const float*>(x)), acc);
}
INLINE void totals(const Acc* x, float* y) { bf16_avx2::totals(x, y); }
#include "half.inc"
}  // namespace fp16_avx2
#pragma GCC pop_options
#endif  // x86

#ifdef HAVE_X86
// The same without zeros.
#define KEPT 1
struct KeptRow {
  const uint8_t* mask;
  const uint16_t *w, *end;

  INLINED KeptRow(const Matrix& m, int64_t row)
      : mask(m.mask + row * (m.in / 8)), w(m.w + m.starts[row]), end(m.w + m.starts[m.out]) {}
};

// For each byte of a mask: which bytes of the next 8 kept weights go to which place; 0x80 gives a zero.
struct Places {
  alignas(16) uint8_t from[256][16];
  constexpr Places() : from{} {
    for (int mask = 0; mask < 256; mask++)
      for (int i = 0, next = 0; i < 8; i++) {
        const bool kept = mask >> i & 1;
        from[mask][2 * i] = uint8_t(kept ? 2 * next : 0x80);
        from[mask][2 * i + 1] = uint8_t(kept ? 2 * next + 1 : 0x80);
        next += kept;
      }
  }
};
constexpr Places PLACES;

// The same for bfloat16 as float32: a kept weight comes into the upper half of its place. Both lanes read the same 8 weights.
struct WidePlaces {
  alignas(32) uint8_t from[256][32];
  constexpr WidePlaces() : from{} {
    for (int mask = 0; mask < 256; mask++)
      for (int i = 0; i < 16; i++) {
        from[mask][4 * (i / 2) + i % 2] = 0x80;
        from[mask][4 * (i / 2) + 2 + i % 2] = PLACES.from[mask][i];
      }
  }
};
constexpr WidePlaces WIDE_PLACES;

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,popcnt")
namespace kept_avx2 {
// The last kept weights of a matrix, fewer than 32, at a place of this thread behind which may be read.
constexpr int REST = 64;
__attribute__((noinline)) static const uint16_t* copied(const uint16_t* w, const uint16_t* end) {
  static thread_local uint16_t rest[REST];
  std::memcpy(rest, w, 2 * size_t(end - w));
  return rest;
}

// A row whose loads may read weights behind its own, of which there are 32 behind `w` after `look_ahead`.
struct Row : KeptRow {
  INLINED Row(const Matrix& m, int64_t row) : KeptRow(m, row) {}
  INLINED void look_ahead() {
    _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
    if (__builtin_expect(w + 32 > end, 0)) w = copied(w, end), end = w + REST;
  }
  INLINED __m128i next_8() {
    const uint32_t kept = *mask++;
    const __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
    w += __builtin_popcount(kept);
    return _mm_shuffle_epi8(from, _mm_load_si128(reinterpret_cast<const __m128i*>(PLACES.from[kept])));
  }
  INLINED __m256 next_8_wide() {
    const uint32_t kept = *mask++;
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    w += __builtin_popcount(kept);
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, _mm256_load_si256(reinterpret_cast<const __m256i*>(WIDE_PLACES.from[kept]))));
  }
};
static void expand(const Matrix& m, int64_t row, uint16_t* to) {  // a row with its zeros
  Row at(m, row);
  for (int64_t k = 0; k < m.in; k += 8) {
    if (k % 32 == 0) at.look_ahead();
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), at.next_8());
  }
}
}  // namespace kept_avx2
namespace kept_bf16_avx2 {
using bf16_avx2::BFLOAT16, bf16_avx2::Acc, bf16_avx2::zero, bf16_avx2::add, bf16_avx2::totals;
constexpr int STEP = 32, BYTES = 128;
struct Word {
  __m256 eights[4];
};
INLINE Acc madd(Acc acc, const Word& word, const char* x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) acc = _mm256_fmadd_ps(word.eights[i], _mm256_loadu_ps(reinterpret_cast<const float*>(x) + 8 * i), acc);
  return acc;
}
struct Row : kept_avx2::Row {
  INLINED Row(const Matrix& m, int64_t row) : kept_avx2::Row(m, row) {}
  template <int T>
  INLINED Word next() {
    look_ahead();
    return {{next_8_wide(), next_8_wide(), next_8_wide(), next_8_wide()}};
  }
};
#include "half.inc"
}  // namespace kept_bf16_avx2
namespace kept_fp16_avx2 {
using fp16_avx2::BFLOAT16, fp16_avx2::Acc, fp16_avx2::zero, fp16_avx2::add, fp16_avx2::totals;
using kept_bf16_avx2::STEP, kept_bf16_avx2::BYTES, kept_bf16_avx2::Word, kept_bf16_avx2::madd;
struct Row : kept_avx2::Row {
  INLINED Row(const Matrix& m, int64_t row) : kept_avx2::Row(m, row) {}
  template <int T>
  INLINED Word next() {
    look_ahead();
    return {{_mm256_cvtph_ps(next_8()), _mm256_cvtph_ps(next_8()), _mm256_cvtph_ps(next_8()), _mm256_cvtph_ps(next_8())}};
  }
};
#include "half.inc"
}  // namespace kept_fp16_avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi2,popcnt,fma,avx2,f16c")
#include "kept.inc"
INLINE __m256i next_16(const uint8_t*& mask, const uint16_t*& w, const uint16_t* end) {
  uint16_t kept;
  std::memcpy(&kept, mask, 2);
  const int count = __builtin_popcount(kept);
  _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
  const __m256i packed = w + 16 <= end ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w))
                                       : _mm256_maskz_loadu_epi16(__mmask16(_bzhi_u32(0xFFFF, count)), w);
  mask += 2, w += count;
  return _mm256_maskz_expand_epi16(kept, packed);
}
// A row with its zeros.
static void expand(const Matrix& m, int64_t row, uint16_t* to) {
  KeptRow at(m, row);
  for (int64_t k = 0; k < m.in; k += 32) _mm512_storeu_si512(to + k, next_32(at.mask, at.w, at.end));
}

namespace kept_bf16_avx512 {
using bf16_avx512::STEP, bf16_avx512::BYTES, bf16_avx512::BFLOAT16, bf16_avx512::Acc, bf16_avx512::Word;
using bf16_avx512::zero, bf16_avx512::add, bf16_avx512::madd, bf16_avx512::totals;
struct Row : KeptRow {
  INLINED Row(const Matrix& m, int64_t row) : KeptRow(m, row) {}
  template <int T>
  INLINED Word next() { return next_32(mask, w, end); }
};
#include "half.inc"
}  // namespace kept_bf16_avx512
namespace kept_fp16_avx512 {
using fp16_avx512::STEP, fp16_avx512::BYTES, fp16_avx512::BFLOAT16, fp16_avx512::Acc, fp16_avx512::Word;
using fp16_avx512::zero, fp16_avx512::add, fp16_avx512::madd, fp16_avx512::totals;
struct Row : KeptRow {
  INLINED Row(const Matrix& m, int64_t row) : KeptRow(m, row) {}
  template <int T>
  INLINED Word next() { return _mm512_cvtph_ps(next_16(mask, w, end)); }
};
#include "half.inc"
}  // namespace kept_fp16_avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx512bf16,bmi2,popcnt,fma,avx2,f16c")
namespace kept_bf16_avx512bf16 {
using bf16_avx512bf16::STEP, bf16_avx512bf16::BYTES, bf16_avx512bf16::BFLOAT16, bf16_avx512bf16::Acc, bf16_avx512bf16::Word;
using bf16_avx512bf16::zero, bf16_avx512bf16::add, bf16_avx512bf16::madd, bf16_avx512bf16::totals;
struct Row : KeptRow {
  INLINED Row(const Matrix& m, int64_t row) : KeptRow(m, row) {}
  template <int T>
  INLINED Word next() { return (Word)next_32(mask, w, end); }
};
#include "half.inc"
}  // namespace kept_bf16_avx512bf16
#pragma GCC pop_options
#undef KEPT
#endif  // x86

#ifdef HAVE_NEON
// Two vectors of sums, to hide the latency of products.
struct TwoSums {
  float32x4_t a, b;
};
INLINE TwoSums added(TwoSums x, TwoSums y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
INLINE void summed(const TwoSums* x, float* y) {
  for (int i = 0; i < 4; i++) y[i] = vaddvq_f32(vaddq_f32(x[i].a, x[i].b));
}
struct Halves {
  uint16x8_t a, b;
};

namespace bf16_neonbf16 {
constexpr int STEP = 16, BYTES = 32;
constexpr bool BFLOAT16 = true;
using Acc = TwoSums;
using Word = Halves;
INLINE Acc zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
INLINE Acc add(Acc a, Acc b) { return added(a, b); }
INLINE Word load(const uint16_t* w) { return {vld1q_u16(w), vld1q_u16(w + 8)}; }
INLINE Acc madd(Acc acc, Word w, const char* x) {
  const Word items = load(reinterpret_cast<const uint16_t*>(x));
  workbench::neon::bfdot(acc.a, w.a, items.a), workbench::neon::bfdot(acc.b, w.b, items.b);
  return acc;
}
INLINE void totals(const Acc* x, float* y) { summed(x, y); }
#include "half.inc"
}  // namespace bf16_neonbf16
namespace bf16_neon {  // a token's even columns of a step come first, then its odd ones
constexpr int STEP = 8, BYTES = 32;
constexpr bool BFLOAT16 = true;
using Acc = TwoSums;
using Word = uint32x4_t;
INLINE Acc zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
INLINE Acc add(Acc a, Acc b) { return added(a, b); }
INLINE Word load(const uint16_t* w) { return vreinterpretq_u32_u16(vld1q_u16(w)); }
INLINE Acc madd(Acc acc, Word w, const char* x) {
  const float* items = reinterpret_cast<const float*>(x);
  acc.a = vfmaq_f32(acc.a, vreinterpretq_f32_u32(vshlq_n_u32(w, 16)), vld1q_f32(items));
  acc.b = vfmaq_f32(acc.b, vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xFFFF0000))), vld1q_f32(items + 4));
  return acc;
}
INLINE void totals(const Acc* x, float* y) { summed(x, y); }
#include "half.inc"
}  // namespace bf16_neon
namespace fp16_neon {
constexpr int STEP = 8, BYTES = 32;
constexpr bool BFLOAT16 = false;
using Acc = TwoSums;
using Word = TwoSums;
INLINE Acc zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
INLINE Acc add(Acc a, Acc b) { return added(a, b); }
INLINE Word load(const uint16_t* w) {
  const uint16x8_t both = vld1q_u16(w);
  return {workbench::neon::from_float16(vget_low_u16(both)), workbench::neon::from_float16(vget_high_u16(both))};
}
INLINE Acc madd(Acc acc, Word w, const char* x) {
  const float* items = reinterpret_cast<const float*>(x);
  return {vfmaq_f32(acc.a, w.a, vld1q_f32(items)), vfmaq_f32(acc.b, w.b, vld1q_f32(items + 4))};
}
INLINE void totals(const Acc* x, float* y) { summed(x, y); }
#include "half.inc"
}  // namespace fp16_neon
#endif  // aarch64
#undef INLINE
#undef INLINED

template <bool IS_BFLOAT16>
struct Portable {
  static void loop(const Matrix& m, const Tokens& x, int64_t row, int rows, int64_t token, int tokens, float* sums) {
    for (int r = 0; r < rows; r++)
      for (int t = 0; t < tokens; t++) {
        const uint16_t* w = m.w + (row + r) * m.in;
        const float* values = x.values + (token + t) * m.in;
        float sum = 0;
        for (int64_t k = 0; k < m.in; k++) sum += widened(w[k], IS_BFLOAT16) * values[k];
        sums[r * TOKENS + t] = sum;
      }
  }
};

// Some rows of a product, for a step of decoding; see step_parts.inc.
template <Loop LOOP, bool AS_STORED>
void some_rows(const workbench::Stored& w, const workbench::Operand& x, int64_t begin, int64_t end, float* y) {
  const Matrix m{static_cast<const uint16_t*>(w.data), w.out, w.in, w.mask, w.starts};
  const Tokens items{x.items, x.values, w.in * (AS_STORED ? 2 : 4)};
  float sums[ROWS * TOKENS];
  for (int64_t row = begin; row < end; row += ROWS) {
    const int rows = int(end - row < ROWS ? end - row : ROWS);
    for (int token = 0; token < x.tokens; token += TOKENS) {
      const int tokens = x.tokens - token < TOKENS ? x.tokens - token : TOKENS;
      LOOP(m, items, row, rows, token, tokens, sums);
      for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) y[(token + t) * w.out + row + r] = sums[r * TOKENS + t];
    }
  }
}

using workbench::Items;

struct Way {
  Loop loop;
  int step;
  Items items;
  decltype(workbench::Product::rows) rows;
};

template <Loop LOOP, int STEP, Items ITEMS>
Way way() {
  return {LOOP, STEP, ITEMS, some_rows<LOOP, ITEMS == Items::stored>};
}

#ifdef HAVE_X86
// The loops for rows without zeros that stand for those of dense rows: of AVX2 where AVX512-VBMI2 is not there.
std::string kept_isa_of(const std::string& isa) {
  return isa.rfind("avx512", 0) == 0 && !workbench::x86().vbmi2 ? "avx2" : isa;
}
#endif

Way way_of(const std::string& wanted, bool bfloat16, bool kept) {
#ifdef HAVE_X86
  const std::string isa = wanted == "avx512bf16" && workbench::x86().slow_pairs ? "avx512" : wanted;
  if (kept && isa != "portable") {
    const std::string kept_isa = kept_isa_of(isa);
    if (kept_isa == "avx512bf16" && bfloat16)
      return way<kept_bf16_avx512bf16::loop, kept_bf16_avx512bf16::STEP, Items::stored>();
    if (kept_isa == "avx512" && bfloat16) return way<kept_bf16_avx512::loop, kept_bf16_avx512::STEP, Items::even_then_odd>();
    if (kept_isa == "avx512") return way<kept_fp16_avx512::loop, kept_fp16_avx512::STEP, Items::widened>();
    if (kept_isa == "avx2" && bfloat16) return way<kept_bf16_avx2::loop, kept_bf16_avx2::STEP, Items::widened>();
    if (kept_isa == "avx2") return way<kept_fp16_avx2::loop, kept_fp16_avx2::STEP, Items::widened>();
  }
#else
  const std::string& isa = wanted;
#endif
  TORCH_CHECK(!kept, "`isa` (='", wanted, "'): this processor has no loops for weights without zeros");
#ifdef HAVE_X86
  if (isa == "avx512bf16" && bfloat16) return way<bf16_avx512bf16::loop, bf16_avx512bf16::STEP, Items::stored>();
  if (isa == "avx512" && bfloat16) return way<bf16_avx512::loop, bf16_avx512::STEP, Items::even_then_odd>();
  if (isa == "avx512") return way<fp16_avx512::loop, fp16_avx512::STEP, Items::widened>();
  if (isa == "avx2" && bfloat16) return way<bf16_avx2::loop, bf16_avx2::STEP, Items::even_then_odd>();
  if (isa == "avx2") return way<fp16_avx2::loop, fp16_avx2::STEP, Items::widened>();
#endif
#ifdef HAVE_NEON
  if (isa == "neon bf16" && bfloat16) return way<bf16_neonbf16::loop, bf16_neonbf16::STEP, Items::stored>();
  if (isa == "neon" && bfloat16) return way<bf16_neon::loop, bf16_neon::STEP, Items::even_then_odd>();
  if (isa == "neon") return way<fp16_neon::loop, fp16_neon::STEP, Items::widened>();
#endif
  TORCH_CHECK(isa == "portable", "`isa` (='", isa, "') does not take ", bfloat16 ? "bfloat16" : "float16");
  return bfloat16 ? way<Portable<true>::loop, 1, Items::widened>() : way<Portable<false>::loop, 1, Items::widened>();
}

#ifdef HAVE_AMX
// Tiles for products of up to 16 tokens, of which each costs next to nothing: A holds 16 rows of W as they lie in memory, B the tokens
// side by side, in pairs of columns, and a sum is over the columns in order, whatever the other tokens are.
constexpr int MOST_TILED = 16;

// The calling thread's tiles, while this object lives: sums 0 and 1, W 2 and 3, tokens 4. The last ones of each may have fewer rows.
class RowTiles {
 public:
  RowTiles(int tokens, int last) {
    alignas(64) struct { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int i : {0, 1, 4}) shape.bytes[i] = uint16_t(4 * tokens);
    for (int i : {2, 3}) shape.bytes[i] = 64;
    for (int i : {0, 2, 4}) shape.rows[i] = TILE_ROWS;
    for (int i : {1, 3}) shape.rows[i] = uint8_t(last);
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~RowTiles() { asm volatile("tilerelease"); }
  RowTiles(const RowTiles&) = delete;
};

// Sums [tiles of 16 rows][tokens] of 32 rows, or of up to 16 with `both` false, whose tiles are 1 and 3. Memory behind the rows is asked
// for meanwhile, up to `end`.
void multiply_rows(const char* w, int64_t in, bool both, const char* x, int64_t x_apart, int tokens, const char* end, float* sums) {
  const int64_t apart = 2 * in, half = TILE_ROWS * apart, sum_apart = 4 * tokens, rows = both ? 2 * TILE_ROWS : TILE_ROWS;
  const char* ahead = w + rows * apart;
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int64_t k = 0; k < in; k += 32, w += 64, x += TILE_ROWS * x_apart) {
    for (int i = 0; i < rows && ahead < end; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    TILE_LOAD(4, x, x_apart);
    if (both) {
      TILE_LOAD(2, w, apart);
      asm volatile("tdpbf16ps %%tmm4, %%tmm2, %%tmm0" : :);
      TILE_LOAD(3, w + half, apart);
    } else {
      TILE_LOAD(3, w, apart);
    }
    asm volatile("tdpbf16ps %%tmm4, %%tmm3, %%tmm1" : :);
  }
  if (both) TILE_STORE(0, sums, sum_apart);
  TILE_STORE(1, sums + (both ? TILE_ROWS * tokens : 0), sum_apart);
}

// As `some_rows`, by tiles.
void tiled_rows(const workbench::Stored& w, const workbench::Operand& x, int64_t begin, int64_t end, float* y) {
  const int tokens = x.tokens;
  const auto* items = static_cast<const uint32_t*>(x.items);  // pairs of columns, [tokens, in / 2]
  const int64_t pairs = w.in / 2;
  static thread_local std::vector<uint32_t> room;
  if (tokens > 1) {
    room.resize(pairs * tokens + 16);
    uint32_t* to = room.data();
    for (int t = 0; t < tokens; t++)
      for (int64_t k = 0; k < pairs; k++) to[k * tokens + t] = items[t * pairs + k];
    items = to;
  }
  const char* data = static_cast<const char*>(w.data);
  const char* until = data + 2 * w.in * end;
  float sums[2 * TILE_ROWS * MOST_TILED];
  const auto put = [&](int64_t row, int64_t count) {
    for (int t = 0; t < tokens; t++)
      for (int64_t r = 0; r < count; r++) y[t * w.out + row + r] = sums[r * tokens + t];
  };
  const auto multiply = [&](int64_t row, bool both) {
    multiply_rows(data + 2 * w.in * row, w.in, both, reinterpret_cast<const char*>(items), 4 * tokens, tokens, until, sums);
  };
  int64_t row = begin;
  {
    const RowTiles tiles(tokens, TILE_ROWS);
    for (; row + 2 * TILE_ROWS <= end; row += 2 * TILE_ROWS) multiply(row, true), put(row, 2 * TILE_ROWS);
    if (row + TILE_ROWS <= end) multiply(row, false), put(row, TILE_ROWS), row += TILE_ROWS;
  }
  if (row == end) return;
  const RowTiles tiles(tokens, int(end - row));
  multiply(row, false), put(row, end - row);
}
#endif

#include "isa.inc"

// The tokens in float32, and the items of the loops.
struct Laid {
  std::unique_ptr<float[]> values, mixed;
  Tokens tokens{};

  Laid(const at::Tensor& x, int64_t count, int64_t in, const Way& way, bool bfloat16) {
    const auto* bits = reinterpret_cast<const uint16_t*>(x.const_data_ptr());
    if (way.items != Items::stored || in % way.step) {
      values.reset(new float[count * in]);
      for (int64_t i = 0; i < count * in; i++) values[i] = widened(bits[i], bfloat16);
    }
    tokens = {bits, values.get(), in * 2};
    if (way.items == Items::stored) return;
    tokens = {values.get(), values.get(), in * 4};
    if (way.items == Items::widened) return;
    mixed.reset(new float[count * in]);
    const int64_t half = way.step / 2;
    for (int64_t t = 0; t < count; t++)
      for (int64_t k = 0; k + way.step <= in; k += way.step) {
        const float* from = values.get() + t * in + k;
        float* to = mixed.get() + t * in + k;
        for (int64_t i = 0; i < half; i++) to[i] = from[2 * i], to[half + i] = from[2 * i + 1];
      }
    tokens.items = mixed.get();
  }
};

struct Bias {
  const void* data;  // null for none
  at::ScalarType type;
  float operator[](int64_t i) const {
    if (!data) return 0;
    if (type == at::kFloat) return static_cast<const float*>(data)[i];
    return widened(static_cast<const uint16_t*>(data)[i], type == at::kBFloat16);
  }
};

inline void put(at::Tensor& y, void* to, int64_t at, float value) {
  if (y.scalar_type() == at::kBFloat16) static_cast<at::BFloat16*>(to)[at] = static_cast<at::BFloat16>(value);
  else static_cast<at::Half*>(to)[at] = static_cast<at::Half>(value);
}

// Products of the same tokens [..., in] with matrices: one call, in which each thread has one share.
std::vector<at::Tensor> multiply(const at::Tensor& x, const std::vector<Matrix>& matrices, const std::vector<Bias>& biases,
                                 const std::string& wanted) {
  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  const int64_t in = x.size(-1), count = in ? x.numel() / in : 0;
  std::vector<at::Tensor> outputs;
  std::vector<void*> to;
  std::vector<int64_t> blocks{0};  // of ROWS rows, before each matrix
  for (const Matrix& m : matrices) {
    auto sizes = x.sizes().vec();
    sizes.back() = m.out;
    outputs.push_back(at::empty(sizes, x.options()));
    to.push_back(outputs.back().mutable_data_ptr());
    blocks.push_back(blocks.back() + (m.out + ROWS - 1) / ROWS);
  }
  if (!count || matrices.empty()) return outputs;
  const std::string isa = wanted == "auto" ? best_isa(bfloat16) : wanted;
  TORCH_CHECK(runs(isa), "`isa` (='", isa, "') is not one of this machine's");
  const Way way = way_of(isa, bfloat16, matrices[0].mask);
  const Laid laid(x, count, in, way, bfloat16);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, in * ROWS));
  at::parallel_for(0, blocks.back(), grain, [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(blocks.begin(), blocks.end(), begin) - blocks.begin() - 1;
    float sums[ROWS * TOKENS];
    for (int64_t block = begin; block < end; block++) {
      while (block >= blocks[i + 1]) i++;
      const Matrix& m = matrices[i];
      const int64_t row = (block - blocks[i]) * ROWS;
      const int rows = int(std::min<int64_t>(ROWS, m.out - row));
      for (int64_t token = 0; token < count; token += TOKENS) {
        const int tokens = int(std::min<int64_t>(TOKENS, count - token));
        way.loop(m, laid.tokens, row, rows, token, tokens, sums);
        for (int t = 0; t < tokens; t++)
          for (int r = 0; r < rows; r++)
            put(outputs[i], to[i], (token + t) * m.out + row + r, sums[r * TOKENS + t] + biases[i][row + r]);
      }
    }
  });
  return outputs;
}

Bias bias_of(const std::optional<at::Tensor>& bias, int64_t out) {
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == out && bias->is_contiguous()), "a bias is [", out, "]");
  return {bias ? bias->const_data_ptr() : nullptr, bias ? bias->scalar_type() : at::kFloat};
}

bool readable(const at::Tensor& x) {
  return (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf) && x.device().is_cpu();
}

// Products with several dense weights, such as those of queries, keys and values.
std::vector<at::Tensor> half_matmul(const at::Tensor& x_, at::TensorList weights,
                                    const c10::List<std::optional<at::Tensor>>& biases, const std::string& wanted) {
  const at::Tensor x = x_.contiguous();
  const int64_t in = x.size(-1);
  TORCH_CHECK(readable(x) && weights.size() == biases.size(), "half_matmul: x ", x.scalar_type(), " cannot be read");
  std::vector<Matrix> matrices;
  std::vector<Bias> added;
  for (size_t i = 0; i < weights.size(); i++) {
    const at::Tensor& w = weights[i];
    TORCH_CHECK(w.dim() == 2 && w.size(1) == in && w.is_contiguous() && w.scalar_type() == x.scalar_type(), "half_matmul: x ",
                x.sizes(), " and weight ", w.sizes(), " ", w.scalar_type(), " do not fit");
    matrices.push_back({reinterpret_cast<const uint16_t*>(w.const_data_ptr()), w.size(0), in});
    added.push_back(bias_of(biases[i], w.size(0)));
  }
  return multiply(x, matrices, added, wanted);
}

Matrix kept_matrix(const at::Tensor& mask, const at::Tensor& values, const at::Tensor& starts) {
  const int64_t out = mask.size(0), in = mask.size(-1) * 8;
  TORCH_CHECK(workbench::kept_fits(mask, values, starts, out, in), "the mask ", mask.sizes(), " and ", values.numel(),
              " weights do not fit");
  return {reinterpret_cast<const uint16_t*>(values.const_data_ptr()), out, in, mask.const_data_ptr<uint8_t>(),
          starts.const_data_ptr<int64_t>()};
}

// The product with a weight of which only the kept entries are stored.
at::Tensor kept_matmul(const at::Tensor& x_, const at::Tensor& mask, const at::Tensor& values, const at::Tensor& starts,
                       const std::string& wanted) {
  const at::Tensor x = x_.contiguous();
  TORCH_CHECK(readable(x) && x.scalar_type() == values.scalar_type() && mask.size(-1) * 8 == x.size(-1), "kept_matmul: x ",
              x.sizes(), " ", x.scalar_type(), " and weights in ", values.scalar_type(), " do not fit");
  return multiply(x, {kept_matrix(mask, values, starts)}, {Bias{nullptr, at::kFloat}}, wanted)[0];
}

// Some rows of such a weight with their zeros, [end - begin, in].
at::Tensor kept_rows(const at::Tensor& mask, const at::Tensor& values, const at::Tensor& starts, int64_t begin, int64_t end) {
  const Matrix m = kept_matrix(mask, values, starts);
  TORCH_CHECK(0 <= begin && begin <= end && end <= m.out && values.element_size() == 2, "kept_rows: no such rows");
  const at::Tensor W = at::empty({end - begin, m.in}, values.options());
  auto* to = static_cast<uint16_t*>(W.mutable_data_ptr());
  at::parallel_for(begin, end, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, m.in)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      uint16_t* at = to + (row - begin) * m.in;
#ifdef HAVE_X86
      if (workbench::kept_runs()) {
        workbench::x86().vbmi2 ? expand(m, row, at) : kept_avx2::expand(m, row, at);
        continue;
      }
#endif
      const uint16_t* w = m.w + m.starts[row];
      for (int64_t k = 0; k < m.in; k++) at[k] = m.mask[(row * m.in + k) / 8] >> k % 8 & 1 ? *w++ : 0;
    }
  });
  return W;
}

}  // namespace

workbench::Product workbench::half_product(const std::string& isa, bool bfloat16, int64_t in, bool kept) {
#ifdef HAVE_AMX
  if (isa == "avx512bf16" && bfloat16 && !kept && in % 32 == 0 && amx_available()) return {Items::stored, 32, tiled_rows};
#endif
  const Way way = way_of(isa, bfloat16, kept);
  return {way.items, way.step, way.rows};
}

// The name of the loops for rows of `in` columns: in a step of decoding, or in products by themselves.
static std::string rows_isa(bool bfloat16, int64_t in, bool kept, bool step) {
  const std::string isa = best_isa(bfloat16);
#ifdef HAVE_AMX
  if (step && workbench::half_product(isa, bfloat16, in, kept).rows == tiled_rows) return "amx";
#endif
#ifdef HAVE_X86
  const std::string used = isa == "avx512bf16" && workbench::x86().slow_pairs ? "avx512" : isa;
  return kept ? kept_isa_of(used) : used;
#endif
  return isa;
}

bool workbench::kept_runs() {
#ifdef HAVE_X86
  return workbench::x86().avx2;
#else
  return false;
#endif
}

bool workbench::kept_fits(const at::Tensor& mask, const at::Tensor& values, const at::Tensor& starts, int64_t out, int64_t in) {
  if (mask.dim() != 2 || mask.size(0) != out || mask.size(1) * 8 != in || in % 32 || mask.scalar_type() != at::kByte ||
      starts.scalar_type() != at::kLong || starts.numel() != out + 1 || !mask.is_contiguous() || !values.is_contiguous() ||
      !starts.is_contiguous())
    return false;
  const auto* from = starts.const_data_ptr<int64_t>();
  return from[0] == 0 && from[out] == values.numel();
}

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("half_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str isa) -> Tensor[]");
  m.def("kept_matmul(Tensor x, Tensor mask, Tensor values, Tensor starts, str isa) -> Tensor");
  m.def("kept_rows(Tensor mask, Tensor values, Tensor starts, int begin, int end) -> Tensor");
  m.def("rows_isa(bool bfloat16, int columns, bool kept, bool step) -> str", rows_isa);
  m.def("kept_runs() -> bool", [] { return workbench::kept_runs(); });
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("half_matmul", half_matmul);
  m.impl("kept_matmul", kept_matmul);
  m.impl("kept_rows", kept_rows);
}
