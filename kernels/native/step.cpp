// One step of decoding of a whole decoder: a list of instructions that the threads of one parallel region go through side by
// side, with a barrier after each. kernels/step/README.md describes the instructions; kernels/step/program.py makes them.
//
// Three kinds: products, in which each thread computes some rows of weights; those of a mixture's chosen experts; and attention,
// in which each takes some positions of some heads. If the cache has its own attention, the step stops instead, hands over
// queries, keys and values, and continues with the caller's result. All other work (residual sums, norms, rounding) is repeated
// in every thread: for a few tokens this is cheaper than another barrier.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#include "neon.inc"
#include "step_parts.inc"

namespace {

#include "step_types.inc"

Norm norm_of(const Maybe& weight, double eps) {
  if (!weight) return {};
  TORCH_CHECK(weight->scalar_type() == at::kFloat && weight->is_contiguous(), "norms are float32");
  return {*weight, float(eps)};
}

bool is_floats(const Maybe& x, int64_t count) {
  return x && x->scalar_type() == at::kFloat && x->is_contiguous() && x->numel() == count;
}

int64_t DecodeStep::weight(const std::string& layout, const at::Tensor& data, const Maybe& scale, const Maybe& zero,
                           const Maybe& table, const Maybe& bias, const Maybe& step, std::vector<int64_t> sizes) {
  auto w = std::make_unique<Weight>();
  const int64_t out = sizes.at(0), in = sizes.at(1);
  w->data = data;
  w->stored = {data.const_data_ptr(), nullptr, 0, nullptr, nullptr, false, nullptr, out, in, 1};
  TORCH_CHECK(data.is_contiguous() && data.device().is_cpu(), "weights are contiguous, on a CPU");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == out), "bias: float32 [out]");
  if (bias) w->bias = *bias;
  if (layout == "rows") {
    TORCH_CHECK(data.scalar_type() == (bfloat16_ ? at::kBFloat16 : at::kHalf) && data.numel() == out * in,
                "rows: ", data.sizes(), " ", data.scalar_type(), " is no weight of ", out, " x ", in);
    w->bits = 0, w->product = half_product(isa_, bfloat16_, in, false), w->unit_bytes = UNIT * in * 2;
  } else if (layout == "kept") {
    TORCH_CHECK(data.scalar_type() == (bfloat16_ ? at::kBFloat16 : at::kHalf) && scale && zero && kept_fits(*scale, data, *zero, out, in),
                "kept: ", data.sizes(), " ", data.scalar_type(), " is no weight of ", out, " x ", in);
    w->bits = 0, w->product = half_product(isa_, bfloat16_, in, true);
    w->unit_bytes = (2 * data.numel() + out * in / 8) / std::max<int64_t>(1, w->units());
    w->scale = *scale, w->zero = *zero;
    w->stored.mask = scale->const_data_ptr<uint8_t>(), w->stored.starts = zero->const_data_ptr<int64_t>();
  } else if (layout == "int8") {
    w->product = int8_product();
    TORCH_CHECK(w->product.rows, "int8: this CPU has neither AVX512-VNNI nor NEON's dot products");
    TORCH_CHECK(data.dim() == 4 && data.scalar_type() == at::kChar && data.numel() == data.size(0) * data.size(1) * INT8_UNIT * 4 &&
                    data.size(0) == (out + INT8_UNIT - 1) / INT8_UNIT && data.size(1) == (in + 3) / 4 && is_floats(scale, out) &&
                    (!step || is_floats(step, 1)),
                "int8: ", data.sizes(), " is no weight of ", out, " x ", in);
    w->bits = 8, w->unit = INT8_UNIT, w->unit_bytes = INT8_UNIT * data.size(1) * 4;
    w->scale = *scale, w->stored.scale = scale->const_data_ptr();
    if (step) w->step = *step, w->stored.step = step->const_data_ptr<float>();
  } else if (layout == "walks") {
    const int bits = int(sizes.at(2)), length = data.dim() == 3 ? int(data.size(2) * 8 / bits) : 0;
    TORCH_CHECK(length && length % UNIT == 0 && data.scalar_type() == at::kByte && data.size(1) == in &&
                    data.size(0) == (out + length - 1) / length && is_floats(scale, out),
                "walks: ", data.sizes(), " is no weight of ", out, " x ", in);
    w->bits = bits, w->product = trellis_product(isa_), w->unit_bytes = UNIT * in * bits / 8;
    w->scale = *scale, w->stored.scale = scale->const_data_ptr(), w->stored.loops = w->product.loops;
    w->stored.bits = bits, w->stored.length = length, w->stored.states = int(sizes.at(3));
  } else {
    TORCH_CHECK(layout == "panels", "`layout` (='", layout, "') must be 'rows', 'kept', 'panels', 'int8' or 'walks'");
    const int64_t panels = (out + UNIT - 1) / UNIT;
    const int bits = data.dim() == 3 ? width_of(data) : 0;
    const int64_t columns = bits == 4 || bits == 8 ? 8 : 16;
    TORCH_CHECK(bits && in % columns == 0 && data.size(0) == panels && data.size(1) == in / columns && scale && scale->is_contiguous() &&
                    scale->dim() == 3 && scale->size(0) == panels && scale->size(2) == UNIT && (in / columns) % scale->size(1) == 0 &&
                    (!zero || (zero->is_contiguous() && zero->scalar_type() == at::kChar && zero->sizes() == scale->sizes())) &&
                    table_fits(table, bits),
                layout, ": ", data.sizes(), " is no weight of ", out, " x ", in);
    w->scale = *scale;
    w->stored.scale = scale->const_data_ptr(), w->stored.groups = scale->size(1);
    w->stored.scale_kind = scale->scalar_type() == at::kFloat ? 0 : scale->scalar_type() == at::kBFloat16 ? 1 : 2;
    if (zero) w->zero = *zero, w->stored.zero = zero->const_data_ptr<int8_t>();
    fill_table(table, bits, w->table);
    w->stored.table = w->table, w->stored.integers = !table;
    w->bits = bits, w->product = panels_product(isa_, bfloat16_, bits, w->stored), w->unit_bytes = UNIT * in * bits / 8;
    w->stored.loops = w->product.loops;
    groups_ = std::max(groups_, w->stored.groups * w->stored.pieces);
  }
  weights_.push_back(std::move(w));
  return int64_t(weights_.size()) - 1;
}

