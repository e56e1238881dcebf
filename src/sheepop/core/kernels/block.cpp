// Transformer blocks for single tokens of many texts, on a CPU in float32: norms, projections, attention to blocks of
// keys and values, and feed-forward networks or mixtures of them, without a return to Python between them.
//
// Products, attention and its storage are function pointers, because each format of weights and keys has its own kernels.

#include <algorithm>
#include <optional>
#include <vector>

#include "attention.h"
#include "experts.h"

// The norms of a branch: of its input, of its output, and of the sum with the residual stream.
struct Branch {
  Norm before, after, sum;
};

struct Layer {
  Branch attention, feed_forward;
  Norm query, key;
  Linear q, k, v, o, gate, up, down;
  int64_t width, heads, kv_heads, key_width, value_width, parallel;
  Activation activation;
  double scale, cap, branch_scale;  // of scores, and of the output of a branch
  const float *slopes, *sinks;
  const Experts* experts;  // or null; then `gate`, `up` and `down` are those of the shared experts, or empty
};

// What an adapter adds to a product of a row x (K): scale B^T A x with A, B (rank, K or N). Without A it adds nothing.
struct Change {
  const float *down, *up;
  int64_t rank;
  double scale;
};

enum Place : int64_t { kQ, kK, kV, kO, kGate, kUp, kDown };

// The R tokens: the block and offset where each is stored, the tiles in which they attend (see attention.cpp), and their
// rotary angles, if any.
struct Tokens {
  int64_t count, num_tiles, block_size, table_width, window, angles;
  const int64_t *block, *offset, *table, *tiles;
  const float *cos, *sin;
};

// A layer and what it reads in a pass; `changes` are those of each row by place, or null.
struct Step {
  const Layer* layer;
  const Tokens* tokens;
  Stored keys, values;
  const Change* const* changes;
};

namespace {

constexpr int64_t kWork = 1 << 15;  // weights that are worth a thread

// Rotates pairs (i, i + count) by their angles.
void rotate(float* x, const float* cos, const float* sin, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const float one = x[i], other = x[i + count];
    x[i] = one * cos[i] - other * sin[i];
    x[i + count] = other * cos[i] + one * sin[i];
  }
}

// Memory of a pass: rows of R tokens each.
struct Buffers {
  float *normed, *q, *k, *v, *attended, *found, *hidden, *gate;
  float* rounded[3];  // inputs of products, in the forms that up to three different kinds of weights need
};

struct Block {
  const Layer& layer;
  const Tokens& tokens;
  const Stored &keys, &values;
  const Change* const* changes;
  Attend attend;
  Write write;
  const Buffers& at;
  const std::optional<Mixture>& mixture;
  int64_t threads;
  Worker& worker;

  // Prepares row r of x for products with these matrices; those that round in the same way share the result.
  template <class... Linears>
  void round(const float* x, int64_t r, const Linears&... linears) const {
    const Linear* all[] = {&linears...};
    for (int i = 0; i < static_cast<int>(sizeof...(linears)); i++)
      if (all[i]->round && shared(all, i) == i) all[i]->round(x + r * all[i]->K, r, at.rounded[i], tokens.count, all[i]->K);
  }

  static int shared(const Linear* const* all, int i) {
    return static_cast<int>(std::find_if(all, all + i, [&](auto* one) { return one->round == all[i]->round; }) - all);
  }

  // Multiplies x, whose rows are prepared, with these matrices.
  template <int count>
  void products(const float* x, const Linear* const (&all)[count], float* const (&to)[count]) const {
    Product found[count];
    for (int i = 0; i < count; i++)
      found[i] = {all[i], all[i]->round ? at.rounded[shared(all, i)] : x, to[i]};
    multiply(worker, found, tokens.count, threads);
  }

