// Attention of single tokens to keys and values that lie in blocks, on a CPU in float32.
//
// Token r attends from its place `last[r]` back to `first[r]`; place p of its text is entry p % S of block table[r][p / S].

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t kWork = 1 << 14;  // numbers to read that are worth a thread

inline float dot(const float* a, const float* b, int64_t count) {
  Floats total = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) total += load<Floats>(a + i) * load<Floats>(b + i);
  float rest = 0;
  for (; i < count; i++) rest += a[i] * b[i];
  return sum(total) + rest;
}

inline void add_times(float* to, float weight, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load<Floats>(to + i) + weight * load<Floats>(from + i));
  for (; i < count; i++) to[i] += weight * from[i];
}

// e^x for x <= 0: 2^n e^r with |r| <= ln 2 / 2, and a Taylor series for e^r whose error is below 2e-7.
inline Floats exponential(Floats x) {
  Floats scaled = x * 1.44269504f;
  Floats n = __builtin_convertvector(__builtin_convertvector(scaled - 0.5f, FloatBits), Floats);
  Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Floats e = 1.f + r * (1.f + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
  FloatBits bits = (__builtin_convertvector(n, FloatBits) + 127) << 23;
  return (x < -87.f) ? Floats{} : e * reinterpret_cast<Floats>(bits);
}

struct Attention {
  const float *queries;                  // (R, H, C)
  const float *keys, *values;            // (blocks, K, S, C) and (blocks, K, S, D)
  const int64_t *table, *first, *last;   // (R, M), (R,), (R,)
  float* out;                            // (R, H, D)
  int64_t R, H, K, S, C, D, M;
  float scale, cap;                      // no cap where 0
  const float *slopes, *sinks;           // (H,) or null

  int64_t entry(int64_t r, int64_t k, int64_t place) const { return (table[r * M + place / S] * K + k) * S + place % S; }

  // The query heads of token r that share key-value head k; `scores` has room for a row of each.
  void group(int64_t r, int64_t k, std::vector<float>& scores) const {
    const int64_t heads = H / K, head = r * H + k * heads, count = last[r] - first[r] + 1;
    const int64_t width = (count + kLanes - 1) / kLanes * kLanes;
    scores.assign(heads * width, -std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < count; j++) {
      const float* key = keys + entry(r, k, first[r] + j) * C;
      for (int64_t g = 0; g < heads; g++) {
        float score = dot(queries + (head + g) * C, key, C) * scale;
        if (cap > 0) score = cap * std::tanh(score / cap);
        if (slopes) score -= slopes[k * heads + g] * static_cast<float>(count - 1 - j);
        scores[g * width + j] = score;
      }
    }
    for (int64_t g = 0; g < heads; g++) {
      softmax(scores.data() + g * width, width, sinks ? sinks + k * heads + g : nullptr);
      std::fill_n(out + (head + g) * D, D, 0.f);
    }
    for (int64_t j = 0; j < count; j++) {
      const float* value = values + entry(r, k, first[r] + j) * D;
      for (int64_t g = 0; g < heads; g++) add_times(out + (head + g) * D, scores[g * width + j], value, D);
    }
  }

  // A sink is one more score, whose weight goes nowhere.
  static void softmax(float* scores, int64_t width, const float* sink) {
    float top = *std::max_element(scores, scores + width);
    if (sink) top = std::max(top, *sink);
    Floats total = {};
    for (int64_t j = 0; j < width; j += kLanes) {
      Floats weights = exponential(load<Floats>(scores + j) - top);
      store(scores + j, weights);
      total += weights;
    }
    const float inverse = 1.f / (sum(total) + (sink ? std::exp(*sink - top) : 0.f));
    for (int64_t j = 0; j < width; j++) scores[j] *= inverse;
  }
};

}  // namespace

extern "C" void attend(const float* queries, const float* keys, const float* values, const int64_t* table,
                       const int64_t* first, const int64_t* last, float* out, int64_t R, int64_t H, int64_t K, int64_t S,
                       int64_t C, int64_t D, int64_t M, float scale, float cap, const float* slopes, const float* sinks,
                       int64_t threads) {
  const Attention attention{queries, keys, values, table, first, last, out,   R,     H,
                            K,       S,    C,      D,     M,     scale, cap, slopes, sinks};
  share(R * K, 1 + kWork / (S * (C + D)), threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scores;
    for (int64_t i = begin; i < end; i++) attention.group(i / K, i % K, scores);
  });
}