int64_t DecodeStep::change(const Maybe& signs, std::vector<at::Tensor> factors, const Maybe& order, int64_t bits, int64_t group, int64_t wide,
                           double step) {
  Change c;
  c.bits = bits, c.group = group, c.wide = wide, c.step = float(step);
  int64_t block = 1;
  for (const at::Tensor& H : factors) {
    TORCH_CHECK(H.dim() == 2 && is_floats(H, H.size(0) * H.size(0)), "factors of a transform are square");
    block *= H.size(0);
  }
  if (signs) {
    TORCH_CHECK(is_floats(signs, signs->numel()) && signs->numel() % block == 0, "signs: float32, of blocks of ", block);
    c.signs = *signs;
    for (auto H = factors.rbegin(); H != factors.rend(); H++) {  // a vector behind the last row can be read
      const int64_t f = H->size(0);
      c.factors.push_back(at::zeros({f + (UNIT + f - 1) / f, f}, H->options()));
      c.factors.back().narrow(0, 0, f).copy_(*H);
    }
  }
  if (order) {
    TORCH_CHECK(order->scalar_type() == at::kInt && order->is_contiguous() && order->dim() == 1, "order: int32 [in]");
    for (int64_t k = 0; k < order->numel(); k++)
      TORCH_CHECK(uint32_t(order->const_data_ptr<int32_t>()[k]) < order->numel(), "order: numbers of columns");
    c.order = *order;
  }
  TORCH_CHECK(bits == 0 || (bits >= 2 && bits <= 8 && group > 0), "codes have 2 to 8 bits, in groups of columns");
  changes_.push_back(std::move(c));
  return int64_t(changes_.size()) - 1;
}

void DecodeStep::changes(int64_t weight, int64_t change, const Maybe& gains) {
  Weight& w = *weights_.at(weight);
  const Change& c = changes_.at(change);
  TORCH_CHECK((!c.signs.defined() || c.signs.numel() == w.stored.in) && (!c.order.defined() || c.order.numel() == w.stored.in) && (c.bits == 0 || w.stored.in % c.group == 0) &&
                  (!gains || is_floats(gains, w.stored.in)), "an input of ", w.stored.in, " columns cannot be changed so");
  w.change = int(change);
  if (gains) w.gains = *gains;
}

