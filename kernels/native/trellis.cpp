// Weights as walks through a trellis: the Viterbi encoder, the decoder, and y = x Wᵀ that decodes as it multiplies.
// kernels/trellis_matmul/README.md has the code, the layout and what they cost. One file for every instruction set, chosen
// when it runs.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "neon.inc"
#include "step_parts.inc"

namespace {

#include "trellis.inc"

constexpr int PANELS = 4;       // that one pass over the columns takes
constexpr int TOKENS = 4;
constexpr int AHEAD = 4096;     // bytes: the processor does not read columns far enough ahead by itself

// Of two vectors, one after the other, every second number from the `at`th on.
#define EVERY_OTHER(a, b, at)                                                                                        \
  __builtin_shufflevector(a, b, at, at + 2, at + 4, at + 6, at + 8, at + 10, at + 12, at + 14, at + 16, at + 18, at + 20, \
                          at + 22, at + 24, at + 26, at + 28, at + 30)

// Sequences to encode. values: of the state (j << bits) + p at [j / 16][p][j % 16].
struct Search {
  const float* values;
  int length, states, window;
};

struct Loops {
  void (*encode)(int bits, const Search& s, const float* x, float* costs, float* parts, uint8_t* symbols, float* cost);
  void (*decode)(int bits, const Weight& w, const uint8_t* sequence, float* out);
  void (*multiply)(int bits, const Weight& w, int64_t segment, int panel, int panels, const float* x, int tokens, float* sums);
};

#include "isa.inc"

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
constexpr bool FIELDS = false;
constexpr int SUMS = 16;
typedef Floats Values;
INLINE void add(Values& sum, const Values& values, float x) { sum += values * x; }
INLINE void put(const Values& values, float* to) { *(Floats*)to = values; }
struct Taker {  // takes sixteen states, `bits` apart, out of 16 bytes
  __m512i places, shifts, mask, multiplier;
};
INLINE Taker taker(int bits, int states) {
  alignas(64) uint8_t places[64];
  alignas(64) int32_t shifts[16];
  for (int i = 0; i < 16; i++) {
    shifts[i] = (bits * i) & 7;
    for (int b = 0; b < 4; b++) places[4 * i + b] = uint8_t(((bits * i) >> 3) + b);
  }
  return {_mm512_load_si512(places), _mm512_load_si512(shifts), _mm512_set1_epi32((1 << states) - 1),
          _mm512_set1_epi32(int(MULTIPLIER))};
}
template <bool WIDE>
INLINE Values take(const Taker& t, const uint8_t* p) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i state = _mm512_and_si512(_mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, t.places), t.shifts), t.mask);
  const __m512i hash = _mm512_mullo_epi32(state, t.multiplier);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), hash);
  return (Floats)_mm512_cvtepi32_ps(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#include "trellis_loops.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,fma,avx2,f16c")
namespace avx512fields {
#include "trellis_fields.inc"
#include "trellis_loops.inc"
}  // namespace avx512fields
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
constexpr bool FIELDS = false;
constexpr int SUMS = 4;
struct Values {
  __m256 half[2];
};
INLINE void add(Values& sum, const Values& values, float x) {
  for (int i = 0; i < 2; i++) sum.half[i] = _mm256_fmadd_ps(values.half[i], _mm256_set1_ps(x), sum.half[i]);
}
INLINE void put(const Values& values, float* to) {
  for (int i = 0; i < 2; i++) _mm256_storeu_ps(to + 8 * i, values.half[i]);
}
struct Taker {
  __m256i places[2], shifts[2], mask, multiplier;
};
INLINE Taker taker(int bits, int states) {
  alignas(32) uint8_t places[64];
  alignas(32) int32_t shifts[16];
  for (int i = 0; i < 16; i++) {
    shifts[i] = (bits * i) & 7;
    for (int b = 0; b < 4; b++) places[4 * i + b] = uint8_t(((bits * i) >> 3) + b);
  }
  const auto load = [](const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); };
  return {{load(places), load(places + 32)}, {load(shifts), load(shifts + 8)}, _mm256_set1_epi32((1 << states) - 1),
          _mm256_set1_epi32(int(MULTIPLIER))};
}
template <bool WIDE>
INLINE Values take(const Taker& t, const uint8_t* p) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  Values values;
  for (int i = 0; i < 2; i++) {
    const __m256i state = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, t.places[i]), t.shifts[i]), t.mask);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_mullo_epi32(state, t.multiplier));
    values.half[i] = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return values;
}
#include "trellis_loops.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif  // x86

