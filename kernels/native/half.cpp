// y = x Wᵀ + bias on a CPU for a few tokens, with W in 16 bits as it is stored, row by row. A step of decoding reads every
// weight once, so that memory is the limit. kernels/linear/README.md says what it costs. One file for every instruction
// set, chosen when it runs.

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

constexpr int ROWS = 4;          // of W in a share of a thread
constexpr int TOKENS = 4;        // that share one load of W
constexpr int64_t GRAIN = 32768;  // weights worth a thread

struct Matrix {
  const uint16_t* w;  // [out, in]
  int64_t out, in;
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

#define INLINE static inline __attribute__((always_inline))
#ifdef HAVE_X86
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
INLINE float total(Acc acc) { return _mm512_reduce_add_ps(acc); }
#include "half.inc"
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
INLINE float total(Acc acc) { return _mm512_reduce_add_ps(acc); }
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
INLINE float total(Acc acc) { return _mm512_reduce_add_ps(acc); }
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
INLINE float total(Acc acc) { return bf16_avx2::total(acc); }
#include "half.inc"
}  // namespace fp16_avx2
#pragma GCC pop_options
#endif  // x86

#ifdef HAVE_NEON
// Two vectors of sums, to hide the latency of products.
struct TwoSums {
  float32x4_t a, b;
};
INLINE TwoSums added(TwoSums x, TwoSums y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
INLINE float summed(TwoSums x) { return vaddvq_f32(vaddq_f32(x.a, x.b)); }
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
INLINE float total(Acc acc) { return summed(acc); }
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
INLINE float total(Acc acc) { return summed(acc); }
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
INLINE float total(Acc acc) { return summed(acc); }
#include "half.inc"
}  // namespace fp16_neon
#endif  // aarch64
#undef INLINE

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
  const Matrix m{static_cast<const uint16_t*>(w.data), w.out, w.in};
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

Way way_of(const std::string& isa, bool bfloat16) {
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

// Products of the same tokens with several weights, such as those of queries, keys and values: one call, in which each
// thread has one share.
std::vector<at::Tensor> half_matmul(const at::Tensor& x_, at::TensorList weights,
                                    const c10::List<std::optional<at::Tensor>>& biases, const std::string& wanted) {
  const at::Tensor x = x_.contiguous();
  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  const int64_t in = x.size(-1), count = in ? x.numel() / in : 0;
  TORCH_CHECK((bfloat16 || x.scalar_type() == at::kHalf) && x.device().is_cpu() && weights.size() == biases.size(),
              "half_matmul: x ", x.scalar_type(), " cannot be read");
  std::vector<at::Tensor> outputs;
  std::vector<Matrix> matrices;
  std::vector<Bias> added;
  std::vector<int64_t> blocks{0};  // of ROWS rows, before each matrix
  for (size_t i = 0; i < weights.size(); i++) {
    const at::Tensor& w = weights[i];
    const std::optional<at::Tensor> bias = biases[i];
    TORCH_CHECK(w.dim() == 2 && w.size(1) == in && w.is_contiguous() && w.scalar_type() == x.scalar_type() &&
                    (!bias || (bias->dim() == 1 && bias->size(0) == w.size(0) && bias->is_contiguous())),
                "half_matmul: x ", x.sizes(), " and weight ", w.sizes(), " ", w.scalar_type(), " do not fit");
    auto sizes = x.sizes().vec();
    sizes.back() = w.size(0);
    outputs.push_back(at::empty(sizes, x.options()));
    matrices.push_back({reinterpret_cast<const uint16_t*>(w.const_data_ptr()), w.size(0), in});
    added.push_back({bias ? bias->const_data_ptr() : nullptr, bias ? bias->scalar_type() : at::kFloat});
    blocks.push_back(blocks.back() + (w.size(0) + ROWS - 1) / ROWS);
  }
  if (!count) return outputs;
  const std::string isa = wanted == "auto" ? best_isa(bfloat16) : wanted;
  TORCH_CHECK(runs(isa), "`isa` (='", isa, "') is not one of this machine's");
  const Way way = way_of(isa, bfloat16);
  const Laid laid(x, count, in, way, bfloat16);
  std::vector<void*> to;
  for (auto& y : outputs) to.push_back(y.mutable_data_ptr());
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
            put(outputs[i], to[i], (token + t) * m.out + row + r, sums[r * TOKENS + t] + added[i][row + r]);
      }
    }
  });
  return outputs;
}

}  // namespace

workbench::Product workbench::half_product(const std::string& isa, bool bfloat16) {
  const Way way = way_of(isa, bfloat16);
  return {way.items, way.step, way.rows};
}

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("half_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str isa) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("half_matmul", half_matmul); }
