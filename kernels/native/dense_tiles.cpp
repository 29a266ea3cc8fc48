// Many tokens by 16-bit weights on a CPU with AVX512-BF16 or AMX: products of bfloat16, summed in float32. Weights were laid out once in
// the order of tiles, or their zeros are not stored, and their rows become tiles strip by strip (kernels/sparse_matmul/README.md). Several
// weights may multiply the same tokens.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "neon.inc"
#include "step_parts.inc"

namespace {

#include "amx.inc"
#include "vector_tiles.inc"
#include "tile_plan.inc"

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace dense {
#include "tile_rows.inc"
}  // namespace dense
#pragma GCC pop_options

#define INLINE static inline __attribute__((always_inline))
constexpr int AHEAD = 1024;
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx512bf16,bmi2,popcnt,fma,avx2,f16c")
namespace kept {
#include "kept.inc"

// The next columns of a row: their bits of the mask, and the weights that are kept.
struct Row {
  const uint8_t* mask;
  const uint16_t* w;
};

// Sixteen rows of 16 pairs, as columns of a tile: [16 pairs][16 rows].
INLINE void transpose(const __m512i* rows, char* to) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)  // b[i + j] holds pairs j, 4 + j, 8 + j and 12 + j of rows i to i + 3
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512i even[2] = {_mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88)};
    const __m512i odd[2] = {_mm512_shuffle_i32x4(b[j], b[4 + j], 0xDD), _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xDD)};
    _mm512_storeu_si512(to + 64 * j, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
    _mm512_storeu_si512(to + 64 * (4 + j), _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
    _mm512_storeu_si512(to + 64 * (8 + j), _mm512_shuffle_i32x4(even[0], even[1], 0xDD));
    _mm512_storeu_si512(to + 64 * (12 + j), _mm512_shuffle_i32x4(odd[0], odd[1], 0xDD));
  }
}

// The next `tiles` tiles of 16 rows, of which there may be fewer.
static void next_tiles(Row* rows, int64_t count, const uint16_t* end, int64_t tiles, char* to) {
  for (; tiles-- > 0; to += TILE_BYTES) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) words[r] = r < count ? next_32(rows[r].mask, rows[r].w, end) : _mm512_setzero_si512();
    transpose(words, to);
  }
}
}  // namespace kept
#pragma GCC pop_options
#undef INLINE

// A weight as an operand of TilePlan: its tiles, or its rows without zeros.
struct Dense {
  static constexpr TileItems ITEMS = TileItems::bfloat16;
  static constexpr int ITEM_BYTES = 2;
  int64_t tokens, columns, out, strips;
  const char* tiles;  // [strips][two times 16 rows][column tiles][16 pairs of columns][16 rows] pairs of bfloat16; null: without zeros
  const uint16_t* x;
  uint16_t* y;
  const uint8_t* mask = nullptr;    // [out, columns / 8], a bit for each place, 1 where a weight is kept
  const uint16_t* values = nullptr;  // that are kept, row by row
  const int64_t* starts = nullptr;  // [out + 1], the first kept weight of each row

  int64_t until(int64_t strip) const { return strips - strip; }
  void share(const Dense&) {}
  void prepare(int64_t, int64_t) {}

  template <class Plan>
  void pack(const Plan& plan, int64_t token, int64_t count) const {
    for (int64_t tile = 0; tile < plan.tiles(); tile++)
      dense::pack_tile(x + token * columns, columns, tile * dense::TILE_COLUMNS, count, plan.piece(token, tile));
  }

  TileRow strip(int64_t first, int64_t n, int64_t tile, int64_t count, char* room) const {
    if (!tiles) return kept_strip(first + n, n, tile, count, room);
    const int64_t of_rows = (columns + dense::TILE_COLUMNS - 1) / dense::TILE_COLUMNS;
    return {tiles + (2 * (first + n) * of_rows + tile) * TILE_BYTES, 64, TILE_BYTES, of_rows * TILE_BYTES};
  }

  void finish(const char* sums, int64_t apart, int64_t token, int64_t first, int64_t count) const {
    dense::finish(sums, apart, first * STRIP, count, out, y + token * out);
  }

 private:
  // The tiles of a strip follow each other: a thread keeps how far it is in the rows of the strips that it takes together.
  TileRow kept_strip(int64_t strip, int64_t n, int64_t tile, int64_t count, char* room) const {
    static thread_local kept::Row rows[TOGETHER][STRIP];
    kept::Row* own = rows[n];
    const int64_t row = strip * STRIP, there = std::min<int64_t>(STRIP, out - row), half = STRIP / 2;
    for (int64_t r = 0; !tile && r < there; r++) own[r] = {mask + (row + r) * (columns / 8), values + starts[row + r]};
    kept::next_tiles(own, std::min(there, half), values + starts[out], count, room);
    kept::next_tiles(own + half, std::max<int64_t>(0, there - half), values + starts[out], count, room + count * TILE_BYTES);
    return {room, 64, TILE_BYTES, count * TILE_BYTES};
  }
};

std::vector<at::Tensor> run(const std::string& isa, std::vector<std::unique_ptr<Dense>> operands, std::vector<at::Tensor> results) {
  if (!operands[0]->tokens) return results;
  Joined<Dense> joined(std::move(operands));
#ifdef HAVE_AMX
  if (isa == "amx") return TilePlan<Joined<Dense>, Amx>(joined).run(), results;
#endif
  return TilePlan<Joined<Dense>, Vectors>(joined).run(), results;
}