void DecodeStep::products(int64_t from, int64_t to, const std::vector<int64_t>& weights, int64_t activation, int64_t added,
                          const Maybe& after, double after_eps, const Maybe& before, double before_eps) {
  Products p{from, to, 0, {}, int(activation), added, norm_of(after, after_eps), norm_of(before, before_eps)};
  int64_t size = 0;
  for (int64_t i : weights) {
    p.weights.push_back(weights_.at(i).get());
    size += p.weights.back()->stored.out * most_;
  }
  p.in = p.weights.at(0)->stored.in;
  for (const Weight* w : p.weights) TORCH_CHECK(w->stored.in == p.in, "weights of one input have its columns");
  TORCH_CHECK(activation == NONE || (p.weights.size() == 2 && p.weights[0]->stored.out == p.weights[1]->stored.out &&
                                     p.weights[0]->unit % p.weights[1]->unit == 0),
              "an activation needs a gate and another product of its size");
  TORCH_CHECK(from != RESIDUAL || (p.in == hidden_ && (!before || before->numel() == hidden_)), "the residual stream does not fit");
  sizes_.resize(std::max<size_t>(sizes_.size(), to + 1));
  sizes_[to] = std::max(sizes_[to], size);
  widest_ = std::max({widest_, p.in, hidden_});
  stages_.push_back(std::move(p));
  own_.clear();
}

// Weights of one size, the experts' in order.
std::vector<const Weight*> DecodeStep::alike(const std::vector<int64_t>& weights) const {
  std::vector<const Weight*> found;
  for (int64_t i : weights) {
    const Weight* w = weights_.at(i).get();
    found.push_back(w);
    TORCH_CHECK(w->stored.out == found[0]->stored.out && w->stored.in == found[0]->stored.in && w->unit == found[0]->unit,
                "the weights of all experts have one size and unit");
  }
  return found;
}

// sizes: the buffers of logits and results, the number of chosen experts, sigmoid, rounded, whole, and the activation.
void DecodeStep::experts(std::vector<int64_t> sizes, const std::vector<int64_t>& gates, const std::vector<int64_t>& others, double factor,
                         const Maybe& bias) {
  Experts e{sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3) != 0, sizes.at(4) != 0, sizes.at(5) != 0, float(factor), {},
            alike(gates), alike(others), int(sizes.at(6))};
  const int64_t count = e.gates.size(), out = e.gates.at(0)->stored.out;
  const auto* router = stages_.empty() ? nullptr : std::get_if<Products>(&stages_.back());
  TORCH_CHECK(router && router->to == e.from && router->in == e.gates[0]->stored.in && router->weights[0]->stored.out == count,
              "the product of a router with the experts' input comes before them");
  TORCH_CHECK(e.chosen >= 1 && e.chosen <= count && e.others.size() == e.gates.size() && e.others[0]->stored.out == out &&
                  e.others[0]->stored.in == router->in && e.others[0]->unit == e.gates[0]->unit && e.activation != NONE &&
                  (!bias || is_floats(bias, count)),
              "experts: ", e.chosen, " of ", count, " experts do not fit");
  if (bias) e.bias = *bias;
  sizes_.resize(std::max<size_t>(sizes_.size(), e.to + 1));
  sizes_[e.to] = std::max(sizes_[e.to], 2 * most_ * e.chosen * out);
  widest_ = std::max({widest_, count, e.chosen * out}), chosen_ = std::max(chosen_, e.chosen), scores_ = std::max(scores_, count);
  stages_.push_back(std::move(e));
  own_.clear();
}

// sizes: the buffers of the experts' results and of the sum, the number of chosen experts, what is added, and its gate.
void DecodeStep::mixture(std::vector<int64_t> sizes, const std::vector<int64_t>& weights) {
  Mixture m{sizes.at(0), sizes.at(1), sizes.at(2), alike(weights), sizes.at(3), sizes.at(4)};
  TORCH_CHECK(m.weights.at(0)->stored.out == hidden_ && m.chosen <= chosen_ &&
                  2 * most_ * m.chosen * m.weights[0]->stored.in <= sizes_.at(m.from) && (m.added < 0 || sizes_.at(m.added) >= most_ * hidden_),
              "mixture: its sizes do not fit");
  sizes_.resize(std::max<size_t>(sizes_.size(), m.to + 1));
  sizes_[m.to] = std::max(sizes_[m.to], most_ * hidden_);
  stages_.push_back(std::move(m));
  own_.clear();
}

