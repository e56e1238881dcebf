// Products of tiles in the registers of Intel's AMX: sums (rows, 16) += inputs (rows, 64 bytes) times weights of 16 rows,
// whose tile has 4 bytes of each of them side by side. Registers 0 to 3 hold sums, 4 to 6 inputs, and 7 weights.

#pragma once

#include "native.h"

#ifdef __AMX_TILE__

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

// Some compilers do not know which memory the instructions for tiles read and write: call it before and after them.
inline void settle_memory() { asm volatile("" ::: "memory"); }

inline void shape_tiles(int64_t rows) {
  alignas(64) uint8_t shapes[64] = {1};  // the kind of table, and from byte 16 on the bytes of rows, from 48 on the rows
  for (int i = 0; i < 8; i++) shapes[16 + 2 * i] = kTileBytes, shapes[48 + i] = i < 7 ? rows : kTileRows;
  settle_memory();
  _tile_loadconfig(shapes);
}

#define ZERO_SUMS() \
  _tile_zero(0);    \
  _tile_zero(1);    \
  _tile_zero(2);    \
  _tile_zero(3)

// Stores the four sums `apart` elements from each other, in rows of `stride` bytes.
#define STORE_SUMS(to, apart, stride)          \
  _tile_stored(0, to, stride);                 \
  _tile_stored(1, to + (apart), stride);       \
  _tile_stored(2, to + 2 * (apart), stride);   \
  _tile_stored(3, to + 3 * (apart), stride);   \
  settle_memory()

#endif
