// y = x Wᵀ on a CPU with AVX512-VNNI or NEON's dot products, W in 2 to 8 bits in panels (kernels/int_matmul/README.md has the layout) and activations
// rounded to 4 or 8 bits on the way: products of codes are summed in int32 inside a group of columns, and each group's sum is
// scaled in float32. kernels/w4a8_matmul/README.md says what it costs.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "neon.inc"
#include "step_parts.inc"

namespace {

using Maybe = std::optional<at::Tensor>;

#include "panels.inc"
#include "isa.inc"
#include "amx.inc"
#include "tile_plan.inc"

#if defined(HAVE_X86) || defined(HAVE_NEON)
#define STATIC static inline __attribute__((always_inline))

constexpr int PAIR = 2;                // panels whose rows are multiplied together
constexpr int SOME = 16;               // tokens up to which codes are decoded in registers
#ifdef HAVE_NEON
constexpr int TOKENS = 2;              // in a block: 16 registers of sums of codes, eight of W and one of x
#else
constexpr int TOKENS = 7;              // in a block: 14 sums of codes, 14 totals, two vectors of W and one of x fill the registers
#endif
constexpr int PIECE = 64;              // columns of a token that lie together in a block, at most
constexpr int BLOCKS = 8;              // a thread with this many blocks of tokens takes all of W; else threads share the panels
constexpr int64_t FIRST = 20 << 10;    // bytes of decoded W that should stay in a core's L1
constexpr int64_t SECOND = 3 << 18;    // bytes of codes of tokens that should stay in its L2
constexpr int64_t MOST_COLUMNS = 1 << 16;  // of a group: 2^16 products of at most 2^15 are below 2^31
constexpr int64_t THIRD = 1 << 21;     // bytes of codes that threads share, in L3
constexpr int64_t SMALL = 1 << 21;     // weights up to which every thread decodes all of W
constexpr int64_t PART = 1 << 16;      // products of four codes by a panel, or elements of x, worth a thread

// How a call divides the columns. A group here has one scale of W and one step of x.
struct Plan {
  int64_t in, groups, columns;  // columns of a group
  int64_t per_scale;            // groups that share a scale of W
  int64_t step_columns, steps;  // columns that share a step of x, and steps of a token
  int64_t piece;                // columns of a token that lie together, a divisor of `columns`
  float bound;                  // largest code; 127 if `wide`
  int64_t wide;                 // number of first steps of a token, whose codes go up to 127
  const float* fixed;           // given steps, with `fixed_each` for each group; null: computed here
  bool fixed_each;
  const uint8_t* order;         // of sixteen columns, a coder's ORDER
};

// Tokens, each with its codes in one row.
struct Rounded {
  const int8_t* codes;  // [tokens, in]
  const int32_t* sums;  // [tokens, groups] of the codes
  const float* step;    // [tokens], or [tokens, groups] where a token has several
};

// Decoded columns of a pair of panels.
struct Tile {
  uint8_t* codes;  // int8 [columns / 4, 2, 16, 4]: code - zero; with i8mm [columns / 8, 2, 16, 8]
  int32_t* start;  // [groups, 2, 16]: -SIGN Σ codes, for the SIGN that is added to codes of x
  float* scale;    // [groups, 2, 16]
};

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,avx2,f16c")
#endif
namespace dots {
#ifdef HAVE_X86
using namespace wide;
#include "integers_avx512.inc"
#else
using namespace quads;
#include "integers_neon.inc"
#endif
#include "int8.inc"
#include "w4a8.inc"

#include "w4a8_loops.inc"
}  // namespace dots
#ifdef HAVE_X86
#pragma GCC pop_options
#endif

bool able() { return !integer_isa().empty(); }

Kind kind_of(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat ? Kind::float32 : t.scalar_type() == at::kHalf ? Kind::float16 : Kind::bfloat16;
}

// The data of a call.
struct Call {
  const void* x;
  const int32_t* from;  // the order in which columns of x are read; null: unchanged
  Kind kind;
  int64_t tokens;
  Weight w;
  Plan plan;
  const dots::Coder* coder;
  Output y;
  int64_t element;  // of y, in bytes
  bool large;       // codes less their zero points do not fit a byte
};

// Rows of x, to be rounded. Rows in another order are gathered in memory of the reader.
class Reader {
 public:
  explicit Reader(const Call& call) : c(call), bytes(c.kind == Kind::float32 ? 4 : 2) {
    if (c.from) room.reset(new char[c.plan.in * bytes]);
  }

