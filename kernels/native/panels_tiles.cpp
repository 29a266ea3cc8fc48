// Many tokens by a weight in panels on a CPU with AVX512-BF16 or AMX: codes become bfloat16 weights, scale (value - zero), rounded once, as the op's
// reference rounds them; products with bfloat16 tokens are summed in float32. kernels/int_matmul/README.md says what it costs.

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

#include "panels.inc"
#include "amx.inc"
#include "vector_tiles.inc"
#include "tile_plan.inc"

#ifdef HAVE_X86
#define STATIC static inline __attribute__((always_inline))

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace tiles {
using namespace wide;
#include "panels_bfloat16.inc"
#include "tile_rows.inc"
#include "panels_tiles.inc"
}  // namespace tiles
#pragma GCC pop_options

// A weight in panels as an operand of TilePlan: a strip is two panels; an odd last panel is taken twice.
struct Panels {
  static constexpr TileItems ITEMS = TileItems::bfloat16;
  static constexpr int ITEM_BYTES = 2;
  int64_t tokens, columns, out, strips;
  Weight w;
  tiles::Dequantise dequantise;
  const uint16_t* x;
  uint16_t* y;

  int64_t until(int64_t strip) const { return strips - strip; }
  void share(const Panels&) {}
  void prepare(int64_t, int64_t) {}

  template <class Plan>
  void pack(const Plan& plan, int64_t token, int64_t count) const {
    for (int64_t tile = 0; tile < plan.tiles(); tile++)
      tiles::pack_tile(x + token * columns, columns, tile * tiles::TILE_COLUMNS, count, plan.piece(token, tile));
  }

  TileRow strip(int64_t first, int64_t n, int64_t tile, int64_t count, char* room) const {
    const int64_t panel = 2 * (first + n), column = tile * tiles::TILE_COLUMNS, here = std::min(columns - column, count * tiles::TILE_COLUMNS);
    char* other = room + count * TILE_BYTES;
    dequantise(w, panel, column, here, reinterpret_cast<uint32_t*>(room));
    dequantise(w, std::min(panel + 1, w.panels - 1), column, here, reinterpret_cast<uint32_t*>(other));
    return {room, 64, TILE_BYTES, other - room};
  }

  void finish(const char* sums, int64_t apart, int64_t token, int64_t first, int64_t count) const {
    tiles::finish(sums, apart, first * STRIP, count, out, y + token * out);
  }
};
#endif

}  // namespace

#ifdef HAVE_X86
const char* workbench::tiles_isa() {
  static const bool vectors = workbench::x86().bfloat16;
#ifdef HAVE_AMX
  static const bool amx = vectors && amx_available();
  if (amx) return "amx";
#endif
  return vectors ? "avx512 tiles" : "";
}

void workbench::tiles_multiply(const std::string& isa, const std::vector<Stored>& weights, const uint16_t* x, int64_t tokens, const std::vector<uint16_t*>& y) {
  std::vector<std::unique_ptr<Panels>> panels;
  for (const Stored& s : weights) {
    Weight w{};
    w.units = static_cast<const uint8_t*>(s.data);
    w.scale = s.scale, w.kind = Kind(s.scale_kind);
    w.zero = s.zero, w.table = s.table;
    w.panels = (s.out + ROWS - 1) / ROWS;
    w.units_per_row = s.in / (s.bits == 4 || s.bits == 8 ? 8 : 16);
    w.groups = s.groups, w.group_units = w.units_per_row / s.groups;
    panels.emplace_back(new Panels{tokens, s.in, s.out, (w.panels + 1) / 2, w, tiles::dequantise_for(s.bits), x, y[panels.size()]});
  }
  Joined<Panels> joined(std::move(panels));
#ifdef HAVE_AMX
  if (isa == "amx") return TilePlan<Joined<Panels>, Amx>(joined).run();
#endif
  TilePlan<Joined<Panels>, Vectors>(joined).run();
}
#else
const char* workbench::tiles_isa() { return ""; }
void workbench::tiles_multiply(const std::string&, const std::vector<Stored>&, const uint16_t*, int64_t, const std::vector<uint16_t*>&) {}
#endif

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def("tiles_isa() -> str", [] { return std::string(workbench::tiles_isa()); });
}