#ifdef HAVE_NEON
namespace neon {
constexpr bool FIELDS = false;
constexpr int SUMS = 4;
struct Values {
  float32x4_t part[4];
};
INLINE void add(Values& sum, const Values& values, float x) {
  for (int q = 0; q < 4; q++) sum.part[q] = vfmaq_n_f32(sum.part[q], values.part[q], x);
}
INLINE void put(const Values& values, float* to) {
  for (int q = 0; q < 4; q++) vst1q_f32(to + 4 * q, values.part[q]);
}
struct Taker {
  uint8x16_t places[4];
  int32x4_t shifts[4];  // to the right
  uint32x4_t mask, multiplier;
};
INLINE Taker taker(int bits, int states) {
  Taker t;
  for (int q = 0; q < 4; q++) {
    uint8_t places[16];
    int32_t shifts[4];
    for (int i = 0; i < 4; i++) {
      const int first = bits * (4 * q + i);
      shifts[i] = -(first & 7);
      for (int b = 0; b < 4; b++) places[4 * i + b] = uint8_t((first >> 3) + b);
    }
    t.places[q] = vld1q_u8(places), t.shifts[q] = vld1q_s32(shifts);
  }
  t.mask = vdupq_n_u32((1u << states) - 1), t.multiplier = vdupq_n_u32(MULTIPLIER);
  return t;
}
template <bool WIDE>
INLINE Values take(const Taker& t, const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  Values values;
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    const uint32x4_t words = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, t.places[q]));
    const uint32x4_t hash = vmulq_u32(vandq_u32(vshlq_u32(words, t.shifts[q]), t.mask), t.multiplier);
    values.part[q] = vcvtq_f32_s32(vpaddlq_s16(vpaddlq_s8(vreinterpretq_s8_u32(hash))));
  }
  return values;
}
#include "trellis_loops.inc"
}  // namespace neon
#endif  // aarch64

namespace portable {
constexpr bool FIELDS = false;
constexpr int SUMS = 4;
typedef Floats Values;
INLINE void add(Values& sum, const Values& values, float x) { sum += values * x; }
INLINE void put(const Values& values, float* to) { *(Floats*)to = values; }
struct Taker {
  int bits;
  uint32_t mask;
};
INLINE Taker taker(int bits, int states) { return {bits, (1u << states) - 1}; }
template <bool WIDE>
INLINE Values take(const Taker& t, const uint8_t* p) {
  Values values;
  for (int i = 0; i < LANES; i++) {
    uint32_t word = 0;
    for (int b = 0; b < 4; b++) word |= uint32_t(p[((t.bits * i) >> 3) + b]) << (8 * b);
    const uint32_t hash = ((word >> ((t.bits * i) & 7)) & t.mask) * MULTIPLIER;
    values[i] = float(int8_t(hash) + int8_t(hash >> 8) + int8_t(hash >> 16) + int8_t(hash >> 24));
  }
  return values;
}
#include "trellis_loops.inc"
}  // namespace portable

const Loops& loops_of(const std::string& isa) {
  const std::string taken = isa == "auto" ? best_isa(false) : isa;
  TORCH_CHECK(runs(taken), "`isa` (='", taken, "') is not one of this machine's");
#ifdef HAVE_X86
  if (has_fields() && (isa == "auto" || taken == "avx512bf16")) return avx512fields::loops;
  if (taken == "avx512" || taken == "avx512bf16") return avx512::loops;
  if (taken == "avx2") return avx2::loops;
#endif
#ifdef HAVE_NEON
  if (taken == "neon" || taken == "neon bf16") return neon::loops;
#endif
  return portable::loops;
}

std::tuple<at::Tensor, at::Tensor> encode(const at::Tensor& x, const at::Tensor& table, int64_t bits, int64_t window,
                                          const std::string& isa) {
  int states = 0;
  while ((int64_t(1) << states) < table.numel()) states++;
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat && table.is_contiguous() &&
                  table.scalar_type() == at::kFloat && table.numel() == int64_t(1) << states && bits >= 2 && bits <= 4 &&
                  states >= 2 * bits + 4 && states <= 16,
              "trellis_encode: x ", x.sizes(), ", ", table.numel(), " values and ", bits, " bits do not fit");
  const Loops& loops = loops_of(isa);
  const int64_t n = int64_t(1) << (states - bits), length = x.size(1), sequences = x.size(0);
  at::Tensor ordered = at::empty_like(table);
  float* values = ordered.mutable_data_ptr<float>();
  for (int64_t state = 0; state < table.numel(); state++) {
    const int64_t j = state >> bits, p = state & ((1 << bits) - 1);
    values[(((j / LANES) << bits) + p) * LANES + j % LANES] = table.const_data_ptr<float>()[state];
  }
  const Search search{values, int(length), states, int(std::min(window, length / 2))};
  at::Tensor symbols = at::empty({sequences, length}, x.options().dtype(at::kByte));
  at::Tensor cost = at::empty({sequences}, x.options());
  at::parallel_for(0, sequences, 1, [&](int64_t from, int64_t to) {
    const at::Tensor costs = at::empty({length + 1, n}, x.options()), parts = at::empty({n}, x.options());
    for (int64_t i = from; i < to; i++)
      loops.encode(int(bits), search, x.const_data_ptr<float>() + i * length, costs.mutable_data_ptr<float>(),
                   parts.mutable_data_ptr<float>(), symbols.mutable_data_ptr<uint8_t>() + i * length,
                   cost.mutable_data_ptr<float>() + i);
  });
  return {symbols, cost};
}

