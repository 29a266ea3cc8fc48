// Many tokens by a weight in panels on a CPU with AMX: codes become bfloat16 weights, scale (value - zero), rounded once, as the op's
// reference rounds them; products with bfloat16 tokens are summed in float32. kernels/int_matmul/README.md says what it costs.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "neon.inc"
#include "step_parts.inc"

namespace {

#include "panels.inc"
#include "amx.inc"

#ifdef HAVE_AMX
#define STATIC static inline __attribute__((always_inline))

constexpr int64_t WIDEST = 320;         // columns of a chunk, at most: 20 kB of two panels and as much of 32 tokens share the first cache
constexpr int64_t MOST_TILES = 64;      // of tokens that meet a decoded chunk: their columns stay in the second cache
constexpr int64_t TILE_COLUMNS = 32;    // of bfloat16

// The rest of a panel whose rows are not all there.
void put_some(const Output& y, int64_t at, int64_t count, const __m512& rows) {
  float lanes[ROWS];
  std::memcpy(lanes, &rows, sizeof lanes);
  for (int64_t r = 0; r < count; r++) put_one(y, at + r, lanes[r]);
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,f16c")
namespace tiles {
using namespace wide;
#include "panels_bfloat16.inc"
#include "panels_tiles.inc"
}  // namespace tiles
#pragma GCC pop_options

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class ByTiles {
 public:
  ByTiles(const Weight& w, int bits, const uint16_t* x, int64_t tokens, int64_t in, const float* steps, const Output& y)
      : w(w), dequantise(tiles::dequantise_for(bits)), x(x), tokens(tokens), in(in), steps(steps), y(y),
        token_tiles(ceil_div(tokens, TILE_ROWS)), column_tiles(ceil_div(in, TILE_COLUMNS)), chunks(ceil_div(in, WIDEST)),
        chunk_tiles(ceil_div(column_tiles, chunks)), packed(token_tiles * column_tiles * (TILE_BYTES / 2)) {}

  void run() const {
    at::parallel_for(0, token_tiles, std::max<int64_t>(1, GRAIN / in), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int64_t c = 0; c < chunks; c++)
          tiles::pack_tokens(x + t * TILE_ROWS * in, in, c * chunk_tiles * TILE_COLUMNS, tiles_of(c), tokens - t * TILE_ROWS,
                             packed.at + tile_at(c, t) * (TILE_BYTES / 2));
    });
    at::parallel_for(0, ceil_div(w.panels, 2), std::max<int64_t>(1, GRAIN / (in * token_tiles)), [&](int64_t begin, int64_t end) {
      const Tiles configured;
      const int64_t panel = chunk_tiles * TILE_BYTES, held = (std::min(MOST_TILES, token_tiles) + 1) * TILE_ROWS * 2 * ROWS * sizeof(float);
      const Aligned<uint8_t> memory(2 * panel + held);
      for (int64_t pair = begin; pair < end; pair++)
        two_panels(2 * pair, memory.at, memory.at + panel, reinterpret_cast<float*>(memory.at + 2 * panel));
    });
  }

 private:
  // All tokens by the panels `panel` and `panel` + 1, or by the last one, twice.
  void two_panels(int64_t panel, uint8_t* one, uint8_t* other, float* sums) const {
    for (int64_t first = 0; first < token_tiles; first += MOST_TILES)
      for (int64_t c = 0; c < chunks; c++) {
        const int64_t count = tiles_of(c), column = c * chunk_tiles * TILE_COLUMNS, columns = std::min(in - column, count * TILE_COLUMNS);
        dequantise(w, panel, column, columns, reinterpret_cast<uint32_t*>(one));
        dequantise(w, std::min(panel + 1, w.panels - 1), column, columns, reinterpret_cast<uint32_t*>(other));
        for (int64_t t = first; t < std::min(token_tiles, first + MOST_TILES); t += 2) {
          const TileRow its{packed.at + tile_at(c, t) * (TILE_BYTES / 2), 64, TILE_BYTES, count * TILE_BYTES};
          float* to = sums + (chunks > 1 ? (t - first) * TILE_ROWS * 2 * ROWS : 0);
          multiply_tiles<false>(its, t + 1 < token_tiles, {one, 64, TILE_BYTES, other - one}, count, c == 0, to, 2 * ROWS * sizeof(float));
          const int64_t token = t * TILE_ROWS;
          if (c + 1 == chunks) tiles::finish(to, steps, token, std::min<int64_t>(2 * TILE_ROWS, tokens - token), panel, y);
        }
      }
  }

  int64_t tiles_of(int64_t chunk) const { return std::min(chunk_tiles, column_tiles - chunk * chunk_tiles); }
  int64_t tile_at(int64_t chunk, int64_t token_tile) const { return chunk * chunk_tiles * token_tiles + token_tile * tiles_of(chunk); }

  const Weight& w;
  const tiles::Dequantise dequantise;
  const uint16_t* x;
  int64_t tokens, in;
  const float* steps;
  const Output& y;
  int64_t token_tiles, column_tiles, chunks, chunk_tiles;
  Aligned<uint16_t> packed;  // [chunk][token tile][column tile of the chunk][16 tokens][32 columns]
};
#endif

}  // namespace

#ifdef HAVE_AMX
bool workbench::tiles_run() {
  static const bool found = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq") && amx_available();
  return found;
}

void workbench::tiles_multiply(const Stored& s, const uint16_t* x, int64_t tokens, const float* steps, void* y, int y_kind) {
  Weight w{};
  w.units = static_cast<const uint8_t*>(s.data);
  w.scale = s.scale, w.kind = Kind(s.scale_kind);
  w.zero = s.zero, w.table = s.table;
  w.panels = ceil_div(s.out, ROWS);
  w.units_per_row = s.in / (s.bits == 4 || s.bits == 8 ? 8 : 16);
  w.groups = s.groups, w.group_units = w.units_per_row / s.groups;
  const Output to{y, Kind(y_kind), s.out};
  ByTiles(w, s.bits, x, tokens, s.in, steps, to).run();
}
#else
bool workbench::tiles_run() { return false; }
void workbench::tiles_multiply(const Stored&, const uint16_t*, int64_t, const float*, void*, int) {}
#endif

TORCH_LIBRARY_FRAGMENT(workbench, m) { m.def("tiles_run() -> bool", workbench::tiles_run); }
