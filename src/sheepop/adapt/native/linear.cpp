// y = x W^T + b on a CPU for the few rows of x that writing text has, where the time goes into reading W.
//
// W (N, K) is float32 or bfloat16 here; `integers.cpp` has the integers. A row of y is the same to the last bit whatever
// the other rows of x are, and however many threads share the work.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t kPanel = 48;      // rows of W that stay in the cache while a block of x passes
constexpr int64_t kBlock = 64;      // rows of x that stay in the cache while a panel of W passes
constexpr int64_t kAhead = 1024;    // bytes to fetch before they are needed
constexpr int64_t kWork = 1 << 15;  // weights that are worth a thread

// Kinds of weights. `kStep` of them, at place k of row n, are multiplied by as many inputs at a time; a tile has `kRows`
// rows of weights and `kInputs` rows of inputs, or `kFewRows` and all inputs where these are fewer.

inline Floats wide(const float* weights) { return load<Floats>(weights); }
inline Floats wide(const uint16_t* bfloat16) {
  return reinterpret_cast<Floats>(__builtin_convertvector(load<HighBits>(bfloat16), FloatBits) << 16);
}

template <class T, int rows, int inputs, int few_rows>
struct Floating {
  static constexpr int kStep = kLanes, kRows = rows, kInputs = inputs, kFewRows = few_rows;
  const T* weights;
  const void* address(int64_t place) const { return weights + place; }
  Floats read(int64_t place) const { return wide(weights + place); }
};
using Float32 = Floating<float, 6, 2, 6>;
using BFloat16 = Floating<uint16_t, 3, 4, 4>;

template <class F>
struct Tiles {
  F weights;
  const float* inputs;  // (M, K)
  const float* bias;    // (N,), or null
  float* out;           // (M, N)
  int64_t M, K, N;

  // R rows of weights from n on, times B rows of inputs from m on.
  template <int R, int B>
  void tile(int64_t n, int64_t m) const {
    Floats totals[R][B] = {};
    for (int64_t k = 0; k < K; k += F::kStep) {
      if constexpr (R == 1) {
        __builtin_prefetch(static_cast<const char*>(weights.address(n * K + k)) + kAhead);
      } else if (m == 0) {
        for (int r = 0; r < R; r++) __builtin_prefetch(weights.address((n + R + r) * K + k));  // of the next tile
      }
      Floats w[R];
      for (int r = 0; r < R; r++) w[r] = weights.read((n + r) * K + k);
      for (int b = 0; b < B; b++)
        for (int r = 0; r < R; r++) totals[r][b] = multiply_add(totals[r][b], w[r], load<Floats>(inputs + (m + b) * K + k));
    }
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) out[(m + b) * N + n + r] = bias ? sum(totals[r][b]) + bias[n + r] : sum(totals[r][b]);
  }

  // R rows of weights, times the B inputs from m on or the last ones, where fewer are left.
  template <int R, int B>
  void upto(int64_t n, int64_t m) const {
    if constexpr (B > 1) {
      if (M - m < B) return upto<R, B - 1>(n, m);
    }
    tile<R, B>(n, m);
  }

  void part(int64_t begin, int64_t end) const {
    if (M < F::kInputs) {
      int64_t n = begin;
      for (; n + F::kFewRows <= end; n += F::kFewRows) upto<F::kFewRows, F::kInputs - 1>(n, 0);
      for (; n < end; n++) upto<1, F::kInputs - 1>(n, 0);
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
};

template <class T, class F>
void multiply_rows(const Linear& linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {
  const F weights{static_cast<const T*>(linear.weights)};
  Tiles<F>{weights, static_cast<const float*>(inputs), linear.bias, y, M, linear.K, linear.N}.part(begin, end);
}

}  // namespace

extern "C" {

void multiply_float32(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {
  multiply_rows<float, Float32>(*linear, inputs, y, M, begin, end);
}

void multiply_bfloat16(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {
  multiply_rows<uint16_t, BFloat16>(*linear, inputs, y, M, begin, end);
}

// y (M, N) = x W^T + b.
void run_linear(const Linear* linear, const float* x, float* y, int64_t M, int64_t threads) {
  thread_local std::vector<float> memory;
  const int64_t K = linear->K;
  if (linear->round) memory.resize(std::max<size_t>(memory.size(), rounded_floats(M, K)));
  float* rounded = memory.data();
  together(std::min(threads, 1 + linear->N * K / kWork), [&](Worker& worker) {
    if (linear->round) worker.share(M, [&](int64_t m) { linear->round(x + m * K, m, rounded, M, K); });
    multiply(worker, {{linear, linear->round ? static_cast<const void*>(rounded) : x, y}}, M, threads);
  });
}
}
