// y = x W^T + b on a CPU for weights that are integers of 8 or 4 bits; docs/generation.md explains the method.
//
// W (N, K) has int8 with a scale a row, or integers of 8 or 4 bits with a scale, and perhaps an offset, for every 16 or
// 32 neighbours: weight = scale * code + offset. x becomes integers, of 16 bits for rows with one scale and of 30 bits
// for groups, so that the products within a group are exact sums of integers. A row of y is the same to the last bit
// whatever the other rows of x are, however many threads share the work, and however wide the vectors are.

#include <algorithm>
#include <cmath>
#include <vector>

#include "native.h"

namespace {

constexpr int kBytes = 16;           // of each row of W are read at a time
constexpr int kColumns = 16;         // columns whose inputs lie together
constexpr int kPairs = kColumns / 2;
constexpr int kLowBits = 15;
constexpr int64_t kInputs = 64;      // rows of x whose sums stay in the cache

// A number, or two neighbouring short ones, for each of `kLanes` rows of W.
typedef int32_t Lanes __attribute__((vector_size(4 * kLanes)));
typedef int16_t Pairs __attribute__((vector_size(4 * kLanes)));
typedef int32_t Quarter __attribute__((vector_size(kBytes)));

inline Lanes spread_pair(const int16_t* pair) { return Lanes{} + load<int32_t>(pair); }

// total + the products of pairs.
inline Lanes add_pairs(Lanes total, Pairs a, Lanes b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Lanes>(
      _mm512_dpwssd_epi32(reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  return total + reinterpret_cast<Lanes>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return total + reinterpret_cast<Lanes>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const Pairs pairs = reinterpret_cast<Pairs>(b);
  for (int i = 0; i < kLanes; i++) total[i] += a[2 * i] * pairs[2 * i] + a[2 * i + 1] * pairs[2 * i + 1];
  return total;
#endif
}

inline Floats floats(Lanes values) { return __builtin_convertvector(values, Floats); }

// Interleaves units of `size` bytes within each quarter: the first halves, or the second ones.
template <class T, bool second>
inline Lanes interleaved(Lanes a, Lanes b) {
  typedef T Units __attribute__((vector_size(4 * kLanes)));
  constexpr int count = kBytes / sizeof(T), all = 4 * kLanes / sizeof(T);
  Units places;
  for (int i = 0; i < all; i++)
    places[i] = i / count * count + (second ? count / 2 : 0) + i % count / 2 + (i % 2 ? all : 0);
  return reinterpret_cast<Lanes>(__builtin_shuffle(reinterpret_cast<Units>(a), reinterpret_cast<Units>(b), places));
}

// The 16 bytes at `at` of every fourth row.
inline Lanes joined(const char* const* rows, int64_t at) {
  Quarter parts[kLanes / 4];
  for (int i = 0; i < kLanes / 4; i++) parts[i] = load<Quarter>(rows[4 * i] + at);
#if defined(__AVX2__)
  auto pair = [&](int i) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(reinterpret_cast<__m128i>(parts[i])),
                                   reinterpret_cast<__m128i>(parts[i + 1]), 1);
  };
#if defined(__AVX512F__)
  return reinterpret_cast<Lanes>(_mm512_inserti64x4(_mm512_castsi256_si512(pair(0)), pair(2), 1));
#else
  return reinterpret_cast<Lanes>(pair(0));
#endif
#else
  return load<Lanes>(parts);
#endif
}

// Reads 16 bytes of each row, 4 numbers of 32 bits or so, and returns each number of all rows.
struct Columns {
  Lanes parts[4];
  explicit Columns(const char* const* rows, int64_t at) {
    Lanes read[4];
    for (int i = 0; i < 4; i++) read[i] = joined(rows + i, at);
    const Lanes low[] = {interleaved<int32_t, false>(read[0], read[1]), interleaved<int32_t, false>(read[2], read[3])},
                high[] = {interleaved<int32_t, true>(read[0], read[1]), interleaved<int32_t, true>(read[2], read[3])};
    parts[0] = interleaved<int64_t, false>(low[0], low[1]), parts[1] = interleaved<int64_t, true>(low[0], low[1]);
    parts[2] = interleaved<int64_t, false>(high[0], high[1]), parts[3] = interleaved<int64_t, true>(high[0], high[1]);
  }
};

// Kinds of codes: `unpack` makes pairs of short numbers of the 16 bytes of each row. Of four neighbours c the pairs are
// (c[0], c[2]) and (c[1], c[3]), which need no more than shifts.
struct Bytes {
  static constexpr int kCodes = 16;
  static void unpack(const Columns& columns, Pairs* to) {
    for (const Lanes part : columns.parts) {
      const Pairs pairs = reinterpret_cast<Pairs>(part);
      *to++ = (pairs << 8) >> 8, *to++ = pairs >> 8;
    }
  }
};

// Byte i holds code i in its lower half and code i + 16 in its upper one.
template <bool is_signed>
struct Nibbles {
  static constexpr int kCodes = 32;
  static Pairs code(Lanes part, int shift) {
    const Pairs found = reinterpret_cast<Pairs>((part >> shift) & 0x000f000f);
    return is_signed ? (found ^ 8) - 8 : found;
  }
  static void unpack(const Columns& columns, Pairs* to) {
    for (int i = 0; i < 4; i++) {
      const Lanes part = columns.parts[i];
      to[2 * i] = code(part, 0), to[2 * i + 1] = code(part, 8);
      to[kPairs + 2 * i] = code(part, 4), to[kPairs + 2 * i + 1] = code(part, 12);
    }
  }
};

// The place of a column's input among its 16, in the order of the pairs.
constexpr int place(int column) { return (column & ~3) | (column & 1) << 1 | (column >> 1 & 1); }

// Rows of x as integers of `planes` short parts: of 16 columns the upper parts of each row, then the lower parts.
template <int planes>
class Inputs {
 public:
  Inputs(void* memory, int64_t M, int64_t K)
      : scales_(static_cast<float*>(memory)),
        sums_(scales_ + M),
        parts_(reinterpret_cast<int16_t*>(sums_ + M * K / kColumns)),
        M_(M),
        K_(K) {}

