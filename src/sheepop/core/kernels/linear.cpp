// y = x W^T + b on a CPU: for the few rows of x that writing text has, where the time goes into reading W, and for the many
// of a prompt, where it goes into arithmetic.
//
// W (N, K) is float32, bfloat16 or float16 here, whose numbers are exact in float32, in which the sums are computed;
// `integers.cpp` has the integers. A row of y is the same to the last bit whatever the other rows of x are, and however
// many threads share the work. With AMX, many rows of x meet bfloat16 as sums of three bfloat16, which is exact, but
// summed in another order. `rounded` kernels round x to bfloat16, too.

#include <algorithm>
#include <vector>

#include "amx.h"
#include "numbers.h"

namespace {

constexpr int64_t kPanel = 48;                   // rows of W that stay in the cache while x passes
constexpr int64_t kWork = 1 << 15;               // weights that are worth a thread
constexpr int kTotals = kLanes == 16 ? 24 : 12;  // as many as a processor has registers for
constexpr int kRows = 8;                         // of W at a time, at most
constexpr int64_t kAhead = 24 << 10;             // bytes that are on their way from memory

// Weights of a type that meet inputs in float32.
template <class T>
struct Exact {
  using Weight = T;
  using Input = float;
  static constexpr int kStep = kLanes;                   // columns that meet at once
  static constexpr int kInputs = kLanes == 16 ? 6 : 4;  // rows of x at a time
  static Floats weights(const T* from) { return read(from); }
  static Floats inputs(const float* from) { return load<Floats>(from); }
  static Floats add(Floats total, Floats input, Floats weight) { return multiply_add(total, input, weight); }
};

#ifdef __AVX512BF16__

// Weights and inputs in bfloat16; a lane adds the products of two adjacent columns at once.
struct Rounded {
  using Weight = BFloat16;
  using Input = BFloat16;
  static constexpr int kStep = 2 * kLanes, kInputs = 8;
  static __m512bh weights(const BFloat16* from) { return load<__m512bh>(from); }
  static __m512bh inputs(const BFloat16* from) { return load<__m512bh>(from); }
  static Floats add(Floats total, __m512bh input, __m512bh weight) { return _mm512_dpbf16_ps(total, input, weight); }
};

#endif

template <class Numbers>
struct Tiles {
  using T = typename Numbers::Weight;
  using Input = typename Numbers::Input;
  static constexpr int kInputs = Numbers::kInputs, kStep = Numbers::kStep;
  const T* weights;     // (N, K)
  const Input* inputs;  // (M, K)
  const float* bias;    // (N,), or null
  float* out;           // (M, N)
  int64_t M, K, N;

  // R rows of weights from n on, times B rows of inputs from m on.
  template <int R, int B>
  void tile(int64_t n, int64_t m) const {
    Floats totals[R * B];
    UNROLLED for (int i = 0; i < R * B; i++) totals[i] = Floats{};
    constexpr int64_t kBytes = R * kStep * sizeof(T);  // of weights in a step
    const int64_t size = R * K;
    // A later tile, which is fetched in the order of memory.
    const T *row = weights + n * K, *later = row + size * (1 + kAhead / (size * sizeof(T)));
    for (int64_t k = 0; k < K; k += kStep, later += R * kStep) {
      decltype(Numbers::weights(row)) w[R];
      UNROLLED for (int r = 0; r < R; r++) w[r] = Numbers::weights(row + r * K + k);
      for (int64_t i = 0; R > 1 && i < kBytes; i += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(later) + i, 0, 2);
      UNROLLED for (int b = 0; b < B; b++) {
        const auto part = Numbers::inputs(inputs + (m + b) * K + k);
        UNROLLED for (int r = 0; r < R; r++) totals[r * B + b] = Numbers::add(totals[r * B + b], part, w[r]);
      }
    }
    float found[R * B];
    UNROLLED for (int i = 0; i + 8 <= R * B; i += 8) store(found + i, sums(totals + i, totals + i + 4));
    UNROLLED for (int i = R * B / 8 * 8; i < R * B; i++) found[i] = sum(totals[i]);
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) out[(m + b) * N + n + r] = bias ? found[r * B + b] + bias[n + r] : found[r * B + b];
  }

