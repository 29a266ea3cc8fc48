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

namespace {

constexpr int ROWS = 16;   // rows of W in a panel, one to a lane
constexpr int FEW = 8;     // tokens up to which codes are decoded in registers
constexpr int CHUNK = 64;  // tokens that a decoded group is used for
constexpr int64_t GRAIN = 2048;  // words times tokens worth a thread
constexpr float INTEGERS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

enum class Kind { float32, bfloat16, float16 };

struct Weight {
  const uint32_t* words;  // [panels, in/8, 16]
  const void* scale;      // [groups, 16 panels], of type `kind`
  Kind kind;
  const int8_t* zero;     // [groups, 16 panels], or null
  const float* table;     // [16]
  int64_t panels, words_per_row, groups, group_words;
};

// What a step multiplies by: 32 bits, a pair of bfloat16 or a float32.
struct Tokens {
  const uint32_t* items;  // [tokens, stride]; for `many` [groups, tokens, items of a group]
  int64_t stride;
  const float* sums;      // [tokens, groups]: sum of x over the group, where there are zero points
};

struct Output {
  void* y;  // [tokens, out], of type `kind`
  Kind kind;
  int64_t out;
};

struct Loops {
  int items;  // steps in a word of eight codes
  void (*few)(const Weight&, const Tokens&, int tokens, int64_t panel, const Output&);
  void (*many)(const Weight&, const Tokens&, int tokens, int64_t panel, float* scratch, const Output&);
};

inline void put_one(const Output& y, int64_t at, float value) {
  if (y.kind == Kind::float32) static_cast<float*>(y.y)[at] = value;
  else if (y.kind == Kind::float16) static_cast<at::Half*>(y.y)[at] = static_cast<at::Half>(value);
  else static_cast<at::BFloat16*>(y.y)[at] = static_cast<at::BFloat16>(value);
}

inline float widen(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

#if defined(__x86_64__) && !defined(__clang__)
#define HAVE_X86 1

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
#define INLINE static inline __attribute__((always_inline))

namespace wide {  // what both AVX-512 variants share
using Vec = __m512;
using Words = __m512i;
INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec add_product(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(b, c, a); }
INLINE Vec subtract_product(Vec a, Vec b, float c) { return _mm512_fnmadd_ps(b, _mm512_set1_ps(c), a); }
INLINE Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
INLINE Vec load_scale(const Weight& w, int64_t group, int64_t panel) {
  const int64_t at = (group * w.panels + panel) * ROWS;
  if (w.kind == Kind::float32) return _mm512_loadu_ps(static_cast<const float*>(w.scale) + at);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(w.scale) + at));
  if (w.kind == Kind::float16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
INLINE Vec load_zero(const Weight& w, int64_t group, int64_t panel) {
  const int8_t* at = w.zero + (group * w.panels + panel) * ROWS;
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
INLINE __m256i to_bfloat16(Vec v) {  // to nearest even; a NaN stays one
  const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000)), 16));
}
INLINE void put_all(const Output& y, int64_t at, Vec v) {
  if (y.kind == Kind::float32) return _mm512_storeu_ps(static_cast<float*>(y.y) + at, v);
  const __m256i half = y.kind == Kind::float16 ? _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : to_bfloat16(v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(y.y) + at), half);
}
}  // namespace wide