  const void* row(int64_t token) {
    const char* at = static_cast<const char*>(c.x) + token * c.plan.in * bytes;
    if (!c.from) return at;
    if (bytes == 4) gather<uint32_t>(at);
    else gather<uint16_t>(at);
    return room.get();
  }

 private:
  template <class T>
  void gather(const char* row) {
    const T* x = reinterpret_cast<const T*>(row);
    T* to = reinterpret_cast<T*>(room.get());
    for (int64_t k = 0; k < c.plan.in; k++) to[k] = x[c.from[k]];
  }

  const Call& c;
  const int64_t bytes;
  std::unique_ptr<char[]> room;
};

void some_tokens(const Call& c) {
  std::vector<int32_t> sums(c.tokens * c.plan.groups);
  std::vector<float> step(c.tokens * (c.plan.steps > 1 ? c.plan.groups : 1));
  std::unique_ptr<uint8_t[]> codes(new uint8_t[c.tokens * c.plan.in]);
  const auto round = [&](int64_t begin, int64_t end) {
    Reader x(c);
    for (int64_t m = begin; m < end; m++)
      dots::round_token(x.row(m), c.kind, c.plan, 0, codes.get() + m * c.plan.in, 64, step.data() + m * (step.size() / c.tokens),
                        sums.data() + m * c.plan.groups);
  };
  at::parallel_for(0, c.tokens, std::max<int64_t>(1, PART / c.plan.in), round);
  const Rounded x{reinterpret_cast<const int8_t*>(codes.get()), sums.data(), step.data()};
  at::parallel_for(0, c.w.panels, std::max<int64_t>(1, PART / (4 * c.plan.in * c.tokens)), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) c.coder->few(c.w, c.plan, x, c.tokens, p, c.y);
  });
}

// The codes of many tokens in blocks of nearly the same size, and their products with the weights of all calls, which share the tokens
// and have the same groups.
class Many {
 public:
  explicit Many(const std::vector<Call>& calls)
      : c(calls[0]), threads(at::get_num_threads()), count((c.tokens + TOKENS - 1) / TOKENS), several(c.plan.steps > 1),
        per_token(several ? c.plan.groups : 1), step(c.tokens * per_token), codes(new uint8_t[c.tokens * c.plan.in]) {
    int64_t outs = 0;
    for (const Call& call : calls) {
      for (int64_t panel = 0; panel < call.w.panels; panel += PAIR) pairs.push_back({&call, panel});
      outs += call.y.out;
    }
    apart = count >= BLOCKS * threads && c.plan.in * outs <= SMALL;
    if (apart) count = (count + threads - 1) / threads * threads;
    const int64_t share = apart ? count / threads : count, near = std::max<int64_t>(BLOCKS, (apart ? SECOND : THIRD) / (TOKENS * c.plan.in));
    const int64_t parts = (share + near - 1) / near;
    held = (share + parts - 1) / parts;
    const int64_t most = std::max<int64_t>(1, FIRST / (PAIR * ROWS * c.plan.columns));
    const int64_t tiles = (c.plan.groups + most - 1) / most;
    tile_groups = (c.plan.groups + tiles - 1) / tiles;
  }

