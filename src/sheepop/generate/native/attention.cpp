// Paged attention of single tokens, on a CPU in float32.
//
// Token r attends to positions `first[r]` to `last[r]`; position p of its sequence is entry p % S of block
// table[r][p / S]. Keys and values are float32, bfloat16 or float16, or of 8 bits with a scale for each head of a token.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t kWork = 1 << 14;  // the fewest numbers to read that are worth a thread

// The dot products of q with several adjacent keys of `width` numbers.
template <int keys, class T>
inline void dots(const float* q, const T* key, int64_t width, float* out) {
  Floats totals[keys] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats part = load<Floats>(q + i);
    for (int j = 0; j < keys; j++) totals[j] = multiply_add(totals[j], part, read(key + j * width + i));
  }
  for (int j = 0; j < keys; j++) {
    out[j] = sum(totals[j]);
    for (int64_t rest = i; rest < width; rest++) out[j] += q[rest] * widened(key[j * width + rest]);
  }
}

// Adds weights[j] times `vectors` vectors of each value j; the sums stay in registers.
template <int vectors, class T>
inline void add_values(float* out, const float* weights, const T* values, int64_t width, int64_t count) {
  Floats totals[vectors];
  for (int i = 0; i < vectors; i++) totals[i] = load<Floats>(out + i * kLanes);
  for (int64_t j = 0; j < count; j++) {
    const Floats weight = spread<Floats>(weights[j]);
    for (int i = 0; i < vectors; i++) totals[i] = multiply_add(totals[i], weight, read(values + j * width + i * kLanes));
  }
  for (int i = 0; i < vectors; i++) store(out + i * kLanes, totals[i]);
}

template <class T>
struct Stored {
  const T* numbers;     // (blocks, K, S, width)
  const float* scales;  // (blocks, K, S), or null
  int64_t width;
};

template <class T>
struct Attention {
  const float* queries;                 // (R, H, C)
  Stored<T> keys, values;                 // widths C and D
  const int64_t *table, *first, *last;  // (R, M), (R,), (R,)
  float* out;                           // (R, H, D)
  int64_t R, H, K, S, M;
  float scale, cap;             // 0 means no cap
  const float *slopes, *sinks;  // (H,) or null

  // Calls `work(entry, j, count, ahead)` for each block that token r sees: its `count` entries of head k from `entry` on
  // are keys j, j + 1, ... of the token. `ahead` is the entry after them, to prefetch.
  template <class Work>
  void by_block(int64_t r, int64_t k, const Work& work) const {
    auto entry = [&](int64_t position) { return (table[r * M + position / S] * K + k) * S + position % S; };
    for (int64_t position = first[r]; position <= last[r];) {
      const int64_t count = std::min(last[r] + 1 - position, S - position % S);
      work(entry(position), position - first[r], count, entry(std::min(last[r], position + count)));
      position += count;
    }
  }

