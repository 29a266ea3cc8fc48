// Many tokens by walks through a trellis on a CPU with AVX512-BF16 or AMX: values become bfloat16 weights, rounded once with their scale; products with
// bfloat16 tokens are summed in float32. kernels/trellis_matmul/README.md has the code.

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
#include "trellis.inc"

#ifdef HAVE_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,avx2,f16c")
namespace walks {
#include "tile_rows.inc"
#include "trellis_fields.inc"

// Sixteen rows of the columns [column, column + columns) to [pairs of columns][16 rows] pairs of bfloat16, up to a whole tile of pairs.
// sequence: the column's walk. LAST: the rows are the walk's last ones.
template <bool WIDE, bool LAST>
static void decode_panel(int bits, const Weight& w, const uint8_t* sequence, int64_t before, int64_t columns, const float* scale, uint32_t* to) {
  const Taker t = taker(bits, w.states);
  const __m512 scales = _mm512_loadu_ps(scale);
  const auto values = [&](int64_t column) __attribute__((always_inline)) {
    const uint8_t* walk = sequence + column * w.bytes;
    uint8_t last[16];
    if (LAST) close(bits, w, walk, last);
    return _mm512_mul_ps((__m512)take<WIDE>(t, LAST ? last : walk + before), scales);
  };
  const uint32_t* end = to + (columns + TILE_COLUMNS - 1) / TILE_COLUMNS * (TILE_BYTES / 4);
  int64_t column = 0;
  for (; column + 2 <= columns; column += 2, to += LANES) _mm512_storeu_si512(to, pairs_of(values(column), values(column + 1)));
  if (column < columns) _mm512_storeu_si512(to, pairs_of(values(column), _mm512_setzero_ps())), to += LANES;
  for (; to < end; to += LANES) _mm512_storeu_si512(to, _mm512_setzero_si512());
}

static void decode_rows(int bits, const Weight& w, int64_t panel, int64_t column, int64_t columns, const float* scale, uint32_t* to) {
  const int64_t panels = w.length / LANES, own = panel % panels, before = 2 * bits * own;
  const uint8_t* sequence = w.codes + (panel / panels * w.in + column) * w.bytes;
  const bool last = own == panels - 1;
  if (bits == 4)
    return last ? decode_panel<true, true>(bits, w, sequence, before, columns, scale, to) : decode_panel<true, false>(bits, w, sequence, before, columns, scale, to);
  return last ? decode_panel<false, true>(bits, w, sequence, before, columns, scale, to) : decode_panel<false, false>(bits, w, sequence, before, columns, scale, to);
}
}  // namespace walks
#pragma GCC pop_options

// A weight in walks as an operand of TilePlan: a strip is two panels of 16 rows; an odd last panel is taken twice.
struct Walks {
  static constexpr TileItems ITEMS = TileItems::bfloat16;
  static constexpr int ITEM_BYTES = 2;
  int64_t tokens, columns, out, strips;
  int bits;
  Weight w;
  const float* scale;  // [16 * panels]
  const uint16_t* x;
  uint16_t* y;

  int64_t until(int64_t strip) const { return strips - strip; }
  void prepare(int64_t, int64_t) {}

  template <class Plan>
  void pack(const Plan& plan, int64_t token, int64_t count) const {
    for (int64_t tile = 0; tile < plan.tiles(); tile++)
      walks::pack_tile(x + token * columns, columns, tile * walks::TILE_COLUMNS, count, plan.piece(token, tile));
  }

  TileRow strip(int64_t first, int64_t n, int64_t tile, int64_t count, char* room) const {
    const int64_t panel = 2 * (first + n), next = std::min(panel + 1, (out + LANES - 1) / LANES - 1);
    const int64_t column = tile * walks::TILE_COLUMNS, here = std::min(columns - column, count * walks::TILE_COLUMNS);
    char* other = room + count * TILE_BYTES;
    walks::decode_rows(bits, w, panel, column, here, scale + panel * LANES, reinterpret_cast<uint32_t*>(room));
    walks::decode_rows(bits, w, next, column, here, scale + next * LANES, reinterpret_cast<uint32_t*>(other));
    return {room, 64, TILE_BYTES, other - room};
  }

  void finish(const char* sums, int64_t apart, int64_t token, int64_t first, int64_t count) const {
    walks::finish(sums, apart, first * STRIP, count, out, y + token * out);
  }
};

std::string tiles() {
  return has_fields() ? workbench::tiles_isa() : "";
}

at::Tensor multiply(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, int64_t bits, int64_t states, const std::string& wanted) {
  const Weight w = weight_of(codes, bits, states);
  const int64_t out = scale.numel(), tokens = x.numel() / std::max<int64_t>(w.in, 1), panels = (out + LANES - 1) / LANES;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && x.is_contiguous() && x.dim() > 0 && x.size(-1) == w.in && w.in > 0, "trellis_tiles: x ", x.sizes(),
              " of ", x.scalar_type(), " does not fit ", w.in, " columns");
  TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.is_contiguous() && out > 0 && out <= codes.size(0) * w.length, "trellis_tiles: ", out,
              " scales do not fit ", codes.size(0) * w.length, " rows");
  const std::string best = tiles(), isa = wanted == "auto" ? best : wanted;
  TORCH_CHECK(!best.empty() && (isa == best || (isa == "avx512 tiles" && best == "amx")), "`isa` (='", wanted, "') is not one of this machine's");
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  at::Tensor y = at::empty(sizes, x.options());
  if (!y.numel()) return y;
  const at::Tensor scales = at::zeros({panels * LANES}, scale.options());  // of whole panels
  scales.narrow(0, 0, out).copy_(scale);
  Walks walks{tokens, w.in, out, (panels + 1) / 2, int(bits), w, scales.const_data_ptr<float>(), static_cast<const uint16_t*>(x.const_data_ptr()),
              static_cast<uint16_t*>(y.mutable_data_ptr())};
#ifdef HAVE_AMX
  if (isa == "amx") return TilePlan<Walks, Amx>(walks).run(), y;
#endif
  return TilePlan<Walks, Vectors>(walks).run(), y;
}
#else
std::string tiles() { return ""; }
at::Tensor multiply(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, const std::string&) {
  TORCH_CHECK(false, "trellis_tiles: this machine has no tiles");
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("trellis_tiles_isa() -> str", tiles);
  m.def("trellis_tiles(Tensor x, Tensor codes, Tensor scale, int bits, int states, str isa) -> Tensor");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("trellis_tiles", multiply); }
