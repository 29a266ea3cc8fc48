// y = x Wᵀ on a CPU with int8 codes on both sides: activations are quantised token by token, products of codes are summed in
// int32 by AVX512-VNNI or NEON's dot products, sums are scaled and written in x's dtype. kernels/w8a8_matmul/README.md has the layouts
// and what it costs.
// Many tokens take tiles of AMX where the processor has it.

#include <ATen/Parallel.h>
#include <torch/library.h>
#include <torch/types.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "neon.inc"
#include "step_parts.inc"

namespace {
#include "isa.inc"
#include "amx.inc"
#include "tile_plan.inc"
}  // namespace

#if defined(HAVE_X86) || defined(HAVE_NEON)
namespace {

constexpr int ROWS = 32;         // of W in a panel: two vectors of int32 sums
#ifdef HAVE_NEON
constexpr int TOKENS = 2;        // in a block, at most: 16 registers of sums, eight of W and one of a token
#else
constexpr int TOKENS = 14;       // in a block, at most: 28 sums, two vectors of W and one to spare are the 32 registers
#endif
constexpr int MANY = 8;          // tokens above which AMX multiplies
constexpr int CHUNK = 64;        // columns of a token that lie together in a block: a cache line
constexpr int STEP = 4;          // columns that one instruction sums
constexpr int BLOCKS = 4;        // a thread with this many blocks of tokens takes all of W; else threads share the panels
constexpr int64_t NEAR = 1 << 19;  // bytes of codes that should stay in a core's L2
constexpr int64_t GRAIN = 1 << 16;  // bytes of W times tokens, or elements of x, worth a thread

enum class Kind { float32, bfloat16, float16 };

struct Input {
  const void* x;  // [tokens, in], of type `kind`
  Kind kind;
  int64_t tokens, in;
  const float* step;  // of all tokens; null: each has its own
};

struct Weight {
  const uint8_t* codes;  // [panels, steps, 32, 4]: code + 128
  const float* scale;    // [out]
  int64_t out, panels, steps;
};

// Codes of up to TOKENS tokens.
struct Block {
  int8_t* codes;   // [chunks, tokens, 64]; zeros beyond `in`
  float* step;     // [tokens]; NaN where a token holds a NaN or an infinity
  int32_t* above;  // [tokens]: SIGN Σ codes, to subtract from sums for the SIGN added to W's codes
};

Kind kind_of(at::ScalarType type) {
  return type == at::kFloat ? Kind::float32 : type == at::kHalf ? Kind::float16 : Kind::bfloat16;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

#define INLINE static inline __attribute__((always_inline))
#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,avx2,f16c")
#endif
namespace dots {
#ifdef HAVE_X86
#include "integers_avx512.inc"
#else
#include "integers_neon.inc"
#endif
#include "int8.inc"

// One token. Its codes, with `flip` applied to the bits of each, go to `to`, chunks `stride` bytes apart; `whole`: the last one
// is filled up with zeros. Returns the step; `sum` is that of the codes.
template <Kind kind>
static float quantize(const void* x, int64_t n, const float* fixed, int flip, bool whole, uint8_t* to, int64_t stride,
                      int32_t* sum) {
  const Step step = step_of<kind>(x, n, fixed);
  const Floats inverse = all(step.inverse);
  const Int flips = bytes(flip), ones = bytes(1);
  Int total = none();
  int64_t i = 0;
  for (; i + CHUNK <= n; i += CHUNK, to += stride) {
    const Int codes = encode<kind>(x, i, CHUNK, inverse, fixed);
    add_products(total, ones, codes);
    write(to, differing(codes, flips));
  }
  if (i < n) {
    const Int codes = encode<kind>(x, i, n - i, inverse, fixed);
    add_products(total, ones, codes);
    write_first(to, whole ? 64 : n - i, differing(codes, flips));
  }
  *sum = sum_of(total);
  return step.step;
}

static float quantize(const Input& x, int64_t token, int flip, bool whole, uint8_t* to, int64_t stride, int32_t* sum) {
  const int64_t at = token * x.in;
  if (x.kind == Kind::float32)
    return quantize<Kind::float32>(static_cast<const float*>(x.x) + at, x.in, x.step, flip, whole, to, stride, sum);
  const void* row = static_cast<const uint16_t*>(x.x) + at;
  if (x.kind == Kind::float16) return quantize<Kind::float16>(row, x.in, x.step, flip, whole, to, stride, sum);
  return quantize<Kind::bfloat16>(row, x.in, x.step, flip, whole, to, stride, sum);
}

static void quantize_block(const Input& x, int64_t first, int count, const Block& to) {
  for (int m = 0; m < count; m++) {
    int32_t sum;
    uint8_t* codes = reinterpret_cast<uint8_t*>(to.codes) + m * CHUNK;
    to.step[m] = quantize(x, first + m, 0, true, codes, count * CHUNK, &sum);
    to.above[m] = SIGN * sum;
  }
}

// sum += four columns of the tokens by the panel's 32 rows.
template <int M>
INLINE void step(Int (&sum)[M][2], const uint8_t* weights, const int8_t* codes) {
  const Int a = read_codes(weights), b = read_codes(weights + 64);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    const Int x = words(*reinterpret_cast<const int32_t*>(codes + m * CHUNK));
    add_products(sum[m][0], a, x);
    add_products(sum[m][1], b, x);
  }
}

// A block of M tokens by a panel of W; y: the outputs of its first token.
template <int M>
static void multiply(const Block& x, const Weight& w, int64_t panel, void* y, Kind kind) {
  constexpr int CHAINS = M == 1 ? dots::CHAINS : M <= 3 ? (dots::CHAINS + 1) / 2 : 1;  // independent sums, to hide a product's latency
  Int sum[CHAINS][M][2];
#pragma GCC unroll 64
  for (int i = 0; i < CHAINS * M * 2; i++) sum[i / (2 * M)][i / 2 % M][i % 2] = none();
  const uint8_t* weights = w.codes + panel * w.steps * ROWS * STEP;
  const int8_t* codes = x.codes;
  for (int64_t left = w.steps; left > 0; left -= CHUNK / STEP, codes += M * CHUNK) {
    const int64_t steps = left < CHUNK / STEP ? left : CHUNK / STEP;
    int64_t s = 0;
    for (; s + CHAINS <= steps; s += CHAINS)
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; c++, weights += ROWS * STEP) step<M>(sum[c], weights, codes + (s + c) * STEP);
    for (; CHAINS > 1 && s < steps; s++, weights += ROWS * STEP) step<M>(sum[0], weights, codes + s * STEP);
  }
  const int64_t row = panel * ROWS, here = w.out - row;
  Floats scale[2];
  first_floats(w.scale + row, here, scale);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    const Int above = words(x.above[m]);
    const Floats step = all(x.step[m]);
    Floats v[2];
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      Int total = minus(sum[0][m][n], above);
#pragma GCC unroll 4
      for (int c = 1; c < CHAINS; c++) total = plus(total, sum[c][m][n]);
      v[n] = times(times(floats(total), scale[n]), step);
    }
    put(y, kind, m * w.out + row, v[0], v[1], here);
  }
}

