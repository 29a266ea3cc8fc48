// y = x Wᵀ on a CPU, with W in 2 to 8 bits: W[n, k] = scale[n, g] (value(code[n, k]) - zero[n, g]), where values are integers or
// entries of a table. kernels/int_matmul/README.md has the layout ("panels") and the speed; panels.py packs it. One file for
// all widths and instruction sets, selected at run time.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "neon.inc"
#include "step_parts.inc"

namespace {

#include "panels.inc"

#define STATIC static inline __attribute__((always_inline))

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
using namespace wide;
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  return _mm512_fmadd_ps(weights, _mm512_set1_ps(*reinterpret_cast<const float*>(item)), acc);
}

struct Nibbles {
  static constexpr int COLUMNS = 8, BYTES = 64, ITEMS = 8;
  using Words = __m512i;
  STATIC Words load(const uint8_t* p) { return load_bits(p); }
  STATIC __m512 table(const Weight& w) { return _mm512_loadu_ps(w.table); }
  STATIC Vec decode(Words w, int i, __m512 table) { return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * i), table); }
};

template <int BITS>
struct Planes {
  static constexpr int COLUMNS = 16, BYTES = 32 * BITS, ITEMS = 16;
  using Words = PlaneWords<BITS>;
  STATIC Words load(const uint8_t* p) { return load_planes<BITS>(p); }
  struct Table { __m512 part[4]; };
  STATIC Table table(const Weight& w) {
    Table t;
    for (int i = 0; i < 4; i++) t.part[i] = _mm512_loadu_ps(w.table + 16 * i);
    return t;
  }
  STATIC Vec decode(const Words& w, int s, const Table& t) {  // the even columns first
    const __m512i code = code_of(w, s % 8, s / 8 * 16);
    if constexpr (BITS < 4) return _mm512_permutexvar_ps(code, t.part[0]);
    const __m512 first = _mm512_permutex2var_ps(t.part[0], code, t.part[1]);  // by five bits
    if constexpr (BITS == 5) return first;
    const __m512 second = _mm512_permutex2var_ps(t.part[2], code, t.part[3]);
    return _mm512_mask_mov_ps(first, _mm512_test_epi32_mask(code, _mm512_set1_epi32(32)), second);
  }
};

struct Bytes {
  static constexpr int COLUMNS = 8, BYTES = 128, ITEMS = 8;
  STATIC const uint8_t* load(const uint8_t* p) { return p; }
  STATIC int table(const Weight&) { return 0; }
  STATIC Vec decode(const uint8_t* w, int i, int) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w) + i)));
  }
};
#include "panels_loops.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace avx512bf16 {  // steps are of two columns, 2 i and 2 i + 1, side by side in each lane
using namespace wide;
INLINE Vec madd(Vec acc, Vec weights, const uint32_t* item) {
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(*item)));
}
#include "panels_bfloat16.inc"
#include "panels_loops.inc"
}  // namespace avx512bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,avx2,f16c")
// Pairs of bfloat16 as integers of 16 bits, a group of columns of one token at a time, times weights that are integers; the error of an
// element is about 2^-15 of the group's largest one.
namespace avx512vnni {
using namespace wide;
INLINE __mmask16 some(int64_t from, int64_t count) { return __mmask16(count - from >= 16 ? 0xFFFF : (1u << (count - from)) - 1); }

struct Multiples : Unit {  // of a group's items
  Multiples(const uint32_t* items, int64_t count) {
    __m512i top = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
      const __m512i both = _mm512_and_si512(_mm512_maskz_loadu_epi32(some(i, count), items + i), _mm512_set1_epi16(0x7FFF));
      top = _mm512_max_epu16(top, both);
    }
    top = _mm512_max_epu16(_mm512_and_si512(top, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(top, 16));
    Unit::operator=(unit_of(uint32_t(_mm512_reduce_max_epi32(top))));
  }
  __attribute__((always_inline)) __m512i codes(__m512i bits) const {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(inverse)));
  }
  // Sixteen pairs, or zeros behind the last.
  __attribute__((always_inline)) __m512i integers(const uint32_t* items, int64_t from, int64_t count) const {
    const __m512i both = _mm512_maskz_loadu_epi32(some(from, count), items + from);
    const __m512i even = codes(_mm512_slli_epi32(both, 16)), odd = codes(_mm512_and_si512(both, _mm512_set1_epi32(int(0xFFFF0000))));
    return _mm512_mask_mov_epi16(even, 0xAAAAAAAA, _mm512_slli_epi32(odd, 16));
  }
};

#include "panels_bytes.inc"
}  // namespace avx512vnni
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
using namespace narrow;

struct Nibbles {
  static constexpr int COLUMNS = 8, BYTES = 64, ITEMS = 8;
  struct Words { __m256i low, high; };
  struct Table { __m256 low, high; };
  STATIC Words load(const uint8_t* p) { return {load_bits(p), load_bits(p + 32)}; }
  STATIC Table table(const Weight& w) { return {_mm256_loadu_ps(w.table), _mm256_loadu_ps(w.table + 8)}; }
  STATIC __m256 look_up(__m256i w, int i, Table table) {
    const __m256i index = _mm256_srli_epi32(w, 4 * i);  // three bits choose the lane, the fourth the half of the table
    const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index), _mm256_permutevar8x32_ps(table.high, index), half);
  }
  STATIC Vec decode(Words w, int i, Table table) { return {look_up(w.low, i, table), look_up(w.high, i, table)}; }
};

