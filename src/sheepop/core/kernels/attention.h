// What attention in a layer reads and writes, as `block.cpp` and Python tell the kernels of `attention.cpp`.

#pragma once

#include <cstdint>

// Keys or values of a layer: (blocks, K, S, C or D), and in 8 bits a scale for each head of a token.
struct Stored {
  void* numbers;
  float* scales;
};

// R tiles of tokens, of which H query heads attend to K heads of keys in blocks of S tokens.
struct Attention {
  const float* queries;  // (tokens, H, C)
  Stored keys, values;
  const int64_t *table, *tiles;  // (texts, M), (R, 4)
  float* out;                    // (tokens, H, D)
  int64_t R, H, K, S, C, D, M, window;  // 0 means no window
  float scale, cap;                     // 0 means no cap
  const float *slopes, *sinks;          // (H,) or null
};

// Computes the items `begin` to `end` of R * K.
typedef void (*Attend)(const Attention* attention, int64_t begin, int64_t end, int64_t threads);
// Stores the key or value of a head of a token as entry `entry`.
typedef void (*Write)(void* numbers, float* scales, int64_t entry, const float* x, int64_t width);
