// Attention of a decode step on a CPU. kernels/kv_decode/README.md has the layouts. Every kv head's range is cut into spans of
// one size for any number of threads, and the sums of the spans are added in a fixed order: results have the same bits every
// time. One file for all instruction sets, selected at run time.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "neon.inc"
#include "step_parts.inc"

namespace {

constexpr int SPAN = 256;  // positions; a multiple of every group
constexpr int ROW_BYTES = 512;  // of a row of bytes (kv_codes.inc)

enum class Kind { float32, bfloat16, float16, byte, nibble, quarter, three };  // the last four: codes of 8, 4, 2 and 3 bits

constexpr int bits_of(Kind kind) { return kind == Kind::byte ? 8 : kind == Kind::nibble ? 4 : kind == Kind::three ? 3 : 2; }

// Byte strides. n: per position; coded values: per group.
struct Part {
  Kind kind;
  const char *k, *v;
  int64_t k_b, k_h, k_n, v_b, v_h, v_n;
  int64_t first;  // its first position
  Kind values = Kind::float32;  // of coded values; `kind` is that of keys
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
  const int64_t* list;  // [B, H, listed] positions to read, in their order; null: ranges of the cache itself
  int64_t listed;
  bool scattered;       // may a whole span be read in the order of `STREAMS`?
};

// Floats of a thread's work space beside its scores; behind them are a span's values of 3 bits, unpacked to nibbles.
int64_t scratch_size(const Problem& p) {
  return 2 * p.longest + 2 * p.rows * (p.longest + 32) + p.rows * ROW_BYTES / 4;
}

struct Task {
  int64_t b, h, from, to, end;  // end: of the whole range; with a list, they count its entries
  bool tail;
  const Problem* problem;       // of the head's cache
  const Task* after = nullptr;  // the same thread's next task
  bool foreseen = false;        // was it prefetched?
};

// A whole span is read as this many streams, one position of each in turn: hardware prefetchers follow all of them, whereas with
// a single stream memory idles at each page end; and they read less unneeded data where lists name single positions.
constexpr int STREAMS = 16;
struct Order {
  uint8_t of[SPAN];
};
constexpr Order ORDER = [] {
  Order order{};
  for (int i = 0; i < SPAN; i++) order.of[i] = uint8_t(i % STREAMS * (SPAN / STREAMS) + i / STREAMS);
  return order;
}();

// Operands of a product: one item every `stride` bytes, or the items that `list` names, in the given `order`.
struct Items {
  const char* from;
  int64_t stride;
  const int64_t* list = nullptr;
  const uint8_t* order = nullptr;

  const char* at(int64_t i) const {
    if (order) i = order[i];
    return from + (list ? list[i] : i) * stride;
  }
  Items from_on(int64_t i) const {
    if (order) return {from, stride, list, order + i};
    return list ? Items{from, stride, list + i} : Items{from + i * stride, stride};
  }
};

// Memory to be read soon, prefetched little by little over the steps of the work before it.
struct Ahead {
  struct Region {
    Items items;
    int64_t bytes;  // of an item
    uint32_t left;  // items
  };
  Region regions[6];
  int count = 0, now = 0;
  uint32_t all = 0, rate = 0, at = 0;  // items; per step, and a fraction, both in units of 2^-16