// Nibbles that index integers of 8 bits: a look-up gives four columns of eight rows, and a value is half as many instructions.
struct Looked {
  static constexpr int COLUMNS = Nibbles::COLUMNS, BYTES = Nibbles::BYTES, ITEMS = Nibbles::ITEMS;
  using Words = Nibbles::Words;
  STATIC Words load(const uint8_t* p) { return Nibbles::load(p); }
  STATIC __m256i table(const Weight& w) {
    alignas(16) int8_t values[16];
    for (int i = 0; i < 16; i++) values[i] = int8_t(w.table[i]);
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
  }
  STATIC __m256 value(__m256i w, int i, __m256i table) {
    const __m256i index = _mm256_and_si256(i % 2 ? _mm256_srli_epi32(w, 4) : w, _mm256_set1_epi8(15));
    const __m256i four = _mm256_shuffle_epi8(table, index);  // the same for columns i, i + 2, i + 4 and i + 6
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(i < 6 ? _mm256_slli_epi32(four, 24 - i / 2 * 8) : four, 24));
  }
  STATIC Vec decode(Words w, int i, __m256i table) { return {value(w.low, i, table), value(w.high, i, table)}; }
};

template <int BITS>
struct Planes {
  static constexpr int COLUMNS = 16, BYTES = 32 * BITS, ITEMS = 16;
  using Half = PlaneWords<BITS>;  // of the rows
  struct Words { Half low, high; };
  STATIC Words load(const uint8_t* p) { return {load_planes<BITS>(p), load_planes<BITS>(p, 8)}; }
  struct Table { __m256 first; const float* all; };
  STATIC Table table(const Weight& w) { return {_mm256_loadu_ps(w.table), w.integers ? nullptr : w.table}; }
  STATIC __m256 value(const Half& w, int s, const Table& table) {
    const __m256i code = code_of(w, s % 8, s / 8 * 16);
    if constexpr (BITS < 4) return _mm256_permutevar8x32_ps(table.first, code);
    constexpr int ALL = (1 << BITS) - 1;
    const __m256i only = _mm256_and_si256(code, _mm256_set1_epi32(ALL));
    if (table.all) return _mm256_i32gather_ps(table.all, only, 4);
    return _mm256_sub_ps(_mm256_cvtepi32_ps(only), _mm256_set1_ps(ALL / 2 + 1));
  }
  STATIC Vec decode(const Words& w, int s, const Table& table) { return {value(w.low, s, table), value(w.high, s, table)}; }
};

struct Bytes {
  static constexpr int COLUMNS = 8, BYTES = 128, ITEMS = 8;
  STATIC const uint8_t* load(const uint8_t* p) { return p; }
  STATIC int table(const Weight&) { return 0; }
  STATIC __m256 floats(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  STATIC Vec decode(const uint8_t* w, int i, int) { return {floats(w + 16 * i), floats(w + 16 * i + 8)}; }
};
#include "panels_loops.inc"

static void few_nibbles(const Weight& w, const Tokens& x, int tokens, int64_t panel, const Output& y) {
  of_bytes(w.table) ? few_any<Looked>(w, x, tokens, panel, y) : few_any<Nibbles>(w, x, tokens, panel, y);
}
static void many_nibbles(const Weight& w, const Tokens& x, int tokens, int64_t panel, float* scratch, const Output& y) {
  of_bytes(w.table) ? many<Looked>(w, x, tokens, panel, scratch, y) : many<Nibbles>(w, x, tokens, panel, scratch, y);
}
static constexpr Loops nibbles{Nibbles::COLUMNS, Nibbles::BYTES, Nibbles::ITEMS, nullptr, few_nibbles, many_nibbles};

// A group's pairs of bfloat16 -> pairs of integers of 16 bits; as `Multiples` of AVX512-VNNI.
static float encode_pairs(const uint32_t* items, int64_t count, uint32_t* to, int32_t* total) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t even = items[i] & 0x7FFF, odd = items[i] >> 16 & 0x7FFF, larger = even > odd ? even : odd;
    most = larger > most ? larger : most;
  }
  const Unit unit = unit_of(most);
  for (int64_t i = 0; i < count; i++) {
    const float even = __builtin_rintf(float_of(items[i] << 16) * unit.inverse);
    const float odd = __builtin_rintf(float_of(items[i] & 0xFFFF0000) * unit.inverse);
    to[i] = (uint32_t(int32_t(even)) & 0xFFFF) | uint32_t(int32_t(odd)) << 16;
  }
  *total = 0;  // values of 0 are codes of 0
  return unit.step;
}