  float scale(int64_t m) const { return scales_[m]; }
  float sum(int64_t column, int64_t m) const { return sums_[column / kColumns * M_ + m]; }  // of 16 integers
  const int16_t* parts(int64_t column, int64_t m) const { return parts_ + (column / kColumns * M_ + m) * planes * kColumns; }

  // A row with a number that is not finite becomes 0 with the scale NaN, so that all of its products are NaN.
  void round(const float* x, int64_t m) {
    Floats tops = {}, spoiled = {};
    for (int64_t k = 0; k < K_; k += kLanes) {
      const Floats values = load<Floats>(x + k), sizes = values < 0.f ? -values : values;
      tops = sizes > tops ? sizes : tops;
      spoiled += values * 0.f;
    }
    float top = 0;
    for (int i = 0; i < kLanes; i++) top = std::max(top, tops[i]);
    const bool is_finite = ::sum(spoiled) == 0;
    const float factor = is_finite ? factor_for(top) : 1.f;
    scales_[m] = is_finite ? 1 / factor : NAN;
    for (int64_t k = 0; k < K_; k += kColumns) {
      int32_t integers[kColumns];
      for (int i = 0; i < kColumns; i++)
        integers[i] = static_cast<int32_t>(std::nearbyint((is_finite ? x[k + i] : 0.f) * factor));
      split(integers, k / kColumns * M_ + m);
    }
  }

 private:
  float *scales_, *sums_;  // (M,), (K / 16, M)
  int16_t* parts_;         // (K / 16, M, planes, 16)
  int64_t M_, K_;

  static float factor_for(float top) {
    if (planes == 1) return 32767 / std::max(top, 1e-30f);
    int exponent;  // of a power of two above all numbers
    std::frexp(top, &exponent);
    return std::ldexp(1.f, 2 * kLowBits - 1 - std::max(exponent, -90));
  }

