// Many tokens by 16-bit weights that were laid out once in the order of tiles, on a CPU with AVX512-BF16 or AMX: products of bfloat16, summed in
// float32. Several weights may multiply the same tokens.

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

// A laid out weight as an operand of TilePlan.
struct Dense {
  static constexpr TileItems ITEMS = TileItems::bfloat16;
  static constexpr int ITEM_BYTES = 2;
  int64_t tokens, columns, out, strips;
  const char* tiles;  // [strips][two times 16 rows][column tiles][16 pairs of columns][16 rows] pairs of bfloat16
  const uint16_t* x;
  uint16_t* y;

  int64_t until(int64_t strip) const { return strips - strip; }
  void share(const Dense&) {}
  void prepare(int64_t, int64_t) {}

  template <class Plan>
  void pack(const Plan& plan, int64_t token, int64_t count) const {
    for (int64_t tile = 0; tile < plan.tiles(); tile++)
      dense::pack_tile(x + token * columns, columns, tile * dense::TILE_COLUMNS, count, plan.piece(token, tile));
  }

  TileRow strip(int64_t first, int64_t n, int64_t tile, int64_t, char*) const {
    const int64_t of_rows = (columns + dense::TILE_COLUMNS - 1) / dense::TILE_COLUMNS;
    return {tiles + (2 * (first + n) * of_rows + tile) * TILE_BYTES, 64, TILE_BYTES, of_rows * TILE_BYTES};
  }

  void finish(const char* sums, int64_t apart, int64_t token, int64_t first, int64_t count) const {
    dense::finish(sums, apart, first * STRIP, count, out, y + token * out);
  }
};

std::vector<at::Tensor> multiply(const at::Tensor& x, at::TensorList weights, at::IntArrayRef outs, const std::string& wanted) {
  const std::string best = workbench::tiles_isa(), isa = wanted == "auto" ? best : wanted;
  TORCH_CHECK(!best.empty() && (isa == best || (isa == "avx512 tiles" && best == "amx")), "`isa` (='", wanted, "') is not one of this machine's");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && x.is_contiguous() && x.dim() > 0 && x.size(-1) > 0, "dense_tiles: x ", x.sizes(), " of ",
              x.scalar_type(), " does not fit");
  TORCH_CHECK(!weights.empty() && weights.size() == outs.size(), "dense_tiles: ", weights.size(), " weights and ", outs.size(), " numbers of rows");
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
  if (!tokens) return results;
  Joined<Dense> joined(std::move(operands));
#ifdef HAVE_AMX
  if (isa == "amx") return TilePlan<Joined<Dense>, Amx>(joined).run(), results;
#endif
  return TilePlan<Joined<Dense>, Vectors>(joined).run(), results;
}
#else
std::vector<at::Tensor> multiply(const at::Tensor&, at::TensorList, at::IntArrayRef, const std::string&) {
  TORCH_CHECK(false, "dense_tiles: this machine has no tiles");
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) { m.def("dense_tiles(Tensor x, Tensor[] weights, int[] outs, str isa) -> Tensor[]"); }
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("dense_tiles", multiply); }
