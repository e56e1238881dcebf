// Products of tiles in the registers of Intel's AMX: sums (rows, 16) += inputs (rows, 64 bytes) times weights of 16 rows,
// whose tile has 4 bytes of each of them side by side. Registers 0 to 3 hold sums, 4 to 6 inputs, and 7 weights.

#pragma once

#include "native.h"

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

// Rows of inputs (M, width bytes) in `planes` parts, tile by tile: the parts of the first 64 bytes of 16 rows, of the next
// 64 bytes, and so on, then those of the next 16 rows.
struct TileOrder {
  int64_t planes, M, width;

  int64_t rows(int64_t m) const { return std::min(M - m / kTileRows * kTileRows, kTileRows); }

  // The byte at which `at` bytes of part `part` of row m lie.
  int64_t place(int64_t part, int64_t m, int64_t at) const {
    const int64_t tile = at / kTileBytes * planes + part;
    return m / kTileRows * kTileRows * planes * width + (tile * rows(m) + m % kTileRows) * kTileBytes + at % kTileBytes;
  }
};

template <class T>
inline T* aligned(T* memory) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory) + kTileBytes - 1) / kTileBytes * kTileBytes);
}

#ifdef __AMX_TILE__

// Some compilers do not know which memory the instructions for tiles read and write: call it before and after them.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Prepares the registers for tiles of so many rows of inputs, unless they are already.
inline void shape_tiles(int64_t rows, int64_t& shaped) {
  if (rows == shaped) return;
  shaped = rows;
  alignas(64) uint8_t shapes[64] = {1};  // the kind of table, and from byte 16 on the bytes of rows, from 48 on the rows
  for (int i = 0; i < 8; i++) shapes[16 + 2 * i] = kTileBytes, shapes[48 + i] = i < 7 ? rows : kTileRows;
  settle_memory();
  _tile_loadconfig(shapes);
}

#define ZERO_SUMS() \
  settle_memory();  \
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