  void split(const int32_t* integers, int64_t number) {
    int16_t* to = parts_ + number * planes * kColumns;
    int64_t total = 0;
    for (int i = 0; i < kColumns; i++) {
      const int32_t high = planes == 1 ? integers[i] : (integers[i] + (1 << (kLowBits - 1))) >> kLowBits;
      to[place(i)] = static_cast<int16_t>(high);
      if (planes == 2) to[kColumns + place(i)] = static_cast<int16_t>(integers[i] - (high << kLowBits));
      total += integers[i];
    }
    sums_[number] = static_cast<float>(total);
  }
};

template <int planes>
void round_row(const float* x, int64_t m, void* memory, int64_t M, int64_t K) {
  Inputs<planes>(memory, M, K).round(x, m);
}

// The rows of a matrix that a tile has; beyond the last row of the matrix that row is read again.
template <class T>
struct Rows {
  const char* starts[kLanes];
  int64_t bytes;  // from a row to the next
  Rows(const void* matrix, int64_t length, int64_t n, int64_t N) : bytes(length * static_cast<int64_t>(sizeof(T))) {
    const T* first = static_cast<const T*>(matrix);
    for (int r = 0; r < kLanes; r++) starts[r] = reinterpret_cast<const char*>(first + std::min(n + r, N - 1) * length);
  }
  // While `count` bytes at `at` of each row are read, as many of the next tile are fetched, in the order of memory.
  void fetch_next(int64_t at, int64_t count) const {
    const char* next = starts[0] + kLanes * (bytes + at);
    for (int64_t i = 0; i < kLanes * count; i += 64) __builtin_prefetch(next + i, 0, 2);
  }
};

inline float number(float value) { return value; }
inline float number(uint16_t bfloat16) { return single(bfloat16); }

// Reads scales or offsets of `count` groups from `at` on.
template <class Scale>
void read_groups(const Rows<Scale>& rows, int64_t at, int64_t count, Floats* to) {
  rows.fetch_next(at * sizeof(Scale), count * sizeof(Scale));
  constexpr int kMany = kBytes / sizeof(Scale);
  int64_t g = 0;
  for (; g + kMany <= count; g += kMany) {
    const Columns columns(rows.starts, (at + g) * sizeof(Scale));
    for (const Lanes part : columns.parts) {
      if constexpr (kMany == 8) *to++ = reinterpret_cast<Floats>(part << 16);  // the first of two bfloat16
      *to++ = reinterpret_cast<Floats>(kMany == 8 ? part & static_cast<int32_t>(0xffff0000) : part);
    }
  }
  for (; g < count; g++, to++)
    for (int r = 0; r < kLanes; r++) (*to)[r] = number(reinterpret_cast<const Scale*>(rows.starts[r])[at + g]);
}

// Integers in groups: total = the sum of scale * sum(codes * inputs) + offset * sum(inputs).
template <class Codes, int group, class Scale, bool has_offset>
struct Groups {
  static constexpr int kPlanes = 2, kStep = std::max(group, Codes::kCodes), kReads = kStep / Codes::kCodes;
  static constexpr int64_t kPanel = 2048;  // columns whose scales stay in the cache
  Rows<uint8_t> codes;
  Rows<Scale> scales, offsets;

  Groups(const Linear& linear, int64_t n)
      : codes(linear.weights, linear.K * kBytes / Codes::kCodes, n, linear.N),
        scales(linear.scales, linear.K / group, n, linear.N),
        offsets(has_offset ? linear.offsets : linear.scales, linear.K / group, n, linear.N) {}

  void add(const Inputs<2>& inputs, int64_t first, int64_t count, int64_t begin, int64_t end, Floats* totals) const {
    Floats panel_scales[kPanel / group], panel_offsets[has_offset ? kPanel / group : 1];
    read_groups(scales, begin / group, (end - begin) / group, panel_scales);
    if (has_offset) read_groups(offsets, begin / group, (end - begin) / group, panel_offsets);
    for (int64_t k = begin; k < end; k += kStep) {
      Pairs weights[kStep / 2];
      const int64_t at = k * kBytes / Codes::kCodes;
      if (first == 0) codes.fetch_next(at, kReads * kBytes);
      for (int i = 0; i < kReads; i++)
        Codes::unpack(Columns(codes.starts, at + i * kBytes), weights + i * Codes::kCodes / 2);
      for (int g = 0; g < kStep / group; g++) {
        const int64_t number = (k - begin) / group + g;
        for (int64_t i = 0; i < count; i++)
          totals[i] = added(totals[i], weights + g * group / 2, panel_scales[number],
                            panel_offsets[has_offset ? number : 0], inputs, k + g * group, first + i);
      }
    }
  }

  static Floats added(Floats total, const Pairs* weights, Floats scale, Floats offset, const Inputs<2>& inputs, int64_t k,
                      int64_t m) {
    Lanes high = {}, low = {};
    float sums = 0;
    for (int part = 0; part < group / kColumns; part++) {
      const int16_t* x = inputs.parts(k + part * kColumns, m);
      for (int i = 0; i < kPairs; i++) {
        high = add_pairs(high, weights[part * kPairs + i], spread_pair(x + 2 * i));
        low = add_pairs(low, weights[part * kPairs + i], spread_pair(x + kColumns + 2 * i));
      }
      if (has_offset) sums += inputs.sum(k + part * kColumns, m);
    }
    const Floats products = multiply_add(floats(low), floats(high), spread<Floats>(1 << kLowBits));
    // The two parts of a group may nearly cancel out, which a large total would make less exact.
    return has_offset ? total + multiply_add(scale * products, offset, spread<Floats>(sums))
                      : multiply_add(total, scale, products);
  }

