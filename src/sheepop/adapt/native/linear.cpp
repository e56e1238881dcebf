// y = x W^T + b on a CPU for the few rows of x that writing text has, where the time goes into reading W.
//
// W (N, K) is float32, bfloat16, int8 with a scale a row, or int4 with a scale for each 32 weights. Beside integers x is
// rounded to 16 bits a row, so that their products are exact sums of integers: of int8 the same on every processor.

#include <ATen/Parallel.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int64_t kGroup = 32;      // int4 weights of one scale
constexpr int64_t kPanel = 48;      // rows of W that stay in the cache while all rows of x pass
constexpr int64_t kBlock = 64;      // rows of x that stay in the cache while a panel passes
constexpr int64_t kAhead = 1024;    // bytes to fetch before they are needed
constexpr int64_t kWork = 1 << 15;  // weights that are worth a thread

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t FloatBits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HighBits __attribute__((vector_size(2 * kLanes)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t Codes __attribute__((vector_size(16)));

template <class V, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

inline float sum(Floats values) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += values[i];
  return total;
}

inline float sum8(Floats8 values) {
  float total = 0;
  for (int i = 0; i < 8; i++) total += values[i];
  return total;
}

inline float single(c10::Half value) {
#ifdef __F16C__
  return _cvtsh_ss(value.x);
#else
  return value;
#endif
}

inline Ints multiply_add(Ints total, Shorts a, Shorts b) {
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

// A kind of weights: `kStep` of them at place k of row n are multiplied by as many inputs at a time.

struct Float32 {
  using Input = float;
  using Total = Floats;
  static constexpr int kStep = kLanes, kRows = 6, kInputs = 2;
  const float* weights;
  struct Weights {
    Floats values;
  };
  const void* address(int64_t K, int64_t n, int64_t k) const { return weights + n * K + k; }
  Weights read(int64_t K, int64_t n, int64_t k) const { return {load<Floats>(weights + n * K + k)}; }
  static Total add(Total total, Weights w, const Input* x) { return total + w.values * load<Floats>(x); }
  float finish(Total total, int64_t) const { return sum(total); }
};

struct BFloat16 {
  using Input = float;
  using Total = Floats;
  static constexpr int kStep = kLanes, kRows = 3, kInputs = 4;
  const uint16_t* weights;
  struct Weights {
    Floats values;
  };
  const void* address(int64_t K, int64_t n, int64_t k) const { return weights + n * K + k; }
  Weights read(int64_t K, int64_t n, int64_t k) const {
    auto bits = __builtin_convertvector(load<HighBits>(weights + n * K + k), FloatBits);
    return {reinterpret_cast<Floats>(bits << 16)};
  }
  static Total add(Total total, Weights w, const Input* x) { return total + w.values * load<Floats>(x); }
  float finish(Total total, int64_t) const { return sum(total); }
};

struct Int8 {
  using Input = int16_t;
  using Total = Ints;
  static constexpr int kStep = 16, kRows = 2, kInputs = 4;
  const int8_t* weights;
  const float* scales;
  struct Weights {
    Shorts values;
  };
  const void* address(int64_t K, int64_t n, int64_t k) const { return weights + n * K + k; }
  Weights read(int64_t K, int64_t n, int64_t k) const {
    return {__builtin_convertvector(load<Bytes>(weights + n * K + k), Shorts)};
  }
  static Total add(Total total, Weights w, const Input* x) { return multiply_add(total, w.values, load<Shorts>(x)); }
  float finish(Total total, int64_t n) const { return sum8(__builtin_convertvector(total, Floats8)) * scales[n]; }
};

struct Int4 {
  using Input = int16_t;
  using Total = Floats8;
  static constexpr int kStep = kGroup, kRows = 2, kInputs = 4;
  const uint8_t* weights;  // of a group, byte i holds weight i in its low half and weight i + 16 in its high one
  const c10::Half* scales;
  struct Weights {
    Shorts low, high;
    float scale;
  };
  const void* address(int64_t K, int64_t n, int64_t k) const { return weights + (n * K + k) / 2; }
  Weights read(int64_t K, int64_t n, int64_t k) const {
    auto codes = load<Codes>(weights + (n * K + k) / 2);
    auto low = reinterpret_cast<Bytes>(codes << 4), high = reinterpret_cast<Bytes>(codes & 0xf0);  // 16 times the weights
    return {__builtin_convertvector(low, Shorts), __builtin_convertvector(high, Shorts),
            single(scales[(n * K + k) / kGroup])};
  }
  static Total add(Total total, Weights w, const Input* x) {
    Ints products = multiply_add(multiply_add(Ints{}, w.low, load<Shorts>(x)), w.high, load<Shorts>(x + 16));
    return total + w.scale * __builtin_convertvector(products, Total);
  }
  float finish(Total total, int64_t) const { return sum8(total) / 16; }
};

template <class F>
struct Product {
  F weights;
  const typename F::Input* inputs;  // (M, K)
  const float* input_scales;        // (M,), or null
  const float* bias;                // (N,), or null
  float* out;                       // (M, N)
  int64_t M, K, N;

  // R rows of W times B rows of x; with `unrolled` above 1 neighbouring steps have totals of their own.
  template <int R, int B, int unrolled>
  void tile(int64_t n, int64_t m) const {
    typename F::Total totals[unrolled][R][B] = {};
    auto step = [&](auto& total, int64_t k) {
      typename F::Weights w[R];
      for (int r = 0; r < R; r++) w[r] = weights.read(K, n + r, k);
      for (int b = 0; b < B; b++)
        for (int r = 0; r < R; r++) total[r][b] = F::add(total[r][b], w[r], inputs + (m + b) * K + k);
    };
    int64_t k = 0;
    for (; k + unrolled * F::kStep <= K; k += unrolled * F::kStep) {
      if (unrolled > 1) __builtin_prefetch(static_cast<const char*>(weights.address(K, n, k)) + kAhead);
      for (int u = 0; u < unrolled; u++) step(totals[u], k + u * F::kStep);
    }
    for (; k < K; k += F::kStep) step(totals[0], k);
    for (int b = 0; b < B; b++)
      for (int r = 0; r < R; r++) {
        auto total = totals[0][r][b];
        for (int u = 1; u < unrolled; u++) total += totals[u][r][b];
        float value = weights.finish(total, n + r);
        if (input_scales) value *= input_scales[m + b];
        out[(m + b) * N + n + r] = bias ? value + bias[n + r] : value;
      }
  }

  template <int R, int B>
  void inputs_left(int64_t n, int64_t m, int64_t end) const {
    if constexpr (B > 0) {
      if (end - m == B) tile<R, B, 1>(n, m);
      else inputs_left<R, B - 1>(n, m, end);
    }
  }

  template <int R>
  void rows(int64_t n, int64_t m, int64_t end) const {
    for (; m + F::kInputs <= end; m += F::kInputs) tile<R, F::kInputs, 1>(n, m);
    inputs_left<R, F::kInputs - 1>(n, m, end);
  }

  void part(int64_t begin, int64_t end) const {
    if (M <= 4) {  // one long stream of weights
      for (int64_t n = begin; n < end; n++) switch (M) {
        case 1: tile<1, 1, 4>(n, 0); break;
        case 2: tile<1, 2, 4>(n, 0); break;
        case 3: tile<1, 3, 4>(n, 0); break;
        case 4: tile<1, 4, 2>(n, 0); break;
      }
      return;
    }
    for (int64_t panel = begin; panel < end; panel += kPanel) {
      int64_t last = std::min(end, panel + kPanel);
      for (int64_t block = 0; block < M; block += kBlock) {
        int64_t n = panel, stop = std::min(M, block + kBlock);
        for (; n + F::kRows <= last; n += F::kRows) rows<F::kRows>(n, block, stop);
        for (; n < last; n++) rows<1>(n, block, stop);
      }
    }
  }

  void run() const {
    int64_t share = (N + at::get_num_threads() - 1) / at::get_num_threads();
    at::parallel_for(0, N, std::max(share, 1 + kWork / K), [&](int64_t begin, int64_t end) { part(begin, end); });
  }
};

// Rows of x as 16-bit integers with a scale each, small enough that no total of products with int8 overflows.
struct Rounded {
  std::vector<int16_t> values;
  std::vector<float> scales;
  Rounded(const float* x, int64_t M, int64_t K) : values(M * K), scales(M) {
    const float largest = static_cast<float>(std::min<int64_t>(32767, (int64_t{1} << 34) / (128 * std::max<int64_t>(K, 1))));
    at::parallel_for(0, M, 1 + kWork / K, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) {
        const float* row = x + m * K;
        float top = 0;
        for (int64_t k = 0; k < K; k++) top = std::max(top, std::abs(row[k]));
        scales[m] = top / largest;
        const float factor = top > 0 ? largest / top : 0;
        for (int64_t k = 0; k < K; k++) values[m * K + k] = static_cast<int16_t>(std::nearbyint(row[k] * factor));
      }
    });
  }
};

}  // namespace

extern "C" void linear_float32(const float* x, const float* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N) {
  Product<Float32>{{w}, x, nullptr, bias, y, M, K, N}.run();
}

extern "C" void linear_bfloat16(const float* x, const uint16_t* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N) {
  Product<BFloat16>{{w}, x, nullptr, bias, y, M, K, N}.run();
}

extern "C" void linear_int8(const float* x, const int8_t* w, const float* scales, const float* bias, float* y, int64_t M, int64_t K, int64_t N) {
  Rounded rounded(x, M, K);
  Product<Int8>{{w, scales}, rounded.values.data(), rounded.scales.data(), bias, y, M, K, N}.run();
}

extern "C" void linear_int4(const float* x, const uint8_t* w, const c10::Half* scales, const float* bias, float* y, int64_t M, int64_t K, int64_t N) {
  Rounded rounded(x, M, K);
  Product<Int4>{{w, scales}, rounded.values.data(), rounded.scales.data(), bias, y, M, K, N}.run();
}