  void run() {
    const int64_t number = pairs.size();
    if (apart)  // each thread rounds its own tokens and multiplies them by all of W
      return at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        Scratch scratch(*this);
        for (int64_t b = begin; b < end; b += held) {
          const int64_t stop = std::min(end, b + held);
          round(b, stop);
          for (int64_t pair = 0; pair < number; pair++) multiply(pair, b, stop, scratch);
        }
      });
    at::parallel_for(0, count, std::max<int64_t>(1, PART / (TOKENS * c.plan.in)), [&](int64_t begin, int64_t end) { round(begin, end); });
    at::parallel_for(0, number, std::max<int64_t>(1, PART / (8 * c.plan.in * c.tokens)), [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t pair = begin; pair < end; pair++)
        for (int64_t b = 0; b < count; b += held) multiply(pair, b, std::min(count, b + held), scratch);
    });
  }

 private:
  struct Pair {  // of panels of a weight
    const Call* call;
    int64_t panel;
  };
  struct Scratch {  // of a thread
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, std::free};
    Tile tile;
    float* totals;
    explicit Scratch(const Many& m) {
      const int64_t groups = m.tile_groups, rows = PAIR * ROWS, blocks = std::min(m.held, m.count);
      const int64_t codes = rows * groups * m.c.plan.columns, sums = 4 * rows * groups;  // multiples of 64
      memory.reset(static_cast<char*>(std::aligned_alloc(64, codes + 2 * sums + 4 * rows * TOKENS * blocks)));
      TORCH_CHECK(memory, "panels_w4a8: no memory for decoded columns");
      char* at = memory.get();
      tile = {reinterpret_cast<uint8_t*>(at), reinterpret_cast<int32_t*>(at + codes), reinterpret_cast<float*>(at + codes + sums)};
      totals = reinterpret_cast<float*>(at + codes + 2 * sums);
    }
  };

  int64_t first(int64_t block) const { return block * c.tokens / count; }

  void round(int64_t begin, int64_t end) {
    const int64_t piece = c.plan.piece;
    std::unique_ptr<uint8_t[]> row(new uint8_t[c.plan.in]);
    Reader x(c);
    for (int64_t b = begin; b < end; b++) {
      const int64_t from = first(b), size = first(b + 1) - from;
      for (int64_t m = 0; m < size; m++) {
        uint8_t* to = codes.get() + from * c.plan.in + m * piece;
        const bool straight = piece == PIECE;
        dots::round_token(x.row(from + m), c.kind, c.plan, dots::SIGN, straight ? to : row.get(), straight ? size * PIECE : PIECE,
                          step.data() + (from + m) * per_token, nullptr);
        for (int64_t k = 0; !straight && k < c.plan.in; k += piece, to += size * piece) std::memcpy(to, row.get() + k, piece);
      }
    }
  }

  // Blocks [begin, end) by a pair of panels, one tile of decoded columns at a time.
  void multiply(int64_t pair, int64_t begin, int64_t end, const Scratch& s) {
    const Plan& plan = c.plan;
    const Call& call = *pairs[pair].call;
    const int64_t panel = pairs[pair].panel;
    const int64_t from = first(begin);
    for (int64_t g = 0; g < plan.groups; g += tile_groups) {
      const int64_t stop = std::min(plan.groups, g + tile_groups);
      call.coder->unpack(call.w, plan, panel, g, stop, s.tile);
      const bool more = stop < plan.groups;
      for (int64_t b = begin; b < end; b++) {
        if (more || pair + 1 < int64_t(pairs.size())) fetch(pairs[more ? pair : pair + 1], more ? stop : 0, b - begin, end - begin);
        const int64_t token = first(b), size = first(b + 1) - token;
        const auto product = dots::multiply_of(size, several);
        float* totals = s.totals + (token - from) * PAIR * ROWS;
        product(s.tile, plan, stop - g, codes.get() + token * plan.in + g * plan.columns * size, step.data() + token * per_token + g,
                g == 0, totals);
        const Output y{static_cast<char*>(call.y.y) + token * call.y.out * call.element, call.y.kind, call.y.out};
        if (stop == plan.groups) dots::finish(totals, size, several ? nullptr : step.data() + token, panel, y);
      }
    }
  }

  // Prefetches the `part`th of `parts` parts of a tile's codes into L2, while another tile is multiplied.
  void fetch(const Pair& pair, int64_t group, int64_t part, int64_t parts) const {
    const Call& call = *pair.call;
    const int64_t row_bytes = call.w.units_per_row * call.coder->bytes, group_bytes = row_bytes / c.plan.groups;
    const int64_t bytes = group_bytes * std::min(tile_groups, c.plan.groups - group);
    const int64_t share = (bytes / parts / 64 + 1) * 64;
    for (int64_t p = pair.panel; p < std::min(pair.panel + PAIR, call.w.panels); p++) {
      const uint8_t* at = call.w.units + p * row_bytes + group_bytes * group;
      for (int64_t i = part * share; i < std::min(bytes, (part + 1) * share); i += 64) __builtin_prefetch(at + i, 0, 2);
    }
  }

  const Call& c;  // the first of them
  std::vector<Pair> pairs;
  int64_t threads, count;
  bool several, apart;
  int64_t per_token;
  std::vector<float> step;
  std::unique_ptr<uint8_t[]> codes;
  int64_t held, tile_groups;
};

