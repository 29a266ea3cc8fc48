// Attention of a decode step on a CPU. kernels/kv_decode/README.md has the layouts. Every kv head's range is cut into spans of
// one size, whatever the number of threads; each span leaves its sums, which are then added up in their order: the same bits
// every time. One file for every instruction set, chosen when it runs.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "step_parts.inc"

namespace {

constexpr int SPAN = 256;  // positions; a multiple of every group

enum class Kind { float32, bfloat16, float16, byte, nibble };

// Strides in bytes. n: a position, of coded values a group.
struct Part {
  Kind kind;
  const char *k, *v;
  int64_t k_b, k_h, k_n, v_b, v_h, v_n;
  int64_t first;  // its first position
};

struct Problem {
  Part main, tail;
  const char *params_k, *params_v;
  int64_t pk_b, pk_h, pk_n, pv_b, pv_h;
  int64_t group, longest;
  int heads, rows, tokens, D;  // heads: of the cache; rows: query heads of a kv head, times tokens
  int xs;                      // floats from row to row, zero behind D
  float softcap, scale;
  const uint16_t* q;  // [B, H, rows, xs], where queries are bfloat16
};

struct Task {
  int64_t b, h, from, to, end;  // end: of the whole range
  bool tail;
};

struct Loops {
  void (*span)(const Problem&, const Task&, const float* x, float* s, float* scratch, float* out, float* top, float* sum);
  void (*merge)(const float* out, int64_t os, const float* tops, const float* totals, int64_t step, int spans, int D,
                float* weights, float* y);
  void (*add_mass)(const float* p, int rows, int64_t step, const float* weights, int64_t ws, int n, float* mass);
};

typedef uint32_t Word __attribute__((aligned(2), may_alias));

#include "kv_decode_isa.inc"

const Loops* loops_of(const std::string& isa) {
#ifdef HAVE_X86
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool more = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (isa == "avx512bf16" && avx512 && more) return &avx512bf16::loops;
  if (isa == "avx512" && avx512) return &avx512::loops;
  if (isa == "avx2" && avx2) return &avx2::loops;
#endif
  return isa == "portable" ? &portable::loops : nullptr;
}

std::string best_isa(bool float32) {
  for (const char* isa : {"avx512bf16", "avx512", "avx2"})
    if (loops_of(isa) && !(float32 && isa == std::string("avx512bf16"))) return isa;
  return "portable";
}

// Positions of one head, for a step of decoding; see step_parts.inc.
template <const Loops& LOOPS>
void one_span(const workbench::Span& s) {
  Problem p{};
  p.main.kind = s.bfloat16 ? Kind::bfloat16 : Kind::float16;
  p.main.k = static_cast<const char*>(s.k), p.main.v = static_cast<const char*>(s.v);
  p.main.k_n = s.k_step, p.main.v_n = s.v_step;
  p.heads = p.tokens = 1;
  p.rows = s.rows, p.D = s.channels, p.xs = s.stride;
  p.softcap = s.softcap, p.scale = s.scale, p.q = s.q;
  LOOPS.span(p, {0, 0, 0, s.positions, s.positions, false}, s.x, s.scratch, nullptr, s.out, s.top, s.sum);
}

Part part_of(const at::Tensor& k, const at::Tensor& v, Kind kind, int64_t first) {
  const int64_t size = k.element_size();
  return {kind, static_cast<const char*>(k.const_data_ptr()), static_cast<const char*>(v.const_data_ptr()),
          k.stride(0) * size, k.stride(1) * size, k.stride(2) * size,
          v.stride(0) * size, v.stride(1) * size, v.stride(2) * size, first};
}

using Maybe = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor> kv_decode(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Maybe& params_k, const Maybe& params_v,
    const Maybe& tail_k, const Maybe& tail_v, const at::Tensor& lengths, const Maybe& starts, int64_t bits, int64_t group,
    double scale, double softcap, bool return_mass, const std::string& isa) {
  const Loops* found = loops_of(isa);
  TORCH_CHECK(found, "`isa` (='", isa, "') is not one of this machine's");
  TORCH_CHECK(isa != "avx512bf16" || q.scalar_type() != at::kFloat, "`isa` (='avx512bf16') does not take float32");
  const Loops& loops = *found;
  const int64_t B = q.size(0), H = k.size(1), S = k.size(2), positions = S + (tail_k ? tail_k->size(2) : 0);
  TORCH_CHECK(q.dim() == 4 && H > 0 && q.size(1) % H == 0 &&
                  (bits == 16 || (params_k && params_v && SPAN % group == 0 && q.size(3) <= 4096)),
              "kv_decode: q ", q.sizes(), ", k ", k.sizes(), " and ", bits, " bits do not fit");
  const auto floats = q.options().dtype(at::kFloat);
  at::Tensor mass = return_mass ? at::zeros({B, H, positions}, floats) : at::empty({0}, floats);

  Problem p{};
  const Kind kind = q.scalar_type() == at::kFloat ? Kind::float32 : q.scalar_type() == at::kHalf ? Kind::float16 : Kind::bfloat16;
  p.main = part_of(k, v, bits == 16 ? kind : bits == 8 ? Kind::byte : Kind::nibble, 0);
  if (tail_k) p.tail = part_of(*tail_k, *tail_v, kind, S);
  if (bits != 16) {
    p.params_k = static_cast<const char*>(params_k->const_data_ptr());
    p.params_v = static_cast<const char*>(params_v->const_data_ptr());
    p.pk_b = 2 * params_k->stride(0), p.pk_h = 2 * params_k->stride(1), p.pk_n = 2 * params_k->stride(2);
    p.pv_b = 2 * params_v->stride(0), p.pv_h = 2 * params_v->stride(1);
  }
  p.group = group;
  p.heads = int(H);
  p.tokens = int(q.size(2));
  p.rows = int(q.size(1) / H) * p.tokens;
  p.D = int(q.size(3));
  p.xs = (p.D + 63) / 32 * 32;  // room for a vector that begins behind the middle
  p.longest = std::max<int64_t>(p.xs, SPAN);
  p.softcap = float(softcap);
  p.scale = float(scale);

  const at::Tensor padded = at::zeros({B, q.size(1), q.size(2), p.xs}, q.options());
  padded.narrow(-1, 0, p.D).copy_(q);
  const at::Tensor x = padded.to(at::kFloat).mul_(scale);
  if (kind == Kind::bfloat16) p.q = static_cast<const uint16_t*>(padded.const_data_ptr());

  const at::Tensor length = lengths.to(at::kLong).contiguous(), start = starts ? starts->to(at::kLong).contiguous() : at::Tensor();
  std::vector<Task> tasks;
  std::vector<int64_t> firsts{0};
  for (int64_t i = 0; i < B * H; i++) {
    const int64_t a = start.defined() ? start.const_data_ptr<int64_t>()[i] : 0, n = length.const_data_ptr<int64_t>()[i];
    const int64_t end = std::min(a + n, positions);
    for (int64_t from = std::max<int64_t>(a, 0), to; from < end; from = to) {
      const int64_t first = from < S ? 0 : S;
      to = std::min({end, first + ((from - first) / SPAN + 1) * SPAN, from < S ? S : positions});
      tasks.push_back({i / H, i % H, from, to, end, from >= S});
    }
    firsts.push_back(int64_t(tasks.size()));
  }

  // What every task leaves: a row's sums [xs], its largest score and its sum; for the mass its probabilities too.
  const int64_t count = int64_t(tasks.size()), rows = p.rows, keep = return_mass ? rows * SPAN : 0;
  std::unique_ptr<float[]> outs(new float[count * rows * p.xs]), tops(new float[2 * count * rows]), kept(new float[count * keep]);
  float* totals = tops.get() + count * rows;
  const at::Tensor y = at::empty({B, H, rows, p.xs}, floats);
  const auto merge = [&](int64_t i) {  // the spans of kv head i of B * H
    const int64_t first = firsts[i], spans = firsts[i + 1] - first;
    std::unique_ptr<float[]> weights(new float[rows * spans]);
    for (int64_t r = 0; r < rows; r++)
      loops.merge(outs.get() + (first * rows + r) * p.xs, rows * p.xs, tops.get() + first * rows + r, totals + first * rows + r,
                  rows, int(spans), p.D, weights.get() + r * spans, y.data_ptr<float>() + (i * rows + r) * p.xs);
    for (int64_t s = 0; return_mass && s < spans; s++) {
      const Task& t = tasks[first + s];
      const int64_t before = t.tail || bits == 16 ? 0 : t.from % group;
      loops.add_mass(kept.get() + (first + s) * keep + before, int(rows), SPAN, weights.get() + s, spans, int(t.to - t.from),
                     mass.data_ptr<float>() + i * positions + t.from);
    }
  };
  std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[B * H]);
  for (int64_t i = 0; i < B * H; i++) {
    left[i] = firsts[i + 1] - firsts[i];
    if (left[i] == 0) merge(i);
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    std::unique_ptr<float[]> scratch(new float[rows * SPAN + 2 * p.longest + 2 * rows * (p.longest + 32)]);
    for (int64_t i; (i = next++) < count;) {  // ranges differ: whoever is free takes the next, and the last of a head merges
      const Task& t = tasks[i];
      const int64_t head = t.b * H + t.h;
      loops.span(p, t, x.const_data_ptr<float>() + head * rows * p.xs, return_mass ? kept.get() + i * keep : scratch.get(),
                 scratch.get() + rows * SPAN, outs.get() + i * rows * p.xs, tops.get() + i * rows, totals + i * rows);
      if (--left[head] == 0) merge(head);
    }
  });
  return {y.narrow(-1, 0, p.D).to(q.scalar_type()).reshape(q.sizes()).contiguous(), mass};
}

}  // namespace

static_assert(workbench::SPAN_POSITIONS == SPAN);

workbench::Attention workbench::attention_loops(const std::string& isa) {
#ifdef HAVE_X86
  if (isa == "avx512bf16" && loops_of(isa)) return {one_span<avx512bf16::loops>, avx512bf16::loops.merge};
  if ((isa == "avx512" || isa == "avx512bf16") && loops_of("avx512")) return {one_span<avx512::loops>, avx512::loops.merge};
  if (isa == "avx2" && loops_of(isa)) return {one_span<avx2::loops>, avx2::loops.merge};
#endif
  return {one_span<portable::loops>, portable::loops.merge};
}

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def(
      "kv_decode_native(Tensor q, Tensor k, Tensor v, Tensor? params_k, Tensor? params_v, Tensor? tail_k, Tensor? tail_v, "
      "Tensor lengths, Tensor? starts, int bits, int group, float scale, float softcap, bool return_mass, str isa) "
      "-> (Tensor, Tensor)");
  m.def("kv_decode_isa(bool float32) -> str", best_isa);
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) { m.impl("kv_decode_native", kv_decode); }