at::Tensor decode(const at::Tensor& codes, int64_t bits, int64_t states, const std::string& isa) {
  const Weight w = weight_of(codes, bits, states);
  const Loops& loops = loops_of(isa);
  const int64_t segments = codes.size(0);
  at::Tensor out = at::empty({w.in, segments * w.length}, codes.options().dtype(at::kFloat));
  at::parallel_for(0, w.in, 16, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; c++)
      for (int64_t s = 0; s < segments; s++)
        loops.decode(int(bits), w, w.codes + (s * w.in + c) * w.bytes,
                     out.mutable_data_ptr<float>() + (c * segments + s) * w.length);
  });
  return out;
}

at::Tensor multiply(const at::Tensor& x, const at::Tensor& codes, int64_t bits, int64_t states, const std::string& isa) {
  const Weight w = weight_of(codes, bits, states);
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kFloat && x.size(1) == w.in,
              "trellis_matmul: x ", x.sizes(), " does not fit ", w.in, " columns");
  const Loops& loops = loops_of(isa);
  const int64_t tokens = x.size(0), rows = codes.size(0) * w.length;
  const int panels = w.length / LANES, groups = (panels + PANELS - 1) / PANELS;
  at::Tensor y = at::empty({tokens, rows}, x.options());
  at::parallel_for(0, codes.size(0) * groups, 1, [&](int64_t from, int64_t to) {
    float sums[PANELS * TOKENS * LANES];
    for (int64_t unit = from; unit < to; unit++) {
      const int64_t segment = unit / groups;
      const int panel = int(unit % groups) * PANELS, taken = std::min(PANELS, panels - panel);
      for (int64_t t = 0; t < tokens; t += TOKENS) {
        const int several = int(std::min<int64_t>(TOKENS, tokens - t));
        loops.multiply(int(bits), w, segment, panel, taken, x.const_data_ptr<float>() + t * w.in, several, sums);
        for (int i = 0; i < several; i++)
          memcpy(y.mutable_data_ptr<float>() + (t + i) * rows + segment * w.length + panel * LANES,
                 sums + i * PANELS * LANES, sizeof(float) * LANES * taken);
      }
    }
  });
  return y;
}

// Rows from `begin` to `end` of a weight, for a step of decoding.
void rows(const workbench::Stored& s, const workbench::Operand& x, int64_t begin, int64_t end, float* y) {
  const Loops& loops = *static_cast<const Loops*>(s.loops);
  const Weight w{static_cast<const uint8_t*>(s.data), s.in, int64_t(s.length) * s.bits / 8, s.length, s.states};
  const float *scale = static_cast<const float*>(s.scale), *items = static_cast<const float*>(x.items);
  float sums[PANELS * TOKENS * LANES];
  for (int64_t row = begin, taken; row < end; row += taken) {
    const int panel = int(row % s.length) / LANES;
    const int64_t left = std::min(end - row, int64_t(s.length - panel * LANES));  // of the walk
    const int panels = int(std::min<int64_t>(PANELS, (left + LANES - 1) / LANES));
    taken = std::min<int64_t>(left, panels * LANES);
    for (int t = 0; t < x.tokens; t += TOKENS) {
      const int several = std::min(TOKENS, x.tokens - t);
      loops.multiply(s.bits, w, row / s.length, panel, panels, items + t * s.in, several, sums);
      for (int i = 0; i < several; i++)
        for (int64_t r = 0; r < taken; r++) y[(t + i) * s.out + row + r] = sums[i * PANELS * LANES + r] * scale[row + r];
    }
  }
}

}  // namespace

workbench::Product workbench::trellis_product(const std::string& isa) {
  return {Items::widened, 1, rows, &loops_of(isa == "avx512" ? "auto" : isa)};  // steps avoid slow products of pairs, which are none
}

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("trellis_encode(Tensor x, Tensor table, int bits, int window, str isa) -> (Tensor, Tensor)");
  m.def("trellis_decode(Tensor codes, int bits, int states, str isa) -> Tensor");
  m.def("trellis_multiply(Tensor x, Tensor codes, int bits, int states, str isa) -> Tensor");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("trellis_encode", encode);
  m.impl("trellis_decode", decode);
  m.impl("trellis_multiply", multiply);
}