  void add(const Items& items, int64_t bytes, int64_t many) {
    if (many > 0) regions[count++] = {items, bytes, uint32_t(many)}, all += uint32_t(many);
  }
  // `steps` steps follow; over them, this share of all items is prefetched.
  void pace(int steps, float share) { rate = uint32_t(float(all) * 65536 * share / float(std::max(steps, 1))) + 1; }
};

struct Loops {
  void (*span)(const Problem&, const Task&, const float* x, float* s, float* scratch, float* out, float* top, float* sum);
  void (*merge)(const float* out, int64_t os, const float* tops, const float* totals, int64_t step, int spans, int D,
                float* weights, float* y);
  void (*add_mass)(const float* p, int rows, int64_t step, const float* weights, int64_t ws, int n, float* mass);
  void (*page_dots)(Kind kind, const float* x, const uint16_t* q, int64_t xs, int rows, const char* bounds, int64_t step, int pages,
                    int channels, float* s, int64_t ss, Ahead& ahead);
  void (*page_shares)(float* s, int64_t ss, int rows, int pages, float scale, float* out);
  void (*select)(const float* scores, int n, int count, int32_t* keys, int64_t* chosen);
  bool streams;  // IN_STREAMS
};

typedef uint32_t Word __attribute__((aligned(2), may_alias));

#include "kv_decode_isa.inc"

const Loops* loops_of(const std::string& isa) {
#ifdef HAVE_X86
  const workbench::X86& has = workbench::x86();
#ifdef HAVE_AMX
  if (isa == "amx" && has.bfloat16 && has.vnni && amx_available()) return &amx::loops;
#endif
  if (isa == "avx512bf16" && has.bfloat16 && has.vnni) return &avx512bf16::loops;
  if (isa == "avx512" && has.avx512) return &avx512::loops;
  if (isa == "avx2" && has.avx2) return &avx2::loops;
#endif
#ifdef HAVE_NEON
  if (isa == "neon bf16" && workbench::arm().bf16) return &neonbf16::loops;
  if (isa == "neon" && workbench::arm().neon) return &neon::loops;
#endif
  return isa == "portable" ? &portable::loops : nullptr;
}

// Multiplies pairs of bfloat16, and rows rounded to 16 bits: not for float32.
bool of_pairs(const std::string& isa) { return isa == "amx" || isa == "avx512bf16" || isa == "neon bf16"; }

std::string best_isa(bool float32) {
  for (const char* isa : {"amx", "avx512bf16", "avx512", "avx2", "neon bf16", "neon"})
    if (loops_of(isa) && !(float32 && of_pairs(isa))) return isa;
  return "portable";
}

// One span of one head, for a decoding step; see step_parts.inc.
template <const Loops& LOOPS>
void one_span(const workbench::Span& s) {
  Problem p{};
  p.main.kind = s.bfloat16 ? Kind::bfloat16 : Kind::float16;
  p.main.k = static_cast<const char*>(s.k), p.main.v = static_cast<const char*>(s.v);
  p.main.k_n = s.k_step, p.main.v_n = s.v_step;
  p.heads = p.tokens = 1;
  p.rows = s.rows, p.D = s.channels, p.xs = s.stride;
  p.softcap = s.softcap, p.scale = s.scale, p.q = s.q, p.scattered = LOOPS.streams;
  LOOPS.span(p, {0, 0, 0, s.positions, s.positions, false, &p}, s.x, s.scratch, nullptr, s.out, s.top, s.sum);
}

// Where head 0 would lie if the tensor's first head were number `head`; null for a tensor without elements.
const char* base(const at::Tensor& x, int64_t head) {
  return x.numel() ? static_cast<const char*>(x.const_data_ptr()) - head * x.stride(1) * x.element_size() : nullptr;
}

Part part_of(const at::Tensor& k, const at::Tensor& v, Kind kind, int64_t first, int64_t head) {
  const int64_t size = k.element_size();
  return {kind, base(k, head), base(v, head),
          k.stride(0) * size, k.stride(1) * size, k.stride(2) * size,
          v.stride(0) * size, v.stride(1) * size, v.stride(2) * size, first};
}

float as_float(Kind kind, const char* from, int i) {
  if (kind == Kind::float32) return reinterpret_cast<const float*>(from)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(from)[i];
  if (kind == Kind::float16) return c10::Half(bits, c10::Half::from_bits());
  return c10::BFloat16(bits, c10::BFloat16::from_bits());
}

void from_floats(Kind kind, const float* x, int n, char* to) {
  auto* half = reinterpret_cast<uint16_t*>(to);
  if (kind == Kind::float32) std::memcpy(to, x, n * sizeof(float));
  else if (kind == Kind::float16)
    for (int i = 0; i < n; i++) half[i] = c10::Half(x[i]).x;
  else
    for (int i = 0; i < n; i++) half[i] = c10::BFloat16(x[i]).x;
}

void parameters(const char* pair, float* scale, float* offset) {
  const auto* bits = reinterpret_cast<const uint16_t*>(pair);
  *scale = c10::BFloat16(bits[0], c10::BFloat16::from_bits()), *offset = c10::BFloat16(bits[1], c10::BFloat16::from_bits());
}

// Code i of `count` codes, as layout.py packs them.
int code_at(const uint8_t* codes, int bits, int64_t count, int64_t i) {
  if (bits == 3) return code_at(codes, 2, count, i) | code_at(codes + count / 4, 1, count, i) << 2;
  const int64_t bytes = count * bits / 8;
  return codes[i % bytes] >> i / bytes * bits & ((1 << bits) - 1);
}

// Keys and values [D] of one position of a coded cache, or of its tail, in float32.
void decode(const Problem& p, const Task& t, int64_t n, float* key, float* value) {
  if (p.tail.k && n >= p.tail.first) {
    const int64_t row = n - p.tail.first;
    const char* k = p.tail.k + t.b * p.tail.k_b + t.h * p.tail.k_h + row * p.tail.k_n;
    const char* v = p.tail.v + t.b * p.tail.v_b + t.h * p.tail.v_h + row * p.tail.v_n;
    for (int d = 0; d < p.D; d++) key[d] = as_float(p.tail.kind, k, d), value[d] = as_float(p.tail.kind, v, d);
    return;
  }
  const int64_t g = n / p.group, i = n % p.group;
  const int bits = bits_of(p.main.kind), value_bits = bits_of(p.main.values);
  const auto* k = reinterpret_cast<const uint8_t*>(p.main.k + t.b * p.main.k_b + t.h * p.main.k_h + n * p.main.k_n);
  const auto* v = reinterpret_cast<const uint8_t*>(p.main.v + t.b * p.main.v_b + t.h * p.main.v_h + g * p.main.v_n);
  const char* pairs = p.params_k + t.b * p.pk_b + t.h * p.pk_h + g * p.pk_n;
  float scale, offset;
  for (int d = 0; d < p.D; d++) {
    parameters(pairs + 4 * d, &scale, &offset);
    key[d] = scale * float(code_at(k, bits, p.D, d)) + offset;
  }
  parameters(p.params_v + t.b * p.pv_b + t.h * p.pv_h + 4 * n, &scale, &offset);
  for (int d = 0; d < p.D; d++, v += p.group * value_bits / 8) value[d] = scale * float(code_at(v, value_bits, p.group, i)) + offset;
}

// A task's list entries, from anywhere in a coded cache, decoded to consecutive rows of `room`: a problem without a list.
Problem gathered(const Problem& p, const Task& t, float* room) {
  const int64_t* list = p.list + (t.b * p.heads + t.h) * p.listed;
  float* values = room + SPAN * p.D;
  for (int64_t i = t.from; i < t.to; i++) decode(p, t, list[i], room + (i - t.from) * p.D, values + (i - t.from) * p.D);
  Problem dense = p;
  const int64_t size = 4 * int64_t(p.D);
  dense.main = {Kind::float32, reinterpret_cast<char*>(room), reinterpret_cast<char*>(values), 0, 0, size, 0, 0, size, t.from};
  dense.list = nullptr;
  return dense;
}

using Maybe = std::optional<at::Tensor>;

Kind kind_of(const at::Tensor& q) {
  return q.scalar_type() == at::kFloat ? Kind::float32 : q.scalar_type() == at::kHalf ? Kind::float16 : Kind::bfloat16;
}

// The elements of a tensor of int32 or int64, in order.
class Numbers {
 public:
  Numbers() = default;
  explicit Numbers(const at::Tensor& of) : of_(of.contiguous()), narrow_(of.scalar_type() == at::kInt), from_(of_.const_data_ptr()) {
    TORCH_CHECK(narrow_ || of.scalar_type() == at::kLong, "integers of 32 or 64 bits are wanted, not ", of.scalar_type());
  }
  explicit Numbers(const Maybe& of) : Numbers(of ? Numbers(*of) : Numbers()) {}
  bool given() const { return of_.defined(); }
  int64_t operator[](int64_t i) const {
    return narrow_ ? static_cast<const int32_t*>(from_)[i] : static_cast<const int64_t*>(from_)[i];
  }

