// y = x W^T + b on a CPU for the few rows of x that writing text has, where the time goes into reading W.
//
// W (N, K) is int8 with a scale a row, or integers of 8 or 4 bits with a scale, and perhaps an offset, for every 16 or 32
// neighbours: weight = scale * code + offset. x is rounded, to 16 bits a row for rows with one scale and to 30 bits for
// groups, so that products within a row or a group are exact sums of integers. A row of y is the same to the last bit
// whatever the other rows of x are, and however many threads share the work.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "native.h"

namespace {

typedef int32_t Ints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t Codes __attribute__((vector_size(16)));

constexpr int64_t kPanel = 48;      // rows of W that stay in the cache while a block of x passes
constexpr int64_t kBlock = 64;      // rows of x that stay in the cache while a panel of W passes
constexpr int64_t kAhead = 1024;    // bytes to fetch before they are needed
constexpr int64_t kWork = 1 << 15;  // weights that are worth a thread

// total + the products of 16 pairs, two neighbours to each of 8 totals.
inline Ints add_pairs(Ints total, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return reinterpret_cast<Ints>(_mm256_dpwssd_epi32(
      reinterpret_cast<__m256i>(total), reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__AVX2__)
  return total +
         reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  for (int i = 0; i < 8; i++) total[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return total;
#endif
}

// Kinds of weights. `kStep` of them, at place k of row n, are multiplied by as many inputs at a time; a tile has `kRows`
// rows of weights and `kInputs` rows of inputs, or `kFewRows` and all inputs where these are fewer. Where sums are exact,
// `kStreams` neighbouring steps of a row may then be added apart. `kFetches` where reading takes longer than computing.

struct Int8 {
  using Input = int16_t;
  using Total = Ints;
  using Weights = Shorts;
  static constexpr int kStep = 16, kRows = 2, kInputs = 4, kFewRows = 1, kStreams = 4;
  static constexpr bool kFetches = true;
  const int8_t* weights;
  const float* scales;  // (N,)
  const void* address(int64_t place) const { return weights + place; }
  Weights read(int64_t place) const { return __builtin_convertvector(load<Bytes>(weights + place), Shorts); }
  static Total add(Total total, Weights w, const Input* x) { return add_pairs(total, w, load<Shorts>(x)); }
  float finish(Total total, int64_t n) const { return sum(__builtin_convertvector(total, Floats8)) * scales[n]; }
};

inline float number(float value) { return value; }
inline float number(uint16_t bfloat16) { return single(bfloat16); }

// A number of x times a power of two, an integer of 30 bits: of 16 neighbours first the upper parts, then the lower parts
// of 15 bits, then the sums of neighbouring pairs as floats.
struct Halved {
  int16_t parts[3];
};
constexpr int kLowBits = 15;

// The integers of a group and 16 of its inputs after another: total += scale * sum(codes * inputs) + offset * sum(inputs).
template <int parts, bool has_offset>
inline Floats8 add_group(Floats8 total, const Shorts* codes, Floats8 scale, Floats8 offset, const Halved* x) {
  Ints high = {}, low = {};
  Floats8 sums = {};
  for (int i = 0; i < parts; i++) {
    const auto* inputs = reinterpret_cast<const int16_t*>(x + 16 * i);
    high = add_pairs(high, codes[i], load<Shorts>(inputs));
    low = add_pairs(low, codes[i], load<Shorts>(inputs + 16));
    if (has_offset) sums += load<Floats8>(inputs + 32);
  }
  const Floats8 products = multiply_add(__builtin_convertvector(low, Floats8), __builtin_convertvector(high, Floats8),
                                        spread<Floats8>(1 << kLowBits));
  // The two parts of a group may nearly cancel out, which a large total would make less exact.
  return has_offset ? total + multiply_add(scale * products, offset, sums) : multiply_add(total, scale, products);
}

// Integers of 8 bits whose rows are divided into groups; offsets are null if there are none.
template <int group, bool has_offset>
struct Int8Groups {
  using Input = Halved;
  using Total = Floats8;
  static constexpr int kParts = group / 16;
  struct Weights {
    Shorts codes[kParts];
    Floats8 scale, offset;
  };
  static constexpr int kStep = group, kRows = 2, kInputs = 4, kFewRows = 4, kStreams = 1;
  static constexpr bool kFetches = true;
  const int8_t* weights;
  const float *scales, *offsets;  // (N, K / group)
  const void* address(int64_t place) const { return weights + place; }
  Weights read(int64_t place) const {
    Weights w;
    for (int i = 0; i < kParts; i++) w.codes[i] = __builtin_convertvector(load<Bytes>(weights + place + 16 * i), Shorts);
    w.scale = spread<Floats8>(scales[place / group]);
    if (has_offset) w.offset = spread<Floats8>(offsets[place / group]);
    return w;
  }
  static Total add(Total total, const Weights& w, const Input* x) {
    return add_group<kParts, has_offset>(total, w.codes, w.scale, w.offset, x);
  }
  float finish(Total total, int64_t) const { return sum(total); }
};

// Integers of 4 bits, from -8 to 7, or from 0 to 15 beside offsets. Of 32 neighbours, byte i holds weight i in its lower
// half and weight i + 16 in its upper one.
template <class Scale, int group, bool has_offset>
struct Int4Groups {
  using Input = Halved;
  using Total = Floats8;
  static constexpr int kPair = 32, kGroups = kPair / group;
  struct Weights {
    Shorts halves[2];
    Floats8 scales[kGroups], offsets[kGroups];
  };
  static constexpr int kStep = kPair, kRows = 2, kInputs = 4, kFewRows = 4, kStreams = 1;
  static constexpr bool kFetches = false;
  const uint8_t* weights;
  const Scale *scales, *offsets;  // (N, K / group)
  const void* address(int64_t place) const { return weights + place / 2; }
  Weights read(int64_t place) const {
    const auto codes = load<Codes>(weights + place / 2);
    // Signed codes are 16 times as large here.
    const auto low = has_offset ? codes & 15 : codes << 4, high = has_offset ? codes >> 4 : codes & 0xf0;
    Weights w;
    w.halves[0] = __builtin_convertvector(reinterpret_cast<Bytes>(low), Shorts);
    w.halves[1] = __builtin_convertvector(reinterpret_cast<Bytes>(high), Shorts);
    for (int g = 0; g < kGroups; g++) {
      w.scales[g] = spread<Floats8>(number(scales[place / group + g]));
      if (has_offset) w.offsets[g] = spread<Floats8>(number(offsets[place / group + g]));
    }
    return w;
  }
  static Total add(Total total, const Weights& w, const Input* x) {
    for (int g = 0; g < kGroups; g++)
      total = add_group<group / 16, has_offset>(total, w.halves + g * group / 16, w.scales[g], w.offsets[g], x + g * group);
    return total;
  }
  float finish(Total total, int64_t) const { return has_offset ? sum(total) : sum(total) / 16; }
};

template <class F>
struct Product {
  F weights;
  const typename F::Input* inputs;  // (M, K)
  const float* input_scales;        // (M,), or null
  const float* bias;                // (N,), or null
  float* out;                       // (M, N)
  int64_t M, K, N;

  // R rows of weights from n on, times B rows of inputs from m on.
  template <int R, int B, int streams = 1>
  void tile(int64_t n, int64_t m) const {
    typename F::Total totals[streams][R][B] = {};
    auto step = [&](auto& total, int64_t k) {
      typename F::Weights w[R];
      for (int r = 0; r < R; r++) w[r] = weights.read((n + r) * K + k);
      for (int b = 0; b < B; b++)
        for (int r = 0; r < R; r++) total[r][b] = F::add(total[r][b], w[r], inputs + (m + b) * K + k);
    };
    int64_t k = 0;
    for (; k + streams * F::kStep <= K; k += streams * F::kStep) {
      if constexpr (R == 1) {
        __builtin_prefetch(static_cast<const char*>(weights.address(n * K + k)) + kAhead);
      } else if (F::kFetches && m == 0) {
        for (int r = 0; r < R; r++) __builtin_prefetch(weights.address((n + R + r) * K + k));  // of the next tile
      }
      for (int s = 0; s < streams; s++) step(totals[s], k + s * F::kStep);
    }
    for (; k < K; k += F::kStep) step(totals[0], k);
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) {
        auto total = totals[0][r][b];
        for (int s = 1; s < streams; s++) total += totals[s][r][b];
        float value = weights.finish(total, n + r);
        if (input_scales) value *= input_scales[m + b];
        out[(m + b) * N + n + r] = bias ? value + bias[n + r] : value;
      }
  }

  // R rows of weights, times the B inputs from m on or the last ones, where fewer are left.
  template <int R, int B, int streams = 1>
  void upto(int64_t n, int64_t m) const {
    if constexpr (B > 1) {
      if (M - m < B) return upto<R, B - 1, streams>(n, m);
    }
    tile<R, B, streams>(n, m);
  }

  void part(int64_t begin, int64_t end) const {
    if (M < F::kInputs) {
      int64_t n = begin;
      for (; n + F::kFewRows <= end; n += F::kFewRows) upto<F::kFewRows, F::kInputs - 1, F::kStreams>(n, 0);
      for (; n < end; n++) upto<1, F::kInputs - 1, F::kStreams>(n, 0);
      return;
    }
    for (int64_t panel = begin; panel < end; panel += kPanel) {
      const int64_t last = std::min(end, panel + kPanel), whole = last - (last - panel) % F::kRows;
      auto across = [&](int64_t m) {
        for (int64_t n = panel; n < whole; n += F::kRows) upto<F::kRows, F::kInputs>(n, m);
        for (int64_t n = whole; n < last; n++) upto<1, F::kInputs>(n, m);
      };
      auto down = [&](auto rows, int64_t n, int64_t from, int64_t to) {
        for (int64_t m = from; m < to; m += F::kInputs) upto<rows, F::kInputs>(n, m);
      };
      // The side whose numbers a tile has fewer of is read more often, and stays in the nearest cache.
      if constexpr (F::kInputs > F::kRows) {
        for (int64_t m = 0; m < M; m += F::kInputs) across(m);
      } else {
        for (int64_t block = 0; block < M; block += kBlock) {
          const int64_t stop = std::min(M, block + kBlock);
          for (int64_t n = panel; n < whole; n += F::kRows) down(std::integral_constant<int, F::kRows>(), n, block, stop);
          for (int64_t n = whole; n < last; n++) down(std::integral_constant<int, 1>(), n, block, stop);
        }
      }
    }
  }

  void run(int64_t threads) const {
    share(N, 1 + kWork / K, threads, [&](int64_t begin, int64_t end) { part(begin, end); });
  }
};

// Calls `round(m, row, largest)`, which returns a scale, for each row of x (M, K); NaN is the scale of a row with a number
// that is not finite, so that all of its products are NaN.
template <class Round>
std::vector<float> rounded_rows(const float* x, int64_t M, int64_t K, int64_t threads, const Round& round) {
  std::vector<float> scales(M);
  share(M, 1 + kWork / K, threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      const float* row = x + m * K;
      float top = 0, spoiled = 0;
      for (int64_t k = 0; k < K; k++) {
        top = std::max(top, std::abs(row[k]));
        spoiled += row[k] * 0;
      }
      scales[m] = std::isnan(spoiled) ? spoiled : round(m, row, top);
    }
  });
  return scales;
}

