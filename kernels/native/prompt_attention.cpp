// Causal attention of a prompt in 16 bits: by pairs of bfloat16 where a CPU multiplies those (AVX512-BF16, AMX), else in float32.
// kernels/prompt_attention/README.md has the algorithm and its speed.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "neon.inc"

namespace {

constexpr int ROWS = 6;    // queries whose scores are computed together: with four vectors of keys 24 sums in registers, with two 12
constexpr int TILES = 16;  // of so many rows, for which a block of keys and values is read from L2
constexpr double LOG2E = 1.4426950408889634;
// 2^f from -1/2 to 1/2: the cubic polynomial whose largest relative error, 7.5e-5, is the least (a reweighted least-squares fit).
constexpr float C0 = 0.99992807f, C1 = 0.69326099f, C2 = 0.24261113f, C3 = 0.05517167f;

// Strides in elements.
struct Rows {
  const uint16_t* at;
  int64_t b, h, n;
};

struct Problem {
  Rows q, k, v;
  bool bfloat16;  // or float16
  int64_t batch, heads, shared, of_values;  // shared: query heads of a kv head
  int64_t tokens, keys, window;  // the tokens are the last ones of the keys; window: keys that a token sees, its own included; 0: all before it
  // Keys and values are packed in words of 32 bits, each a pair of bfloat16 or one float32.
  int64_t words, value_words;         // of channels of q and k; of positions of values
  int64_t key_blocks, value_vectors;  // blocks of LANES keys, vectors of LANES channels: multiples of WIDE
  float scale;  // times log2 e, because probabilities are powers of 2
  uint16_t* y;  // [batch, tokens, heads, of_values]
};

#include "amx.inc"

#define INLINE static inline __attribute__((always_inline))
#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace pairs {
using Vec = __m512;
constexpr int LANES = 16;
#include "vectors.inc"
#include "prompt_attention_pairs.inc"
#include "prompt_attention.inc"
#ifdef HAVE_AMX
#include "prompt_attention_tiles.inc"
#endif
}  // namespace pairs
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
using Vec = __m512;
constexpr int LANES = 16, WIDE = 4;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? to_bfloat16(v) : (Halves)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? of_bfloat16(h) : (Vec)_mm512_cvtph_ps((__m256i)h); }
#include "prompt_attention_floats.inc"
#include "prompt_attention.inc"
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
using Vec = __m256;
constexpr int LANES = 8, WIDE = 2;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? to_bfloat16(v) : (Halves)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? of_bfloat16(h) : (Vec)_mm256_cvtph_ps((__m128i)h); }
#include "prompt_attention_floats.inc"
#include "prompt_attention.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif
#ifdef HAVE_NEON
namespace neon {
typedef float Vec __attribute__((vector_size(16)));
constexpr int LANES = 4, WIDE = 4;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? to_bfloat16(v) : (Halves)workbench::neon::to_float16(v); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? of_bfloat16(h) : (Vec)workbench::neon::from_float16((uint16x4_t)h); }
#include "prompt_attention_floats.inc"
#include "prompt_attention.inc"
}  // namespace neon
#endif

#include "isa.inc"

Rows rows_of(const at::Tensor& t) {
  return {static_cast<const uint16_t*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

constexpr int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

using Pack = void (*)(const Problem&, int64_t b, int64_t h, uint32_t* to);

struct Packed {  // keys and values of all kv heads of all sequences, for WIDE vectors of LANES
  int64_t kv_heads, of_keys, of_values;  // words of one head
  Aligned<uint32_t> keys, values;

  Packed(const Problem& p, int64_t kv_heads, int64_t lanes, Pack pack_keys, Pack pack_values)
      : kv_heads(kv_heads), of_keys(p.key_blocks * p.words * lanes), of_values(p.value_words * p.value_vectors * lanes),
        keys(p.batch * kv_heads * of_keys), values(p.batch * kv_heads * of_values) {
    at::parallel_for(0, p.batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        pack_keys(p, i / kv_heads, i % kv_heads, keys.at + i * of_keys);
        pack_values(p, i / kv_heads, i % kv_heads, values.at + i * of_values);
      }
    });
  }
};