// Coders of pairs: `pairs` gives, for eight rows from `half` on, the values of all pairs of columns of a unit, as integers of 16 bits.
struct LookedPairs {
  static constexpr int COLUMNS = Looked::COLUMNS, BYTES = Looked::BYTES, PAIRS = COLUMNS / 2, MOST = 4;
  STATIC __m256i table(const Weight& w) { return Looked::table(w); }
  STATIC void pairs(const uint8_t* p, int half, __m256i table, __m256i* pair) {
    const __m256i codes = load_bits(p + 32 * half), nibble = _mm256_set1_epi8(15);
    const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));  // of pairs 0 and 2, byte by byte
    const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(codes, 4), nibble));
    pair[0] = _mm256_srai_epi16(_mm256_slli_epi16(even, 8), 8), pair[1] = _mm256_srai_epi16(_mm256_slli_epi16(odd, 8), 8);
    pair[2] = _mm256_srai_epi16(even, 8), pair[3] = _mm256_srai_epi16(odd, 8);
  }
};

template <int BITS>
struct PlanePairs {
  static constexpr int COLUMNS = Planes<BITS>::COLUMNS, BYTES = Planes<BITS>::BYTES, PAIRS = COLUMNS / 2, MOST = 2;
  STATIC int table(const Weight&) { return 0; }
  STATIC void pairs(const uint8_t* p, int half, int, __m256i* pair) {
    const auto words = load_planes<BITS>(p, 8 * half);
    const __m256i code = _mm256_set1_epi16((1 << BITS) - 1), middle = _mm256_set1_epi16(1 << (BITS - 1));
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++) pair[i] = _mm256_sub_epi16(_mm256_and_si256(code_of(words, i, 0), code), middle);
  }
};

// M tokens by a panel whose values are integers of 8 bits or less: pairs of columns, whose products are added in 32 bits.
template <class C, int M>
static void few_pairs(const Weight& w, const Tokens& x, int first, int64_t panel, const Output& y) {
  const auto table = C::table(w);
  const uint8_t* units = w.units + panel * w.units_per_row * C::BYTES;
  const uint32_t* items = x.items + first * x.stride;
  Vec total[M];
  for (int m = 0; m < M; m++) total[m] = zero();
  for (int64_t g = 0; g < w.groups; g++) {
    __m256i acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = _mm256_setzero_si256();
    for (int64_t j = 0; j < w.group_units; j++, units += C::BYTES, items += C::PAIRS) {
      for (int b = 0; b < C::BYTES; b += 64) __builtin_prefetch(units + AHEAD + b, 0, 3);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        __m256i pair[C::PAIRS];
        C::pairs(units, half, table, pair);
#pragma GCC unroll 8
        for (int p = 0; p < C::PAIRS; p++)
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            const __m256i both = _mm256_set1_epi32(int(items[m * x.stride + p]));
            acc[m][half] = _mm256_add_epi32(acc[m][half], _mm256_madd_epi16(pair[p], both));
          }
      }
    }
    const Vec scale = load_scale(w, g, panel);
    Vec zero_point;
    if (w.zero) zero_point = load_zero(w, g, panel);
    for (int m = 0; m < M; m++) {
      const int64_t at = (first + m) * w.groups + g;
      const __m256 unit = _mm256_set1_ps(x.steps[at]);
      const Vec sum = {_mm256_mul_ps(_mm256_cvtepi32_ps(acc[m][0]), unit), _mm256_mul_ps(_mm256_cvtepi32_ps(acc[m][1]), unit)};
      total[m] = finish(total[m], sum, scale, w.zero ? &zero_point : nullptr, x, at);
    }
  }
  for (int m = 0; m < M; m++) put(y, first + m, panel, total[m]);
}

template <class C>
static void any_pairs(const Weight& w, const Tokens& x, int tokens, int64_t panel, const Output& y) {
  int m = 0;
  for (; C::MOST == 4 && tokens - m >= 4; m += 4) few_pairs<C, 4>(w, x, m, panel, y);
  for (; tokens - m >= 2; m += 2) few_pairs<C, 2>(w, x, m, panel, y);
  if (tokens > m) few_pairs<C, 1>(w, x, m, panel, y);
}

template <class C>
static constexpr Loops of_pairs{C::COLUMNS, C::BYTES, C::PAIRS, encode_pairs, any_pairs<C>, nullptr};

static const Loops* pairs_for(int bits) {
  switch (bits) {
    case 2: return &of_pairs<PlanePairs<2>>;
    case 3: return &of_pairs<PlanePairs<3>>;
    case 4: return &of_pairs<LookedPairs>;
    case 5: return &of_pairs<PlanePairs<5>>;
    case 6: return &of_pairs<PlanePairs<6>>;
    default: return nullptr;  // bytes are multiplied as fast as floats
  }
}
}  // namespace avx2
#pragma GCC pop_options
#endif  // x86

