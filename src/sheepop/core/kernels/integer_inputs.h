// Inputs of products with integers as integers of 16 or 30 bits, which leave logits as they are.

#pragma once

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "integer_tiles.h"

constexpr int kColumns = 16;     // whose inputs lie together
constexpr int kLowBits = 15;     // of the lower parts of integers of 30 bits
constexpr int64_t kInputs = 64;  // rows of x whose sums stay in the cache
#ifdef __AMX_INT8__
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

typedef uint64_t Fours __attribute__((vector_size(2 * kColumns)));  // of short numbers

// The inputs of 16 columns in the order of the pairs: of each four, those in the middle change places.
inline Fours in_pairs(const int16_t* x) {
  const Fours fours = load<Fours>(x);
  return (fours & 0xffff00000000ffff) | (fours >> 16 & 0xffff0000) | (fours & 0xffff0000) << 16;
}

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
  float sum(int64_t column, int64_t m) const { return sums_[place_of(column, m)]; }  // of 16 integers
  const int16_t* parts(int64_t column, int64_t m) const { return parts_ + place_of(column, m) * planes * kColumns; }
  // From those of 16 columns to those of the next ones.
  int64_t stride(int64_t m) const { return std::min(kInputs, M_ - m / kInputs * kInputs) * planes * kColumns; }

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
      is_in_bytes() ? split_in_bytes(integers, k, m) : split(integers, place_of(k, m));
    }
    if (is_in_bytes() && K_ % kUnit)
      for (int part = 0; part < 2; part++) std::fill_n(bytes(part, K_, m), kUnit - K_ % kUnit, uint8_t{0});
  }

  // Whether the integers lie as tiles of AMX: their upper bytes, with a sign, and their lower ones without.
  bool is_in_bytes() const { return kHasTiles && planes == 1 && M_ >= kRows; }
  uint8_t* bytes(int part, int64_t column, int64_t m) const {
    const TileOrder order{2, M_, (K_ + kUnit - 1) / kUnit * kUnit};
    return aligned(reinterpret_cast<uint8_t*>(parts_)) + order.place(part, m, column);
  }

 private:
  float *scales_, *sums_;  // (M,), and (K / 16, rows) for each kInputs rows
  int16_t* parts_;         // (K / 16, rows, planes, 16) for each kInputs rows, which are read together
  int64_t M_, K_;

  // The number of the 16 columns of row m that begin with `column`.
  int64_t place_of(int64_t column, int64_t m) const {
    const int64_t first = m / kInputs * kInputs;
    return first * (K_ / kColumns) + column / kColumns * std::min(kInputs, M_ - first) + m - first;
  }

  static float factor_for(float top) {
    if (planes == 1) return 32767 / std::max(top, 1e-30f);
    int exponent;  // of a power of two above all numbers
    std::frexp(top, &exponent);
    return std::ldexp(1.f, 2 * kLowBits - 1 - std::max(exponent, -90));
  }

  void split_in_bytes(const int32_t* integers, int64_t k, int64_t m) {
    for (int i = 0; i < kColumns; i++) {
      *bytes(0, k + i, m) = static_cast<uint8_t>(integers[i] >> 8);
      *bytes(1, k + i, m) = static_cast<uint8_t>(integers[i]);
    }
  }

  void split(const int32_t* integers, int64_t number) {
    int16_t* to = parts_ + number * planes * kColumns;
    int16_t high[kColumns], low[kColumns];
    for (int i = 0; i < kColumns; i++) {
      const int32_t upper = planes == 1 ? integers[i] : (integers[i] + (1 << (kLowBits - 1))) >> kLowBits;
      high[i] = static_cast<int16_t>(upper), low[i] = static_cast<int16_t>(integers[i] - (upper << kLowBits));
    }
    store(to, in_pairs(high));
    if constexpr (planes == 2) {
      store(to + kColumns, in_pairs(low));
      int64_t total = 0;
      for (int i = 0; i < kColumns; i++) total += integers[i];
      sums_[number] = static_cast<float>(total);
    }
  }
};
