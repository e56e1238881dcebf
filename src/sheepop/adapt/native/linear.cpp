// y = x W^T + b on a CPU for the few rows of x that writing text has, where the time goes into reading W.
//
// W (N, K) is float32, bfloat16, int8 with a scale a row, or int4 with a scale for every 32 weights. Beside integers x is
// rounded to 16 bits a row, so that products of int8 are exact sums of integers. A row of y is the same to the last bit
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

constexpr int64_t kGroup = 32;      // int4 weights of one scale
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

inline Floats wide(const float* weights) { return load<Floats>(weights); }
inline Floats wide(const uint16_t* bfloat16) {
  return reinterpret_cast<Floats>(__builtin_convertvector(load<HighBits>(bfloat16), FloatBits) << 16);
}

template <class T, int rows, int inputs, int few_rows>
struct Floating {
  using Input = float;
  using Total = Floats;
  using Weights = Floats;
  static constexpr int kStep = kLanes, kRows = rows, kInputs = inputs, kFewRows = few_rows, kStreams = 1;
  static constexpr bool kFetches = true;
  const T* weights;
  const void* address(int64_t place) const { return weights + place; }
  Weights read(int64_t place) const { return wide(weights + place); }
  static Total add(Total total, Weights w, const Input* x) { return multiply_add(total, w, load<Floats>(x)); }
  float finish(Total total, int64_t) const { return sum(total); }
};
using Float32 = Floating<float, 6, 2, 6>;
using BFloat16 = Floating<uint16_t, 3, 4, 4>;

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

struct Int4 {
  using Input = int16_t;
  using Total = Floats8;
  struct Weights {
    Shorts low, high;
    Floats8 scale;
  };
  static constexpr int kStep = kGroup, kRows = 2, kInputs = 4, kFewRows = 4, kStreams = 1;
  static constexpr bool kFetches = false;
  const uint8_t* weights;  // of a group, byte i holds weight i in its lower half and weight i + 16 in its upper one
  const uint16_t* scales;  // (N, K / 32), bfloat16
  const void* address(int64_t place) const { return weights + place / 2; }
  Weights read(int64_t place) const {
    auto codes = load<Codes>(weights + place / 2);
    auto low = reinterpret_cast<Bytes>(codes << 4), high = reinterpret_cast<Bytes>(codes & 0xf0);  // 16 times as large
    return {__builtin_convertvector(low, Shorts), __builtin_convertvector(high, Shorts),
            spread<Floats8>(single(scales[place / kGroup]))};
  }
  static Total add(Total total, const Weights& w, const Input* x) {
    Ints products = add_pairs(add_pairs(Ints{}, w.low, load<Shorts>(x)), w.high, load<Shorts>(x + 16));
    return multiply_add(total, w.scale, __builtin_convertvector(products, Floats8));
  }
  float finish(Total total, int64_t) const { return sum(total) / 16; }
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

// Rows of x as 16-bit integers with a scale each, small enough that no total of products with int8 overflows.
struct Rounded {
  std::vector<int16_t> values;
  std::vector<float> scales;
  Rounded(const float* x, int64_t M, int64_t K, int64_t threads) : values(M * K), scales(M) {
    const float largest = static_cast<float>(std::min<int64_t>(32767, (int64_t{1} << 34) / (128 * K)));
    share(M, 1 + kWork / K, threads, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) {
        const float* row = x + m * K;
        float top = 0, spoiled = 0;  // NaN where a number is not finite, and then so are its products
        for (int64_t k = 0; k < K; k++) {
          top = std::max(top, std::abs(row[k]));
          spoiled += row[k] * 0;
        }
        scales[m] = top / largest + spoiled;
        if (std::isnan(spoiled)) continue;
        const float factor = top > 0 ? largest / top : 0;
        for (int64_t k = 0; k < K; k++) values[m * K + k] = static_cast<int16_t>(std::nearbyint(row[k] * factor));
      }
    });
  }
};

}  // namespace

extern "C" {

void linear_float32(const float* x, const float* w, const void*, const float* bias, float* y, int64_t M, int64_t K,
                    int64_t N, int64_t threads) {
  Product<Float32>{{w}, x, nullptr, bias, y, M, K, N}.run(threads);
}

void linear_bfloat16(const float* x, const uint16_t* w, const void*, const float* bias, float* y, int64_t M, int64_t K,
                     int64_t N, int64_t threads) {
  Product<BFloat16>{{w}, x, nullptr, bias, y, M, K, N}.run(threads);
}

void linear_int8(const float* x, const int8_t* w, const float* scales, const float* bias, float* y, int64_t M, int64_t K,
                 int64_t N, int64_t threads) {
  Rounded rounded(x, M, K, threads);
  Product<Int8>{{w, scales}, rounded.values.data(), rounded.scales.data(), bias, y, M, K, N}.run(threads);
}

void linear_int4(const float* x, const uint8_t* w, const uint16_t* scales, const float* bias, float* y, int64_t M,
                 int64_t K, int64_t N, int64_t threads) {
  Rounded rounded(x, M, K, threads);
  Product<Int4>{{w, scales}, rounded.values.data(), rounded.scales.data(), bias, y, M, K, N}.run(threads);
}
}