#ifdef HAVE_NEON
namespace quads {
template <int WIDTH>
struct Codes {  // a unit of codes, byte by byte: in every register one byte of each of the 16 rows
  static constexpr int BITS = WIDTH, COLUMNS = BITS == 4 ? 8 : 16, BYTES = 2 * COLUMNS * BITS;
  static constexpr int TABLES = BITS == 6 ? 4 : BITS == 5 ? 2 : 1;  // registers of sixteen values
  struct Words { uint8x16x4_t bytes[BITS == 4 ? 1 : BITS / 2], nibbles; };
  STATIC Words load(const uint8_t* p) {
    Words w;
    for (auto& bytes : w.bytes) bytes = vld4q_u8(p), p += 64;
    if constexpr (BITS % 2) {
      const uint8x8x4_t both = vld4_u8(p);  // of rows 0 to 7 the lower nibbles, of 8 to 15 the upper ones
      for (int b = 0; b < 4; b++) w.nibbles.val[b] = vcombine_u8(both.val[b], vshr_n_u8(both.val[b], 4));
    }
    return w;
  }
  // `width` bits of every row, from bit `at` on.
  STATIC uint8x16_t part(uint8x16_t v, int at, int width) {
    const uint8x16_t low = at == 0 ? v : vshlq_u8(v, vdupq_n_s8(int8_t(-at)));
    return at + width == 8 ? low : vandq_u8(low, vdupq_n_u8(uint8_t((1 << width) - 1)));
  }
  // Column 2 i, or 2 i + 1.
  STATIC uint8x16_t code(const Words& w, int i, int odd) {
    if constexpr (BITS == 4) return part(w.bytes[0].val[2 * odd + i / 2], 4 * (i % 2), 4);
    const int byte = 2 * odd + i / 4, turn = i % 4;
    const auto bytes = [&](int word, int at, int width) __attribute__((always_inline)) { return part(w.bytes[word].val[byte], at, width); };
    const auto nibble = [&](int at, int width) __attribute__((always_inline)) { return part(w.nibbles.val[byte], at, width); };
    if constexpr (BITS == 2) return bytes(0, 2 * turn, 2);
    if constexpr (BITS == 3) {
      if (turn == 2) return vorrq_u8(vshlq_n_u8(bytes(0, 6, 2), 1), nibble(0, 1));
      return turn == 3 ? nibble(1, 3) : bytes(0, 3 * turn, 3);
    }
    if constexpr (BITS == 5) return turn < 2 ? bytes(turn, 0, 5) : vorrq_u8(bytes(turn - 2, 5, 3), vshlq_n_u8(nibble(2 * turn - 4, 2), 3));
    if (turn < 3) return bytes(turn, 0, 6);
    return vorrq_u8(vorrq_u8(bytes(0, 6, 2), vshlq_n_u8(bytes(1, 6, 2), 2)), vshlq_n_u8(bytes(2, 6, 2), 4));
  }
  struct Bytes16 { uint8x16_t part[TABLES]; };  // one byte of every value of a table
  STATIC uint8x16_t look_up(const Bytes16& t, uint8x16_t code) {
    if constexpr (TABLES == 1) return vqtbl1q_u8(t.part[0], code);
    else if constexpr (TABLES == 2) return vqtbl2q_u8({{t.part[0], t.part[1]}}, code);
    else return vqtbl4q_u8({{t.part[0], t.part[1], t.part[2], t.part[3]}}, code);
  }
};
}  // namespace quads

namespace neon {
using namespace quads;
INLINE Vec madd(const Vec& acc, const Vec& weights, const uint32_t* item) {
  float x;
  __builtin_memcpy(&x, item, 4);
  return {vfmaq_n_f32(acc.a, weights.a, x), vfmaq_n_f32(acc.b, weights.b, x), vfmaq_n_f32(acc.c, weights.c, x),
          vfmaq_n_f32(acc.d, weights.d, x)};
}

template <int WIDTH>
struct Planes : Codes<WIDTH> {
  using Base = Codes<WIDTH>;
  static constexpr int ITEMS = Base::COLUMNS;
  struct Table { typename Base::Bytes16 byte[4]; };
  STATIC Table table(const Weight& w) {
    Table t;
    for (int i = 0; i < Base::TABLES; i++) {
      const uint8x16x4_t values = vld4q_u8(reinterpret_cast<const uint8_t*>(w.table + 16 * i));
      for (int b = 0; b < 4; b++) t.byte[b].part[i] = values.val[b];
    }
    return t;
  }
  STATIC Vec decode(const typename Base::Words& w, int s, const Table& t) {  // the even columns first
    const uint8x16_t code = Base::code(w, s % (ITEMS / 2), s / (ITEMS / 2));
    return workbench::neon::from_bytes(Base::look_up(t.byte[0], code), Base::look_up(t.byte[1], code),
                                       Base::look_up(t.byte[2], code), Base::look_up(t.byte[3], code));
  }
};
using Nibbles = Planes<4>;

struct Bytes {
  static constexpr int COLUMNS = 8, BYTES = 128, ITEMS = 8;
  STATIC const uint8_t* load(const uint8_t* p) { return p; }
  STATIC int table(const Weight&) { return 0; }
  STATIC Vec decode(const uint8_t* w, int i, int) {
    return workbench::neon::from_integers(vld1q_s8(reinterpret_cast<const int8_t*>(w) + 16 * i));
  }
};
#include "panels_loops.inc"
}  // namespace neon