 private:
  at::Tensor of_;
  bool narrow_ = false;
  const void* from_ = nullptr;
};

// Some heads of a layer, with ranges of their own.
struct Cache {
  at::Tensor k, v;
  Maybe params_k, params_v, tail_k, tail_v;
  Numbers length, start;  // [B, H]; no length: up to the last position; no start: 0
  int64_t in_use = -1, behind = -1;  // positions of k and of the tail; -1: all

  int64_t heads() const { return k.size(1); }
  int64_t first_part() const { return in_use < 0 ? k.size(2) : in_use; }
  int64_t held() const { return first_part() + (behind >= 0 ? behind : tail_k ? tail_k->size(2) : 0); }
};

void check_entries(const int64_t* list, const Task& t, int64_t held) {
  const auto none = [held](int64_t entry) { return uint64_t(entry) >= uint64_t(std::max<int64_t>(held, 1)); };
  bool wrong = false;
  for (int64_t i = t.from; i < t.to; i++) wrong |= none(list[i]);
  for (int64_t i = t.from; wrong && i < t.to; i++)
    TORCH_CHECK_VALUE(!none(list[i]), "`indices` hold ", list[i], ", which is none of the ", held, " positions of the cache");
}

// Queries [B, H, T, D] of any strides as rows of xs numbers, zero behind D: in float32, times `scale`, and if they are
// bfloat16, also unchanged.
struct Queries {
  std::unique_ptr<float[]> x;
  std::unique_ptr<uint16_t[]> bits;