  // Adds to row r of a product y (R, N) of x (R, K) what the row's adapter adds.
  void change(int64_t r, Place place, const Linear& linear, const float* x, float* y) const {
    if (!changes || !changes[r] || !changes[r][place].down) return;
    const Change& found = changes[r][place];
    x += r * linear.K, y += r * linear.N;
    for (int64_t i = 0; i < found.rank; i++) {
      const float *row = found.down + i * linear.K, *column = found.up + i * linear.N;
      Floats totals = {};
      for (int64_t j = 0; j < linear.K; j += kLanes) totals += load<Floats>(x + j) * load<Floats>(row + j);
      const float low = found.scale * sum(totals);
      for (int64_t n = 0; n < linear.N; n++) y[n] += low * column[n];
    }
  }

  // Applies the norm before a branch, if any, to row r of x; returns the rows.
  const float* before(const Norm& norm, const float* x, int64_t r) const {
    if (norm.kind == kNone) return x;
    normalise(norm, x + r * layer.width, at.normed + r * layer.width);
    return at.normed;
  }

  // x += the scaled row r of the output of a branch, with the norms after it.
  void add(const Branch& branch, float* x, int64_t r) const {
    float *from = at.found + r * layer.width, *to = x + r * layer.width;
    const float factor = static_cast<float>(layer.branch_scale);
    if (branch.after.kind != kNone) normalise(branch.after, from, from);
    for (int64_t i = 0; i < layer.width; i++) to[i] += factor * from[i];
    if (branch.sum.kind != kNone) normalise(branch.sum, to, to);
  }

  // Normalises and rotates the heads of row r of queries or keys.
  void norm_and_rotate(const Norm& norm, float* x, int64_t heads, int64_t r) const {
    if (norm.kind != kNone)
      for (int64_t i = 0; i < heads * layer.key_width; i += norm.width) normalise(norm, x + i, x + i);
    const int64_t angle = r * tokens.angles;
    for (int64_t h = 0; tokens.angles && h < heads; h++)
      rotate(x + h * layer.key_width, tokens.cos + angle, tokens.sin + angle, tokens.angles);
  }

  void store_keys(int64_t r) const {
    norm_and_rotate(layer.query, at.q + r * layer.q.N, layer.heads, r);
    norm_and_rotate(layer.key, at.k + r * layer.k.N, layer.kv_heads, r);
    for (int64_t head = 0; head < layer.kv_heads; head++) {
      const int64_t entry = (tokens.block[r] * layer.kv_heads + head) * tokens.block_size + tokens.offset[r];
      write(keys.numbers, keys.scales, entry, at.k + r * layer.k.N + head * layer.key_width, layer.key_width);
      write(values.numbers, values.scales, entry, at.v + r * layer.v.N + head * layer.value_width, layer.value_width);
    }
  }

  void attend_to_keys() const {
    const Attention all{at.q, keys, values, tokens.table, tokens.tiles, at.attended, tokens.num_tiles, layer.heads,
                        layer.kv_heads, tokens.block_size, layer.key_width, layer.value_width, tokens.table_width,
                        tokens.window, static_cast<float>(layer.scale), static_cast<float>(layer.cap), layer.slopes,
                        layer.sinks};
    const int64_t items = tokens.num_tiles * layer.kv_heads, size = items_together(items, threads);
    worker.share((items + size - 1) / size,
                 [&](int64_t i) { attend(&all, i * size, std::min(items, (i + 1) * size), 1); });
  }

  template <class Work>
  void by_row(const Work& work) const {
    worker.share(tokens.count, work);
  }

  void run(const float* x, float* out) const {
    const float* input = layer.attention.before.kind == kNone ? x : at.normed;
    by_row([&](int64_t r) {
      std::copy_n(x + r * layer.width, layer.width, out + r * layer.width);
      round(before(layer.attention.before, x, r), r, layer.q, layer.k, layer.v);
    });
    products(input, {&layer.q, &layer.k, &layer.v}, {at.q, at.k, at.v});
    by_row([&](int64_t r) {
      change(r, kQ, layer.q, input, at.q);
      change(r, kK, layer.k, input, at.k);
      change(r, kV, layer.v, input, at.v);
      store_keys(r);
    });
    attend_to_keys();
    by_row([&](int64_t r) { round(at.attended, r, layer.o); });
    products(at.attended, {&layer.o}, {at.found});
    feed_forward(layer.parallel ? x : out, out);
  }