using Multiply = void (*)(const Block&, const Weight&, int64_t panel, void* y, Kind);

template <class Counts>
struct Ways;
template <int... M>
struct Ways<std::integer_sequence<int, M...>> {
  static constexpr Multiply of[] = {multiply<M + 1>...};
};
constexpr auto& MULTIPLY = Ways<std::make_integer_sequence<int, TOKENS>>::of;  // by the number of tokens, less one

#ifdef HAVE_AMX
// Writes a token's sums of codes of `panels` panels from `panel` on, `apart` bytes apart, to its outputs y [out].
static void finish_tiles(const char* sums, int64_t apart, int64_t panel, int64_t panels, int32_t above, float step, const Weight& w, void* y, Kind kind) {
  const Int too_much = words(above);
  const Floats by = all(step);
  for (; panels-- > 0; panel++, sums += apart) {
    const int64_t row = panel * ROWS, here = w.out - row;
    Floats scale[2];
    first_floats(w.scale + row, here, scale);
    const Floats a = floats(minus(read(sums), too_much)), b = floats(minus(read(sums + 64), too_much));
    put(y, kind, row, times(times(a, scale[0]), by), times(times(b, scale[1]), by), here);
  }
}
#endif

}  // namespace dots
#ifdef HAVE_X86
#pragma GCC pop_options
#endif
#undef INLINE