  static Floats finished(Floats total, const Linear&, int64_t, int64_t) { return total; }
};

// Integers of 8 bits with a scale for each row.
struct WholeRows {
  static constexpr int kPlanes = 1;
  static constexpr int64_t kPanel = 256;  // products of 8 and 16 bits whose sum cannot overflow
  Rows<int8_t> codes;

  WholeRows(const Linear& linear, int64_t n) : codes(linear.weights, linear.K, n, linear.N) {}

  void add(const Inputs<1>& inputs, int64_t first, int64_t count, int64_t begin, int64_t end, Floats* totals) const {
    Lanes sums[kInputs] = {};
    for (int64_t k = begin; k < end; k += kColumns) {
      Pairs weights[kPairs];
      if (first == 0) codes.fetch_next(k, kBytes);
      Bytes::unpack(Columns(codes.starts, k), weights);
      for (int64_t i = 0; i < count; i++) {
        const int16_t* x = inputs.parts(k, first + i);
        Lanes other = {};  // so that not every sum waits for the one before
        for (int pair = 0; pair < kPairs; pair += 2) {
          sums[i] = add_pairs(sums[i], weights[pair], spread_pair(x + 2 * pair));
          other = add_pairs(other, weights[pair + 1], spread_pair(x + 2 * pair + 2));
        }
        sums[i] += other;
      }
    }
    for (int64_t i = 0; i < count; i++) totals[i] += floats(sums[i]);
  }

  static Floats finished(Floats total, const Linear& linear, int64_t n, int64_t rows) {
    return total * some(static_cast<const float*>(linear.scales) + n, rows);
  }

  static Floats some(const float* from, int64_t count) {
    Floats found = {};
    std::memcpy(&found, from, count * sizeof(float));
    return found;
  }
};

// Rows `begin` to `end` of W times all inputs, a tile of `kLanes` rows at a time.
template <class Tile>
void multiply(const Linear& linear, const void* memory, float* y, int64_t M, int64_t begin, int64_t end) {
  const Inputs<Tile::kPlanes> inputs(const_cast<void*>(memory), M, linear.K);
  for (int64_t n = begin; n < end; n += kLanes) {
    const Tile tile(linear, n);
    const int64_t rows = std::min<int64_t>(kLanes, end - n);
    for (int64_t first = 0; first < M; first += kInputs) {
      Floats totals[kInputs] = {};
      const int64_t count = std::min(kInputs, M - first);
      for (int64_t k = 0; k < linear.K; k += Tile::kPanel)
        tile.add(inputs, first, count, k, std::min(linear.K, k + Tile::kPanel), totals);
      for (int64_t i = 0; i < count; i++) {
        Floats found = Tile::finished(totals[i], linear, n, rows) * inputs.scale(first + i);
        if (linear.bias) found += WholeRows::some(linear.bias + n, rows);
        std::memcpy(y + (first + i) * linear.N + n, &found, rows * sizeof(float));
      }
    }
  }
}

template <template <bool> class Tile>
void multiply_groups(const Linear& linear, const void* memory, float* y, int64_t M, int64_t begin, int64_t end) {
  (linear.offsets ? multiply<Tile<true>> : multiply<Tile<false>>)(linear, memory, y, M, begin, end);
}

template <bool has_offset> using Int8In16s = Groups<Bytes, 16, float, has_offset>;
template <bool has_offset> using Int8In32s = Groups<Bytes, 32, float, has_offset>;
template <bool has_offset> using Int4In16s = Groups<Nibbles<!has_offset>, 16, float, has_offset>;
template <bool has_offset> using Int4In32s = Groups<Nibbles<!has_offset>, 32, float, has_offset>;
template <bool has_offset> using Int4In32sOfHalves = Groups<Nibbles<!has_offset>, 32, uint16_t, has_offset>;

}  // namespace

#define KERNEL(name, planes, function)                                                                              \
  void round_##name(const float* x, int64_t m, void* memory, int64_t M, int64_t K) {                                \
    round_row<planes>(x, m, memory, M, K);                                                                          \
  }                                                                                                                 \
  void multiply_##name(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) { \
    function(*linear, inputs, y, M, begin, end);                                                                    \
  }

extern "C" {

KERNEL(int8, 1, multiply<WholeRows>)
KERNEL(int8_16_float32, 2, multiply_groups<Int8In16s>)
KERNEL(int8_32_float32, 2, multiply_groups<Int8In32s>)
KERNEL(int4_16_float32, 2, multiply_groups<Int4In16s>)
KERNEL(int4_32_float32, 2, multiply_groups<Int4In32s>)
KERNEL(int4_32_bfloat16, 2, multiply_groups<Int4In32sOfHalves>)
}