#ifdef HAVE_AMX
// Many tokens of bfloat16 with one step each, on a CPU with AMX, as an operand of TilePlan: tokens' codes are bytes already, and the weight
// becomes bytes with one scale for each row (w4a8_tiles.inc).
struct CodeTiles {
  static constexpr TileItems ITEMS = TileItems::bytes;
  static constexpr int ITEM_BYTES = 1;

  explicit CodeTiles(const Call& call)
      : tokens(call.tokens), columns(call.plan.in), strips((call.w.panels + 1) / 2), c(call), largest(c.coder->middle), step(std::make_shared<std::vector<float>>(call.tokens)) {
    if (!c.w.table) return;
    float top = 1;
    for (int64_t i = 0; i < ROWS; i++) top = std::max(top, std::fabs(c.w.table[i]));
    times = int(127 / top), largest = int(top) * times;
    for (int64_t i = 0; i < ROWS; i++) table[i] = c.w.table[i] * float(times);
    c.w.table = table;
  }
  CodeTiles(const CodeTiles&) = delete;

  int64_t until(int64_t strip) const { return strips - strip; }
  void share(const CodeTiles& other) { step = other.step; }

  void prepare(int64_t first, int64_t count) const {
    float* scales = scales_of(count);
    for (int64_t p = 2 * first; p < 2 * (first + count); p++, scales += ROWS)
      c.coder->byte_scale(c.w, std::min(p, c.w.panels - 1), largest, scales);
  }

  template <class Plan>
  void pack(const Plan& plan, int64_t token, int64_t count) {
    const std::unique_ptr<uint8_t[]> row(new uint8_t[plan.tiles() * 64]());
    Reader x(c);
    for (int64_t m = token; m < token + TILE_ROWS; m++) {
      if (m < token + count) dots::round_token(x.row(m), c.kind, c.plan, 0, row.get(), 64, &(*step)[m], nullptr);
      else std::memset(row.get(), 0, c.plan.in);
      for (int64_t t = 0; t < plan.tiles(); t++) std::memcpy(plan.piece(m, t), row.get() + t * 64, 64);
    }
  }

  TileRow strip(int64_t first, int64_t n, int64_t tile, int64_t count, char* room) const {
    const int64_t panel = 2 * (first + n), column = tile * 64, here = std::min(columns - column, count * 64);
    const float* scales = scales_of(0) + n * STRIP;
    char* other = room + count * TILE_BYTES;
    c.coder->to_bytes(c.w, c.plan, panel, column, here, scales, reinterpret_cast<uint8_t*>(room));
    c.coder->to_bytes(c.w, c.plan, std::min(panel + 1, c.w.panels - 1), column, here, scales + ROWS, reinterpret_cast<uint8_t*>(other));
    return {room, 64, TILE_BYTES, other - room};
  }

  void finish(const char* sums, int64_t apart, int64_t token, int64_t first, int64_t count) const {
    dots::finish_bytes(sums, apart, first * STRIP, count, scales_of(0), (*step)[token] / float(times), c.y.out, static_cast<uint16_t*>(c.y.y) + token * c.y.out);
  }

  int64_t tokens, columns, strips;

 private:
  static float* scales_of(int64_t count) { return reinterpret_cast<float*>(kept_memory<2>(count * STRIP * 4)); }  // of the thread's strips

  Call c;
  float table[ROWS];  // the values times `times`, so that those of a small table fill bytes too
  int times = 1, largest;
  std::shared_ptr<std::vector<float>> step;  // of each token
};
#endif

// Multiplies by tiles if these take all of the calls, which share their tokens; returns whether they do. A code of eight bits less a zero
// point does not fit their bytes.
bool by_tiles([[maybe_unused]] const std::vector<Call>& calls) {
#ifdef HAVE_AMX
  std::vector<std::unique_ptr<CodeTiles>> codes;
  for (const Call& c : calls) {
    if (c.tokens <= SOME || c.plan.steps > 1 || c.kind != Kind::bfloat16 || c.large || !amx_available()) return false;
    codes.emplace_back(new CodeTiles(c));
  }
  Joined<CodeTiles> joined(std::move(codes));
  TilePlan<Joined<CodeTiles>, Amx>(joined).run();
  return true;
#else
  return false;
#endif
}