// Items of `of_item` queries of all heads, divided among threads.
template <class Scratch, auto ATTEND>
void attend_all(const Problem& p, const Packed& packed, int64_t of_item) {
  const int64_t items = (p.tokens + of_item - 1) / of_item;
  at::parallel_for(0, p.batch * p.heads * items, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(p);
    for (int64_t i = begin; i < end; i++) {
      const int64_t head = i / items, at = i % items;  // late queries see more keys: late and early ones alternate
      const int64_t item = at % 2 ? items - 1 - at / 2 : at / 2, kv = head / p.heads * packed.kv_heads + head % p.heads / p.shared;
      ATTEND(p, head / p.heads, head % p.heads, item * of_item, packed.keys.at + kv * packed.of_keys, packed.values.at + kv * packed.of_values, scratch);
    }
  });
}

// How many vectors of keys and of channels there are, whole groups of `wide` of them.
void count_vectors(Problem& p, int64_t lanes, int64_t wide) {
  p.key_blocks = up_to(p.keys, wide * lanes) / lanes, p.value_vectors = up_to(p.of_values, wide * lanes) / lanes;
}

#define IN_FLOATS(isa)                                                                       \
  count_vectors(p, isa::LANES, isa::WIDE);                                                   \
  attend_all<isa::Scratch, isa::attend>(p, {p, kv_heads, isa::LANES, isa::pack_keys, isa::pack_values}, ROWS * TILES);

at::Tensor prompt_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale, int64_t window) {
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK(best_isa(false) != "portable", "prompt_attention: this CPU has no AVX2, and no NEON");
  for (const at::Tensor* t : {&query, &key, &value})
    TORCH_CHECK(t->dim() == 4 && t->scalar_type() == type && (type == at::kBFloat16 || type == at::kHalf),
                "prompt_attention: bfloat16 or float16 [batch, heads, tokens, channels], not ", t->scalar_type(), " ", t->sizes());
  const auto unit = [](const at::Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); };
  const at::Tensor q = unit(query), k = unit(key), v = unit(value);
  const int64_t batch = q.size(0), heads = q.size(1), tokens = q.size(2), channels = q.size(3);
  const int64_t kv_heads = k.size(1), places = k.size(2), of_values = v.size(3);
  TORCH_CHECK(k.size(0) == batch && v.size(0) == batch && places >= tokens && v.size(2) == places && k.size(3) == channels &&
                  kv_heads == v.size(1) && kv_heads > 0 && heads % kv_heads == 0 && window >= 0,
              "prompt_attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit");
  at::Tensor y = at::empty({batch, tokens, heads, of_values}, q.options());
  if (y.numel() == 0) return y;
  Problem p{rows_of(q), rows_of(k), rows_of(v), type == at::kBFloat16, batch, heads, heads / kv_heads, of_values, tokens, places, window, channels, places,
            0, 0, float(scale * LOG2E), static_cast<uint16_t*>(y.data_ptr())};
#ifdef HAVE_X86
  if (p.bfloat16 && channels % 2 == 0 && workbench::x86().bfloat16) {
    p.words = channels / 2, p.value_words = up_to(places, 32) / 2;
    count_vectors(p, pairs::LANES, pairs::WIDE);
    const Packed packed(p, kv_heads, pairs::LANES, pairs::pack_keys, pairs::pack_values);
#ifdef HAVE_AMX
    if (p.words % TILE_ROWS == 0 && places == tokens && (!window || window >= tokens) && amx_available()) {  // channels fill whole tiles
      attend_all<pairs::TileScratch, pairs::attend_by_tiles>(p, packed, pairs::GROUP * pairs::GROUPS);
      return y;
    }
#endif
    attend_all<pairs::Scratch, pairs::attend>(p, packed, ROWS * TILES);
  } else if (workbench::x86().avx512) {
    IN_FLOATS(avx512)
  } else {
    IN_FLOATS(avx2)
  }
#endif
#ifdef HAVE_NEON
  IN_FLOATS(neon)
#endif
  return y;
}

bool prompt_attention_runs() { return best_isa(false) != "portable"; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("prompt_attention_native(Tensor q, Tensor k, Tensor v, float scale, int window) -> Tensor");
  m.def("prompt_attention_runs() -> bool", prompt_attention_runs);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("prompt_attention_native", prompt_attention); }