// A norm of each head, or of all of them together.
void check_norm(const Norm& norm, int64_t heads, int64_t channels) {
  const int64_t count = norm.weight.defined() ? norm.weight.numel() : channels;
  TORCH_CHECK(count == channels || count == heads * channels, "a norm of ", count, " channels for ", heads, " heads of ", channels);
}

void DecodeStep::attend(std::vector<int64_t> sizes, double scale, double softcap, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& length, const at::Tensor& cos, const at::Tensor& sin, const Maybe& query,
                        const Maybe& key, double eps) {
  Attend a{sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), sizes.at(4), cos.size(1), float(scale), float(softcap), keys, values, length,
           cos, sin, norm_of(query, eps), norm_of(key, eps), sizes.at(5) != 0};
  const auto type = bfloat16_ ? at::kBFloat16 : at::kHalf;
  if (!sequences_) sequences_ = keys.size(0);
  TORCH_CHECK(sequences_ == 1 || sequences_ == most_, "the cache ", keys.sizes(), " is neither of ", most_, " sequences nor of one");
  for (const at::Tensor& t : {keys, values})
    TORCH_CHECK(t.dim() == 4 && t.size(0) == sequences_ && t.size(1) == a.kv_heads && t.size(3) == a.channels && t.stride(3) == 1 &&
                    t.scalar_type() == type && t.size(2) == keys.size(2), "the cache ", t.sizes(), " does not fit");
  TORCH_CHECK(a.heads % a.kv_heads == 0 && length.scalar_type() == at::kLong && length.numel() == 1 && a.turned % 2 == 0 &&
                  a.turned <= a.channels && cos.is_contiguous() && sin.is_contiguous() && cos.scalar_type() == at::kFloat &&
                  sin.scalar_type() == at::kFloat && cos.sizes() == sin.sizes(), "attention: its tensors do not fit");
  check_norm(a.query, a.heads, a.channels), check_norm(a.key, a.kv_heads, a.channels);
  rows_ = std::max(rows_, a.heads / a.kv_heads);
  stride_ = std::max(stride_, attention_stride(a.channels));
  heads_ = std::max(heads_, a.kv_heads);
  widest_ = std::max(widest_, a.heads * a.channels);
  stages_.push_back(std::move(a));
  own_.clear();
}

void DecodeStep::prepare(int shares) {
  if (own_.size() == size_t(shares)) return;
  buffers_.resize(sizes_.size());
  for (size_t i = 0; i < sizes_.size(); i++) buffers_[i].make(sizes_[i] + LINE);
  own_.clear();
  for (int i = 0; i < shares; i++) {
    auto own = std::make_unique<Own>();
    const int64_t room = most_ * widest_ + LINE;
    own->residual.make(most_ * hidden_ + LINE);
    for (auto* r : {&own->x, &own->values, &own->mixed}) r->make(room);
    if (!changes_.empty())
      for (auto* r : {&own->changed, &own->spare, &own->changed_values}) r->make(room);
    own->bits.make(room), own->changed_bits.make(room), own->spare_bits.make(widest_ + LINE);
    own->sums.make(most_ * chosen_ * groups_), own->multiples.make(most_ * chosen_ * groups_), own->totals.make(most_ * chosen_ * groups_);
    own->scores.make(scores_ + LINE), own->ranks.make(scores_ + LINE);
    own->integers.make(room / 2);
    own->q.make(rows_ * stride_ + 2 * stride_), own->q_bits.make(rows_ * stride_ + LINE);
    own->scratch.make(std::max(rows_ * SPAN_POSITIONS, stride_) + LINE);
    own_.push_back(std::move(own));
  }
  best_.resize(shares * most_);
}

