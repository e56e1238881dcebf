// The instructions of AMX in plain C++ (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), so that
// kernels for them can be tested on any processor.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

struct SoftwareTiles {
  int rows[8] = {}, bytes[8] = {};
  uint8_t tiles[8][16][64] = {};
};
static thread_local SoftwareTiles software;

static void check(bool holds) {
  if (!holds) std::abort();
}

static void software_loadconfig(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  check(bytes[0] == 1);
  software = {};
  for (int i = 0; i < 8; i++) {
    software.rows[i] = bytes[48 + i];
    software.bytes[i] = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    check(software.rows[i] <= 16 && software.bytes[i] <= 64);
  }
}
static void software_release() { software = {}; }
static void software_zero(int tile) { std::memset(software.tiles[tile], 0, sizeof(software.tiles[tile])); }

static void software_loadd(int tile, const void* from, int64_t stride) {
  check(software.rows[tile] > 0);
  software_zero(tile);
  for (int r = 0; r < software.rows[tile]; r++)
    std::memcpy(software.tiles[tile][r], static_cast<const char*>(from) + r * stride, software.bytes[tile]);
}
static void software_stored(int tile, void* to, int64_t stride) {
  check(software.rows[tile] > 0);
  for (int r = 0; r < software.rows[tile]; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, software.tiles[tile][r], software.bytes[tile]);
}

template <class Total, class Product>
static void each(int to, int a, int b, const Product& product) {
  check(software.rows[to] == software.rows[a] && software.bytes[a] == 4 * software.rows[b]);
  for (int m = 0; m < software.rows[to]; m++)
    for (int k = 0; k < software.rows[b]; k++)
      for (int n = 0; n < software.bytes[to] / 4; n++) {
        Total total;
        uint8_t* at = software.tiles[to][m] + 4 * n;
        std::memcpy(&total, at, 4);
        total = product(total, software.tiles[a][m] + 4 * k, software.tiles[b][k] + 4 * n);
        std::memcpy(at, &total, 4);
      }
}
template <class A>
static void products_of_bytes(int to, int a, int b) {
  each<int32_t>(to, a, b, [](int32_t total, const uint8_t* x, const uint8_t* w) {
    for (int i = 0; i < 4; i++) total += static_cast<int32_t>(static_cast<A>(x[i])) * static_cast<int8_t>(w[i]);
    return total;
  });
}
static void software_dpbssd(int to, int a, int b) { products_of_bytes<int8_t>(to, a, b); }
static void software_dpbusd(int to, int a, int b) { products_of_bytes<uint8_t>(to, a, b); }

static float bfloat16(const uint8_t* from) {
  const uint32_t bits = from[0] << 16 | static_cast<uint32_t>(from[1]) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return std::fpclassify(value) == FP_SUBNORMAL ? 0.f : value;
}
static void software_dpbf16ps(int to, int a, int b) {
  each<float>(to, a, b, [](float total, const uint8_t* x, const uint8_t* w) {
    for (int i = 0; i < 4; i += 2) total = std::fma(bfloat16(x + i), bfloat16(w + i), total);
    return total;
  });
}

#undef _tile_dpbf16ps
#define _tile_dpbf16ps software_dpbf16ps
#undef _tile_dpbssd
#define _tile_dpbssd software_dpbssd
#undef _tile_dpbusd
#define _tile_dpbusd software_dpbusd
#undef _tile_loadconfig
#define _tile_loadconfig software_loadconfig
#undef _tile_loadd
#define _tile_loadd software_loadd
#undef _tile_release
#define _tile_release software_release
#undef _tile_stored
#define _tile_stored software_stored
#undef _tile_zero
#define _tile_zero software_zero
