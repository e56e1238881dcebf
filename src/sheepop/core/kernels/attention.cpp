// Paged attention on a CPU in float32: tokens of a text attend in tiles, which read their keys and values once.
//
// A tile is (row, tokens, position, text): its token t is row `row + t` of the queries, at `position + t` of its text,
// and sees the last `window` positions up to its own. Position p is entry p % S of block table[text][p / S].
// Keys and values are float32, bfloat16 or float16, or of 8 bits with a scale for each head of a token.
//
// All sums of a token have the same order in every tile, so its result is the same to the last bit.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "numbers.h"

namespace {

constexpr int64_t kWork = 1 << 14;        // the fewest numbers to read that are worth a thread
constexpr int64_t kMostScores = 1 << 17;  // of a tile at a time, if it has more rows than
constexpr int64_t kLeastRows = 16;
constexpr int kQueries = kLanes / 4;  // whose products with four keys are as many as the lanes of a vector
constexpr int kRows = 4, kVectors = kLanes / 4;  // of sums of values in registers

// Fetches what is `ahead` bytes behind a number, or nothing.
struct Nothing {};
template <class N>
inline void fetch(const N* from, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead);
}
template <class N>
inline void fetch(const N*, Nothing) {}

// The sums of a query's products with four keys, each added up as `sum` does, for one query after another.
inline Floats sums_of_rows(const Floats (*totals)[4]) {
#ifdef __AVX512F__
  __m512 of_key[4];
  UNROLLED for (int j = 0; j < 4; j++) {
    const auto halves = [&](int r) {
      const __m512 a = totals[r][j], b = totals[r + 1][j];
      return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    };
    const __m512 a = halves(0), b = halves(2);
    of_key[j] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }
  const auto pairs = [](__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee); };
  const __m512 a = pairs(of_key[0], of_key[1]), b = pairs(of_key[2], of_key[3]);
  return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
#else
  return sums(totals[0], totals[1]);
#endif
}

// The dot products of adjacent queries with adjacent keys of `width` numbers.
template <int rows, int keys, class N, class Ahead>
__attribute__((always_inline)) inline void dots(const float* queries, int64_t next, const N* key, int64_t width,
                                                Ahead ahead, float* scores, int64_t line) {
  Floats totals[rows][keys];
  UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int j = 0; j < keys; j++) totals[r][j] = Floats{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats parts[keys];
    UNROLLED for (int j = 0; j < keys; j++) {
      fetch(key + j * width + i, ahead);
      parts[j] = read(key + j * width + i);
    }
    UNROLLED for (int r = 0; r < rows; r++) {
      const Floats query = load<Floats>(queries + r * next + i);
      UNROLLED for (int j = 0; j < keys; j++) totals[r][j] = multiply_add(totals[r][j], query, parts[j]);
    }
  }
  if constexpr (rows == 1 && keys == 8) {
    store(scores, sums(totals[0], totals[0] + 4));
  } else if constexpr (rows == kQueries && keys == 4) {
    const Floats found = sums_of_rows(totals);
    UNROLLED for (int r = 0; r < rows; r++)
      std::memcpy(scores + r * line, reinterpret_cast<const float*>(&found) + 4 * r, 16);
  } else {
    UNROLLED for (int r = 0; r < rows; r++)
      UNROLLED for (int j = 0; j < keys; j++) scores[r * line + j] = sum(totals[r][j]);
  }
  for (; i < width; i++)
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < keys; j++) scores[r * line + j] += queries[r * next + i] * widened(key[j * width + i]);
}

// Adds the values `begin` to `end` times their weights to adjacent rows, `vectors` vectors from `column` on.
template <int rows, int vectors, class N, class Ahead>
void add_values(float* out, int64_t next, const float* weights, int64_t line, const N* values, int64_t width, Ahead ahead,
                int64_t begin, int64_t end) {
  Floats totals[rows][vectors];
  UNROLLED for (int r = 0; r < rows; r++)
    UNROLLED for (int i = 0; i < vectors; i++) totals[r][i] = load<Floats>(out + r * next + i * kLanes);
  for (int64_t j = begin; j < end; j++) {
    Floats parts[vectors];
    UNROLLED for (int i = 0; i < vectors; i++) {
      fetch(values + j * width + i * kLanes, ahead);
      parts[i] = read(values + j * width + i * kLanes);
    }
    UNROLLED for (int r = 0; r < rows; r++) {
      const Floats weight = spread<Floats>(weights[r * line + j]);
      UNROLLED for (int i = 0; i < vectors; i++) totals[r][i] = multiply_add(totals[r][i], weight, parts[i]);
    }
  }
  UNROLLED for (int r = 0; r < rows; r++)
    UNROLLED for (int i = 0; i < vectors; i++) store(out + r * next + i * kLanes, totals[r][i]);
}

