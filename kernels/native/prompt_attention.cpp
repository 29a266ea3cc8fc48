// Causal attention of a prompt in bfloat16, on a CPU that multiplies pairs of them (AVX512-BF16).
// kernels/prompt_attention/README.md has the algorithm and its speed.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "processor.inc"

namespace {

constexpr int ROWS = 6;    // queries whose scores are computed together: with four vectors of keys 24 sums in registers
constexpr int TILES = 16;  // of so many rows, for which a block of keys and values is read from L2
constexpr int KEYS = 512;  // in a block
constexpr int WIDE = 4;    // vectors of keys, or of channels, that are multiplied together
constexpr int LANE = 16;
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
  int64_t batch, heads, shared, tokens, pairs, of_values;  // shared: query heads of a kv head; pairs: of channels of q and k
  int64_t key_blocks, value_vectors;                       // blocks of 16 keys, vectors of 16 channels: whole fours of them
  int64_t value_pairs;                                     // pairs of positions: whole sixteens of them
  float scale;  // times log2 e, because probabilities are powers of 2
  uint16_t* y;  // [batch, tokens, heads, of_values]
};

#include "amx.inc"

#ifdef HAVE_X86
#define INLINE static inline __attribute__((always_inline))
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace pairs {
using Vec = __m512;
constexpr int LANES = LANE;
#include "vectors.inc"
#include "prompt_attention.inc"
#ifdef HAVE_AMX
#include "prompt_attention_tiles.inc"
#endif
}  // namespace pairs
#pragma GCC pop_options
#endif

bool runs() {
#ifdef HAVE_X86
  return workbench::x86().bfloat16;
#else
  return false;
#endif
}

Rows rows_of(const at::Tensor& t) {
  return {static_cast<const uint16_t*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

#ifdef HAVE_X86
struct Packed {  // by `pack_keys` and `pack_values`, of all kv heads of all sequences
  int64_t kv_heads, of_keys, of_values;  // numbers of 32 bits of one head
  const uint32_t *keys, *values;
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
      ATTEND(p, head / p.heads, head % p.heads, item * of_item, packed.keys + kv * packed.of_keys, packed.values + kv * packed.of_values, scratch);
    }
  });
}
#endif

at::Tensor prompt_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale) {
  TORCH_CHECK(runs(), "prompt_attention: this CPU has no AVX512-BF16");
  for (const at::Tensor* t : {&query, &key, &value})
    TORCH_CHECK(t->dim() == 4 && t->scalar_type() == at::kBFloat16, "prompt_attention: bfloat16 [batch, heads, tokens, channels], not ",
                t->scalar_type(), " ", t->sizes());
  const auto unit = [](const at::Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); };
  const at::Tensor q = unit(query), k = unit(key), v = unit(value);
  const int64_t batch = q.size(0), heads = q.size(1), tokens = q.size(2), channels = q.size(3), of_values = v.size(3);
  TORCH_CHECK(k.size(0) == batch && v.size(0) == batch && k.size(2) == tokens && v.size(2) == tokens && k.size(3) == channels &&
                  channels % 2 == 0 && k.size(1) == v.size(1) && k.size(1) > 0 && heads % k.size(1) == 0,
              "prompt_attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit");
  at::Tensor y = at::empty({batch, tokens, heads, of_values}, q.options());
  if (y.numel() == 0) return y;
#ifdef HAVE_X86
  const int64_t of_wide = WIDE * LANE, kv_heads = k.size(1);
  Problem p{rows_of(q), rows_of(k), rows_of(v), batch, heads, heads / kv_heads, tokens, channels / 2, of_values,
            (tokens + of_wide - 1) / of_wide * WIDE, (of_values + of_wide - 1) / of_wide * WIDE, (tokens + 31) / 32 * 16, float(scale * LOG2E),
            static_cast<uint16_t*>(y.data_ptr())};
  const int64_t of_keys = p.key_blocks * p.pairs * LANE, of_packed = p.value_pairs * p.value_vectors * LANE;
  const Aligned<uint32_t> keys(batch * kv_heads * of_keys);
  const Aligned<uint32_t> values(batch * kv_heads * of_packed);
  at::parallel_for(0, batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      pairs::pack_keys(p, i / kv_heads, i % kv_heads, keys.at + i * of_keys);
      pairs::pack_values(p, i / kv_heads, i % kv_heads, values.at + i * of_packed);
    }
  });
  const Packed packed{kv_heads, of_keys, of_packed, keys.at, values.at};
#ifdef HAVE_AMX
  if (p.pairs % TILE_ROWS == 0 && amx_available()) {  // channels fill whole tiles
    attend_all<pairs::TileScratch, pairs::attend_by_tiles>(p, packed, pairs::GROUP * pairs::GROUPS);
    return y;
  }
#endif
  attend_all<pairs::Scratch, pairs::attend>(p, packed, ROWS * TILES);
#endif
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("prompt_attention_native(Tensor q, Tensor k, Tensor v, float scale) -> Tensor");
  m.def("prompt_attention_runs() -> bool", runs);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("prompt_attention_native", prompt_attention); }