  Queries(const at::Tensor& q, Kind kind, int64_t xs, float scale) {
    const int64_t H = q.size(1), T = q.size(2), D = q.size(3), count = q.size(0) * H * T, size = q.element_size();
    x.reset(new float[count * xs]);
    if (kind == Kind::bfloat16) bits.reset(new uint16_t[count * xs]);
    at::parallel_for(0, count, (1 << 16) / xs + 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) {
        const int64_t at = i / T / H * q.stride(0) + i / T % H * q.stride(1) + i % T * q.stride(2);
        const char* row = static_cast<const char*>(q.const_data_ptr()) + at * size;
        float* of = x.get() + i * xs;
        for (int64_t d = 0; d < D; d++) of[d] = as_float(kind, row, int(d)) * scale;
        std::fill(of + D, of + xs, 0.0f);
        if (!bits) continue;
        std::memcpy(bits.get() + i * xs, row, D * size);
        std::fill(bits.get() + i * xs + D, bits.get() + (i + 1) * xs, uint16_t(0));
      }
    });
  }
};

// Adds to `p` all that depends on the cache, whose first head is number `head`.
Problem problem_of(Problem p, const Cache& c, Kind kind, int64_t bits, int64_t head) {
  p.main = part_of(c.k, c.v, bits == 16 ? kind : bits == 8 ? Kind::byte : bits == 4 ? Kind::nibble : Kind::quarter, 0, head);
  if (c.tail_k) p.tail = part_of(*c.tail_k, *c.tail_v, kind, c.first_part(), head);
  if (bits != 16) {
    const int64_t value_bits = c.v.size(4) * 8 / p.group;
    TORCH_CHECK(value_bits == 8 || value_bits == 4 || value_bits == 3 || value_bits == 2, "kv_decode: values of ", value_bits, " bits");
    p.main.values = value_bits == 8 ? Kind::byte : value_bits == 4 ? Kind::nibble : value_bits == 3 ? Kind::three : Kind::quarter;
    p.params_k = base(*c.params_k, head), p.params_v = base(*c.params_v, head);
    p.pk_b = 2 * c.params_k->stride(0), p.pk_h = 2 * c.params_k->stride(1), p.pk_n = 2 * c.params_k->stride(2);
    p.pv_b = 2 * c.params_v->stride(0), p.pv_h = 2 * c.params_v->stride(1);
  }
  return p;
}

#include "kv_pages.inc"

