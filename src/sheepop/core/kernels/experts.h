// Mixtures of experts: a router chooses a few feed-forward networks for each row, and their results are added up.
//
// A loop over experts has as many items as there may be at most, and what was chosen is read in items alone: a thread that
// comes late to a loop counts it like the others, while those may have overwritten the choices for the next block.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "rows.h"

struct Experts {
  Linear router;                   // (E, D), without its bias
  const Linear *gate, *up, *down;  // of each expert; `gate` may be null
  Norm router_norm, routed_norm;   // of the residual stream; without them the input is that of the shared experts
  Norm routed_output_norm, shared_output_norm;
  const float *router_bias, *balance, *factors;  // (E,); the first and the last may be null
  const float* shared_gate;                      // (D,), or null
  int64_t count, per_token, groups, groups_per_token, group_top, has_sigmoid, normalizes;
  double logit_scale, scale;
};

// The choices of R rows, k each, and their places in the order of the experts. A slot is an expert that some row chose.
struct Choices {
  std::vector<int64_t> experts, places;  // of each choice
  std::vector<float> weights;
  std::vector<int64_t> rows, slots;      // of each place
  std::vector<int64_t> chosen, begins;   // the expert of each slot, and its first place; after the last, their number
  std::vector<int64_t> next;             // the next place of each expert
  int64_t used = 0;                      // slots

  void reserve(int64_t count, int64_t num_experts) {
    for (auto* of_choices : {&experts, &places, &rows, &slots, &chosen, &begins}) of_choices->resize(count + 1);
    weights.resize(count);
    next.resize(num_experts);
  }

  // Sorts `count` choices by expert; those of an expert stay in the order of their rows.
  void sort(int64_t count, int64_t per_token, int64_t num_experts) {
    std::fill_n(next.begin(), num_experts, 0);
    for (int64_t i = 0; i < count; i++) next[experts[i]]++;
    int64_t place = 0;
    used = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
      const int64_t size = next[expert];
      if (size == 0) continue;
      std::fill_n(slots.begin() + place, size, used);
      chosen[used] = expert, begins[used++] = next[expert] = place;
      place += size;
    }
    begins[used] = place;
    for (int64_t i = 0; i < count; i++) {
      places[i] = next[experts[i]]++;
      rows[places[i]] = i / per_token;
    }
  }
};

// The `count` largest of `total` numbers, the largest first and of equal ones the first; NaN is the largest, as in PyTorch.
inline void choose_best(const float* numbers, int64_t total, int64_t count, int64_t* found) {
  const auto exceeds = [](float a, float b) { return a > b || (a != a && b == b); };
  for (int64_t i = 0, kept = 0; i < total; i++) {
    int64_t place = kept;
    while (place > 0 && exceeds(numbers[i], numbers[found[place - 1]])) place--;
    if (place == count) continue;
    kept = std::min(kept + 1, count);
    std::copy_backward(found + place, found + kept - 1, found + kept);
    found[place] = i;
  }
}

// Numbers that the buffers of a mixture, in the order of `ExpertBuffers`, need for each row.
inline std::array<int64_t, 9> expert_widths(const Experts* experts, int64_t width) {
  if (!experts) return {};
  const int64_t k = experts->per_token, inner = experts->up->N;
  const int64_t gathered = k * rounded_floats(1, std::max(width, inner)), own = experts->router_norm.kind == kNone ? 0 : width;
  const bool is_gated = experts->gate;
  return {own,
          own,
          experts->count,
          experts->router.round ? rounded_floats(1, width) : 0,
          gathered,
          is_gated && experts->gate->round != experts->up->round ? gathered : 0,
          k * inner,
          is_gated ? k * inner : 0,
          k * width};
}

struct ExpertBuffers {
  float *scored, *routed, *scores, *rounded, *gathered, *gathered_for_gate, *hidden, *gate, *results;
};

