// y = x W^T + b on a CPU for the few rows of x that writing text has, where the time goes into reading W.
//
// W (N, K) is float32, bfloat16 or float16. Its numbers are exact in float32, in which the sums are computed. A row of y
// is the same to the last bit whatever the other rows of x are, and however many threads share the work.

#include <algorithm>

#include "numbers.h"

namespace {

constexpr int64_t kPanel = 48;                      // rows of W that stay in the cache while x passes
constexpr int64_t kWork = 1 << 15;                  // weights that are worth a thread
constexpr int kTotals = kLanes == 16 ? 24 : 12;     // as many as a processor has registers for
constexpr int kInputs = kLanes == 16 ? 8 : 4;       // rows of x at a time
constexpr int kRows = 8;                            // of W at a time, at most

template <class T>
struct Product {
  const T* weights;   // (N, K)
  const float* x;     // (M, K)
  const float* bias;  // (N,), or null
  float* y;           // (M, N)
  int64_t M, K, N;

  // R rows of weights from n on, times B rows of x from m on.
  template <int R, int B>
  void tile(int64_t n, int64_t m) const {
    Floats totals[R][B] = {};
    const T* row = weights + n * K;
    for (int64_t k = 0; k < K; k += kLanes) {
      Floats w[R];
      for (int r = 0; r < R; r++) {
        w[r] = read(row + r * K + k);
        __builtin_prefetch(row + (R + r) * K + k);  // of the next tile
      }
      for (int b = 0; b < B; b++) {
        const Floats part = load<Floats>(x + (m + b) * K + k);
        for (int r = 0; r < R; r++) totals[r][b] = multiply_add(totals[r][b], part, w[r]);
      }
    }
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) {
        const float value = sum(totals[r][b]);
        y[(m + b) * N + n + r] = bias ? value + bias[n + r] : value;
      }
  }

  // The rows of weights from `begin` to `end`, times B rows of x from m on.
  template <int B>
  void across(int64_t begin, int64_t end, int64_t m) const {
    if constexpr (B > 1) {
      if (M - m < B) return across<B - 1>(begin, end, m);
    }
    constexpr int R = std::min(kRows, kTotals / B);
    int64_t n = begin;
    for (; n + R <= end; n += R) tile<R, B>(n, m);
    for (; n < end; n++) tile<1, B>(n, m);
  }

  void part(int64_t begin, int64_t end) const {
    for (int64_t panel = begin; panel < end; panel += kPanel)
      for (int64_t m = 0; m < M; m += kInputs) across<kInputs>(panel, std::min(end, panel + kPanel), m);
  }

  void run(int64_t threads) const {
    share(N, 1 + kWork / K, threads, [&](int64_t begin, int64_t end) { part(begin, end); });
  }
};

}  // namespace

// Arguments: x (M, K), the weights, two pointers that are null, bias (N,) or null, y (M, N), and the sizes.
#define LINEAR(name, T)                                                                                            \
  void linear_##name(const float* x, const T* weights, const void*, const void*, const float* bias, float* y, int64_t M, \
                     int64_t K, int64_t N, int64_t threads) {                                                      \
    Product<T>{weights, x, bias, y, M, K, N}.run(threads);                                                         \
  }

extern "C" {

LINEAR(float32, float)
LINEAR(bfloat16, BFloat16)
LINEAR(float16, Float16)
}