// Attention to caches of one precision and number of channels, whose heads follow each other in q. Lists and mass need a
// single cache. choice: makes the lists of `indices` first.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attend(
    const at::Tensor& q, const std::vector<Cache>& caches, const Maybe& indices, int64_t bits, int64_t group, double scale,
    double softcap, bool return_mass, bool return_lse, const std::string& isa, Choice* choice = nullptr) {
  const Loops* found = loops_of(isa);
  TORCH_CHECK(found, "`isa` (='", isa, "') is not one of this machine's");
  TORCH_CHECK(!of_pairs(isa) || q.scalar_type() != at::kFloat, "`isa` (='", isa, "') does not take float32");
  const Loops& loops = *found;
  const int64_t B = q.size(0), positions = indices ? indices->size(2) : caches[0].held();  // of the mass, and of the list
  int64_t H = 0;
  for (const Cache& c : caches) {
    H += c.heads();
    TORCH_CHECK(bits == 16 || (c.params_k && c.params_v && SPAN % group == 0 && q.size(3) <= 4096), "kv_decode: q ", q.sizes(),
                ", k ", c.k.sizes(), " and ", bits, " bits do not fit");
  }
  TORCH_CHECK(q.dim() == 4 && H > 0 && q.size(1) % H == 0 && (caches.size() == 1 || !(indices || return_mass)),
              "kv_decode: q ", q.sizes(), " and ", caches.size(), " caches of ", H, " heads do not fit");
  const auto floats = q.options().dtype(at::kFloat);
  at::Tensor mass = return_mass ? at::zeros({B, H, positions}, floats) : at::empty({0}, floats);
  at::Tensor lse = return_lse ? at::empty({B, q.size(1), q.size(2)}, floats) : at::empty({0}, floats);

  Problem p{};
  const Kind kind = kind_of(q);
  p.group = group;
  p.heads = int(H);
  p.tokens = int(q.size(2));
  p.rows = int(q.size(1) / H) * p.tokens;
  p.D = int(q.size(3));
  p.xs = (p.D + 63) / 32 * 32;  // room for a vector that begins at the last item
  p.longest = std::max<int64_t>(p.xs, SPAN);
  p.softcap = float(softcap);
  p.scale = float(scale);

  const Queries queries(q, kind, p.xs, p.scale);
  p.q = queries.bits.get();

  const at::Tensor list = indices ? indices->to(at::kLong).contiguous() : at::Tensor();
  if (list.defined()) p.list = list.const_data_ptr<int64_t>(), p.listed = positions;
  p.scattered = (loops.streams || p.list) && p.tokens == 1 && !return_mass;  // otherwise the order of positions matters
  std::vector<Problem> problems;
  std::vector<std::pair<size_t, int64_t>> of_head;  // each head's cache, and its number there
  for (size_t c = 0; c < caches.size(); c++) {
    problems.push_back(problem_of(p, caches[c], kind, bits, int64_t(of_head.size())));
    for (int64_t h = 0; h < caches[c].heads(); h++) of_head.emplace_back(c, h);
  }
  std::vector<Task> tasks;
  std::vector<int64_t> firsts{0};
  for (int64_t i = 0; i < B * H; i++) {
    const auto [of, own] = of_head[i % H];
    const Cache& cache = caches[of];
    const int64_t at = i / H * cache.heads() + own, held = cache.held(), last = list.defined() ? positions : held;
    const int64_t S = list.defined() ? positions : cache.first_part();  // entries of the list
    const int64_t a = cache.start.given() ? cache.start[at] : 0;
    const int64_t end = cache.length.given() ? std::min(a + cache.length[at], last) : last;
    for (int64_t from = std::max<int64_t>(a, 0), to; from < end; from = to) {
      const int64_t first = from < S ? 0 : S;
      to = std::min({end, first + ((from - first) / SPAN + 1) * SPAN, from < S ? S : last});
      tasks.push_back({i / H, i % H, from, to, end, from >= S, &problems[of]});
    }
    firsts.push_back(int64_t(tasks.size()));
  }

  // Results of each task: a row's sums [xs], largest score and total; for the mass its probabilities too.
  const int64_t count = int64_t(tasks.size()), rows = p.rows, keep = return_mass ? rows * SPAN : 0;
  std::unique_ptr<float[]> outs(new float[count * rows * p.xs]), tops(new float[2 * count * rows]), kept(new float[count * keep]);
  float* totals = tops.get() + count * rows;
  const at::Tensor y = at::empty(q.sizes(), q.options().memory_format(at::MemoryFormat::Contiguous));
  const auto merge = [&](int64_t i) {  // the spans of kv head i of B * H
    const int64_t first = firsts[i], spans = firsts[i + 1] - first;
    std::unique_ptr<float[]> weights(new float[rows * spans + p.xs]);
    float* sums = weights.get() + rows * spans;
    for (int64_t r = 0; r < rows; r++) {
      loops.merge(outs.get() + (first * rows + r) * p.xs, rows * p.xs, tops.get() + first * rows + r, totals + first * rows + r,
                  rows, int(spans), p.D, weights.get() + r * spans, sums);
      from_floats(kind, sums, p.D, static_cast<char*>(y.data_ptr()) + (i * rows + r) * p.D * q.element_size());
    }
    for (int64_t r = 0; return_lse && r < rows; r++) {
      const float *top = tops.get() + first * rows + r, *total = totals + first * rows + r;
      double highest = -INFINITY, sum = 0;
      for (int64_t s = 0; s < spans; s++) highest = std::max<double>(highest, top[s * rows]);
      for (int64_t s = 0; s < spans; s++) sum += top[s * rows] == -INFINITY ? 0 : std::exp(top[s * rows] - highest) * total[s * rows];
      lse.data_ptr<float>()[i * rows + r] = float(sum == 0 ? -INFINITY : highest + std::log(sum));
    }
    for (int64_t s = 0; return_mass && s < spans; s++) {
      const Task& t = tasks[first + s];
      const int64_t before = t.tail || bits == 16 || p.list ? 0 : t.from % group;
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
  const int64_t most = choice ? std::max(count, choice->tasks()) : count;
  at::parallel_for(0, std::min<int64_t>(most, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    if (choice) choice->work();
    std::unique_ptr<float[]> scratch(new float[rows * SPAN + scratch_size(p) + SPAN * p.D / 8]);
    const bool gathers = p.list && bits != 16;
    std::unique_ptr<float[]> room(gathers ? new float[2 * SPAN * p.D + 64] : nullptr);
    Problem local;
    bool foreseen = false;
    for (int64_t i = next++, after; i < count; i = after) {  // free threads take the next task; the last of a head merges
      Task t = tasks[i];
      after = next++;
      const int64_t head = t.b * H + t.h;
      if (choice) choice->wait(head);
      if (after < count && !gathers && (!choice || choice->made(tasks[after].b * H + tasks[after].h))) t.after = &tasks[after];
      t.foreseen = foreseen, foreseen = t.after;
      if (p.list && !choice) check_entries(p.list + head * positions, t, caches[0].held());
      if (gathers) local = gathered(*t.problem, t, room.get()), t.problem = &local;
      loops.span(*t.problem, t, queries.x.get() + head * rows * p.xs, return_mass ? kept.get() + i * keep : scratch.get(),
                 scratch.get() + rows * SPAN, outs.get() + i * rows * p.xs, tops.get() + i * rows, totals + i * rows);
      if (--left[head] == 0) merge(head);
    }
  });
  return {y, mass, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> kv_decode(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Maybe& params_k, const Maybe& params_v,
    const Maybe& tail_k, const Maybe& tail_v, const at::Tensor& lengths, const Maybe& starts,
    const Maybe& indices, int64_t bits, int64_t group, double scale, double softcap, bool return_mass, bool return_lse,
    const std::string& isa) {
  const std::vector<Cache> one{{k, v, params_k, params_v, tail_k, tail_v, Numbers(lengths), Numbers(starts)}};
  return attend(q, one, indices, bits, group, scale, softcap, return_mass, return_lse, isa);
}

// Attention to the pages of a dense cache with the highest bounds: kv_page_list, then kv_decode of its list.
at::Tensor kv_decode_ranked(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& ranking,
                            const at::Tensor& bounds, const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& pages,
                            int64_t page, int64_t most, int64_t behind, double ranking_scale, double scale, double softcap,
                            const std::string& isa) {
  const Loops* loops = loops_of(isa);
  TORCH_CHECK(loops, "`isa` (='", isa, "') is not one of this machine's");
  Choice choice(*loops, isa, ranking, bounds, starts, lengths, pages, page, most, behind, ranking_scale, true);
  for (int64_t i = 0; i < starts.numel(); i++) {
    const int64_t first = Numbers(starts)[i], last = first + Numbers(lengths)[i] + behind;
    TORCH_CHECK_VALUE(first >= 0 && last <= k.size(2), "rows of positions ", first, " to ", last, " are none of the ", k.size(2),
                      " positions of the cache");
  }
  const std::vector<Cache> one{{k, v, {}, {}, {}, {}, Numbers(choice.lists.counts), {}}};
  return std::get<0>(attend(q, one, choice.lists.indices, 16, 64, scale, softcap, false, false, isa, &choice));
}

// k to tail_v: one tensor for each cache, or none at all.
at::Tensor kv_decode_apart(const at::Tensor& q, const std::vector<at::Tensor>& k, const std::vector<at::Tensor>& v,
                           const std::vector<at::Tensor>& params_k, const std::vector<at::Tensor>& params_v,
                           const std::vector<at::Tensor>& tail_k, const std::vector<at::Tensor>& tail_v,
                           const std::vector<at::Tensor>& starts, int64_t bits, int64_t group,
                           double scale, double softcap, const std::string& isa) {
  const auto of = [](const std::vector<at::Tensor>& all, size_t i) { return all.empty() ? Maybe() : Maybe(all[i]); };
  std::vector<Cache> caches;
  for (size_t i = 0; i < k.size(); i++) {
    caches.push_back({k[i], v[i], of(params_k, i), of(params_v, i), of(tail_k, i), of(tail_v, i), {}, Numbers(starts[i])});
    const Cache& c = caches.back();
    const int64_t B = q.size(0), D = q.size(3), codes = 8 / bits;
    const auto dense = [&](const at::Tensor& x) {
      return x.dim() == 4 && x.size(3) == D && x.stride(3) == 1 && x.scalar_type() == q.scalar_type();
    };
    const bool fits = bits == 16 ? dense(c.k) && dense(c.v) : c.k.dim() == 4 && c.k.size(3) * codes == D && c.v.dim() == 5;
    TORCH_CHECK_VALUE(fits && c.k.size(0) == B && (!c.tail_k || (dense(*c.tail_k) && dense(*c.tail_v))) &&
                          starts[i].numel() == B * c.heads(), "kv_decode_apart: q ", q.sizes(), ", k ", c.k.sizes(), ", starts ",
                      starts[i].sizes(), " and ", bits, " bits do not fit");
  }
  return std::get<0>(attend(q, caches, {}, bits, group, scale, softcap, false, false, isa));
}

}  // namespace

static_assert(workbench::SPAN_POSITIONS == SPAN);

namespace {

// This file's `isa` for use with the `isa` of another file.
std::string best_beside(const std::string& isa) {
  if (isa == "avx512bf16" && loops_of("amx")) return "amx";
  if (loops_of(isa)) return isa;
  const char* lesser = isa == "avx512bf16" ? "avx512" : isa == "neon bf16" ? "neon" : "portable";
  return loops_of(lesser) ? lesser : "portable";
}

}  // namespace

workbench::Attention workbench::attention_loops(const std::string& beside) {
  const std::string isa = best_beside(beside);
#ifdef HAVE_X86
#ifdef HAVE_AMX
  if (isa == "amx") return {one_span<::amx::loops>, ::amx::loops.merge};
#endif
  if (isa == "avx512bf16") return {one_span<avx512bf16::loops>, avx512bf16::loops.merge};
  if (isa == "avx512") return {one_span<avx512::loops>, avx512::loops.merge};
  if (isa == "avx2") return {one_span<avx2::loops>, avx2::loops.merge};
#endif
#ifdef HAVE_NEON
  if (isa == "neon bf16") return {one_span<neonbf16::loops>, neonbf16::loops.merge};
  if (isa == "neon") return {one_span<::neon::loops>, ::neon::loops.merge};
#endif
  return {one_span<portable::loops>, portable::loops.merge};
}

at::Tensor workbench::attend_kept(const at::Tensor& q, const std::vector<KeptHeads>& kept, const Sparse& sparse, int64_t bits,
                                  int64_t group, double scale, double softcap, const std::string& beside) {
  const std::string isa = best_beside(beside);
  std::vector<Cache> caches;
  for (const KeptHeads& one : kept) {
    caches.push_back({one.k, one.v, one.params_k, one.params_v, one.tail_k, one.tail_v, {}, Numbers(one.starts)});
    Cache& c = caches.back();
    if (bits == 16) c.in_use = one.more, c.behind = 0;
    else c.in_use = one.coded, c.behind = one.more;
  }
  const auto attended = [&](const Maybe& indices, Choice* choice) {
    return std::get<0>(attend(q, caches, indices, bits, group, scale, softcap, false, false, isa, choice));
  };
  if (!sparse.given()) return attended({}, nullptr);
  TORCH_CHECK(caches.size() == 1, "attend_kept: ", caches.size(), " parts of the heads have no list of positions");
  Cache& c = caches[0];
  c.start = Numbers();  // entries of a list are counted from its first one
  if (sparse.indices) {
    c.length = Numbers(sparse.lengths.value());
    return attended(sparse.indices, nullptr);
  }
  const Numbers starts(kept[0].starts);
  const at::Tensor before = at::empty(kept[0].starts.sizes(), at::kLong);  // positions of each row, without the new one
  for (int64_t i = 0; i < before.numel(); i++)
    before.mutable_data_ptr<int64_t>()[i] = std::max<int64_t>(c.held() - 1 - starts[i], 0);
  Choice choice(*loops_of(isa), isa, sparse.queries, *sparse.bounds, kept[0].starts, before, sparse.pages.value(), sparse.page, sparse.most,
                1, scale, true);
  c.length = Numbers(choice.lists.counts);
  const at::Tensor y = attended(choice.lists.indices, &choice);
  kv_note_key(*sparse.bounds, sparse.keys, before, sparse.page);
  return y;
}

namespace {

// Appends a token to every part of some heads, k and v [heads, D], and attends to all of their positions. Of each part one row; the
// tensors are those of workbench::KeptHeads, and counts its `coded` and `more`, before the token.
at::Tensor kv_append_decode(const at::Tensor& q, const at::Tensor& new_k, const at::Tensor& new_v, const std::vector<at::Tensor>& k,
                            const std::vector<at::Tensor>& v, const std::vector<at::Tensor>& params_k,
                            const std::vector<at::Tensor>& params_v, const std::vector<at::Tensor>& tail_k,
                            const std::vector<at::Tensor>& tail_v, const std::vector<at::Tensor>& starts,
                            at::IntArrayRef counts, int64_t bits, int64_t group, double scale, double softcap, const std::string& isa) {
  const bool coded = bits != 16;
  const size_t parts = k.size();
  TORCH_CHECK_VALUE(parts && v.size() == parts && starts.size() == parts && counts.size() == 2 * parts, "kv_append_decode: ", parts,
                    " keys, ", v.size(), " values, ", starts.size(), " starts and ", counts.size(), " counts do not fit");
  for (const auto* of : {&params_k, &params_v, &tail_k, &tail_v})
    TORCH_CHECK_VALUE(of->size() == (coded ? parts : 0), "kv_append_decode: ", of->size(), " tensors of ", parts, " parts, bits ", bits);
  const int64_t D = q.size(3), bytes = D * q.element_size();
  for (const at::Tensor& x : {new_k, new_v})
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == D && x.is_contiguous() && x.scalar_type() == q.scalar_type(), "kv_append_decode: new ",
                      x.sizes(), " ", x.scalar_type(), " do not fit q ", q.sizes(), " ", q.scalar_type());
  std::vector<workbench::KeptHeads> kept;
  int64_t heads = 0;
  for (size_t i = 0; i < parts; i++) {  // everything is checked before anything is written
    const auto of = [&](const std::vector<at::Tensor>& all) { return coded ? Maybe(all[i]) : Maybe(); };
    const int64_t own = k[i].dim() == 4 ? k[i].size(1) : 0, place = counts[2 * i + 1];
    const auto fits = [&](const at::Tensor& to) {
      return to.dim() == 4 && to.size(0) == 1 && to.size(1) == own && to.size(3) == D && to.stride(3) == 1 &&
             to.scalar_type() == q.scalar_type() && place >= 0 && place < to.size(2);
    };
    const bool codes = !coded || (k[i].size(3) * 8 == D * bits && v[i].dim() == 5 && params_k[i].dim() >= 4 && params_v[i].dim() >= 4 &&
                                  v[i].size(1) == own && counts[2 * i] >= 0 && counts[2 * i] <= k[i].size(2) && fits(tail_v[i]));
    TORCH_CHECK_VALUE(own && codes && fits(coded ? tail_k[i] : k[i]) && (coded || fits(v[i])) && starts[i].numel() == own,
                      "kv_append_decode: the cache ", k[i].sizes(), " has no place for position ", place, " of ", own, " heads of ", D,
                      " channels");
    kept.push_back({k[i], v[i], of(params_k), of(params_v), of(tail_k), of(tail_v), starts[i], counts[2 * i], place + 1});
    heads += own;
  }
  TORCH_CHECK_VALUE(heads == new_k.size(0) && heads == new_v.size(0) && q.size(1) % heads == 0, "kv_append_decode: ", heads,
                    " heads in all, ", new_k.size(0), " new, and q ", q.sizes());
  int64_t head = 0;
  for (const auto& one : kept) {
    for (const auto& [to, from] : {std::pair{coded ? *one.tail_k : one.k, new_k}, std::pair{coded ? *one.tail_v : one.v, new_v}})
      for (int64_t h = 0; h < one.k.size(1); h++)
        std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + (h * to.stride(1) + (one.more - 1) * to.stride(2)) * q.element_size(),
                    static_cast<const char*>(from.const_data_ptr()) + (head + h) * bytes, bytes);
    head += one.k.size(1);
  }
  return workbench::attend_kept(q, kept, {}, bits, group, scale, softcap, isa);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.def(
      "kv_decode_native(Tensor q, Tensor k, Tensor v, Tensor? params_k, Tensor? params_v, Tensor? tail_k, Tensor? tail_v, "
      "Tensor lengths, Tensor? starts, Tensor? indices, int bits, int group, float scale, float softcap, bool return_mass, "
      "bool return_lse, str isa) -> (Tensor, Tensor, Tensor)");
  m.def(
      "kv_decode_apart(Tensor q, Tensor[] k, Tensor[] v, Tensor[] params_k, Tensor[] params_v, Tensor[] tail_k, "
      "Tensor[] tail_v, Tensor[] starts, int bits, int group, float scale, float softcap, str isa) -> Tensor");
  m.def(
      "kv_append_decode(Tensor q, Tensor new_k, Tensor new_v, Tensor(a!)[] k, Tensor(b!)[] v, Tensor[] params_k, Tensor[] params_v, "
      "Tensor(c!)[] tail_k, Tensor(d!)[] tail_v, Tensor[] starts, int[] counts, int bits, int group, float scale, float softcap, "
      "str isa) -> Tensor");
  m.def("kv_decode_isa(bool float32) -> str", best_isa);
  m.def(
      "kv_page_list(Tensor q, Tensor bounds, Tensor starts, Tensor lengths, Tensor pages, int page, int most, int behind, "
      "float scale, str isa) -> (Tensor, Tensor)");
  m.def(
      "kv_decode_ranked(Tensor q, Tensor k, Tensor v, Tensor ranking, Tensor bounds, Tensor starts, Tensor lengths, Tensor pages, "
      "int page, int most, int behind, float ranking_scale, float scale, float softcap, str isa) -> Tensor");
  m.def(
      "kv_score_list(Tensor scores, Tensor starts, Tensor lengths, Tensor pages, int page, int most, int behind) -> (Tensor, "
      "Tensor)");
  m.def("kv_note_key(Tensor(a!) bounds, Tensor key, Tensor place, int page) -> ()");
}
TORCH_LIBRARY_IMPL(workbench, CPU, m) {
  m.impl("kv_decode_native", kv_decode);
  m.impl("kv_decode_apart", kv_decode_apart);
  m.impl("kv_append_decode", kv_append_decode);
  m.impl("kv_page_list", kv_page_list);
  m.impl("kv_decode_ranked", kv_decode_ranked);
  m.impl("kv_score_list", kv_score_list);
  m.impl("kv_note_key", kv_note_key);
}
