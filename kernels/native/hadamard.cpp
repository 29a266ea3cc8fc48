// Rows times a Hadamard matrix that is a Kronecker product of small ones, in blocks, with signs before it and factors behind it. A row stays
// in L1. kernels/hadamard/README.md has the matrices.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "neon.inc"

namespace {

using Maybe = std::optional<at::Tensor>;
constexpr int MOST_FACTORS = 8, WIDEST = 16;  // numbers of the widest vector

struct Row {
  int64_t n;
  bool bfloat16;
  const float *signs, *gains;  // [n], or null
  float scale;
  int factors;
  const float* factor[MOST_FACTORS];  // [order, order], the one of neighbouring numbers first, and a vector behind it
  int64_t order[MOST_FACTORS];
};

using Transform = void (*)(const Row&, const void* x, void* y, float* a, float* b);

#define INLINE static inline __attribute__((always_inline))
#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,f16c")
namespace avx512 {
using Vec = __m512;
constexpr int LANES = 16;
#include "vectors.inc"
#include "hadamard_loops.inc"
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
using Vec = __m256;
constexpr int LANES = 8;
#include "vectors.inc"
#include "hadamard_loops.inc"
}  // namespace avx2
#pragma GCC pop_options
#endif  // x86
#ifdef HAVE_NEON
namespace neon {
typedef float Vec __attribute__((vector_size(16)));
constexpr int LANES = 4;
#include "vectors.inc"
#include "hadamard_loops.inc"
}  // namespace neon
#endif  // aarch64
namespace portable {
typedef float Vec __attribute__((vector_size(16)));
constexpr int LANES = 4;
#include "vectors.inc"
#include "hadamard_loops.inc"
}  // namespace portable
#undef INLINE

#include "isa.inc"

Transform transform_of(const std::string& wanted) {
  const std::string isa = wanted == "auto" ? best_isa(false) : wanted;
  TORCH_CHECK(runs(isa), "`isa` (='", wanted, "') is not one of this machine's");
#ifdef HAVE_X86
  if (isa == "avx512" || isa == "avx512bf16") return avx512::transform;
  if (isa == "avx2") return avx2::transform;
#endif
#ifdef HAVE_NEON
  if (isa == "neon" || isa == "neon bf16") return neon::transform;
#endif
  return portable::transform;
}

const float* of_row(const Maybe& t, int64_t n, const char* name) {
  if (!t) return nullptr;
  TORCH_CHECK(t->scalar_type() == at::kFloat && t->is_contiguous() && t->numel() == n, "hadamard_rows: ", name, " ", t->sizes(), " of ",
              t->scalar_type(), " for rows of ", n);
  return t->const_data_ptr<float>();
}

at::Tensor rows(const at::Tensor& x, const Maybe& signs, at::TensorList factors, const Maybe& gains, double scale, const std::string& isa) {
  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && (bfloat16 || x.scalar_type() == at::kFloat) && x.size(1) % WIDEST == 0, "hadamard_rows: x ",
              x.sizes(), " of ", x.scalar_type(), "; rows must be a multiple of ", WIDEST);
  TORCH_CHECK(factors.size() <= MOST_FACTORS, "hadamard_rows: ", factors.size(), " factors");
  const int64_t n = x.size(1), bytes = n * x.element_size();
  Row r{n, bfloat16, of_row(signs, n, "signs"), of_row(gains, n, "gains"), float(scale), int(factors.size()), {}, {}};
  int64_t block = 1;
  for (int i = 0; i < r.factors; i++) {
    const at::Tensor& H = factors[i];
    const int64_t f = H.dim() == 2 ? H.size(1) : 0;
    TORCH_CHECK(f > 0 && H.scalar_type() == at::kFloat && H.is_contiguous() && (H.size(0) - f) * f >= WIDEST, "hadamard_rows: a factor of ", H.sizes());
    r.factor[i] = H.const_data_ptr<float>(), r.order[i] = f, block *= f;
  }
  TORCH_CHECK(n % block == 0, "hadamard_rows: rows of ", n, " are no blocks of ", block);
  at::Tensor y = at::empty_like(x);
  const Transform transform = transform_of(isa);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  at::parallel_for(0, x.size(0), std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(n, 1)), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> room(new float[2 * (n + WIDEST)]());
    for (int64_t row = begin; row < end; row++) transform(r, from + row * bytes, to + row * bytes, room.get(), room.get() + n + WIDEST);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("hadamard_rows(Tensor x, Tensor? signs, Tensor[] factors, Tensor? gains, float scale, str isa) -> Tensor");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("hadamard_rows", rows); }