namespace {

Input input(const at::Tensor& x, const std::optional<at::Tensor>& fixed) {
  return {x.const_data_ptr(), kind_of(x.scalar_type()), x.numel() / x.size(-1), x.size(-1),
          fixed ? fixed->const_data_ptr<float>() : nullptr};
}

bool able() {
  static const bool found = !integer_isa().empty();
  return found;
}

void check(const at::Tensor& x, const at::Tensor& scale) {
  const auto type = x.scalar_type();
  TORCH_CHECK((type == at::kFloat || type == at::kHalf || type == at::kBFloat16) && x.dim() > 0 && x.size(-1) > 0 &&
                  scale.scalar_type() == at::kFloat && scale.is_contiguous() && scale.dim() == 1,
              "int8_matmul: x ", type, " ", x.sizes(), " and scale ", scale.scalar_type(), " ", scale.sizes(), " cannot be read");
  TORCH_CHECK(able(), "int8_matmul: this CPU has neither AVX512-VNNI nor NEON's dot products");
}

at::Tensor result(const at::Tensor& x, int64_t out) {
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  return at::empty(sizes, x.options());
}

// The codes of all tokens, in blocks of nearly the same size.
struct Blocks {
  int64_t tokens, count, chunks;
  std::vector<float> step;
  std::vector<int32_t> above;
  at::Tensor codes;

  Blocks(int64_t tokens, int64_t count, int64_t in)
      : tokens(tokens), count(count), chunks(ceil_div(in, CHUNK)), step(tokens), above(tokens),
        codes(at::empty({tokens * chunks * CHUNK}, at::kChar)) {}
  int64_t first(int64_t block) const { return block * tokens / count; }
  int size(int64_t block) const { return int(first(block + 1) - first(block)); }
  Block block(int64_t b) {
    const int64_t token = first(b);
    return {codes.mutable_data_ptr<int8_t>() + token * chunks * CHUNK, step.data() + token, above.data() + token};
  }
};

#ifdef HAVE_AMX
#include "int8_tiles.inc"
#endif

Weight weight_of(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale) {
  check(x, scale);
  TORCH_CHECK(codes.dim() == 4 && codes.is_contiguous() && codes.scalar_type() == at::kChar && codes.size(2) == ROWS && codes.size(3) == STEP &&
                  codes.size(0) == ceil_div(scale.size(0), ROWS) && codes.size(1) == ceil_div(x.size(-1), STEP),
              "int8_matmul: x ", x.sizes(), ", codes ", codes.sizes(), " and scale ", scale.sizes(), " do not fit");
  return {static_cast<const uint8_t*>(codes.const_data_ptr()), scale.const_data_ptr<float>(), scale.size(0), codes.size(0), codes.size(1)};
}

// x [..., in]; codes [panels, steps, 32, 4]; scale float32 [out].
at::Tensor by_panels(const at::Tensor& x_, const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& fixed) {
  const at::Tensor x = x_.contiguous();
  const Weight w = weight_of(x, codes, scale);
  const at::Tensor y = result(x, w.out);
  if (y.numel() == 0) return y;
  const Input in = input(x, fixed);
#ifdef HAVE_AMX
  if (in.tokens > MANY && amx_available()) {
    Int8Tiles tiles(in, w, y.mutable_data_ptr(), y.element_size());
    TilePlan<Int8Tiles, Amx>(tiles).run();
    return y;
  }
#endif
  auto* to = static_cast<char*>(y.mutable_data_ptr());
  const int64_t width = w.out * y.element_size(), threads = at::get_num_threads();
  int64_t count = ceil_div(in.tokens, TOKENS);
  const bool apart = count >= BLOCKS * threads;  // each thread quantises its own tokens and multiplies them by all of W
  if (apart) count = ceil_div(count, threads) * threads;
  Blocks blocks(in.tokens, count, in.in);

  const auto quantize = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) dots::quantize_block(in, blocks.first(b), blocks.size(b), blocks.block(b));
  };
  const auto multiply = [&](int64_t panel, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
      dots::MULTIPLY[blocks.size(b) - 1](blocks.block(b), w, panel, to + blocks.first(b) * width, in.kind);
  };
  const int64_t held = std::max<int64_t>(BLOCKS, NEAR / (TOKENS * in.in));  // blocks whose codes fit L2
  if (apart) {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; b += held) {
        const int64_t stop = std::min(end, b + held);
        quantize(b, stop);
        for (int64_t p = 0; p < w.panels; p++) multiply(p, b, stop);
      }
    });
    return y;
  }
  at::parallel_for(0, count, std::max<int64_t>(1, GRAIN / (TOKENS * in.in)), quantize);
  const int64_t parts = std::min(count, ceil_div(BLOCKS * threads, w.panels));  // of the tokens, if panels are too few
  const int64_t grain = std::max<int64_t>(1, GRAIN * parts / (w.steps * ROWS * STEP * in.tokens));
  at::parallel_for(0, parts * w.panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t part = i / w.panels;
      multiply(i % w.panels, part * count / parts, (part + 1) * count / parts);
    }
  });
  return y;
}