// A mixture and the R rows of a pass. Its steps are `enter` for each row, `score`, `choose` for each row, `run`, and `add`
// for each row.
struct Mixture {
  const Experts& experts;
  const ExpertBuffers& at;
  Choices& choices;
  Activation activation;
  int64_t rows, width, threads;
  Worker& worker;

  // Applies the own norms to row r of the stream, if there are any, and prepares the input of the router.
  void enter(const float* stream, const float* input, int64_t r) const {
    const int64_t begin = r * width;
    if (experts.router_norm.kind != kNone) {
      normalise(experts.router_norm, stream + begin, at.scored + begin);
      normalise(experts.routed_norm, stream + begin, at.routed + begin);
    }
    if (experts.router.round) experts.router.round(own(at.scored, input) + begin, r, at.rounded, rows, width);
  }

  const float* own(const float* normed, const float* input) const {
    return experts.router_norm.kind == kNone ? input : normed;
  }

  void score(const float* input) const {
    const void* inputs = experts.router.round ? at.rounded : own(at.scored, input);
    ::multiply(worker, {{&experts.router, inputs, at.scores}}, rows, threads);
  }

  // Chooses the experts of row r and their weights.
  void choose(int64_t r) const {
    thread_local std::vector<float> ranks;
    const int64_t count = experts.count, k = experts.per_token;
    float *scores = at.scores + r * count, *weights = choices.weights.data() + r * k;
    int64_t* const chosen = choices.experts.data() + r * k;
    ranks.resize(count);
    make_scores(scores);
    for (int64_t e = 0; e < count; e++) ranks[e] = scores[e] + experts.balance[e];
    if (experts.groups_per_token < experts.groups) keep_best_groups(ranks.data());
    choose_best(ranks.data(), count, k, chosen);
    float total = 0;
    for (int64_t j = 0; j < k; j++) total += scores[chosen[j]];
    for (int64_t j = 0; j < k; j++) {
      weights[j] = scores[chosen[j]];
      if (experts.normalizes) weights[j] /= total + 1e-20f;
      weights[j] *= static_cast<float>(experts.scale);
      if (experts.factors) weights[j] *= experts.factors[chosen[j]];
    }
  }