// A product with a scale for each row of W; x becomes small enough that no total of products with int8 overflows.
void product_of_rows(const Int8& weights, const float* x, const float* bias, float* y, int64_t M, int64_t K, int64_t N,
                     int64_t threads) {
  const float largest = static_cast<float>(std::min<int64_t>(32767, (int64_t{1} << 34) / (128 * K)));
  std::vector<int16_t> values(M * K);
  const auto scales = rounded_rows(x, M, K, threads, [&](int64_t m, const float* row, float top) {
    const float factor = top > 0 ? largest / top : 0;
    for (int64_t k = 0; k < K; k++) values[m * K + k] = static_cast<int16_t>(std::nearbyint(row[k] * factor));
    return top / largest;
  });
  Product<Int8>{weights, values.data(), scales.data(), bias, y, M, K, N}.run(threads);
}

// A product with scales for groups; W = {weights, scales, offsets}.
template <class W>
void product_of_groups(const W& weights, const float* x, const float* bias, float* y, int64_t M, int64_t K, int64_t N,
                       int64_t threads) {
  std::vector<Halved> values(M * K);
  const auto scales = rounded_rows(x, M, K, threads, [&](int64_t m, const float* row, float top) {
    int exponent;  // of a power of two above all numbers
    std::frexp(top, &exponent);
    exponent = std::max(exponent, -90);
    const float factor = std::ldexp(1.f, 2 * kLowBits - 1 - exponent);
    for (int64_t k = 0; k < K; k += 16) {
      auto* parts = reinterpret_cast<int16_t*>(values.data() + m * K + k);
      int32_t integers[16];
      for (int i = 0; i < 16; i++) {
        integers[i] = static_cast<int32_t>(std::nearbyint(row[k + i] * factor));
        const int32_t high = (integers[i] + (1 << (kLowBits - 1))) >> kLowBits;
        parts[i] = static_cast<int16_t>(high);
        parts[16 + i] = static_cast<int16_t>(integers[i] - (high << kLowBits));
      }
      Floats8 sums;
      for (int i = 0; i < 8; i++) sums[i] = static_cast<float>(integers[2 * i] + integers[2 * i + 1]);
      store(parts + 32, sums);
    }
    return 1 / factor;
  });
  Product<W>{weights, values.data(), scales.data(), bias, y, M, K, N}.run(threads);
}

}  // namespace

