// Attention of single tokens to keys and values that lie in blocks, on a CPU in float32.
//
// Token r attends from its place `last[r]` back to `first[r]`; place p of its text is entry p % S of block table[r][p / S].
// Keys and values are float32, or int8 with a scale for each head of a token.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t kWork = 1 << 14;  // numbers to read that are worth a thread

typedef int8_t FewBytes __attribute__((vector_size(kLanes)));

inline Floats read(const float* from) { return load<Floats>(from); }
inline Floats read(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load<FewBytes>(from), Floats);
#endif
}

// The products of `count` numbers of q with those of several keys, added up.
template <int keys, class T>
inline void dots(const float* q, const T* const* key, int64_t count, float* out) {
  Floats totals[keys] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats part = load<Floats>(q + i);
    for (int j = 0; j < keys; j++) totals[j] = multiply_add(totals[j], part, read(key[j] + i));
  }
  for (int j = 0; j < keys; j++) {
    out[j] = sum(totals[j]);
    for (int64_t rest = i; rest < count; rest++) out[j] += q[rest] * static_cast<float>(key[j][rest]);
  }
}

// Adds weights[j] times `width` vectors of each value, which stay in registers meanwhile.
template <int width, class T>
inline void add_values(float* out, const float* weights, const T* const* values, int64_t count) {
  Floats totals[width];
  for (int i = 0; i < width; i++) totals[i] = load<Floats>(out + i * kLanes);
  for (int64_t j = 0; j < count; j++) {
    const Floats weight = spread<Floats>(weights[j]);
    for (int i = 0; i < width; i++) totals[i] = multiply_add(totals[i], weight, read(values[j] + i * kLanes));
  }
  for (int i = 0; i < width; i++) store(out + i * kLanes, totals[i]);
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

template <class T>
struct Held {
  const T* numbers;     // (blocks, K, S, width)
  const float* scales;  // (blocks, K, S), or null
  int64_t width;
};

template <class T>
struct Attention {
  const float* queries;                 // (R, H, C)
  Held<T> keys, values;                 // widths C and D
  const int64_t *table, *first, *last;  // (R, M), (R,), (R,)
  float* out;                           // (R, H, D)
  int64_t R, H, K, S, M;
  float scale, cap;             // no cap where 0
  const float *slopes, *sinks;  // (H,) or null

  struct Memory {
    std::vector<float> scores, factors;
    std::vector<const T*> found;
  };

  // Where the keys or values of head k lie for the places that token r sees, and their scales.
  void find(const Held<T>& held, int64_t r, int64_t k, Memory& memory) const {
    memory.found.clear();
    memory.factors.clear();
    for (int64_t place = first[r]; place <= last[r];) {
      const int64_t begin = (table[r * M + place / S] * K + k) * S, end = std::min(last[r] + 1, (place / S + 1) * S);
      for (int64_t entry = begin + place % S; place < end; place++, entry++) {
        memory.found.push_back(held.numbers + entry * held.width);
        if (held.scales) memory.factors.push_back(held.scales[entry]);
      }
    }
  }

  // The query heads of token r that share key-value head k.
  void group(int64_t r, int64_t k, Memory& memory) const {
    const int64_t heads = H / K, head = r * H + k * heads, count = last[r] - first[r] + 1;
    const int64_t width = (count + kLanes - 1) / kLanes * kLanes;
    memory.scores.assign(heads * width, -std::numeric_limits<float>::infinity());
    find(keys, r, k, memory);
    for (int64_t g = 0; g < heads; g++) {
      float* scores = memory.scores.data() + g * width;
      const float* query = queries + (head + g) * keys.width;
      int64_t j = 0;
      for (; j + 4 <= count; j += 4) dots<4>(query, memory.found.data() + j, keys.width, scores + j);
      for (; j < count; j++) dots<1>(query, memory.found.data() + j, keys.width, scores + j);
      for (j = 0; j < count; j++) scores[j] *= keys.scales ? scale * memory.factors[j] : scale;
      if (cap > 0)
        for (j = 0; j < count; j++) scores[j] = cap * std::tanh(scores[j] / cap);
      if (slopes)
        for (j = 0; j < count; j++) scores[j] -= slopes[k * heads + g] * static_cast<float>(count - 1 - j);
      softmax(scores, width, sinks ? sinks + k * heads + g : nullptr);
    }
    find(values, r, k, memory);
    for (int64_t g = 0; g < heads; g++) {
      float* weights = memory.scores.data() + g * width;
      if (values.scales)
        for (int64_t j = 0; j < count; j++) weights[j] *= memory.factors[j];
      sum_values(out + (head + g) * values.width, weights, memory.found);
    }
  }

  void sum_values(float* to, const float* weights, std::vector<const T*>& found) const {
    const int64_t count = static_cast<int64_t>(found.size()), width = values.width;
    std::fill_n(to, width, 0.f);
    int64_t i = 0;
    auto skip = [&](int64_t by) {
      i += by;
      for (auto& value : found) value += by;
    };
    for (; i + 4 * kLanes <= width; skip(4 * kLanes)) add_values<4>(to + i, weights, found.data(), count);
    for (; i + kLanes <= width; skip(kLanes)) add_values<1>(to + i, weights, found.data(), count);
    for (; i < width; skip(1))
      for (int64_t j = 0; j < count; j++) to[i] += weights[j] * static_cast<float>(*found[j]);
    skip(-width);
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

template <class T>
void run(const Attention<T>& attention, int64_t threads) {
  const int64_t numbers = attention.S * (attention.keys.width + attention.values.width);
  share(attention.R * attention.K, 1 + kWork / numbers, threads, [&](int64_t begin, int64_t end) {
    typename Attention<T>::Memory memory;
    for (int64_t i = begin; i < end; i++) attention.group(i / attention.K, i % attention.K, memory);
  });
}

}  // namespace

extern "C" {

void attend_float32(const float* queries, const float* keys, const float* values, const void*, const void*,
                    const int64_t* table, const int64_t* first, const int64_t* last, float* out, int64_t R, int64_t H,
                    int64_t K, int64_t S, int64_t C, int64_t D, int64_t M, float scale, float cap, const float* slopes,
                    const float* sinks, int64_t threads) {
  run<float>({queries, {keys, nullptr, C}, {values, nullptr, D}, table, first, last, out, R, H, K, S, M, scale, cap,
              slopes, sinks},
             threads);
}

void attend_int8(const float* queries, const int8_t* keys, const int8_t* values, const float* key_scales,
                 const float* value_scales, const int64_t* table, const int64_t* first, const int64_t* last, float* out,
                 int64_t R, int64_t H, int64_t K, int64_t S, int64_t C, int64_t D, int64_t M, float scale, float cap,
                 const float* slopes, const float* sinks, int64_t threads) {
  run<int8_t>({queries, {keys, key_scales, C}, {values, value_scales, D}, table, first, last, out, R, H, K, S, M, scale,
               cap, slopes, sinks},
              threads);
}
}