int64_t piece_of(int64_t columns) {
  int64_t piece = std::min<int64_t>(PIECE, columns);
  while (columns % piece || piece % 8) piece--;
  return piece;
}

// x [..., in]; codes, scale and zero of a weight in panels; table: the integers that nibbles stand for; x_group: columns that share a step, or 0; x_scale: one step, or one for
// each such group; x_wide: number of first groups, whose codes have 8 bits; x_order: int32 [in], the columns of x in the order of W's.
// y: receives the product.
Call call_of(const at::Tensor& x, const at::Tensor& y, const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& zero,
             const std::optional<at::Tensor>& table, int64_t x_bits, int64_t x_group, const std::optional<at::Tensor>& x_scale, int64_t x_wide,
             const std::optional<at::Tensor>& x_order) {
  const int64_t out = y.size(-1);
  const int bits = codes.dim() == 3 ? workbench::width_of(codes) : 0;
  const auto one_of_ours = [](const at::Tensor& t) {
    return t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  };
  TORCH_CHECK(able(), "panels_w4a8: this CPU has neither AVX512-VNNI nor NEON's dot products");
  TORCH_CHECK(x.dim() > 0 && x.size(-1) > 0 && one_of_ours(x) && one_of_ours(scale) && codes.is_contiguous() && scale.is_contiguous() &&
                  bits && scale.dim() == 3 && scale.size(1) > 0 && (!zero || (zero->is_contiguous() && zero->sizes() == scale.sizes())) &&
                  (!table || (bits == 4 && table->numel() == ROWS && workbench::table_fits(table, bits))) &&
                  (x_bits == 4 || x_bits == 8) && (!x_scale || (x_scale->scalar_type() == at::kFloat && x_scale->is_contiguous())) &&
                  (!x_order || (x_order->scalar_type() == at::kInt && x_order->is_contiguous() && x_order->numel() == x.size(-1))),
              "panels_w4a8: x ", x.scalar_type(), ", codes ", codes.scalar_type(), " ", codes.sizes(), ", scale ", scale.scalar_type(),
              " ", scale.sizes(), ", x_scale or x_order cannot be read");
  for (int64_t i = 0; table && i < ROWS; i++) {
    const float value = table->const_data_ptr<float>()[i];
    TORCH_CHECK(value == std::nearbyint(value) && std::fabs(value) <= 127, "panels_w4a8: `table` holds ", value, ", not integers from -127 to 127");
  }
  const dots::Coder& coder = dots::coder_of(bits, table.has_value());
  const int64_t in = x.size(-1), share = in / scale.size(1), columns = x_group ? std::min(share, x_group) : share;
  Weight w{};
  w.units = static_cast<const uint8_t*>(codes.const_data_ptr());
  w.scale = scale.const_data_ptr(), w.kind = kind_of(scale);
  w.zero = zero ? zero->const_data_ptr<int8_t>() : nullptr;
  w.table = table ? table->const_data_ptr<float>() : nullptr;
  w.panels = codes.size(0), w.units_per_row = codes.size(1), w.groups = scale.size(1);
  TORCH_CHECK(in == coder.columns * w.units_per_row && share * w.groups == in && columns % coder.columns == 0 &&
                  columns <= MOST_COLUMNS && share % columns == 0 && (!x_group || (x_group % columns == 0 && in % x_group == 0)) &&
                  scale.size(0) == w.panels && scale.size(2) == ROWS && (out + ROWS - 1) / ROWS == w.panels &&
                  (!x_scale || x_scale->numel() == 1 || (x_group && x_scale->numel() == in / x_group)) &&
                  x_wide >= 0 && x_wide <= (x_group ? in / x_group : 1),
              "panels_w4a8: x ", x.sizes(), ", codes ", codes.sizes(), ", scale ", scale.sizes(), ", x_group ", x_group, " and x_wide ", x_wide,
              " do not fit");
  const int32_t* from = x_order ? x_order->const_data_ptr<int32_t>() : nullptr;
  bool inside = true;
  for (int64_t k = 0; from && k < in; k++) inside &= uint32_t(from[k]) < in;
  TORCH_CHECK(inside, "panels_w4a8: `x_order` holds numbers that are no columns");
  Plan plan{in, in / columns, columns, share / columns, x_group ? x_group : in, x_group ? in / x_group : 1, piece_of(columns),
            x_bits == 8 ? 127.0f : 7.0f, x_wide, x_scale ? x_scale->const_data_ptr<float>() : nullptr, x_scale && x_scale->numel() > 1, coder.order};
  return {x.const_data_ptr(), from, kind_of(x), x.numel() / in, w, plan, &coder, {y.mutable_data_ptr(), kind_of(y), out}, y.element_size(),
          bits == 8 && zero};
}

