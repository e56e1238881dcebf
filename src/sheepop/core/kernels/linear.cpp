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
  static constexpr int64_t kBlock = 4096 / sizeof(Input);  // columns of which inputs stay in the first cache
  const T* weights;     // (N, K)
  const Input* inputs;  // (M, K)
  const float* bias;    // (N,), or null
  float* out;           // (M, N)
  int64_t M, K, N;

  // Columns `from` to `to` of R rows of weights from n on, times B rows of inputs from m on; adds them to those before.
  template <int R, int B>
  void tile(int64_t n, int64_t m, int64_t from, int64_t to) const {
    Floats totals[R * B];
    UNROLLED for (int i = 0; i < R * B; i++) totals[i] = Floats{};
    // Inputs fetch a later tile in the order of memory, of the next panel if there are many: a line a step if enough rows
    // of inputs pass, or each row its share at once.
    constexpr int64_t kLine = 64 / sizeof(T), kLines = R * kStep / kLine;  // weights; of a step
    const int64_t size = R * K, ahead = M > kInputs ? kPanel * K : size * (1 + kAhead / (size * sizeof(T)));
    const int64_t steps = (to - from) / kStep, pass = m / kInputs;
    const bool is_spread = R == 1 || M >= kInputs * kLines;
    const int64_t first = is_spread ? 0 : steps * m / M, last = is_spread ? 0 : steps * (m + B) / M;
    const int64_t stride = R > 1 && is_spread && pass < kLines ? kLine : 0;
    const T *row = weights + n * K, *later = row + ahead + R * from + first * kLines * kLine + pass * steps * stride;
    const auto add = [&](int64_t k) {
      decltype(Numbers::weights(row)) w[R];
      UNROLLED for (int r = 0; r < R; r++) w[r] = Numbers::weights(row + r * K + k);
      UNROLLED for (int b = 0; b < B; b++) {
        const auto part = Numbers::inputs(inputs + (m + b) * K + k);
        UNROLLED for (int r = 0; r < R; r++) totals[r * B + b] = Numbers::add(totals[r * B + b], part, w[r]);
      }
    };
    int64_t k = from;
    for (const int64_t end = from + (last - first) * kStep; k < end; k += kStep, later += kLines * kLine) {
      for (int64_t i = 0; i < kLines; i++) __builtin_prefetch(later + i * kLine, 0, 2);
      add(k);
    }
    for (; k < to; k += kStep, later += stride) {
      if (R > 1) __builtin_prefetch(later, 0, 2);
      add(k);
    }
    float found[R * B];
    UNROLLED for (int i = 0; i + 8 <= R * B; i += 8) store(found + i, sums(totals + i, totals + i + 4));
    UNROLLED for (int i = R * B / 8 * 8; i < R * B; i++) found[i] = sum(totals[i]);
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) {
        float* const y = out + (m + b) * N + n + r;
        const float total = from ? *y + found[r * B + b] : found[r * B + b];
        *y = bias && to == K ? total + bias[n + r] : total;
      }
  }

  // Rows of weights that meet `count` rows of inputs at a time, as registers allow. A processor fetches a single stream
  // ahead by itself, faster than if it is told where several go on.
  static constexpr int64_t rows_with(int64_t count) { return count == 1 ? 1 : std::min<int64_t>(kRows, kTotals / count); }

  // Columns from `from` on of the rows of weights from `begin` to `end`, times `count` rows of inputs from m on, at most B.
  template <int B>
  void across(int64_t begin, int64_t end, int64_t m, int64_t count, int64_t from) const {
    if constexpr (B > 1) {
      if (count < B) return across<B - 1>(begin, end, m, count, from);
    }
    constexpr int R = rows_with(B);
    const int64_t to = std::min(K, from + kBlock);
    int64_t n = begin;
    for (; n + R <= end; n += R) tile<R, B>(n, m, from, to);
    for (; n < end; n++) tile<1, B>(n, m, from, to);
  }

  void multiply(int64_t begin, int64_t end) const {
    // Few inputs take long rows of weights tile after tile, as they lie in memory.
    const int64_t rows = M > kInputs || K <= kBlock ? kPanel : rows_with(M);
    for (int64_t panel = begin; panel < end; panel += rows)
      for (int64_t from = 0; from < K; from += kBlock)
        for (int64_t m = 0, count; m < M; m += count) {
          const int64_t passes = (M - m + kInputs - 1) / kInputs;  // of about equally many
          count = (M - m + passes - 1) / passes;
          across<kInputs>(panel, std::min(end, panel + rows), m, count, from);
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
