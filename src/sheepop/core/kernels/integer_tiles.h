// Tiles of 16 rows of integers, as ``integers.cpp`` describes them, in vectors, and their formats.

#pragma once

#include "numbers.h"

constexpr int kRows = 16;                 // of a tile
constexpr int kUnit = 4 * kRows;          // bytes of a tile that have the same columns
constexpr int kVectors = kRows / kLanes;  // that hold the same columns of all rows of a tile

// A number, or neighbouring shorter ones, for each of `kLanes` rows of W.
typedef int32_t Lanes __attribute__((vector_size(4 * kLanes)));

inline Floats floats(Lanes values) { return __builtin_convertvector(values, Floats); }

// The first `count` of the numbers from `from` on, at most `kLanes`.
inline Floats some(const float* from, int64_t count) {
  if (count == kLanes) return load<Floats>(from);  // copies of unknown lengths are slow
  Floats found = {};
  std::memcpy(&found, from, count * sizeof(float));
  return found;
}

inline void store_some(float* to, Floats values, int64_t count) {
  count == kLanes ? store(to, values) : static_cast<void>(std::memcpy(to, &values, count * sizeof(float)));
}

// Calls `work.template operator()<size>(first)` for the items 0 to `count`, as many of them at a time as `most`.
template <int most, class Work>
inline void by_size(int64_t count, const Work& work, int64_t first = 0) {
  for (; first + most <= count; first += most) work.template operator()<most>(first);
  if constexpr (most > 1) by_size<most / 2>(count, work, first);
}

// Defines the functions of a kernel, which `Linear` describes.
#define KERNEL(name, Inputs, function)                                                                              \
  void round_##name(const float* x, int64_t m, void* memory, int64_t M, int64_t K) {                                \
    Inputs(memory, M, K).round(x, m);                                                                               \
  }                                                                                                                 \
  void multiply_##name(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end) { \
    function(*linear, inputs, y, M, begin, end);                                                                    \
  }

// Defines kernels for integers in groups, given by name, kind of codes, neighbours in a group, and type of scales.
#define OF_GROUPS(DEFINE)                        \
  DEFINE(int8_16_float32, Bytes, 16, float)      \
  DEFINE(int8_32_float32, Bytes, 32, float)      \
  DEFINE(int4_16_float32, Nibbles, 16, float)    \
  DEFINE(int4_32_float32, Nibbles, 32, float)    \
  DEFINE(int4_32_bfloat16, Nibbles, 32, BFloat16)