// Several weights that multiply the same x: if tiles take it, the tokens are rounded and packed once for all weights.
std::vector<at::Tensor> by_several(const at::Tensor& x_, const std::vector<at::Tensor>& codes, const std::vector<at::Tensor>& scales,
                                   const std::optional<at::Tensor>& fixed) {
  const at::Tensor x = x_.contiguous();
  TORCH_CHECK(codes.size() && codes.size() == scales.size(), "int8_matmul: ", codes.size(), " weights and ", scales.size(), " scales");
  std::vector<at::Tensor> y;
#ifdef HAVE_AMX
  std::vector<std::unique_ptr<Int8Tiles>> tiles;
  const int64_t tokens = x.dim() && x.size(-1) ? x.numel() / x.size(-1) : 0;
  for (size_t i = 0; tokens > MANY && amx_available() && i < codes.size(); i++) {
    const Weight w = weight_of(x, codes[i], scales[i]);
    y.push_back(result(x, w.out));
    tiles.emplace_back(new Int8Tiles(input(x, fixed), w, y.back().mutable_data_ptr(), x.element_size()));
  }
  if (!tiles.empty()) {
    Joined<Int8Tiles> joined(std::move(tiles));
    TilePlan<Joined<Int8Tiles>, Amx>(joined).run();
    return y;
  }
#endif
  for (size_t i = 0; i < codes.size(); i++) y.push_back(by_panels(x, codes[i], scales[i], fixed));
  return y;
}

// Rows from `begin` to `end` of a weight, for a decoding step; every thread rounds the few tokens itself.
void rows(const workbench::Stored& s, const workbench::Operand& x, int64_t begin, int64_t end, float* y) {
  static thread_local std::vector<int8_t> codes;
  float step[TOKENS];
  int32_t above[TOKENS];
  codes.resize(std::min(TOKENS, x.tokens) * ceil_div(s.in, CHUNK) * CHUNK);
  const Input in{x.values, Kind::float32, x.tokens, s.in, s.step};
  const Weight w{static_cast<const uint8_t*>(s.data), static_cast<const float*>(s.scale), s.out, ceil_div(s.out, ROWS),
                 ceil_div(s.in, STEP)};
  const Block block{codes.data(), step, above};
  for (int first = 0; first < x.tokens; first += TOKENS) {
    const int count = std::min(TOKENS, x.tokens - first);
    dots::quantize_block(in, first, count, block);
    for (int64_t panel = begin / ROWS; panel * ROWS < end; panel++)
      dots::MULTIPLY[count - 1](block, w, panel, y + first * s.out, Kind::float32);
  }
}

}  // namespace

workbench::Product workbench::int8_product() { return {Items::widened, 1, able() ? rows : nullptr}; }

#else
workbench::Product workbench::int8_product() { return {Items::widened, 1, nullptr}; }
namespace {
at::Tensor by_panels(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&) {
  TORCH_CHECK(false, "int8_matmul: this build has neither AVX512-VNNI nor NEON's dot products");
}
std::vector<at::Tensor> by_several(const at::Tensor&, const std::vector<at::Tensor>&, const std::vector<at::Tensor>&,
                                   const std::optional<at::Tensor>&) {
  TORCH_CHECK(false, "int8_matmul: this build has neither AVX512-VNNI nor NEON's dot products");
}
}  // namespace
#endif

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("int8_matmul(Tensor x, Tensor codes, Tensor scale, Tensor? x_scale) -> Tensor");
  m.def("int8_matmul_several(Tensor x, Tensor[] codes, Tensor[] scales, Tensor? x_scale) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("int8_matmul", by_panels);
  m.impl("int8_matmul_several", by_several);
}