  static void fetch(const Stored<T>& stored, int64_t entry, int64_t count) {
    auto from = reinterpret_cast<const char*>(stored.numbers + entry * stored.width);
    for (int64_t i = 0; i < count * stored.width * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(from + i);
  }

  // Attends with the query heads of token r that share key-value head k.
  void group(int64_t r, int64_t k, std::vector<float>& memory) const {
    const int64_t heads = H / K, head = r * H + k * heads, count = last[r] - first[r] + 1;
    const int64_t width = (count + kLanes - 1) / kLanes * kLanes;
    memory.assign(heads * width, -std::numeric_limits<float>::infinity());
    by_block(r, k, [&](int64_t entry, int64_t begin, int64_t several, int64_t ahead) {
      for (int64_t g = 0; g < heads; g++) {
        const float* query = queries + (head + g) * keys.width;
        const T* key = keys.numbers + entry * keys.width;
        float* scores = memory.data() + g * width + begin;
        int64_t j = 0;
        for (; j + 4 <= several; j += 4) {
          if (g == 0) fetch(keys, ahead + j, 4);
          dots<4>(query, key + j * keys.width, keys.width, scores + j);
        }
        for (; j < several; j++) dots<1>(query, key + j * keys.width, keys.width, scores + j);
        for (j = 0; j < several; j++) scores[j] *= keys.scales ? scale * keys.scales[entry + j] : scale;
      }
    });
    fetch(values, (table[r * M + first[r] / S] * K + k) * S + first[r] % S, S);
    for (int64_t g = 0; g < heads; g++) weigh(memory.data() + g * width, width, count, k * heads + g);
    std::fill_n(out + head * values.width, heads * values.width, 0.f);
    by_block(r, k, [&](int64_t entry, int64_t begin, int64_t several, int64_t ahead) {
      fetch(values, ahead, S);
      for (int64_t g = 0; g < heads; g++) {
        float* weights = memory.data() + g * width + begin;
        for (int64_t j = 0; values.scales && j < several; j++) weights[j] *= values.scales[entry + j];
        sum_values(out + (head + g) * values.width, weights, values.numbers + entry * values.width, several);
      }
    });
  }

  void weigh(float* scores, int64_t width, int64_t count, int64_t head) const {
    for (int64_t j = 0; cap > 0 && j < count; j++) scores[j] = cap * std::tanh(scores[j] / cap);
    for (int64_t j = 0; slopes && j < count; j++) scores[j] -= slopes[head] * static_cast<float>(count - 1 - j);
    softmax(scores, width, sinks ? sinks + head : nullptr);
  }

  void sum_values(float* to, const float* weights, const T* from, int64_t count) const {
    const int64_t width = values.width;
    int64_t i = 0;
    for (; i + 8 * kLanes <= width; i += 8 * kLanes) add_values<8>(to + i, weights, from + i, width, count);
    for (; i + kLanes <= width; i += kLanes) add_values<1>(to + i, weights, from + i, width, count);
    for (; i < width; i++)
      for (int64_t j = 0; j < count; j++) to[i] += weights[j] * widened(from[j * width + i]);
  }

  // A sink adds a score to the sum, but no value.
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

// Computes the pairs `begin` to `end` of a token and a key-value head.
template <class T>
void run(const Attention<T>& attention, int64_t begin, int64_t end, int64_t threads) {
  const int64_t numbers = attention.S * (attention.keys.width + attention.values.width);
  share(end - begin, 1 + kWork / numbers, threads, [&](int64_t from, int64_t to) {
    std::vector<float> memory;
    for (int64_t i = begin + from; i < begin + to; i++) attention.group(i / attention.K, i % attention.K, memory);
  });
}

// Stores the key or value of a head of a token as entry `entry`.
// If numbers of 8 bits have `largest`, a head whose numbers are not all finite gets a scale that is not.
template <class T>
void write(T* numbers, float* scales, int64_t entry, const float* x, int64_t width, float largest) {
  float top = std::numeric_limits<float>::min(), scale = 1.f;
  if (largest > 0) {
    for (int64_t i = 0; i < width; i++) top = x[i] == x[i] ? std::max(top, std::abs(x[i])) : x[i];
    scale = scales[entry] = top / largest;
  }
  for (int64_t i = 0; i < width; i++) narrow(std::isfinite(top) ? x[i] / scale : 1.f, numbers + entry * width + i);
}

}  // namespace

#define FORMAT(name, T, largest)                                                                                     \
  void attend_##name(const float* queries, const T* keys, const T* values, const float* key_scales,                 \
                     const float* value_scales, const int64_t* table, const int64_t* first, const int64_t* last,    \
                     float* out, int64_t R, int64_t H, int64_t K, int64_t S, int64_t C, int64_t D, int64_t M,       \
                     float scale, float cap, const float* slopes, const float* sinks, int64_t begin, int64_t end,   \
                     int64_t threads) {                                                                             \
    run<T>({queries, {keys, key_scales, C}, {values, value_scales, D}, table, first, last, out, R, H, K, S, M, scale, \
            cap, slopes, sinks},                                                                                    \
           begin, end, threads);                                                                                    \
  }                                                                                                                 \
  void write_##name(T* numbers, float* scales, int64_t entry, const float* x, int64_t width) {                      \
    write(numbers, scales, entry, x, width, largest);                                                               \
  }

extern "C" {

FORMAT(float32, float, 0)
FORMAT(bfloat16, BFloat16, 0)
FORMAT(float16, Float16, 0)
FORMAT(int8, int8_t, 127)
FORMAT(float8_e4m3fn, Float8, 448)
}