template <int rows, class N, class Ahead>
void add_values(float* out, int64_t next, const float* weights, int64_t line, const N* values, int64_t width, Ahead ahead,
                int64_t begin, int64_t end) {
  if (begin >= end) return;
  int64_t i = 0;
  if constexpr (rows == 1)
    for (; i + 8 * kLanes <= width; i += 8 * kLanes)
      add_values<rows, 8>(out + i, next, weights, line, values + i, width, ahead, begin, end);
  for (; i + kVectors * kLanes <= width; i += kVectors * kLanes)
    add_values<rows, kVectors>(out + i, next, weights, line, values + i, width, ahead, begin, end);
  for (; i + kLanes <= width; i += kLanes)
    add_values<rows, 1>(out + i, next, weights, line, values + i, width, ahead, begin, end);
  for (; i < width; i++)
    for (int r = 0; r < rows; r++)
      for (int64_t j = begin; j < end; j++) out[r * next + i] += weights[r * line + j] * widened(values[j * width + i]);
}

// Keys or values of type T.
template <class T>
struct Blocks {
  const T* numbers;     // (blocks, K, S, width)
  const float* scales;  // (blocks, K, S), or null
  int64_t width;

  Blocks(const Stored& of, int64_t size) : numbers(static_cast<T*>(of.numbers)), scales(of.scales), width(size) {}

  const T* at(int64_t entry) const { return numbers + entry * width; }

  // Calls `work` with `count` entries, which are widened first if many rows read them, and what it is to fetch ahead.
  template <class Work>
  void open(int64_t entry, int64_t count, bool many, int64_t ahead, float* memory, const Work& work) const {
    const T* from = at(entry);
    if constexpr (!std::is_same_v<T, float>) {
      if (many) {
        int64_t i = 0;
        for (; i + kLanes <= count * width; i += kLanes) {
          ::fetch(from + i, ahead);
          store(memory + i, read(from + i));
        }
        for (; i < count * width; i++) memory[i] = widened(from[i]);
        return work(static_cast<const float*>(memory), Nothing{});
      }
    }
    work(from, ahead);
  }
};

// The tiles, for any type of keys and values. An item is the query heads of a tile that share a key-value head; adjacent
// items are tiles of a text, which read the same keys, or heads of a single token, which are adjacent in memory.
struct Tiles : Attention {
  struct Item {
    const int64_t *tile, k;
  };

  Item at(int64_t item) const {
    const bool by_head = tiles[1] > 1;
    return {tiles + 4 * (by_head ? item % R : item / K), by_head ? item / R : item % K};
  }

  // The entry with which the first block begins that an item reads.
  int64_t first_entry(Item item) const {
    return (table[item.tile[3] * M + first_of(item.tile[2]) / S] * K + item.k) * S;
  }