// The positions of all heads, in order, are cut into equal shares, and the shares into pieces of one head.
Plan DecodeStep::plan(const Attend& a, int64_t position, int shares) const {
  Plan plan;
  plan.heads.push_back(0);
  const int64_t heads = tokens_ / in_sequence() * a.kv_heads;
  for (int64_t token = 0; token < in_sequence(); token++, position++) {
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0, n = position + 1 - first;
    const int64_t total = heads * n;
    int64_t head = 0;
    for (int s = 0; s < shares; s++) {
      plan.shares.push_back(int64_t(plan.pieces.size()));
      const int64_t end = total * (s + 1) / shares;
      for (int64_t at = total * s / shares, to; at < end; at = to) {
        to = std::min({end, (head + 1) * n, at + SPAN_POSITIONS});
        const bool last = to == (head + 1) * n;
        plan.pieces.push_back({token + head / a.kv_heads, head % a.kv_heads, first + at - head * n, first + to - head * n, last});
        if (last) head++, plan.heads.push_back(int64_t(plan.pieces.size()));
      }
    }
    plan.shares.push_back(int64_t(plan.pieces.size()));
  }
  return plan;
}

// The step stops here; the caller attends to the buffer and returns a result.
void DecodeStep::hand_over(std::vector<int64_t> sizes, int64_t rotation, double scale, double softcap, const Maybe& query,
                           const Maybe& key, double eps) {
  Attend a{};
  a.from = sizes.at(0), a.heads = sizes.at(1), a.kv_heads = sizes.at(2), a.channels = sizes.at(3);
  a.neighbours = sizes.at(4) != 0, a.scale = float(scale), a.softcap = float(softcap), a.query = norm_of(query, eps), a.key = norm_of(key, eps);
  const int64_t count = sizes_.at(a.from);
  TORCH_CHECK(a.kv_heads > 0 && a.heads % a.kv_heads == 0 && count == most_ * (a.heads + 2 * a.kv_heads) * a.channels &&
                  changes_.at(rotation).signs.numel() == a.channels,
              "attention: ", a.heads, " and ", a.kv_heads, " heads of ", a.channels, " channels do not fit");
  check_norm(a.query, a.heads, a.channels), check_norm(a.key, a.kv_heads, a.channels);
  widest_ = std::max(widest_, a.heads * a.channels);
  stages_.push_back(Handed{a.from, count, std::move(a), int(rotation)});
  own_.clear();
}

void DecodeStep::start(const at::Tensor& ids, const Maybe& hidden) {
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() &&
                  (ids.numel() == most_ || (sequences_ == 1 && ids.numel() > 0 && ids.numel() < most_)),
              "`ids` ", ids.sizes(), " ", ids.scalar_type(), " must be ", most_, sequences_ == 1 ? " numbers or fewer" : " numbers");
  tokens_ = ids.numel();
  TORCH_CHECK(!stages_.empty() && std::holds_alternative<Products>(stages_.back()), "a program ends with the head's product");
  TORCH_CHECK(hidden ? hidden->scalar_type() == at::kFloat && hidden->is_contiguous() && hidden->numel() == tokens_ * hidden_
                     : embedding_ != nullptr, "a hidden state (float32) is needed where there is no embedding");
  ids_ = ids.const_data_ptr<int64_t>();
  for (int64_t m = 0; embedding_ && m < tokens_; m++)
    TORCH_CHECK(ids_[m] >= 0 && ids_[m] < embedding_->stored.out, "token ", ids_[m], " is not in the vocabulary");
  given_ = hidden ? hidden->const_data_ptr<float>() : nullptr;
  attended_ = nullptr;
  shares_ = at::in_parallel_region() ? 1 : at::get_num_threads();
  prepare(shares_);
  const Products& head = std::get<Products>(stages_.back());
  const int64_t vocabulary = head.weights[0]->stored.out;
  logits_ = at::from_blob(buffers_[head.to].data, {tokens_, vocabulary}, at::kFloat);
  std::fill(best_.begin(), best_.end(), Best{-INFINITY, vocabulary});
}

void DecodeStep::work_all(int shares, size_t begin, size_t end) {
#ifdef _OPENMP
#pragma omp parallel num_threads(shares)
  work(omp_get_thread_num(), omp_get_num_threads(), shares, begin, end);
#else
  work(0, 1, shares, begin, end);
#endif
  if (!seconds_.empty() && begin < end) seconds_[end - 1] += since(last_began_);
  ended_ = Clock::now();
}

