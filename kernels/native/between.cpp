// The work between the products of a decoder's pass over many tokens on a CPU: sums and norms, rotation into the cache, gates.
// kernels/step/README.md says how a pass uses these.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "neon.inc"

namespace {

using Maybe = std::optional<at::Tensor>;
enum { NONE, SILU, GELU_TANH, RELU };  // numbered as ACTIVATIONS of kernels/step/program.py
// 2^f from -1/2 to 1/2, as in prompt_attention.cpp.
constexpr float C0 = 0.99992807f, C1 = 0.69326099f, C2 = 0.24261113f, C3 = 0.05517167f;

struct Between {
  void (*norm)(float* residual, const uint16_t* added, const float* after, float after_eps, const float* weight, float eps, int64_t n,
               uint16_t* y);
  void (*gate)(int kind, const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y);
  void (*turn)(const uint16_t* x, const float* weight, float eps, const float* cos, const float* sin, int64_t turned, int64_t channels,
               uint16_t* y);
};

#define INLINE static inline __attribute__((always_inline))
#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace avx512bf16 {
using Vec = __m512;
constexpr int LANES = 16;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? (Halves)_mm512_cvtneps_pbh(v) : (Halves)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16) : (Vec)_mm512_cvtph_ps((__m256i)h); }
INLINE Vec inverse(Vec v) { return _mm512_rcp14_ps(v); }  // to 2^-14, of numbers that are rounded to 11 bits at most
INLINE Vec times_power(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }
#include "between_loops.inc"
}  // namespace avx512bf16
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
using Vec = __m512;
constexpr int LANES = 16;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? to_bfloat16(v) : (Halves)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16) : (Vec)_mm512_cvtph_ps((__m256i)h); }
INLINE Vec inverse(Vec v) { return _mm512_rcp14_ps(v); }
INLINE Vec times_power(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }
#include "between_loops.inc"
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
using Vec = __m256;
constexpr int LANES = 8;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? to_bfloat16(v) : (Halves)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16) : (Vec)_mm256_cvtph_ps((__m128i)h); }
INLINE Vec inverse(Vec v) { return 1.0f / v; }
INLINE Vec times_power(Vec p, Vec n) { return power_of_normals(p, n); }
#include "between_loops.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif  // x86
#ifdef HAVE_NEON
namespace neon {
typedef float Vec __attribute__((vector_size(16)));
constexpr int LANES = 4;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) { return bfloat16 ? to_bfloat16(v) : (Halves)workbench::neon::to_float16(v); }
INLINE Vec of_16(bool bfloat16, Halves h) { return bfloat16 ? of_bfloat16(h) : (Vec)workbench::neon::from_float16((uint16x4_t)h); }
INLINE Vec inverse(Vec v) { return 1.0f / v; }
INLINE Vec times_power(Vec p, Vec n) { return power_of_normals(p, n); }
#include "between_loops.inc"
}  // namespace neon
#endif  // aarch64
namespace portable {
typedef float Vec __attribute__((vector_size(16)));
constexpr int LANES = 4;
#include "vectors.inc"
INLINE Halves to_16(bool bfloat16, Vec v) {
  Halves h = to_bfloat16(v);
  for (int i = 0; !bfloat16 && i < LANES; i++) h[i] = static_cast<at::Half>(v[i]).x;
  return h;
}
INLINE Vec of_16(bool bfloat16, Halves h) {
  Vec v = of_bfloat16(h);
  for (int i = 0; !bfloat16 && i < LANES; i++) v[i] = static_cast<float>(at::Half(h[i], at::Half::from_bits()));
  return v;
}
INLINE Vec inverse(Vec v) { return 1.0f / v; }
INLINE Vec times_power(Vec p, Vec n) { return power_of_normals(p, n); }
#include "between_loops.inc"
}  // namespace portable
#undef INLINE

#include "isa.inc"

const Between& loops_of(bool bfloat16, std::string isa) {
  if (isa == "auto") isa = best_isa(bfloat16);
  TORCH_CHECK(runs(isa), "`isa` (='", isa, "') does not run here");
#ifdef HAVE_X86
  if (isa == "avx512bf16") return avx512bf16::loops[bfloat16];
  if (isa == "avx512") return avx512::loops[bfloat16];
  if (isa == "avx2") return avx2::loops[bfloat16];
#endif
#ifdef HAVE_NEON
  if (isa == "neon" || isa == "neon bf16") return neon::loops[bfloat16];
#endif
  return portable::loops[bfloat16];
}

bool of_halves(const at::Tensor& t) {
  return t.device().is_cpu() && (t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf);
}

const float* floats(const Maybe& t, int64_t n, const char* name) {
  if (!t) return nullptr;
  TORCH_CHECK(t->scalar_type() == at::kFloat && t->is_contiguous() && t->numel() == n && t->device().is_cpu(), "`", name, "` must be float32 [", n,
              "], not ", t->scalar_type(), " ", t->sizes());
  return t->const_data_ptr<float>();
}

uint16_t* bits(const at::Tensor& t) { return static_cast<uint16_t*>(t.data_ptr()); }

// Fewest rows of n numbers for a thread: a few thousand numbers.
int64_t grain(int64_t n) { return std::max<int64_t>(1, 4096 / std::max<int64_t>(1, n)); }