namespace avx512 {
using namespace wide;
using Table = __m512;
constexpr int ITEMS = 8;
INLINE Table load_table(const Weight& w) { return _mm512_loadu_ps(w.table); }
INLINE Vec decode(Words w, int i, Table table) { return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * i), table); }
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  return _mm512_fmadd_ps(weights, _mm512_set1_ps(*reinterpret_cast<const float*>(item)), acc);
}
#include "nibble.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace avx512bf16 {
using namespace wide;
using Table = __m512i;
constexpr int ITEMS = 4;
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
#include "nibble.inc"
}  // namespace avx512bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
struct Vec { __m256 low, high; };
struct Words { __m256i low, high; };
struct Table { __m256 low, high; };
constexpr int ITEMS = 8;
INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE Vec add_product(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(b.low, c.low, a.low), _mm256_fmadd_ps(b.high, c.high, a.high)};
}
INLINE Vec subtract_product(Vec a, Vec b, float c) {
  const __m256 all = _mm256_set1_ps(c);
  return {_mm256_fnmadd_ps(b.low, all, a.low), _mm256_fnmadd_ps(b.high, all, a.high)};
}
INLINE Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high); }
INLINE __m256 scale_of_8(const Weight& w, int64_t at) {
  if (w.kind == Kind::float32) return _mm256_loadu_ps(static_cast<const float*>(w.scale) + at);
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(w.scale) + at));
  if (w.kind == Kind::float16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
INLINE Vec load_scale(const Weight& w, int64_t group, int64_t panel) {
  const int64_t at = (group * w.panels + panel) * ROWS;
  return {scale_of_8(w, at), scale_of_8(w, at + 8)};
}
INLINE __m256 zero_of_8(const int8_t* at) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
INLINE Vec load_zero(const Weight& w, int64_t group, int64_t panel) {
  const int8_t* at = w.zero + (group * w.panels + panel) * ROWS;
  return {zero_of_8(at), zero_of_8(at + 8)};
}
INLINE Table load_table(const Weight& w) { return {_mm256_loadu_ps(w.table), _mm256_loadu_ps(w.table + 8)}; }
INLINE __m256 look_up(__m256i w, int i, Table table) {
  const __m256i index = _mm256_srli_epi32(w, 4 * i);  // three bits choose the lane, the fourth the half of the table
  const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index), _mm256_permutevar8x32_ps(table.high, index), half);
}
INLINE Vec decode(Words w, int i, Table table) { return {look_up(w.low, i, table), look_up(w.high, i, table)}; }
INLINE void put_all(const Output& y, int64_t at, Vec v) {
  if (y.kind == Kind::float32) return store(static_cast<float*>(y.y) + at, v);
  if (y.kind == Kind::float16) {
    auto* to = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(y.y) + at);
    _mm_storeu_si128(to, _mm256_cvtps_ph(v.low, _MM_FROUND_TO_NEAREST_INT));
    return _mm_storeu_si128(to + 1, _mm256_cvtps_ph(v.high, _MM_FROUND_TO_NEAREST_INT));
  }
  float lanes[ROWS];
  store(lanes, v);
  for (int r = 0; r < ROWS; r++) put_one(y, at + r, lanes[r]);
}
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  const __m256 all = _mm256_broadcast_ss(reinterpret_cast<const float*>(item));
  return {_mm256_fmadd_ps(weights.low, all, acc.low), _mm256_fmadd_ps(weights.high, all, acc.high)};
}
#include "nibble.inc"
}  // namespace avx2
#pragma GCC pop_options
#undef INLINE
#endif  // x86