at::Tensor DecodeStep::chosen(int shares) const {
  const int64_t vocabulary = logits_.size(1);
  const at::Tensor next = at::empty({tokens_, 1}, at::kLong);
  for (int64_t m = 0; m < tokens_; m++) {
    Best best = best_[m];
    for (int s = 1; s < shares; s++)
      if (const Best& other = best_[s * tokens_ + m]; other.value > best.value) best = other;  // shares are in order
    next.mutable_data_ptr<int64_t>()[m] = best.place < vocabulary ? best.place : 0;
  }
  return next;
}

at::Tensor DecodeStep::run(const at::Tensor& ids, int64_t position, const Maybe& hidden) {
  start(ids, hidden);
  position_ = position;
  const int shares = shares_;
  plans_.clear();
  plan_of_.assign(stages_.size(), -1);
  std::vector<std::pair<int64_t, int64_t>> known;  // (window, heads) of plans
  int64_t pieces = 0;
  for (size_t i = 0; i < stages_.size(); i++) {
    TORCH_CHECK(!std::holds_alternative<Handed>(stages_[i]), "a step in parts begins with `begin`");
    const Attend* a = std::get_if<Attend>(&stages_[i]);
    if (!a) continue;
    const int64_t slot = *a->length.const_data_ptr<int64_t>();
    TORCH_CHECK(slot == position && position >= 0 && position + in_sequence() <= std::min(a->keys.size(2), a->cos.size(0)), "`position` (=",
                position, ") must be the number of positions in the cache (=", slot, "), which has room for ", a->keys.size(2));
    const std::pair<int64_t, int64_t> key{a->window, a->kv_heads};
    const auto found = std::find(known.begin(), known.end(), key);
    plan_of_[i] = int(found - known.begin());
    if (found != known.end()) continue;
    known.push_back(key);
    plans_.push_back(plan(*a, position, shares));
    pieces = std::max(pieces, int64_t(plans_.back().pieces.size()));
  }
  partial_.make(pieces * rows_ * stride_), tops_.make(pieces * rows_), totals_.make(pieces * rows_);
  for (auto& own : own_) own->weights.make(pieces);
  work_all(shares, 0, stages_.size());
  for (auto& stage : stages_)
    if (auto* a = std::get_if<Attend>(&stage)) *a->length.mutable_data_ptr<int64_t>() += in_sequence();
  return chosen(shares);
}

at::Tensor DecodeStep::begin(const at::Tensor& ids, const Maybe& hidden) {
  start(ids, hidden);
  at_ = 0;
  return go_on();
}

at::Tensor DecodeStep::go_on(const at::Tensor& attended) {
  TORCH_CHECK(at_ > 0 && at_ < stages_.size(), "`begin` comes first");
  const auto* p = std::get_if<Products>(&stages_[at_]);
  TORCH_CHECK(p && is_floats(attended, tokens_ * p->in), "`attended` ", attended.sizes(), " ", attended.scalar_type(), " does not fit");
  TORCH_CHECK(at::in_parallel_region() || shares_ == at::get_num_threads(), "the number of threads has changed within a step");
  attended_ = attended.const_data_ptr<float>();
  for (size_t i = 1; i < own_.size(); i++)  // another thread may have this number now
    std::memcpy(own_[i]->residual.data, own_[0]->residual.data, tokens_ * hidden_ * sizeof(float));
  return go_on();
}

// Runs the next layers, as many as there are lists: each appends the new keys and values to a compressed cache, and continues with the
// attention of its queries to this cache. tensors: cosines, sines, and for each part of a layer's heads k, v, starts, then for coded
// caches params_k, params_v, tail_k, tail_v. numbers: bits, group, whether keys and whether values are kept rotated, `page` and `most` of
// workbench::Sparse, then for each part the number of coded positions and of those behind them. sparse: bounds, pages, indices and
// lengths of each layer, if not all positions are read.
at::Tensor DecodeStep::attend_kept(const std::vector<std::vector<at::Tensor>>& tensors, const std::vector<std::vector<int64_t>>& numbers,
                                   const std::vector<Maybe>& sparse, const at::Tensor& positions) {
  TORCH_CHECK(!tensors.empty() && numbers.size() == tensors.size() && sparse.size() == 4 * tensors.size(), "attend_kept: ", tensors.size(),
              " layers, ", numbers.size(), " lists of numbers and ", sparse.size(), " of positions");
  at::Tensor next;
  for (size_t i = 0; i < tensors.size(); i++) next = attend_layer(tensors[i], numbers[i], &sparse[4 * i], positions);
  return next;
}