// residual [rows, n] float32 += `added` (through the norm `after`); y = its norm, if there is one.
void add_norm(const at::Tensor& residual, const Maybe& added, const Maybe& after, double after_eps, const Maybe& weight, double eps,
              const at::Tensor& y, const std::string& isa) {
  const int64_t n = residual.size(-1), rows = residual.numel() / std::max<int64_t>(1, n);
  TORCH_CHECK(residual.scalar_type() == at::kFloat && residual.is_contiguous() && of_halves(y) && y.is_contiguous() && y.numel() == residual.numel() &&
                  (!added || (added->scalar_type() == y.scalar_type() && added->is_contiguous() && added->numel() == y.numel())),
              "add_norm: residual ", residual.sizes(), " ", residual.scalar_type(), " and y ", y.sizes(), " ", y.scalar_type(), " do not fit");
  const Between& loops = loops_of(y.scalar_type() == at::kBFloat16, isa);
  const float *outer = floats(after, n, "after"), *inner = floats(weight, n, "weight");
  float* h = residual.mutable_data_ptr<float>();
  const uint16_t* more = added ? bits(*added) : nullptr;
  uint16_t* to = bits(y);
  at::parallel_for(0, rows, grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      loops.norm(h + i * n, more ? more + i * n : nullptr, outer, float(after_eps), inner, float(eps), n, to + i * n);
  });
}

// y = activation(gate) * up; y may be gate.
void gate(const at::Tensor& gate, const at::Tensor& up, int64_t kind, const at::Tensor& y, const std::string& isa) {
  for (const at::Tensor* t : {&gate, &up, &y})
    TORCH_CHECK(of_halves(*t) && t->is_contiguous() && t->sizes() == gate.sizes() && t->scalar_type() == gate.scalar_type(), "gate: ",
                gate.sizes(), ", ", up.sizes(), " and ", y.sizes(), " do not fit");
  TORCH_CHECK(kind >= SILU && kind <= RELU, "gate: no activation ", kind);
  const Between& loops = loops_of(gate.scalar_type() == at::kBFloat16, isa);
  constexpr int64_t AT_ONCE = 4096;
  const int64_t n = gate.numel();
  at::parallel_for(0, (n + AT_ONCE - 1) / AT_ONCE, 1, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * AT_ONCE, to = std::min(n, end * AT_ONCE);
    loops.gate(int(kind), bits(gate) + from, bits(up) + from, to - from, bits(y) + from);
  });
}

// Rotates q [batch, tokens, heads * channels] in place; k, rotated, and v go into the cache from position `slot` on.
void turn_store(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos, const at::Tensor& sin,
                const at::Tensor& positions, const Maybe& query_norm, const Maybe& key_norm, double eps, const at::Tensor& keys,
                const at::Tensor& values, int64_t slot, const std::string& isa) {
  const int64_t batch = keys.size(0), kv_heads = keys.size(1), channels = keys.size(3), tokens = q.size(-2), turned = cos.size(1);
  const int64_t heads = q.size(-1) / channels;
  for (const at::Tensor* t : {&q, &k, &v})
    TORCH_CHECK(of_halves(*t) && t->is_contiguous() && t->dim() == 3 && t->size(0) == batch && t->size(1) == tokens &&
                    t->size(2) == (t == &q ? heads : kv_heads) * channels && t->scalar_type() == keys.scalar_type(),
                "turn_store: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit the cache ", keys.sizes());
  TORCH_CHECK(keys.dim() == 4 && values.sizes() == keys.sizes() && keys.stride(3) == 1 && values.stride(3) == 1 && slot >= 0 &&
                  slot + tokens <= keys.size(2) && values.scalar_type() == keys.scalar_type(),
              "turn_store: the cache ", keys.sizes(), " has no room for ", tokens, " positions behind ", slot);
  TORCH_CHECK(cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat && cos.is_contiguous() && sin.is_contiguous() &&
                  cos.sizes() == sin.sizes() && turned % 2 == 0 && turned <= channels, "turn_store: cos ", cos.sizes(), " does not fit");
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.is_contiguous() && positions.numel() == batch * tokens, "turn_store: positions ",
              positions.sizes());
  const int64_t* place = positions.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < batch * tokens; i++) TORCH_CHECK(place[i] >= 0 && place[i] < cos.size(0), "turn_store: no position ", place[i]);
  const Between& loops = loops_of(q.scalar_type() == at::kBFloat16, isa);
  const float *of_q = floats(query_norm, channels, "query_norm"), *of_k = floats(key_norm, channels, "key_norm");
  const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  at::parallel_for(0, batch * tokens, grain((heads + 2 * kv_heads) * channels), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / tokens, at = slot + i % tokens, row = place[i] * turned;
      uint16_t* x = bits(q) + i * heads * channels;
      for (int64_t h = 0; h < heads; h++, x += channels) loops.turn(x, of_q, float(eps), c + row, s + row, turned, channels, x);
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t from = (i * kv_heads + h) * channels;
        loops.turn(bits(k) + from, of_k, float(eps), c + row, s + row, turned, channels,
                   bits(keys) + b * keys.stride(0) + h * keys.stride(1) + at * keys.stride(2));
        std::memcpy(bits(values) + b * values.stride(0) + h * values.stride(1) + at * values.stride(2), bits(v) + from, channels * sizeof(uint16_t));
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("add_norm(Tensor(a!) residual, Tensor? added, Tensor? after, float after_eps, Tensor? weight, float eps, Tensor(b!) y, str isa) -> ()", add_norm);
  m.def("gate(Tensor gate, Tensor up, int kind, Tensor(a!) y, str isa) -> ()", gate);
  m.def(
      "turn_store(Tensor(a!) q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor? query_norm, Tensor? key_norm, float eps, "
      "Tensor(b!) keys, Tensor(c!) values, int slot, str isa) -> ()",
      turn_store);
}