namespace neonbf16 {  // steps are of two columns, 2 i and 2 i + 1, side by side in each lane
using namespace quads;
INLINE Vec madd(Vec acc, const Vec& weights, const uint32_t* item) {
  uint32_t pair;
  __builtin_memcpy(&pair, item, 4);
  const uint16x8_t x = vreinterpretq_u16_u32(vdupq_n_u32(pair));
  workbench::neon::bfdot(acc.a, vreinterpretq_u16_f32(weights.a), x), workbench::neon::bfdot(acc.b, vreinterpretq_u16_f32(weights.b), x);
  workbench::neon::bfdot(acc.c, vreinterpretq_u16_f32(weights.c), x), workbench::neon::bfdot(acc.d, vreinterpretq_u16_f32(weights.d), x);
  return acc;
}

template <int WIDTH>
struct Planes : Codes<WIDTH> {
  using Base = Codes<WIDTH>;
  static constexpr int ITEMS = Base::COLUMNS / 2;
  struct Table { typename Base::Bytes16 low, high; };
  STATIC Table table(const Weight& w) {
    Table t;
    for (int i = 0; i < Base::TABLES; i++) {
      uint16_t halves[16];
      workbench::neon::to_halves(halves, workbench::neon::load(w.table + 16 * i), true);
      const uint8x16x2_t values = vld2q_u8(reinterpret_cast<const uint8_t*>(halves));
      t.low.part[i] = values.val[0], t.high.part[i] = values.val[1];
    }
    return t;
  }
  STATIC Vec decode(const typename Base::Words& w, int i, const Table& t) {
    const uint8x16_t even = Base::code(w, i, 0), odd = Base::code(w, i, 1);
    return workbench::neon::from_bytes(Base::look_up(t.low, even), Base::look_up(t.high, even), Base::look_up(t.low, odd),
                                       Base::look_up(t.high, odd));
  }
};
using Nibbles = Planes<4>;

struct Bytes {
  static constexpr int COLUMNS = 8, BYTES = 128, ITEMS = 4;
  STATIC const uint8_t* load(const uint8_t* p) { return p; }
  STATIC int table(const Weight&) { return 0; }
  STATIC Vec floats(const uint8_t* w, int i) {  // integers up to 256 fit bfloat16: the lower half of each float is 0
    return workbench::neon::from_integers(vld1q_s8(reinterpret_cast<const int8_t*>(w) + 16 * i));
  }
  STATIC float32x4_t both(float32x4_t even, float32x4_t odd) {
    return vreinterpretq_f32_u32(vorrq_u32(vshrq_n_u32(vreinterpretq_u32_f32(even), 16), vreinterpretq_u32_f32(odd)));
  }
  STATIC Vec decode(const uint8_t* w, int i, int) {
    const Vec even = floats(w, i), odd = floats(w, 4 + i);
    return {both(even.a, odd.a), both(even.b, odd.b), both(even.c, odd.c), both(even.d, odd.d)};
  }
};
#include "panels_loops.inc"
}  // namespace neonbf16
#endif  // aarch64

namespace portable {
using namespace plain;
template <int WIDTH>
struct Coder {
  static constexpr int BITS = WIDTH, COLUMNS = WIDTH == 4 || WIDTH == 8 ? 8 : 16, BYTES = 2 * COLUMNS * WIDTH, ITEMS = COLUMNS;
  STATIC const uint8_t* load(const uint8_t* p) { return p; }
  STATIC const float* table(const Weight& w) { return w.table; }
  STATIC Vec decode(const uint8_t* p, int i, const float* table) {
    const int column = i < COLUMNS / 2 ? 2 * i : 2 * (i - COLUMNS / 2) + 1;
    Vec v;
    for (int r = 0; r < ROWS; r++) {
      const int code = workbench::code_at(p, WIDTH, r, column);
      v.lane[r] = WIDTH == 8 ? code - 128 : table[code];
    }
    return v;
  }
};
template <int BITS>
using Planes = Coder<BITS>;
using Nibbles = Coder<4>;
using Bytes = Coder<8>;
#include "panels_loops.inc"
}  // namespace portable

#include "isa.inc"

const Loops& loops_of(const std::string& isa, int bits) {
  TORCH_CHECK(runs(isa), "`isa` (='", isa, "') is not one of this machine's");
  const Loops* found = portable::loops_for(bits);
#ifdef HAVE_X86
  if (isa == "avx512bf16") found = avx512bf16::loops_for(bits);
  if (isa == "avx512vnni") found = avx512vnni::loops_for(bits);
  if (isa == "avx512") found = avx512::loops_for(bits);
  if (isa == "avx2") found = bits == 4 ? &avx2::nibbles : avx2::loops_for(bits);
  if (isa == "avx2 pairs") found = avx2::pairs_for(bits);
#endif
#ifdef HAVE_NEON
  if (isa == "neon bf16") found = neonbf16::loops_for(bits);
  if (isa == "neon") found = neon::loops_for(bits);
#endif
  TORCH_CHECK(found, "codes of ", bits, " bits cannot be read");
  return *found;
}