#define INLINE static inline __attribute__((always_inline))
namespace portable {
struct Vec { float lane[ROWS]; };
using Words = const uint32_t*;
using Table = const float*;
constexpr int ITEMS = 8;
INLINE Vec zero() { return Vec{}; }
INLINE Vec add(Vec a, Vec b) {
  for (int r = 0; r < ROWS; r++) a.lane[r] += b.lane[r];
  return a;
}
INLINE Vec add_product(Vec a, Vec b, Vec c) {
  for (int r = 0; r < ROWS; r++) a.lane[r] += b.lane[r] * c.lane[r];
  return a;
}
INLINE Vec subtract_product(Vec a, Vec b, float c) {
  for (int r = 0; r < ROWS; r++) a.lane[r] -= b.lane[r] * c;
  return a;
}
INLINE Words load_words(const uint32_t* p) { return p; }
INLINE void store(float* p, const Vec& v) { std::memcpy(p, v.lane, sizeof v.lane); }
INLINE void put_all(const Output& y, int64_t at, const Vec& v) {
  for (int r = 0; r < ROWS; r++) put_one(y, at + r, v.lane[r]);
}
INLINE Vec load_scale(const Weight& w, int64_t group, int64_t panel) {
  const int64_t at = (group * w.panels + panel) * ROWS;
  Vec v;
  for (int r = 0; r < ROWS; r++) {
    if (w.kind == Kind::float32) v.lane[r] = static_cast<const float*>(w.scale)[at + r];
    else if (w.kind == Kind::bfloat16) v.lane[r] = widen(static_cast<const uint16_t*>(w.scale)[at + r]);
    else v.lane[r] = static_cast<float>(static_cast<const at::Half*>(w.scale)[at + r]);
  }
  return v;
}
INLINE Vec load_zero(const Weight& w, int64_t group, int64_t panel) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.lane[r] = w.zero[(group * w.panels + panel) * ROWS + r];
  return v;
}
INLINE Table load_table(const Weight& w) { return w.table; }
INLINE Vec decode(Words w, int i, Table table) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.lane[r] = table[(w[r] >> (4 * i)) & 15];
  return v;
}
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  float x;
  std::memcpy(&x, item, 4);
  for (int r = 0; r < ROWS; r++) acc.lane[r] += weights.lane[r] * x;
  return acc;
}
#include "nibble.inc"
}  // namespace portable
#undef INLINE

bool runs(const std::string& isa) {
#ifdef HAVE_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == "avx512bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
  if (isa == "avx512") return avx512;
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return isa == "portable";
}

std::string best_isa(bool bfloat16) {
  for (const char* isa : {"avx512bf16", "avx512", "avx2"})
    if (runs(isa) && (bfloat16 || isa != std::string("avx512bf16"))) return isa;
  return "portable";
}

const Loops& loops_of(const std::string& isa) {
  TORCH_CHECK(runs(isa), "`isa` (='", isa, "') is not one of this machine's");
#ifdef HAVE_X86
  if (isa == "avx512bf16") return avx512bf16::loops;
  if (isa == "avx512") return avx512::loops;
  if (isa == "avx2") return avx2::loops;
#endif
  return portable::loops;
}

// float32 items of a word in the order of its nibbles: columns 0 2 4 6 1 3 5 7.
void float_items(const at::Tensor& x, float* out) {
  const int64_t words = x.numel() / 8;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "nibble_matmul", [&] {
    const scalar_t* in = x.const_data_ptr<scalar_t>();
    for (int64_t j = 0; j < words; j++, in += 8, out += 8)
      for (int i = 0; i < 4; i++) out[i] = static_cast<float>(in[2 * i]), out[4 + i] = static_cast<float>(in[2 * i + 1]);
  });
}

Kind kind_of(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat ? Kind::float32 : t.scalar_type() == at::kHalf ? Kind::float16 : Kind::bfloat16;
}