at::Tensor result(const at::Tensor& x, int64_t out) {
  TORCH_CHECK(x.dim() > 0, "panels_w4a8: x has no columns");
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  return at::empty(sizes, x.options());
}

at::Tensor panels_w4a8(const at::Tensor& x_, const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& zero,
                       const std::optional<at::Tensor>& table, int64_t out, int64_t x_bits, int64_t x_group, const std::optional<at::Tensor>& x_scale,
                       int64_t x_wide, const std::optional<at::Tensor>& x_order) {
  const at::Tensor x = x_.contiguous(), y = result(x, out);
  const Call call = call_of(x, y, codes, scale, zero, table, x_bits, x_group, x_scale, x_wide, x_order);
  if (y.numel() == 0 || by_tiles({call})) return y;
  if (call.tokens <= SOME || call.large) some_tokens(call);
  else Many({call}).run();
  return y;
}

// Several weights that multiply the same x, which has one step per token: for many tokens it is rounded once for all weights, if
// they have the same groups.
std::vector<at::Tensor> panels_w4a8_several(const at::Tensor& x_, const std::vector<at::Tensor>& codes, const std::vector<at::Tensor>& scales,
                                            const c10::List<Maybe>& zeros, const c10::List<Maybe>& tables, const std::vector<int64_t>& outs,
                                            int64_t x_bits) {
  const size_t count = codes.size();
  TORCH_CHECK(count && scales.size() == count && zeros.size() == count && tables.size() == count && outs.size() == count,
              "panels_w4a8_several: ", count, " weights need as many scales, zeros, tables and outs");
  const at::Tensor x = x_.contiguous();
  std::vector<at::Tensor> y;
  std::vector<Call> calls;
  for (size_t i = 0; i < count; i++) {
    y.push_back(result(x, outs[i]));
    calls.push_back(call_of(x, y[i], codes[i], scales[i], zeros.get(i), tables.get(i), x_bits, 0, {}, 0, {}));
  }
  if (x.numel() == 0 || by_tiles(calls)) return y;
  const auto alike = [&](const Call& call) {
    return call.tokens > SOME && !call.large && call.plan.columns == calls[0].plan.columns && call.plan.order == calls[0].plan.order;
  };
  if (std::all_of(calls.begin(), calls.end(), alike)) {
    Many(calls).run();
    return y;
  }
  for (size_t i = 0; i < count; i++) y[i] = panels_w4a8(x, codes[i], scales[i], zeros.get(i), tables.get(i), outs[i], x_bits, 0, {}, 0, {});
  return y;
}

#else
at::Tensor panels_w4a8(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&, int64_t, int64_t, int64_t, const std::optional<at::Tensor>&, int64_t,
                       const std::optional<at::Tensor>&) {
  TORCH_CHECK(false, "panels_w4a8: this build has neither AVX512-VNNI nor NEON's dot products");
}
std::vector<at::Tensor> panels_w4a8_several(const at::Tensor&, const std::vector<at::Tensor>&, const std::vector<at::Tensor>&, const c10::List<Maybe>&,
                                            const c10::List<Maybe>&, const std::vector<int64_t>&, int64_t) {
  TORCH_CHECK(false, "panels_w4a8: this build has neither AVX512-VNNI nor NEON's dot products");
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("panels_w4a8(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? table, int out, int x_bits, int x_group, Tensor? x_scale, int x_wide=0, Tensor? x_order=None) -> Tensor");
  m.def("panels_w4a8_several(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] zeros, Tensor?[] tables, int[] outs, int x_bits) -> Tensor[]");
  m.def("integer_isa() -> str", integer_isa);
  m.def("matrices_isa() -> str", matrices_isa);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("panels_w4a8", panels_w4a8);
  m.impl("panels_w4a8_several", panels_w4a8_several);
}