// The loops that multiply few tokens in bfloat16 as integers where `isa` multiplies others, or "".
std::string isa_of_integers(const std::string& isa) { return isa == "avx512bf16" ? "avx512vnni" : isa == "avx2" ? "avx2 pairs" : ""; }

// The fewest equal pieces of a group, in whole units of columns, whose products with 16-bit integers fit into sums of 32 bits; 0: there
// are none, values are not integers of a byte, a table has not 16 values, or this machine has no such loops.
int pieces_for_integers(const std::string& isa, int64_t columns, int64_t unit, const float* values, bool table, int bits) {
  if (!runs(isa) || (isa == "avx2 pairs" && bits == 8)) return 0;
  if (table && (bits != 4 || !of_bytes(values))) return 0;
  float largest = table ? 1 : float(1 << (bits - 1));
  for (int i = 0; table && i < 16; i++) largest = std::max(largest, std::fabs(values[i]));
  const int64_t units = columns / unit, most = int64_t(65535 / largest) / unit;  // an input is at most 32,512
  for (int64_t n = 1; most && n <= units; n++)
    if (units % n == 0 && units / n <= most) return int(n);
  return 0;
}

// Items of a unit as float32: first the even columns, then the odd ones.
void float_items(const at::Tensor& x, int columns, float* out) {
  const int64_t units = x.numel() / columns, half = columns / 2;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "panels_matmul", [&] {
    const scalar_t* in = x.const_data_ptr<scalar_t>();
    at::parallel_for(0, units, 2048, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * columns; at < end * columns; at += columns)
        for (int64_t i = 0; i < half; i++)
          out[at + i] = static_cast<float>(in[at + 2 * i]), out[at + half + i] = static_cast<float>(in[at + 2 * i + 1]);
    });
  });
}

Kind kind_of(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat ? Kind::float32 : t.scalar_type() == at::kHalf ? Kind::float16 : Kind::bfloat16;
}