  int64_t first_of(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t seen(const int64_t* tile) const { return tile[2] + tile[1] - first_of(tile[2]); }

  // Turns `count` scores into weights; returns what makes them sum to 1. A sink adds a score to the sum, but no value.
  float softmax(float* scores, int64_t count, int64_t head) const {
    const int64_t width = (count + kLanes - 1) / kLanes * kLanes;
    Floats top = spread<Floats>(-std::numeric_limits<float>::infinity()), total = {};
    for (int64_t j = 0; j < width; j += kLanes) {
      Floats found = scale * load<Floats>(scores + j);
      if (cap > 0) found = cap * tangent(found / cap);
      store(scores + j, found);
    }
    for (int64_t j = 0; slopes && j < count; j++) scores[j] -= slopes[head] * static_cast<float>(count - 1 - j);
    std::fill(scores + count, scores + width, -std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < width; j += kLanes) {
      const Floats found = load<Floats>(scores + j);
      top = found > top ? found : top;
    }
    float most = sinks ? sinks[head] : top[0];
    for (int i = 0; i < kLanes; i++) most = std::max(most, top[i]);
    for (int64_t j = 0; j < width; j += kLanes) {
      const Floats weights = exponential(load<Floats>(scores + j) - most);
      store(scores + j, weights);
      total += weights;
    }
    return 1.f / (sum(total) + (sinks ? std::exp(sinks[head] - most) : 0.f));
  }
};

// The heads of adjacent tokens that share key-value head k: row i is of token i / heads. Places count from the first
// block that they see on.
template <class T>
class Rows {
 public:
  Rows(const Tiles& of, int64_t row, int64_t tokens, int64_t position, const int64_t* blocks, int64_t k,
       std::vector<float>& memory)
      : of(of), keys(of.keys, of.C), values(of.values, of.D), blocks(blocks), S(of.S), k(k), heads(of.H / of.K),
        row(row), position(position), count(tokens * heads), begin(of.first_of(position) / S),
        end((position + tokens - 1) / S + 1),
        query_line(whole(keys.width)), out_line(whole(values.width)),
        // An odd number of vectors, so that rows are not in the same places of the cache.
        line((((end - begin) * S / kLanes + 2) | 1) * kLanes) {
    const int64_t widened = S * std::max(query_line, out_line);
    const int64_t needed = count * (query_line + out_line + line) + widened + kLanes;
    if (static_cast<int64_t>(memory.size()) < needed) memory.resize(needed);
    queries = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    out = queries + count * query_line, wide = out + count * out_line, scores = wide + widened;
  }

  // Meanwhile the first block of what is read next comes from memory: of the values, then of the keys from `later` on.
  void attend(int64_t later) const {
    for (int64_t i = 0; i < count; i++)
      std::copy_n(of.queries + head_of(i) * keys.width, keys.width, queries + i * query_line);
    by_block<kQueries>(keys, values.at(entry_of(begin)), [&](auto rows, auto... given) { score<rows>(given...); });
    std::fill_n(out, count * out_line, 0.f);
    for (int64_t i = 0; i < count; i++)  // the first number of a query, which is no longer needed
      queries[i * query_line] = of.softmax(scores + i * line + first(i), last(i) + 1 - first(i), k * heads + i % heads);
    by_block<kRows>(values, keys.at(later), [&](auto rows, auto... given) { add<rows>(given...); });
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < values.width; j++)
        of.out[head_of(i) * values.width + j] = out[i * out_line + j] * queries[i * query_line];
  }

 private:
  const Tiles& of;
  const Blocks<T> keys, values;
  const int64_t *blocks, S, k, heads, row, position, count, begin, end;  // `count` rows see blocks `begin` to `end`
  const int64_t query_line, out_line, line;  // from a row's query, output and scores to those of the next
  float *queries, *out, *scores, *wide;

  static int64_t whole(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }
  int64_t entry_of(int64_t block) const { return (blocks[block] * of.K + k) * S; }
  int64_t head_of(int64_t i) const { return (row + i / heads) * of.H + k * heads + i % heads; }
  int64_t first(int64_t i) const { return of.first_of(position + i / heads) - begin * S; }
  int64_t last(int64_t i) const { return position + i / heads - begin * S; }

  // Calls `work` for each block and adjacent rows from i on that see it; the block's numbers are from place `at` on. It
  // fetches the block after, for the last one what is at `last_next`.
  template <int together, class Work>
  void by_block(const Blocks<T>& stored, const T* last_next, const Work& work) const {
    for (int64_t block = begin, at = 0; block < end; block++, at += S) {
      const int64_t entry = entry_of(block), later = at + begin * S - position;
      const T* next = block + 1 < end ? stored.at(entry_of(block + 1)) : last_next;
      const int64_t from = heads * std::max<int64_t>(0, later);
      const int64_t to = of.window ? std::min(count, heads * (later + S + of.window - 1)) : count;
      const int64_t ahead = reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(stored.at(entry));
      stored.open(entry, S, to - from > together, ahead, wide, [&](auto* numbers, auto ahead) {
        auto some = [&](int64_t i, auto ahead) {
          if (i + together <= to) return work(std::integral_constant<int, together>{}, i, entry, numbers, at, ahead), together;
          return work(std::integral_constant<int, 1>{}, i, entry, numbers, at, ahead), 1;
        };
        for (int64_t i = from + some(from, ahead); i < to;) i += some(i, Nothing{});
      });
    }
  }

