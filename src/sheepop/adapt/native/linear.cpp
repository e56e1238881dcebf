// y = x W^T + b on a CPU: for the few rows of x that writing text has, where the time goes into reading W, and for the many
// of a prompt, where it goes into arithmetic.
//
// W (N, K) is float32, bfloat16 or float16 here, whose numbers are exact in float32, in which the sums are computed;
// `integers.cpp` has the integers. A row of y is the same to the last bit whatever the other rows of x are, and however
// many threads share the work; few and many rows are summed in different orders. With AMX, many rows of x meet bfloat16
// as sums of three bfloat16, which is exact.

#include <algorithm>
#include <vector>

#include "amx.h"
#include "numbers.h"

namespace {

constexpr int64_t kPanel = 48;                   // rows of W that stay in the cache while x passes
constexpr int64_t kWork = 1 << 15;               // weights that are worth a thread
constexpr int kTotals = kLanes == 16 ? 24 : 12;  // as many as a processor has registers for
constexpr int kInputs = kLanes == 16 ? 8 : 4;    // rows of x at a time
constexpr int kRows = 8;                         // of W at a time, at most
constexpr int64_t kAhead = 24 << 10;             // bytes that are on their way from memory
// Of many rows of x, so many at a time meet so many vectors of rows of W, and columns whose weights stay in the cache.
constexpr int kMany = kLanes == 16 ? 8 : 6;
constexpr int kVectors = kLanes == 16 ? 3 : 2;
constexpr int kTile = kVectors * kLanes;
constexpr int64_t kDepth = 1024;
constexpr int kBlock = 16;  // columns that are arranged at a time

template <class T>
struct Tiles {
  const T* weights;     // (N, K)
  const float* inputs;  // (M, K)
  const float* bias;    // (N,), or null
  float* out;           // (M, N)
  int64_t M, K, N;

  // R rows of weights from n on, times B rows of inputs from m on.
  template <int R, int B>
  void tile(int64_t n, int64_t m) const {
    Floats totals[R][B] = {};
    constexpr int64_t kBytes = R * kLanes * sizeof(T);  // of weights in a step
    const int64_t size = R * K;
    // A later tile, which is fetched in the order of memory.
    const T *row = weights + n * K, *later = row + size * (1 + kAhead / (size * sizeof(T)));
    for (int64_t k = 0; k < K; k += kLanes, later += R * kLanes) {
      Floats w[R];
      for (int r = 0; r < R; r++) w[r] = read(row + r * K + k);
      for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(later) + i, 0, 2);
      for (int b = 0; b < B; b++) {
        const Floats part = load<Floats>(inputs + (m + b) * K + k);
        for (int r = 0; r < R; r++) totals[r][b] = multiply_add(totals[r][b], part, w[r]);
      }
    }
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) {
        const float value = sum(totals[r][b]);
        out[(m + b) * N + n + r] = bias ? value + bias[n + r] : value;
      }
  }

  // The rows of weights from `begin` to `end`, times B rows of inputs from m on, or the last ones where fewer are left.
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

  void few(int64_t begin, int64_t end) const {
    for (int64_t panel = begin; panel < end; panel += kPanel)
      for (int64_t m = 0; m < M; m += kInputs) across<kInputs>(panel, std::min(end, panel + kPanel), m);
  }

  // Arranges `rows` rows of weights from n on as columns of kTile floats, `depth` of them from k on; missing rows are 0.
  void arrange(int64_t n, int64_t rows, int64_t k, int64_t depth, float* to) const {
    for (int64_t i = 0; i < depth; i += kBlock)
      for (int64_t r = 0; r < kTile; r++) {
        float part[kBlock] = {};
        for (int j = 0; r < rows && j < kBlock; j += kLanes) store(part + j, read(weights + (n + r) * K + k + i + j));
        for (int j = 0; j < kBlock; j++) to[(i + j) * kTile + r] = part[j];
      }
  }

  // Adds the products of B rows of inputs from m on with arranged weights to `out`, or stores them if k is 0.
  template <int B>
  void columns(const float* arranged, int64_t n, int64_t rows, int64_t m, int64_t k, int64_t depth) const {
    if constexpr (B > 1) {
      if (M - m < B) return columns<B - 1>(arranged, n, rows, m, k, depth);
    }
    Floats totals[B][kVectors] = {};
    const float* x = inputs + m * K + k;
    for (int64_t i = 0; i < depth; i++) {
      Floats w[kVectors];
      for (int j = 0; j < kVectors; j++) w[j] = load<Floats>(arranged + i * kTile + j * kLanes);
      for (int b = 0; b < B; b++) {
        const Floats same = spread<Floats>(x[b * K + i]);
        for (int j = 0; j < kVectors; j++) totals[b][j] = multiply_add(totals[b][j], same, w[j]);
      }
    }
    for (int b = 0; b < B; b++) {
      float part[kTile];
      for (int j = 0; j < kVectors; j++) store(part + j * kLanes, totals[b][j]);
      float* y = out + (m + b) * N + n;
      for (int64_t r = 0; r < rows; r++) y[r] = part[r] + (k ? y[r] : bias ? bias[n + r] : 0.f);
    }
  }

  void many(int64_t begin, int64_t end) const {
    thread_local std::vector<float> arranged;
    arranged.resize(kTile * kDepth);
    for (int64_t n = begin; n < end; n += kTile)
      for (int64_t k = 0; k < K; k += kDepth) {
        const int64_t rows = std::min<int64_t>(kTile, end - n), depth = std::min(kDepth, K - k);
        arrange(n, rows, k, depth, arranged.data());
        for (int64_t m = 0; m < M; m += kMany) columns<kMany>(arranged.data(), n, rows, m, k, depth);
      }
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

#define MULTIPLY(name, T, part)                                                                                      \
  void multiply_##name(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {  \
    Tiles<T>{static_cast<const T*>(linear->weights), static_cast<const float*>(inputs), linear->bias, y, M,          \
             linear->K, linear->N}                                                                                   \
        .part(begin, end);                                                                                           \
  }

extern "C" {

MULTIPLY(float32, float, few)
MULTIPLY(bfloat16, BFloat16, few)
MULTIPLY(float16, Float16, few)
MULTIPLY(float32_many, float, many)
#ifdef __AMX_BF16__
void round_bfloat16_many(const float* x, int64_t m, void* memory, int64_t M, int64_t K) {
  Planes{static_cast<char*>(memory), M, K}.split(x, m);
}
void multiply_bfloat16_many(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) {
  const Planes planes{static_cast<char*>(const_cast<void*>(inputs)), M, linear->K};
  Products(*linear, planes, y).multiply(begin, end);
}
#else
MULTIPLY(bfloat16_many, BFloat16, many)
#endif
MULTIPLY(float16_many, Float16, many)

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