at::Tensor DecodeStep::attend_layer(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& numbers, const Maybe* lists,
                                    const at::Tensor& positions) {
  TORCH_CHECK(at_ > 0 && at_ < stages_.size(), "`begin` comes first");
  TORCH_CHECK(std::holds_alternative<Handed>(stages_[at_ - 1]), "the step does not stop here");
  Handed& handed = std::get<Handed>(stages_[at_ - 1]);
  Attend& a = handed.attention;
  const auto type = bfloat16_ ? at::kBFloat16 : at::kHalf;
  const int64_t D = a.channels, size = 2, bits = numbers.at(0), group = numbers.at(1), page = numbers.at(4), most = numbers.at(5);
  const bool turned_keys = numbers.at(2), turned_values = numbers.at(3);
  const size_t parts = (numbers.size() - 6) / 2, of_part = bits == 16 ? 3 : 7;
  TORCH_CHECK(tensors.size() == 2 + parts * of_part, "attend_kept: ", tensors.size(), " tensors are not those of ", parts, " parts");
  const at::Tensor &cos = tensors[0], &sin = tensors[1];
  TORCH_CHECK(cos.dim() == 2 && cos.is_contiguous() && sin.is_contiguous() && cos.scalar_type() == at::kFloat &&
                  sin.scalar_type() == at::kFloat && cos.sizes() == sin.sizes() && cos.size(1) % 2 == 0 && cos.size(1) <= D,
              "cosines ", cos.sizes(), " and sines ", sin.sizes(), " do not fit");
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.numel() == tokens_ && positions.is_contiguous(), "`positions` ",
              positions.sizes(), " must be ", tokens_, " numbers");
  const int64_t* at = positions.const_data_ptr<int64_t>();
  for (int64_t m = 0; m < tokens_; m++)
    TORCH_CHECK(at[m] >= 0 && at[m] < cos.size(0), "position ", at[m], " is none of the ", cos.size(0), " of the tables");
  a.cos = cos, a.sin = sin, a.turned = cos.size(1);
  const float* queries = buffers_[a.from].data;
  const float *keys = queries + tokens_ * a.heads * D, *values = keys + tokens_ * a.kv_heads * D;
  Own& own = *own_[0];
  const Change& rotation = changes_[handed.rotation];
  const auto put = [&](const float* x, bool turned, void* to) {  // D numbers, rounded to 16 bits
    if (turned) turn(own, rotation, D, false, x, own.x.data), x = own.x.data;
    between_.round_to(bfloat16_, x, D, own.bits.data, own.values.data);
    std::memcpy(to, own.bits.data, D * size);
  };
  const bool bounds = lists[0].has_value();
  workbench::Sparse sparse{lists[0], lists[1], page, most, lists[2], lists[3], {}, {}};
  if (bounds) sparse.keys = at::empty({tokens_, a.kv_heads, 1, D}, type);

  std::vector<workbench::KeptHeads> kept;
  int64_t first = 0;  // head of the part
  for (size_t i = 0; i < parts; i++) {
    const at::Tensor* t = &tensors[2 + i * of_part];
    const auto coded = [&](int j) { return bits == 16 ? Maybe() : Maybe(t[j]); };
    kept.push_back({t[0], t[1], coded(3), coded(4), coded(5), coded(6), t[2], numbers[6 + 2 * i], numbers[7 + 2 * i]});
    const auto& one = kept.back();
    const int64_t heads = one.k.size(1), place = one.more;
    for (int side = 0; side < 2; side++) {
      const at::Tensor& to = bits == 16 ? (side ? one.v : one.k) : (side ? *one.tail_v : *one.tail_k);
      TORCH_CHECK(to.dim() == 4 && to.size(0) == tokens_ && to.size(1) == heads && first + heads <= a.kv_heads && to.size(3) == D &&
                      to.stride(3) == 1 && to.scalar_type() == type && place < to.size(2), "the cache ", to.sizes(), " ", to.scalar_type(),
                  " has no place for position ", place, " of ", a.kv_heads, " heads of ", D, " channels");
      for (int64_t m = 0; m < tokens_; m++)
        for (int64_t h = 0; h < heads; h++) {
          const float* x = (side ? values : keys) + (m * a.kv_heads + first + h) * D;
          if (!side) head(own, a.key, a, x, at[m], first + h), x = own.x.data;
          if (!side && bounds)
            put(x, false, static_cast<char*>(sparse.keys.mutable_data_ptr()) + size * (m * a.kv_heads + first + h) * D);
          put(x, side ? turned_values : turned_keys,
              static_cast<char*>(to.mutable_data_ptr()) + size * (m * to.stride(0) + h * to.stride(1) + place * to.stride(2)));
        }
    }
    kept.back().more++;
    first += heads;
  }
  TORCH_CHECK(first == a.kv_heads, "the cache keeps ", first, " heads, and the decoder has ", a.kv_heads);
  const at::Tensor q = at::empty({tokens_, a.heads, 1, D}, type);
  sparse.queries = bounds && turned_keys ? at::empty_like(q) : q;
  for (int64_t i = 0; i < tokens_ * a.heads; i++) {
    head(own, a.query, a, queries + i * D, at[i / a.heads], i % a.heads);
    if (bounds || !turned_keys) put(own.x.data, false, static_cast<char*>(sparse.queries.mutable_data_ptr()) + size * i * D);
    if (turned_keys) put(own.x.data, true, static_cast<char*>(q.mutable_data_ptr()) + size * i * D);
  }
  const at::Tensor y = workbench::attend_kept(q, kept, sparse, bits, group, a.scale, a.softcap, isa_).to(at::kFloat);
  for (float* of = y.data_ptr<float>(); turned_values && of < y.data_ptr<float>() + y.numel(); of += D) turn(own, rotation, D, false, of, of);
  return go_on(y);
}