  // The rows of weights from `begin` to `end`, times B rows of inputs from m on, or the last ones where fewer are left.
  template <int B>
  void across(int64_t begin, int64_t end, int64_t m) const {
    if constexpr (B > 1) {
      if (M - m < B) return across<B - 1>(begin, end, m);
    }
    // A processor fetches a single stream ahead by itself, faster than if it is told where several go on.
    constexpr int R = B == 1 ? 1 : std::min(kRows, kTotals / B);
    int64_t n = begin;
    for (; n + R <= end; n += R) tile<R, B>(n, m);
    for (; n < end; n++) tile<1, B>(n, m);
  }

  void multiply(int64_t begin, int64_t end) const {
    for (int64_t panel = begin; panel < end; panel += kPanel)
      for (int64_t m = 0; m < M; m += kInputs) across<kInputs>(panel, std::min(end, panel + kPanel), m);
  }
};

#ifdef __AMX_BF16__

// Rows of x (M, K) as three planes of bfloat16 that add up to x: each has the next 8 bits. Columns beyond K are 0.
struct Planes {
  static constexpr int64_t kColumns = kTileBytes / 2;  // of a tile
  char* memory;
  int64_t M, K, width = (K + kColumns - 1) / kColumns * kColumns;
  TileOrder order{3, M, 2 * width};

  char* at(int64_t part, int64_t m, int64_t k) const { return memory + order.place(part, m, 2 * k); }

  void split(const float* x, int64_t m) const {
    for (int64_t k = 0; k < width; k += kLanes) {
      Floats rest = k < K ? load<Floats>(x + k) : Floats{};
      for (int part = 0; part < 3; part++) {
        const FloatBits upper = reinterpret_cast<FloatBits>(rest) & static_cast<int32_t>(0xffff0000);
        store(at(part, m, k), __builtin_convertvector(upper >> 16, HighBits));
        rest -= reinterpret_cast<Floats>(upper);
      }
    }
  }
};

// Rows `begin` to `end` of W times all rows of x.
class Products {
 public:
  Products(const Linear& linear, const Planes& inputs, float* y)
      : weights_(static_cast<const uint16_t*>(linear.weights)), bias_(linear.bias), inputs_(inputs), y_(y), N_(linear.N) {}

  void multiply(int64_t begin, int64_t end) {
    thread_local std::vector<uint32_t> arranged;
    arranged.resize(kTileBytes + kTiles * kTileRows * inputs_.width / 2);
    uint32_t* pairs = aligned(arranged.data());
    int64_t shaped = 0;
    for (int64_t n = begin; n < end; n += kTiles * kTileRows) {
      const int64_t rows = std::min(end - n, kTiles * kTileRows);
      arrange(n, rows, pairs);
      for (int64_t m = 0; m < inputs_.M; m += kTileRows) {
        shape_tiles(inputs_.order.rows(m), shaped);
        multiply_tile(n, rows, m, pairs);
      }
    }
    _tile_release();
  }

 private:
  static constexpr int64_t kTiles = 4;  // of W at a time
  static constexpr int64_t kPairs = kTileBytes / 4;
  static constexpr int64_t kSize = kPairs * kTileRows;  // pairs of a tile
  const uint16_t* weights_;
  const float* bias_;
  Planes inputs_;
  float* y_;
  int64_t N_;

  // Pairs of columns of the rows from n on, as a tile has them; missing rows and columns are 0.
  void arrange(int64_t n, int64_t rows, uint32_t* to) const {
    const int64_t K = inputs_.K;
    for (int64_t k = 0; k < inputs_.width; k += 2)
      for (int64_t r = 0; r < kTiles * kTileRows; r++) {
        const int64_t tile = k / Planes::kColumns * kTiles + r / kTileRows;
        to[tile * kSize + k % Planes::kColumns / 2 * kTileRows + r % kTileRows] =
            r < rows && k < K ? load<uint32_t>(weights_ + (n + r) * K + k) : 0;
      }
  }