// The instructions, after checks of what both products have in common.
std::string checked(const char* op, const at::Tensor& x, size_t weights, const std::string& wanted) {
  const std::string best = workbench::tiles_isa(), isa = wanted == "auto" ? best : wanted;
  TORCH_CHECK(!best.empty() && (isa == best || (isa == "avx512 tiles" && best == "amx")), "`isa` (='", wanted, "') is not one of this machine's");
  TORCH_CHECK(weights && x.scalar_type() == at::kBFloat16 && x.is_contiguous() && x.dim() > 0 && x.size(-1) > 0, op, ": x ", x.sizes(), " of ",
              x.scalar_type(), " and ", weights, " weights do not fit");
  return isa;
}

std::vector<at::Tensor> multiply(const at::Tensor& x, at::TensorList weights, at::IntArrayRef outs, const std::string& wanted) {
  const std::string isa = checked("dense_tiles", x, weights.size(), wanted);
  TORCH_CHECK(weights.size() == outs.size(), "dense_tiles: ", weights.size(), " weights and ", outs.size(), " numbers of rows");
  const int64_t in = x.size(-1), tokens = x.numel() / in, of_rows = (in + dense::TILE_COLUMNS - 1) / dense::TILE_COLUMNS;
  auto sizes = x.sizes().vec();
  std::vector<at::Tensor> results;
  std::vector<std::unique_ptr<Dense>> operands;
  for (size_t i = 0; i < weights.size(); i++) {
    const int64_t strips = (outs[i] + STRIP - 1) / STRIP;
    TORCH_CHECK(outs[i] > 0 && weights[i].is_contiguous() && weights[i].scalar_type() == at::kShort && weights[i].dim() == 5 &&
                    weights[i].numel() == strips * 2 * of_rows * TILE_BYTES / 2 && weights[i].size(2) == of_rows &&
                    reinterpret_cast<uintptr_t>(weights[i].const_data_ptr()) % 64 == 0,
                "dense_tiles: a weight of ", weights[i].sizes(), " does not fit ", outs[i], " rows and ", in, " columns");
    sizes.back() = outs[i];
    results.push_back(at::empty(sizes, x.options()));
    operands.emplace_back(new Dense{tokens, in, outs[i], strips, static_cast<const char*>(weights[i].const_data_ptr()),
                                    static_cast<const uint16_t*>(x.const_data_ptr()), static_cast<uint16_t*>(results.back().mutable_data_ptr())});
  }
  return run(isa, std::move(operands), std::move(results));
}

// The same with weights whose zeros are not stored.
std::vector<at::Tensor> multiply_kept(const at::Tensor& x, at::TensorList masks, at::TensorList values, at::TensorList starts, const std::string& wanted) {
  const std::string isa = checked("kept_tiles", x, masks.size(), wanted);
  TORCH_CHECK(workbench::x86().vbmi2, "weights without zeros need AVX512-VBMI2");
  TORCH_CHECK(masks.size() == values.size() && masks.size() == starts.size(), "kept_tiles: ", masks.size(), " masks, ", values.size(), " tensors of values");
  const int64_t in = x.size(-1), tokens = x.numel() / in;
  auto sizes = x.sizes().vec();
  std::vector<at::Tensor> results;
  std::vector<std::unique_ptr<Dense>> operands;
  for (size_t i = 0; i < masks.size(); i++) {
    const int64_t out = masks[i].size(0);
    TORCH_CHECK(out > 0 && values[i].scalar_type() == at::kBFloat16 && workbench::kept_fits(masks[i], values[i], starts[i], out, in), "kept_tiles: a mask ",
                masks[i].sizes(), " and ", values[i].numel(), " weights of ", values[i].scalar_type(), " do not fit ", in, " columns");
    sizes.back() = out;
    results.push_back(at::empty(sizes, x.options()));
    operands.emplace_back(new Dense{tokens, in, out, (out + STRIP - 1) / STRIP, nullptr, static_cast<const uint16_t*>(x.const_data_ptr()),
                                    static_cast<uint16_t*>(results.back().mutable_data_ptr()), masks[i].const_data_ptr<uint8_t>(),
                                    static_cast<const uint16_t*>(values[i].const_data_ptr()), starts[i].const_data_ptr<int64_t>()});
  }
  return run(isa, std::move(operands), std::move(results));
}
#else
std::vector<at::Tensor> multiply_kept(const at::Tensor&, at::TensorList, at::TensorList, at::TensorList, const std::string&) {
  TORCH_CHECK(false, "kept_tiles: this machine has no tiles");
}
std::vector<at::Tensor> multiply(const at::Tensor&, at::TensorList, at::IntArrayRef, const std::string&) {
  TORCH_CHECK(false, "dense_tiles: this machine has no tiles");
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("dense_tiles(Tensor x, Tensor[] weights, int[] outs, str isa) -> Tensor[]");
  m.def("kept_tiles(Tensor x, Tensor[] masks, Tensor[] values, Tensor[] starts, str isa) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("dense_tiles", multiply);
  m.impl("kept_tiles", multiply_kept);
}