  // The scores of rows for a block; also of some places that they do not see, which nobody reads.
  template <int rows, class N, class Ahead>
  void score(int64_t i, int64_t entry, const N* numbers, int64_t at, Ahead ahead) const {
    const float* query = queries + i * query_line;
    float* to = scores + i * line + at;
    const int64_t stop = std::min(S, last(i + rows - 1) + 1 - at), width = keys.width;
    constexpr int together = rows == 1 ? 8 : 4;  // keys
    int64_t j = std::max<int64_t>(0, first(i) - at) / together * together;
    for (; j < stop && j + together <= S; j += together)
      dots<rows, together>(query, query_line, numbers + j * width, width, ahead, to + j, line);
    for (; j < stop; j++) dots<rows, 1>(query, query_line, numbers + j * width, width, ahead, to + j, line);
    for (int r = 0; keys.scales && r < rows; r++)
      for (j = 0; j < S; j++) to[r * line + j] *= keys.scales[entry + j];
  }

  // Adds the values of a block to rows, together those that all of them see.
  template <int rows, class N, class Ahead>
  void add(int64_t i, int64_t entry, const N* numbers, int64_t at, Ahead ahead) const {
    float *to = out + i * out_line, *weights = scores + i * line + at;
    for (int r = 0; values.scales && r < rows; r++)
      for (int64_t j = 0; j < S; j++) weights[r * line + j] *= values.scales[entry + j];
    auto inside = [&](int64_t place) { return std::clamp<int64_t>(place - at, 0, S); };
    const int64_t all = inside(first(i + rows - 1)), stop = std::max(all, inside(last(i) + 1));
    auto alone = [&](int r, int64_t from, int64_t until) {
      const int64_t end = std::min(until, inside(last(i + r) + 1));
      add_values<1>(to + r * out_line, out_line, weights + r * line, line, numbers, values.width, ahead, from, end);
    };
    for (int r = 0; r < rows; r++) alone(r, inside(first(i + r)), all);
    add_values<rows>(to, out_line, weights, line, numbers, values.width, ahead, all, stop);
    for (int r = 0; r < rows; r++) alone(r, stop, S);
  }
};

template <class T>
void attend(const Tiles& of, int64_t item, std::vector<float>& memory) {
  const auto [tile, k] = of.at(item);
  const int64_t heads = of.H / of.K;
  const int64_t most = std::max((kLeastRows + heads - 1) / heads, kMostScores / (heads * of.seen(tile)));
  const int64_t later = of.first_entry(of.at(std::min(item + 1, of.R * of.K - 1)));
  const int64_t* blocks = of.table + tile[3] * of.M;
  for (int64_t t = 0; t < tile[1]; t += most)
    Rows<T>(of, tile[0] + t, std::min(most, tile[1] - t), tile[2] + t, blocks, k, memory).attend(later);
}

// Computes the items `begin` to `end` of R * K, in threads that take one after another.
template <class T>
void run(const Tiles& of, int64_t begin, int64_t end, int64_t threads) {
  int64_t work = 0;
  for (int64_t i = 0; threads > 1 && i < of.R; i++) work += of.tiles[4 * i + 1] * of.seen(of.tiles + 4 * i);
  work *= of.K * (of.C + of.D);
  std::atomic<int64_t> next{begin};
  threads = std::clamp<int64_t>(work / kWork, 1, threads);
  const int64_t size = items_together(end - begin, threads);
  share(threads, 1, threads, [&](int64_t, int64_t) {
    thread_local std::vector<float> memory;
    for (int64_t from = next.fetch_add(size); from < end; from = next.fetch_add(size))
      for (int64_t i = from; i < std::min(end, from + size); i++) attend<T>(of, i, memory);
  });
}

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

#define FORMAT(name, T, largest)                                                                      \
  void attend_##name(const Attention* attention, int64_t begin, int64_t end, int64_t threads) {       \
    run<T>({*attention}, begin, end, threads);                                                        \
  }                                                                                                   \
  void write_##name(void* numbers, float* scales, int64_t entry, const float* x, int64_t width) {     \
    write(static_cast<T*>(numbers), scales, entry, x, width, largest);                                \
  }

extern "C" {

FORMAT(float32, float, 0)
FORMAT(bfloat16, BFloat16, 0)
FORMAT(float16, Float16, 0)
FORMAT(int8, int8_t, 127)
FORMAT(float8_e4m3fn, Float8, 448)
}