// Arguments: x (M, K), the weights, their scales and offsets or null, bias (N,) or null, y (M, N), and the sizes.
#define LINEAR(name, W, S)                                                                                         \
  void linear_##name(const float* x, const W* w, const S* scales, const S* offsets, const float* bias, float* y, \
                     int64_t M, int64_t K, int64_t N, int64_t threads)

#define GROUPED(name, Groups, W, S)                                                     \
  LINEAR(name, W, S) {                                                                  \
    if (offsets)                                                                        \
      product_of_groups(Groups(true){w, scales, offsets}, x, bias, y, M, K, N, threads);  \
    else                                                                                \
      product_of_groups(Groups(false){w, scales, offsets}, x, bias, y, M, K, N, threads); \
  }

#define INT8_16(has_offset) Int8Groups<16, has_offset>
#define INT8_32(has_offset) Int8Groups<32, has_offset>
#define INT4_16(has_offset) Int4Groups<float, 16, has_offset>
#define INT4_32(has_offset) Int4Groups<float, 32, has_offset>
#define INT4_32_BFLOAT16(has_offset) Int4Groups<uint16_t, 32, has_offset>

extern "C" {

LINEAR(int8, int8_t, float) { product_of_rows({w, scales}, x, bias, y, M, K, N, threads); }

GROUPED(int8_16_float32, INT8_16, int8_t, float)
GROUPED(int8_32_float32, INT8_32, int8_t, float)
GROUPED(int4_16_float32, INT4_16, uint8_t, float)
GROUPED(int4_32_float32, INT4_32, uint8_t, float)
GROUPED(int4_32_bfloat16, INT4_32_BFLOAT16, uint8_t, uint16_t)
}