// Runs from the current stage to the next stop or the end.
at::Tensor DecodeStep::go_on() {
  const size_t begin = at_;
  while (at_ < stages_.size() && !std::holds_alternative<Handed>(stages_[at_])) {
    TORCH_CHECK(!std::holds_alternative<Attend>(stages_[at_]), "a step in parts attends to no cache of its own");
    at_++;
  }
  if (!seconds_.empty() && begin > 0) seconds_[begin - 1] += since(ended_);
  work_all(shares_, begin, at_);
  if (at_ == stages_.size()) return chosen(shares_);
  const Handed& handed = std::get<Handed>(stages_[at_++]);
  return at::from_blob(buffers_[handed.from].data, {handed.count}, at::kFloat);
}

// Input of the products before the current stop, [tokens, in], rounded.
at::Tensor DecodeStep::last_input() const { return at::from_blob(own_.at(0)->values.data, {tokens_, hidden_}, at::kFloat); }

#include "step_work.inc"

}  // namespace

TORCH_LIBRARY_FRAGMENT(workbench, m) {
  m.class_<DecodeStep>("DecodeStep")
      .def(torch::init<int64_t, int64_t, bool, std::string>())
      .def("weight", &DecodeStep::weight)
      .def("change", &DecodeStep::change)
      .def("changes", &DecodeStep::changes)
      .def("rotates", &DecodeStep::rotates)
      .def("embed", &DecodeStep::embed)
      .def("products", &DecodeStep::products)
      .def("experts", &DecodeStep::experts)
      .def("mixture", &DecodeStep::mixture)
      .def("attend", static_cast<void (DecodeStep::*)(std::vector<int64_t>, double, double, const at::Tensor&, const at::Tensor&,
                                                      const at::Tensor&, const at::Tensor&, const at::Tensor&, const Maybe&,
                                                      const Maybe&, double)>(&DecodeStep::attend))
      .def("hand_over", &DecodeStep::hand_over)
      .def("run", &DecodeStep::run)
      .def("begin", &DecodeStep::begin)
      .def("go_on", static_cast<at::Tensor (DecodeStep::*)(const at::Tensor&)>(&DecodeStep::go_on))
      .def("attend_kept", &DecodeStep::attend_kept)
      .def("last_input", &DecodeStep::last_input)
      .def("logits", &DecodeStep::logits)
      .def("time", &DecodeStep::time)
      .def("seconds", &DecodeStep::seconds);
}