  void multiply_tile(int64_t n, int64_t rows, int64_t m, const uint32_t* arranged) const {
    const int64_t count = inputs_.order.rows(m);
    ZERO_SUMS();
    for (int64_t k = 0; k < inputs_.width; k += Planes::kColumns, arranged += kTiles * kSize) {
      _tile_loadd(4, inputs_.at(0, m, k), kTileBytes);
      _tile_loadd(5, inputs_.at(1, m, k), kTileBytes);
      _tile_loadd(6, inputs_.at(2, m, k), kTileBytes);
#define ADD_PRODUCTS(tile)                              \
  _tile_loadd(7, arranged + tile * kSize, kTileBytes);  \
  _tile_dpbf16ps(tile, 6, 7);                           \
  _tile_dpbf16ps(tile, 5, 7);                           \
  _tile_dpbf16ps(tile, 4, 7)
      ADD_PRODUCTS(0);
      ADD_PRODUCTS(1);
      ADD_PRODUCTS(2);
      ADD_PRODUCTS(3);
#undef ADD_PRODUCTS
    }
    alignas(kTileBytes) float sums[kTileRows][kTiles * kTileRows];
    STORE_SUMS(sums[0], kTileRows, static_cast<int64_t>(sizeof(sums[0])));
    for (int64_t i = 0; i < count; i++) {
      float* y = y_ + (m + i) * N_ + n;
      if (bias_) {
        for (int64_t r = 0; r < rows; r++) y[r] = sums[i][r] + bias_[n + r];
      } else {
        std::copy_n(sums[i], rows, y);
      }
    }
  }
};

#endif

}  // namespace

template <class Numbers>
Tiles<Numbers> tiles_of(const Linear& linear, const void* inputs, float* y, int64_t M) {
  return {static_cast<const typename Numbers::Weight*>(linear.weights),
          static_cast<const typename Numbers::Input*>(inputs), linear.bias, y, M, linear.K, linear.N};
}

#define MULTIPLY(name, Numbers)                                                                                \
  void multiply_##name(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {  \
    tiles_of<Numbers>(*linear, inputs, y, M).multiply(begin, end);                                                       \
  }

extern "C" {

MULTIPLY(float32, Exact<float>)
MULTIPLY(bfloat16, Exact<BFloat16>)
MULTIPLY(float16, Exact<Float16>)
#ifdef __AMX_BF16__
void round_bfloat16_many(const float* x, int64_t m, void* memory, int64_t M, int64_t K) {
  Planes{static_cast<char*>(memory), M, K}.split(x, m);
}
void multiply_bfloat16_many(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {
  const Planes planes{static_cast<char*>(const_cast<void*>(inputs)), M, linear->K};
  Products(*linear, planes, y).multiply(begin, end);
}
#endif
#ifdef __AVX512BF16__
void round_bfloat16_rounded(const float* x, int64_t m, void* memory, int64_t, int64_t K) {
  auto* to = static_cast<BFloat16*>(memory) + m * K;
  for (int64_t k = 0; k < K; k += kLanes) store(to + k, _mm512_cvtneps_pbh(load<Floats>(x + k)));
}
MULTIPLY(bfloat16_rounded, Rounded)
#endif

// y (M, N) = x W^T + b.
void run_linear(const Linear* linear, const float* x, float* y, int64_t M, int64_t threads) {
  thread_local std::vector<float> memory;
  const int64_t K = linear->K;
  if (linear->round) memory.resize(std::max<size_t>(memory.size(), rounded_floats(M, K)));
  float* rounded = aligned(memory.data());
  together(std::min(threads, 1 + linear->N * K / kWork), [&](Worker& worker) {
    if (linear->round) worker.share(M, [&](int64_t m) { linear->round(x + m * K, m, rounded, M, K); });
    multiply(worker, {{linear, linear->round ? static_cast<const void*>(rounded) : x, y}}, M, threads);
  });
}
}