bool one_of_ours(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// Do codes in units of so many columns, scales and features fit together?
void check_groups(const at::Tensor& codes, const at::Tensor& scale, int64_t in, int64_t out, int64_t columns) {
  const int64_t units = codes.size(1), groups = scale.size(1);
  TORCH_CHECK(in == columns * units && groups > 0 && units % groups == 0 && scale.size(0) == codes.size(0) && scale.size(2) == ROWS &&
                  (out + ROWS - 1) / ROWS == codes.size(0),
              "panels_matmul: x of ", in, " columns, codes ", codes.sizes(), " and scale ", scale.sizes(), " do not fit");
}

// Tokens up to which loops multiply; tiles take more. Tiles of vectors are filled with 16 tokens at a time: slow for few tokens.
int64_t most_in_loops() {
  static const int64_t most = std::string(workbench::tiles_isa()) == "amx" ? FEW : CHUNK;
  return most;
}

bool in_tiles(const at::Tensor& x, int64_t tokens) {
  return x.scalar_type() == at::kBFloat16 && tokens > most_in_loops() && *workbench::tiles_isa();
}

// Checks the tensors; returns the bits of codes.
int check_panels(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& table,
                 const std::optional<at::Tensor>& zero) {
  const int bits = codes.dim() == 3 ? workbench::width_of(codes) : 0;
  TORCH_CHECK(one_of_ours(x) && one_of_ours(scale) && x.device().is_cpu() && codes.is_contiguous() && scale.is_contiguous() && bits &&
                  scale.dim() == 3 && (!zero || (zero->is_contiguous() && zero->sizes() == scale.sizes())) &&
                  workbench::table_fits(table, bits),
              "panels_matmul: x ", x.scalar_type(), ", codes ", codes.scalar_type(), " ", codes.sizes(), ", scale ",
              scale.scalar_type(), " ", scale.sizes(), " or the table cannot be read");
  return bits;
}

// A weight as tiles read it; values: [TABLE] that its codes stand for.
workbench::Stored stored_of(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& table,
                            const std::optional<at::Tensor>& zero, const float* values, int64_t in, int64_t out, int bits) {
  check_groups(codes, scale, in, out, bits == 4 || bits == 8 ? 8 : 16);
  return {codes.const_data_ptr(), scale.const_data_ptr(), int(kind_of(scale)), zero ? zero->const_data_ptr<int8_t>() : nullptr,
          values, !table, nullptr, out, in, scale.size(1), nullptr, bits};
}

at::Tensor panels_matmul(const at::Tensor& x_, const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& table,
                         const std::optional<at::Tensor>& zero, int64_t out, const std::string& wanted) {
  const at::Tensor x = x_.contiguous();
  const int64_t in = x.size(-1), tokens = in ? x.numel() / in : 0;
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  const at::Tensor y = at::empty(sizes, x.options());
  const int bits = check_panels(x, codes, scale, table, zero);
  if (y.numel() == 0) return y;
  if (in == 0) return y.zero_();

  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  float values[workbench::TABLE];
  workbench::fill_table(table, bits, values);
  const bool asked = wanted == "amx" || wanted == "avx512 tiles";
  if (asked || (wanted == "auto" && in_tiles(x, tokens))) {
    const std::string best = workbench::tiles_isa();
    TORCH_CHECK(!asked || wanted == best || (wanted == "avx512 tiles" && best == "amx"), "`isa` (='", wanted, "') is not one of this machine's");
    TORCH_CHECK(bfloat16, "`isa` (='", wanted, "') takes bfloat16, not ", x.scalar_type());
    workbench::tiles_multiply(asked ? wanted : best, {stored_of(codes, scale, table, zero, values, in, out, bits)}, static_cast<const uint16_t*>(x.const_data_ptr()), tokens,
                              {static_cast<uint16_t*>(y.mutable_data_ptr())});
    return y;
  }
  const std::string isa = wanted == "auto" ? best_isa(bfloat16) : wanted;
  const bool asked_integers = isa == "avx512vnni" || isa == "avx2 pairs";
  TORCH_CHECK((!of_pairs(isa) && !asked_integers) || bfloat16, "`isa` (='", isa, "') takes bfloat16, not ", x.scalar_type());
  const int64_t groups = scale.size(1), unit = loops_of(isa, bits).columns, columns = groups ? in / groups : in;
  const std::string for_few = asked_integers ? isa : wanted == "auto" && bfloat16 && tokens <= FEW ? isa_of_integers(isa) : "";
  const int pieces = pieces_for_integers(for_few, columns, unit, values, table.has_value(), bits);
  TORCH_CHECK(pieces || !asked_integers, "`isa` (='", isa, "') does not take this table, or groups of ", columns, " columns");
  const Loops& loops = loops_of(pieces ? for_few : isa, bits);

  Weight w{};
  w.units = static_cast<const uint8_t*>(codes.const_data_ptr());
  w.scale = scale.const_data_ptr();
  w.kind = kind_of(scale);
  w.zero = zero ? zero->const_data_ptr<int8_t>() : nullptr;
  w.table = values, w.integers = !table;
  w.panels = codes.size(0);
  w.units_per_row = codes.size(1);
  w.pieces = std::max(pieces, 1);
  w.groups = groups * w.pieces;
  w.group_units = w.groups ? w.units_per_row / w.groups : 0;
  check_groups(codes, scale, in, out, loops.columns);

  Tokens t{};
  t.stride = w.units_per_row * loops.items;
  std::unique_ptr<float[]> converted;
  if (loops.items < loops.columns) {
    t.items = static_cast<const uint32_t*>(x.const_data_ptr());
  } else {
    converted.reset(new float[x.numel()]);
    float_items(x, loops.columns, converted.get());
    t.items = reinterpret_cast<const uint32_t*>(converted.get());
  }
  at::Tensor sums;
  if (w.zero) {
    sums = x.view({tokens, w.groups, in / w.groups}).sum(-1, false, at::kFloat);
    t.sums = sums.const_data_ptr<float>();
  }

  const Output whole{y.mutable_data_ptr(), kind_of(y), out};
  const int64_t grain = std::max<int64_t>(1, GRAIN / (in * tokens)), steps = w.group_units * loops.items;
  const bool few = !loops.many || tokens <= FEW;
  std::unique_ptr<uint32_t[]> grouped(few && !pieces ? nullptr : new uint32_t[tokens * t.stride]);
  std::unique_ptr<float[]> multiples(pieces ? new float[tokens * w.groups] : nullptr);
  t.steps = multiples.get();
  if (few) {
    std::unique_ptr<int32_t[]> totals(pieces ? new int32_t[tokens * w.groups] : nullptr);
    for (int64_t i = 0; pieces && i < tokens * w.groups; i++)
      multiples[i] = loops.encode(t.items + i * steps, steps, grouped.get() + i * steps, &totals[i]);
    if (pieces) t.items = grouped.get(), t.totals = totals.get();
    at::parallel_for(0, w.panels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) loops.few(w, t, int(tokens), p, whole);
    });
    return y;
  }
  // [chunk][group][token][item]: one pass over a decoded group reads contiguous memory.
  const int64_t chunks = (tokens + CHUNK - 1) / CHUNK;
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * CHUNK; first < std::min(end * CHUNK, tokens); first += CHUNK) {
      const int64_t count = std::min<int64_t>(CHUNK, tokens - first);
      uint32_t* to = grouped.get() + first * t.stride;
      for (int64_t g = 0; g < w.groups; g++)
        for (int64_t m = 0; m < count; m++, to += steps) std::memcpy(to, t.items + (first + m) * t.stride + g * steps, steps * sizeof(uint32_t));
    }
  });
  at::parallel_for(0, (w.panels + 1) / 2, std::max<int64_t>(1, grain / 2), [&](int64_t begin, int64_t end) {
    auto* scratch = static_cast<float*>(std::aligned_alloc(64, std::max(steps, JOINED) * 2 * ROWS * sizeof(float)));
    TORCH_CHECK(scratch, "panels_matmul: no memory for decoded groups");
    for (int64_t pair = begin; pair < end; pair++)
      for (int64_t first = 0; first < tokens; first += CHUNK) {
        const Tokens part{grouped.get() + first * t.stride, t.stride, t.sums ? t.sums + first * w.groups : nullptr, nullptr, nullptr};
        const Output rows{static_cast<char*>(whole.y) + first * out * y.element_size(), whole.kind, out};
        loops.many(w, part, int(std::min<int64_t>(CHUNK, tokens - first)), 2 * pair, scratch, rows);
      }
    std::free(scratch);
  });
  return y;
}

