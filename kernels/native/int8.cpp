// int8 products on a CPU: activations to int8, token by token, torch's oneDNN product of codes, and its sums back to the
// activations' dtype. Each of the two passes of ours goes over memory once.

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr float SMALLEST = 0x1p-100f, LARGEST = 127.0f;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: the last byte of v + ROUND is v, rounded to nearest even

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The loops, which the compiler turns into vectors of the instruction set in TARGET.
struct Loops {
  void (*widen)(const uint16_t* x, float* out, int64_t n);
  uint32_t (*largest)(const float* x, int64_t n);
  void (*encode)(const float* x, float inverse, uint8_t* out, int64_t n);
  void (*scale)(const float* y, float s, uint16_t* out, int64_t n);
};

#define LOOPS(NAME, TARGET)                                                                                     \
  namespace NAME {                                                                                              \
  TARGET void widen(const uint16_t* x, float* out, int64_t n) {                                                 \
    for (int64_t i = 0; i < n; i++) out[i] = float_of(uint32_t(x[i]) << 16);                                    \
  }                                                                                                             \
  /* Bits of the largest |x|: as integers in the order of |x|, infinity and NaN above all that is finite. */   \
  TARGET uint32_t largest(const float* x, int64_t n) {                                                          \
    uint32_t top = 0;                                                                                           \
    for (int64_t i = 0; i < n; i++) {                                                                           \
      uint32_t bits = bits_of(x[i]) & 0x7FFFFFFF;                                                               \
      top = bits > top ? bits : top;                                                                            \
    }                                                                                                           \
    return top;                                                                                                 \
  }                                                                                                             \
  /* code + 128. The bounds keep product and sum from being fused: codes are those of plain torch. */          \
  TARGET void encode(const float* x, float inverse, uint8_t* out, int64_t n) {                                  \
    for (int64_t i = 0; i < n; i++) {                                                                           \
      float v = x[i] * inverse;                                                                                 \
      v = v > LARGEST ? LARGEST : v;                                                                            \
      v = v < -LARGEST ? -LARGEST : v;                                                                          \
      out[i] = uint8_t(bits_of(v + ROUND)) ^ 0x80;                                                              \
    }                                                                                                           \
  }                                                                                                             \
  TARGET void scale(const float* y, float s, uint16_t* out, int64_t n) {                                        \
    for (int64_t i = 0; i < n; i++) {                                                                           \
      float v = y[i] * s;                                                                                       \
      uint32_t bits = bits_of(v);                                                                               \
      out[i] = v != v ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);                          \
    }                                                                                                           \
  }                                                                                                             \
  constexpr Loops loops{widen, largest, encode, scale};                                                         \
  }

LOOPS(portable, )
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
LOOPS(avx2, __attribute__((target("avx2"))))
LOOPS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#endif

const Loops& loops() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  static const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool half = __builtin_cpu_supports("avx2");
  if (wide) return avx512::loops;
  if (half) return avx2::loops;
#endif
  return portable::loops;
}

int64_t grain(int64_t columns) { return std::max<int64_t>(1, 32768 / columns); }

std::tuple<at::Tensor, at::Tensor> quantize(const at::Tensor& x, const std::optional<at::Tensor>& fixed) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto codes = at::empty({rows, n}, x.options().dtype(at::kByte));
  auto scale = at::empty({rows, 1}, x.options().dtype(at::kFloat));
  const bool half = x.scalar_type() == at::kBFloat16;
  const auto source = half ? x : x.to(at::kFloat);
  const float step = fixed ? fixed->item<float>() : 0.0f;
  const void* from = source.const_data_ptr();
  auto* to = codes.mutable_data_ptr<uint8_t>();
  auto* steps = scale.mutable_data_ptr<float>();
  const auto& l = loops();
  at::parallel_for(0, rows, grain(n), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(half ? n : 0);
    for (int64_t r = begin; r < end; r++) {
      const float* row = half ? buffer.data() : static_cast<const float*>(from) + r * n;
      if (half) l.widen(static_cast<const uint16_t*>(from) + r * n, buffer.data(), n);
      const uint32_t bits = l.largest(row, n);
      const bool finite = bits < 0x7F800000;
      const float top = std::max(float_of(finite ? bits : 0), SMALLEST);
      const float inverse = fixed ? 1.0f / step : LARGEST / top;
      steps[r] = !finite ? std::numeric_limits<float>::quiet_NaN() : fixed ? step : top / LARGEST;
      l.encode(row, finite ? inverse : 0.0f, to + r * n, n);
    }
  });
  return {codes, scale};
}

at::Tensor scaled(const at::Tensor& y, const at::Tensor& scale, at::ScalarType dtype) {
  if (dtype != at::kBFloat16) return y.mul(scale).to(dtype);
  const int64_t rows = y.size(0), n = y.size(1);
  auto out = at::empty({rows, n}, y.options().dtype(dtype));
  const float *from = y.const_data_ptr<float>(), *s = scale.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  const auto& l = loops();
  at::parallel_for(0, rows, grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) l.scale(from + r * n, s[r], to + r * n, n);
  });
  return out;
}

// x [..., in]; codes as onednn::qlinear_prepack lays them out; scale float32 [out].
at::Tensor int8_matmul(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale,
                       const std::optional<at::Tensor>& x_scale) {
  static const auto product = c10::Dispatcher::singleton().findSchemaOrThrow("onednn::qlinear_pointwise", "");
  auto [a, steps] = quantize(x.reshape({-1, x.size(-1)}).contiguous(), x_scale);
  const auto zero = at::zeros({scale.size(0)}, scale.options().dtype(at::kInt));
  std::vector<c10::IValue> stack{a, 1.0, int64_t(128), codes, scale, zero, c10::IValue(), 1.0, int64_t(0), int64_t(at::kFloat),
                                 std::string("none"), c10::List<std::optional<at::Scalar>>(), std::string("")};
  product.callBoxed(&stack);
  auto shape = x.sizes().vec();
  shape.back() = scale.size(0);
  return scaled(stack[0].toTensor(), steps, x.scalar_type()).view(shape);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("int8_matmul(Tensor x, Tensor codes, Tensor scale, Tensor? x_scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("int8_matmul", int8_matmul); }
TORCH_LIBRARY_IMPL(workbench, MkldnnCPU, m) { m.impl("int8_matmul", int8_matmul); }  // the dispatcher sees the opaque codes