  // Turns products with the router into a softmax, or sigmoids.
  void make_scores(float* scores) const {
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t e = 0; e < experts.count; e++) {
      scores[e] *= static_cast<float>(experts.logit_scale);
      if (experts.router_bias) scores[e] += experts.router_bias[e];
      top = std::max(top, scores[e]);
    }
    double total = 0;
    for (int64_t e = 0; e < experts.count; e++) {
      scores[e] = experts.has_sigmoid ? 1.f / (1.f + std::exp(-scores[e])) : std::exp(scores[e] - top);
      total += scores[e];
    }
    for (int64_t e = 0; !experts.has_sigmoid && e < experts.count; e++) scores[e] /= static_cast<float>(total);
  }

  // Makes the ranks of the experts outside of the best groups -infinity.
  void keep_best_groups(float* ranks) const {
    const int64_t groups = experts.groups, size = experts.count / groups;
    std::vector<int64_t> best(std::max(experts.group_top, experts.groups_per_token));
    std::vector<float> of_groups(groups);
    for (int64_t group = 0; group < groups; group++) {
      choose_best(ranks + group * size, size, experts.group_top, best.data());
      for (int64_t j = 0; j < experts.group_top; j++) of_groups[group] += ranks[group * size + best[j]];
    }
    choose_best(of_groups.data(), groups, experts.groups_per_token, best.data());
    const auto end = best.begin() + experts.groups_per_token;
    for (int64_t group = 0; group < groups; group++)
      if (std::find(best.begin(), end, group) == end)
        std::fill_n(ranks + group * size, size, -std::numeric_limits<float>::infinity());
  }

  // Computes the chosen experts, each for all rows that chose it.
  void run(const float* input) const {
    const int64_t count = rows * experts.per_token, inner = experts.up->N;
    const float* from = own(at.routed, input);
    const bool is_gated = experts.gate, is_apart = is_gated && experts.gate->round != experts.up->round;
    worker.share(1, [&](int64_t) { choices.sort(count, experts.per_token, experts.count); });
    worker.share(count, [&](int64_t place) {
      const float* x = from + choices.rows[place] * width;
      prepare(*experts.up, x, place, at.gathered);
      if (is_apart) prepare(*experts.gate, x, place, at.gathered_for_gate);
    });
    const float* for_gate = is_apart ? at.gathered_for_gate : at.gathered;
    multiply({experts.up, at.gathered, at.hidden}, {is_gated ? experts.gate : nullptr, for_gate, at.gate});
    worker.share(count, [&](int64_t place) {
      float* hidden = at.hidden + place * inner;
      activate(activation, hidden, is_gated ? at.gate + place * inner : nullptr, inner);
      prepare(*experts.down, hidden, place, at.gathered);
    });
    multiply({experts.down, at.gathered, at.results}, {});
  }

  // Prepares the input x of a place for products with an expert; `one` is the matrix of any expert.
  void prepare(const Linear& one, const float* x, int64_t place, float* memory) const {
    const int64_t slot = choices.slots[place], begin = choices.begins[slot], M = choices.begins[slot + 1] - begin;
    float* to = memory + rounded_floats(begin, one.K);
    if (one.round) {
      one.round(x, place - begin, to, M, one.K);
    } else {
      std::copy_n(x, one.K, to + (place - begin) * one.K);
    }
  }

  // Multiplies with matrices of all chosen experts, which `linear` of a product has one after another, or is null.
  void multiply(const Product& one, const Product& other) const {
    const int64_t slots = std::min(rows * experts.per_token, experts.count), N = one.linear->N;
    const int64_t matrices = slots * (other.linear ? 2 : 1);
    const int64_t size = rows_together(matrices * N, threads), pieces = (N + size - 1) / size;
    const auto first = [&](int64_t owner) { return first_of(owner, pieces, worker.threads()); };
    const auto own = [&](int64_t owner) { return first(owner + 1) - first(owner); };
    worker.share_parts([&](int64_t owner) { return matrices * own(owner); }, [&](int64_t owner, int64_t item) {
      const int64_t matrix = item / own(owner), slot = matrix % slots, from = (first(owner) + item % own(owner)) * size;
      if (slot >= choices.used) return;
      const int64_t begin = choices.begins[slot], M = choices.begins[slot + 1] - begin;
      const Product& product = matrix < slots ? one : other;
      const Linear* linear = product.linear + choices.chosen[slot];
      const float* inputs = static_cast<const float*>(product.inputs) + rounded_floats(begin, linear->K);
      linear->multiply(linear, inputs, product.y + begin * N, M, from, std::min(N, from + size));
    });
  }

  // Adds to row r of what shared experts found the weighted sum of the others, in the order of the choices; without shared
  // experts it is the sum alone.
  void add(const float* input, float* found, int64_t r, bool has_shared) const {
    const int64_t* places = choices.places.data() + r * experts.per_token;
    const float* weights = choices.weights.data() + r * experts.per_token;
    float* sums = at.results + places[0] * width;
    for (int64_t i = 0; i < width; i++) sums[i] *= weights[0];
    for (int64_t j = 1; j < experts.per_token; j++)
      for (int64_t i = 0; i < width; i++) sums[i] += weights[j] * at.results[places[j] * width + i];
    if (experts.routed_output_norm.kind != kNone) normalise(experts.routed_output_norm, sums, sums);
    found += r * width, input += r * width;
    if (!has_shared) {
      std::copy_n(sums, width, found);
      return;
    }
    if (experts.shared_output_norm.kind != kNone) normalise(experts.shared_output_norm, found, found);
    float factor = 1;
    if (experts.shared_gate)
      factor /= 1.f + std::exp(-total(width, [&](int64_t i) { return input[i] * experts.shared_gate[i]; }));
    for (int64_t i = 0; i < width; i++) found[i] = sums[i] + factor * found[i];
  }
};