// Some panels of a product, for a step of decoding; see step_parts.inc.
void some_rows(const workbench::Stored& s, const workbench::Operand& x, int64_t begin, int64_t end, float* y) {
  const auto& loops = *static_cast<const Loops*>(s.loops);
  Weight w{};
  w.units = static_cast<const uint8_t*>(s.data);
  w.scale = s.scale;
  w.kind = s.scale_kind == 0 ? Kind::float32 : s.scale_kind == 1 ? Kind::bfloat16 : Kind::float16;
  w.zero = s.zero;
  w.table = s.table, w.integers = s.integers;
  w.panels = (s.out + ROWS - 1) / ROWS;
  w.units_per_row = s.in / loops.columns;
  w.pieces = s.pieces;
  w.groups = s.groups * s.pieces;
  w.group_units = w.units_per_row / w.groups;
  const Tokens t{static_cast<const uint32_t*>(x.items), w.units_per_row * loops.items, x.sums, x.multiples, x.totals, x.alike};
  const Output to{y, Kind::float32, s.out};
  for (int64_t p = begin / ROWS; p * ROWS < end; p++) loops.few(w, t, x.tokens, p, to);
}

// Several weights [out_i, in] that multiply the same x [..., in]: if tiles take it, the tokens are packed once for all weights.
std::vector<at::Tensor> panels_matmul_several(const at::Tensor& x_, const std::vector<at::Tensor>& codes, const std::vector<at::Tensor>& scales,
                                              const c10::List<std::optional<at::Tensor>>& tables, const c10::List<std::optional<at::Tensor>>& zeros,
                                              const std::vector<int64_t>& outs) {
  const at::Tensor x = x_.contiguous();
  const size_t count = codes.size();
  TORCH_CHECK(count && scales.size() == count && tables.size() == count && zeros.size() == count && outs.size() == count && x.dim() > 0,
              "panels_matmul_several: ", count, " weights need as many scales, tables, zeros and outs");
  const int64_t in = x.size(-1), tokens = in ? x.numel() / in : 0;
  std::vector<at::Tensor> results;
  if (!in_tiles(x, tokens)) {
    for (size_t i = 0; i < count; i++) results.push_back(panels_matmul(x, codes[i], scales[i], tables.get(i), zeros.get(i), outs[i], "auto"));
    return results;
  }
  std::vector<std::array<float, workbench::TABLE>> values(count);
  std::vector<workbench::Stored> weights;
  std::vector<uint16_t*> y;
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < count; i++) {
    const int bits = check_panels(x, codes[i], scales[i], tables.get(i), zeros.get(i));
    workbench::fill_table(tables.get(i), bits, values[i].data());
    weights.push_back(stored_of(codes[i], scales[i], tables.get(i), zeros.get(i), values[i].data(), in, outs[i], bits));
    sizes.back() = outs[i];
    results.push_back(at::empty(sizes, x.options()));
    y.push_back(static_cast<uint16_t*>(results.back().mutable_data_ptr()));
  }
  workbench::tiles_multiply(workbench::tiles_isa(), weights, static_cast<const uint16_t*>(x.const_data_ptr()), tokens, y);
  return results;
}

}  // namespace

workbench::Product workbench::panels_product(const std::string& isa, bool bfloat16, int bits, Stored& stored) {
  const Loops& loops = loops_of(isa, bits);
  const int64_t columns = stored.in / stored.groups;
  const std::string for_few = bfloat16 ? isa_of_integers(isa) : "";
  const int pieces = pieces_for_integers(for_few, columns, loops.columns, stored.table, !stored.integers, bits);
  if (pieces) {
    stored.pieces = pieces;
    const Loops& of_integers = loops_of(for_few, bits);
    return {Items::integers, columns / pieces, some_rows, &of_integers, of_integers.encode};
  }
  const Items items = loops.items < loops.columns ? Items::stored : Items::even_then_odd;
  return {items, loops.columns, some_rows, &loops};
}

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("panels_matmul(Tensor x, Tensor codes, Tensor scale, Tensor? table, Tensor? zero, int out, str isa) -> Tensor");
  m.def("panels_matmul_several(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] tables, Tensor?[] zeros, int[] outs) -> Tensor[]");
  m.def("panels_isa(bool bfloat16) -> str", best_isa);
  m.def("panels_most_in_loops() -> int", most_in_loops);
  m.def("panels_runs(str isa) -> bool", runs);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("panels_matmul", panels_matmul);
  m.impl("panels_matmul_several", panels_matmul_several);
}