bool one_of_ours(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

at::Tensor nibble_matmul(const at::Tensor& x_, const at::Tensor& words, const at::Tensor& scale,
                         const std::optional<at::Tensor>& table, const std::optional<at::Tensor>& zero, int64_t out,
                         const std::string& wanted) {
  const at::Tensor x = x_.contiguous();
  const int64_t in = x.size(-1), tokens = in ? x.numel() / in : 0;
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  const at::Tensor y = at::empty(sizes, x.options());
  TORCH_CHECK(one_of_ours(x) && one_of_ours(scale) && x.device().is_cpu() && words.is_contiguous() && scale.is_contiguous() &&
                  words.dim() == 3 && words.size(2) == ROWS && scale.dim() == 2 && (!table || table->is_contiguous()) &&
                  (!zero || (zero->is_contiguous() && zero->sizes() == scale.sizes())),
              "nibble_matmul: x ", x.scalar_type(), ", words ", words.sizes(), " and scale ", scale.scalar_type(), " ", scale.sizes(),
              " cannot be read");
  if (y.numel() == 0) return y;
  if (in == 0) return y.zero_();

  Weight w{};
  w.words = reinterpret_cast<const uint32_t*>(words.const_data_ptr<int32_t>());
  w.scale = scale.const_data_ptr();
  w.kind = kind_of(scale);
  w.zero = zero ? zero->const_data_ptr<int8_t>() : nullptr;
  w.table = table ? table->const_data_ptr<float>() : INTEGERS;
  w.panels = words.size(0);
  w.words_per_row = words.size(1);
  w.groups = scale.size(0);
  w.group_words = w.groups ? w.words_per_row / w.groups : 0;
  TORCH_CHECK(in == 8 * w.words_per_row && w.group_words * w.groups == w.words_per_row && scale.size(1) == w.panels * ROWS &&
                  (out + ROWS - 1) / ROWS == w.panels && (!table || table->numel() == 16),
              "nibble_matmul: x ", x.sizes(), ", words ", words.sizes(), " and scale ", scale.sizes(), " do not fit");

  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  const std::string isa = wanted == "auto" ? best_isa(bfloat16) : wanted;
  TORCH_CHECK(isa != "avx512bf16" || bfloat16, "`isa` (='avx512bf16') takes bfloat16, not ", x.scalar_type());
  const Loops& loops = loops_of(isa);

  Tokens t{};
  t.stride = w.words_per_row * loops.items;
  std::unique_ptr<float[]> converted;
  if (loops.items == 4) {
    t.items = static_cast<const uint32_t*>(x.const_data_ptr());
  } else {
    converted.reset(new float[x.numel()]);
    float_items(x, converted.get());
    t.items = reinterpret_cast<const uint32_t*>(converted.get());
  }
  at::Tensor sums;
  if (w.zero) {
    sums = x.view({tokens, w.groups, in / w.groups}).sum(-1, false, at::kFloat);
    t.sums = sums.const_data_ptr<float>();
  }

  const Output whole{y.mutable_data_ptr(), kind_of(y), out};
  const int64_t grain = std::max<int64_t>(1, GRAIN / (w.words_per_row * tokens));
  if (tokens <= FEW) {
    at::parallel_for(0, w.panels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) loops.few(w, t, int(tokens), p, whole);
    });
    return y;
  }
  // [chunk][group][token][item]: what one pass over a decoded group reads lies together.
  const int64_t steps = w.group_words * loops.items, chunks = (tokens + CHUNK - 1) / CHUNK;
  std::unique_ptr<uint32_t[]> grouped(new uint32_t[tokens * t.stride]);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * CHUNK; first < std::min(end * CHUNK, tokens); first += CHUNK) {
      const int64_t count = std::min<int64_t>(CHUNK, tokens - first);
      uint32_t* to = grouped.get() + first * t.stride;
      for (int64_t g = 0; g < w.groups; g++)
        for (int64_t m = 0; m < count; m++, to += steps)
          std::memcpy(to, t.items + (first + m) * t.stride + g * steps, steps * sizeof(uint32_t));
    }
  });
  at::parallel_for(0, (w.panels + 1) / 2, std::max<int64_t>(1, grain / 2), [&](int64_t begin, int64_t end) {
    auto* scratch = static_cast<float*>(std::aligned_alloc(64, steps * 2 * ROWS * sizeof(float)));
    TORCH_CHECK(scratch, "nibble_matmul: no memory for a decoded group");
    for (int64_t pair = begin; pair < end; pair++)
      for (int64_t first = 0; first < tokens; first += CHUNK) {
        const Tokens part{grouped.get() + first * t.stride, t.stride, t.sums ? t.sums + first * w.groups : nullptr};
        const Output rows{static_cast<char*>(whole.y) + first * out * y.element_size(), whole.kind, out};
        loops.many(w, part, int(std::min<int64_t>(CHUNK, tokens - first)), 2 * pair, scratch, rows);
      }
    std::free(scratch);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("nibble_matmul(Tensor x, Tensor words, Tensor scale, Tensor? table, Tensor? zero, int out, str isa) -> Tensor");
  m.def("nibble_isa(bool bfloat16) -> str", best_isa);
  m.def("nibble_runs(str isa) -> bool", runs);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("nibble_matmul", nibble_matmul); }