  // Adds the output of attention to `out`, and that of the feed-forward network for `x`.
  void feed_forward(const float* x, float* out) const {
    const int64_t width = layer.up.N;
    const float* input = layer.feed_forward.before.kind == kNone ? x : at.normed;
    by_row([&](int64_t r) {
      change(r, kO, layer.o, at.attended, at.found);
      add(layer.attention, out, r);
      round(before(layer.feed_forward.before, x, r), r, layer.up, layer.gate);
      if (mixture) mixture->enter(x, input, r);
    });
    products(input, {&layer.up, &layer.gate}, {at.hidden, at.gate});
    if (mixture) mixture->score(input);
    by_row([&](int64_t r) {
      change(r, kUp, layer.up, input, at.hidden);
      change(r, kGate, layer.gate, input, at.gate);
      activate(layer.activation, at.hidden + r * width, layer.gate.multiply ? at.gate + r * width : nullptr, width);
      round(at.hidden, r, layer.down);
      if (mixture) mixture->choose(r);
    });
    products(at.hidden, {&layer.down}, {at.found});
    if (mixture) mixture->run(input);
    by_row([&](int64_t r) {
      change(r, kDown, layer.down, at.hidden, at.found);
      if (mixture) mixture->add(input, at.found, r, layer.down.multiply);
      add(layer.feed_forward, out, r);
    });
  }
};

}  // namespace

extern "C" {

// out = the residual stream x (R, D) after the blocks of `count` steps, which have the same tokens and width.
void run_blocks(const Step* steps, int64_t count, const float* x, float* out, Attend attend, Write write, int64_t threads) {
  thread_local std::vector<float> memory;  // which grows to the needs of the largest pass and is reused
  thread_local Choices of_thread;
  Choices& choices = of_thread;  // this thread's, in all threads of the team
  const int64_t rows = steps->tokens->count, width = steps->layer->width;
  std::vector<size_t> widths, begins;  // of each buffer the numbers of a row, and its place in memory
  int64_t weights = 0;
  for (const Step* step = steps; step < steps + count; step++) {
    const Layer& layer = *step->layer;
    const Experts* experts = layer.experts;
    const int64_t rounded = rounded_floats(1, std::max({layer.width, layer.o.K, layer.up.N}));
    std::vector<int64_t> needed = {width,      layer.q.N,    layer.k.N, layer.v.N, layer.o.K, width,
                                   layer.up.N, layer.gate.N, rounded,   rounded,   rounded,   width};
    for (int64_t more : expert_widths(experts, width)) needed.push_back(more);
    widths.resize(needed.size());
    for (size_t i = 0; i < widths.size(); i++) widths[i] = std::max<size_t>(widths[i], needed[i]);
    weights = std::max(weights, width * (layer.q.N + layer.up.N + (experts ? experts->per_token * experts->up->N : 0)));
    if (experts) choices.reserve(rows * experts->per_token, experts->count);
  }
  size_t used = 0;
  for (size_t needed : widths) begins.push_back(used), used += (rows * needed + kLanes - 1) / kLanes * kLanes;
  memory.resize(std::max(memory.size(), used));
  auto at = [&](int i) { return memory.data() + begins[i]; };
  const Buffers buffers{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), {at(8), at(9), at(10)}};
  const ExpertBuffers of_experts{at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20)};
  float* const streams[] = {out, at(11)};
  together(std::min(threads, 1 + weights / kWork), [&](Worker& worker) {
    const float* from = x;
    for (int64_t i = 0; i < count; i++) {
      const Step& step = steps[i];
      const Layer& layer = *step.layer;
      float* to = streams[(count - 1 - i) % 2];
      std::optional<Mixture> mixture;
      if (layer.experts)
        mixture.emplace(Mixture{*layer.experts, of_experts, choices, layer.activation, rows, width, threads, worker});
      Block{layer, *step.tokens, step.keys, step.values, step.changes, attend, write, buffers, mixture, threads, worker}.run(
          from, to);
      from = to;
    }
  });
}
}
