// y = x W^T + b on a CPU for weights that are integers of 8 or 4 bits; docs/kernels.md explains the method.
//
// W (N, K) has int8 with a scale a row, or integers of 8 or 4 bits with a scale, and perhaps an offset, for every 16 or
// 32 neighbours: weight = scale * code + offset. It lies in tiles of 16 rows: the first 4 bytes of each row, then the
// next 4 of each, and so on, and likewise the scales of groups, so that memory is read once, from one end to the other.
// x becomes integers, of 16 bits for rows with one scale and of 30 bits for groups, so that the products within a group
// are exact sums of integers. A row of y is the same to the last bit whatever the other rows of x are, however many
// threads share the work, and however wide the vectors are.

#include <limits>
#include <vector>

#include "integer_inputs.h"
#include "integer_tiles.h"

namespace {

constexpr int kBytes = 16;           // of each row of W are read at a time
constexpr int kAhead = 4096;         // bytes that are on their way from memory
constexpr int kPairs = kColumns / 2;
constexpr int kParts = kLanes == 16 ? 8 : 4;  // of inputs, whose sums stay in registers
constexpr int kTiles = kLanes == 16 ? 2 : 1;  // that meet many inputs at a time
constexpr int64_t kMany = 32;                 // rows of x

inline Pairs spread_pair(const int16_t* pair) { return reinterpret_cast<Pairs>(Lanes{} + load<int32_t>(pair)); }

// Adds to `sums` the products of `width` columns with parts of inputs, which lie one after another; those of the next 16
// columns are `stride` further. The loops stay loops, because compilers that see all of their sums change the order and
// run out of registers.
template <int parts, int vectors>
inline void add_products(const Pairs (*weights)[vectors], const int16_t* x, int64_t stride, int64_t width,
                         Lanes (*sums)[vectors]) {
  Lanes found[parts][vectors], other[parts][vectors] = {};  // so that few additions wait for the sum before
  for (int part = 0; part < parts; part++)
    for (int v = 0; v < vectors; v++) found[part][v] = sums[part][v];
  for (int64_t column = 0; column < width; column += kColumns, x += stride, weights += kPairs)
#pragma GCC unroll 1
    for (int pair = 0; pair < kPairs; pair += 2)
      for (int part = 0; part < parts; part++) {
        const Pairs one = spread_pair(x + part * kColumns + 2 * pair);
        const Pairs next = spread_pair(x + part * kColumns + 2 * pair + 2);
        for (int v = 0; v < vectors; v++) {
          found[part][v] = add_pairs(found[part][v], weights[pair][v], one);
          Lanes& sum = (parts * vectors < 4 ? other : found)[part][v];
          sum = add_pairs(sum, weights[pair + 1][v], next);
        }
      }
  for (int part = 0; part < parts; part++)
    for (int v = 0; v < vectors; v++) sums[part][v] = found[part][v] + other[part][v];
}

// Kinds of codes: `unpack` makes pairs of short numbers of 16 bytes of all rows of some tiles, from `at` on. Of four
// neighbours c the pairs are (c[0], c[2]) and (c[1], c[3]), which need no more than shifts. A tile has `tile` bytes.
inline const char* vector_at(const char* at, int64_t tile, int v) {
  return at + v / kVectors * tile + v % kVectors * sizeof(Pairs);
}

template <bool>
struct Bytes {
  static constexpr int kCodes = 16;
  template <int vectors>
  static void unpack(const char* at, int64_t tile, Pairs (*to)[vectors]) {
    for (int i = 0; i < kBytes / 4; i++)
      for (int v = 0; v < vectors; v++) {
        const Pairs pairs = load<Pairs>(vector_at(at + i * kUnit, tile, v));
        to[2 * i][v] = (pairs << 8) >> 8, to[2 * i + 1][v] = pairs >> 8;
      }
  }
};

// Byte i holds code i in its lower half and code i + 16 in its upper one; codes have a sign unless there are offsets.
template <bool has_offset>
struct Nibbles {
  static constexpr int kCodes = 32;
  static Pairs code(Lanes part, int shift) {
    const Pairs found = reinterpret_cast<Pairs>((part >> shift) & 0x000f000f);
    return has_offset ? found : (found ^ 8) - 8;
  }
  template <int vectors>
  static void unpack(const char* at, int64_t tile, Pairs (*to)[vectors]) {
    for (int i = 0; i < kBytes / 4; i++)
      for (int v = 0; v < vectors; v++) {
        const Lanes part = load<Lanes>(vector_at(at + i * kUnit, tile, v));
        to[2 * i][v] = code(part, 0), to[2 * i + 1][v] = code(part, 8);
        to[kPairs + 2 * i][v] = code(part, 4), to[kPairs + 2 * i + 1][v] = code(part, 12);
      }
  }
};

inline void fetch_after(const char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + kAhead + i);
}

// Integers in groups: total = the sum of scale * sum(codes * inputs) + offset * sum(inputs).
template <class Codes, int group, class Scale, bool has_offset>
struct Groups {
  static constexpr int kPlanes = 2, kStep = std::max(group, Codes::kCodes), kReads = kStep / Codes::kCodes;
  static constexpr int64_t kPanel = std::numeric_limits<int64_t>::max() / 2;  // all columns at a time
  const char* codes;
  const Scale *scales, *offsets;
  int64_t K, tile;  // bytes of codes of a tile

  Groups(const Linear& linear, int64_t n)
      : codes(static_cast<const char*>(linear.weights) + n * linear.K * kBytes / Codes::kCodes),
        scales(static_cast<const Scale*>(linear.scales) + n * (linear.K / group)),
        offsets(static_cast<const Scale*>(linear.offsets) + (has_offset ? n * (linear.K / group) : 0)),
        K(linear.K),
        tile(kRows * K * kBytes / Codes::kCodes) {}

  template <int vectors>
  void add(const Inputs<2>& inputs, int64_t first, int64_t count, int64_t, int64_t end, Floats (*totals)[vectors]) const {
    for (int64_t k = 0; k < end; k += kStep) {
      Pairs weights[kStep / 2][vectors];
      const char* at = codes + k * kUnit * kBytes / (4 * Codes::kCodes);
      for (int v = 0; v < vectors; v += kVectors) fetch_after(vector_at(at, tile, v), kReads * kBytes * kRows);
      for (int i = 0; i < kReads; i++)
        Codes::template unpack<vectors>(at + i * kUnit * kBytes / 4, tile, weights + i * Codes::kCodes / 2);
      for (int g = 0; g < kStep / group; g++) {
        const int64_t column = k + g * group;
        by_size<kParts / kPlanes>(count, [&]<int size>(int64_t i) {
          add_group<size, vectors>(weights + g * group / 2, inputs, column, first + i, totals + i);
        });
      }
    }
  }

  // Adds the products of a group with `size` inputs from m on.
  template <int size, int vectors>
  void add_group(const Pairs (*weights)[vectors], const Inputs<2>& inputs, int64_t column, int64_t m,
                 Floats (*totals)[vectors]) const {
    Lanes found[2 * size][vectors] = {};
    add_products<2 * size, vectors>(weights, inputs.parts(column, m), inputs.stride(m), group, found);
    for (int i = 0; i < size; i++) {
      float sums = 0;
      for (int part = 0; has_offset && part < group / kColumns; part++) sums += inputs.sum(column + part * kColumns, m + i);
      for (int v = 0; v < vectors; v++) {
        const int64_t place = v / kVectors * kRows * (K / group) + column / group * kRows + v % kVectors * kLanes;
        const Floats scale = read(scales + place);
        const Floats products =
            multiply_add(floats(found[2 * i + 1][v]), floats(found[2 * i][v]), spread<Floats>(1 << kLowBits));
        // The two parts of a group may nearly cancel out, which a large total would make less exact.
        totals[i][v] = has_offset ? totals[i][v] + multiply_add(scale * products, read(offsets + place), spread<Floats>(sums))
                                  : multiply_add(totals[i][v], scale, products);
      }
    }
  }

  static Floats finished(Floats total, const Linear&, int64_t, int64_t) { return total; }
};

// Integers of 8 bits with a scale for each row.
struct WholeRows {
  static constexpr int kPlanes = 1;
  static constexpr int64_t kPanel = 256;  // products of 8 and 16 bits whose sum cannot overflow
  const char* codes;
  int64_t tile;

  WholeRows(const Linear& linear, int64_t n)
      : codes(static_cast<const char*>(linear.weights) + n * linear.K), tile(kRows * linear.K) {}

  template <int vectors>
  void add(const Inputs<1>& inputs, int64_t first, int64_t count, int64_t begin, int64_t end,
           Floats (*totals)[vectors]) const {
    // Many inputs meet the weights of a panel, which are unpacked before; few meet them while others come from memory.
    (count < kMany ? add_steps<kColumns, vectors> : add_steps<kPanel, vectors>)(*this, inputs, first, count, begin, end,
                                                                                 totals);
  }

  template <int64_t step, int vectors>
  static void add_steps(const WholeRows& rows, const Inputs<1>& inputs, int64_t first, int64_t count, int64_t begin,
                        int64_t end, Floats (*totals)[vectors]) {
    Lanes sums[kInputs][vectors];
    const int64_t stride = step == kColumns ? 0 : inputs.stride(first);
    for (int64_t i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++) sums[i][v] = Lanes{};
    for (int64_t k = begin; k < end; k += step) {
      Pairs weights[step / 2][vectors];
      const int64_t width = step == kColumns ? step : std::min(step, end - k);
      for (int64_t column = 0; column < width; column += kColumns) {
        const char* at = rows.codes + (k + column) * kRows;
        for (int v = 0; v < vectors; v += kVectors) fetch_after(vector_at(at, rows.tile, v), kBytes * kRows);
        Bytes<false>::unpack<vectors>(at, rows.tile, weights + column / 2);
      }
      by_size<kParts>(count, [&]<int size>(int64_t i) {
        add_products<size, vectors>(weights, inputs.parts(k, first + i), stride, width, sums + i);
      });
    }
    for (int64_t i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++) totals[i][v] += floats(sums[i][v]);
  }

  static Floats finished(Floats total, const Linear& linear, int64_t n, int64_t rows) {
    return total * some(static_cast<const float*>(linear.scales) + n, rows);
  }

};

#ifdef __AMX_INT8__

// Adds to totals (rows, 16) the products of rows of x from m on with columns `begin` to `end` of a tile of W.
void add_in_tiles(const char* codes, const Inputs<1>& inputs, int64_t m, int64_t begin, int64_t end, float* totals) {
  ZERO_SUMS();
  for (int64_t k = begin; k < end; k += kUnit) {
    alignas(64) char last[kRows * kUnit] = {};
    const char* at = codes + k * kRows;
    if (end - k < kUnit) std::memcpy(last, at, (end - k) * kRows), at = last;
    settle_memory();
    _tile_loadd(4, inputs.bytes(0, k, m), kUnit);
    _tile_loadd(5, inputs.bytes(1, k, m), kUnit);
    _tile_loadd(7, at, kUnit);
    if (k / kUnit % 2) {  // so that only one product waits for the one before
      _tile_dpbssd(0, 4, 7);
      _tile_dpbusd(1, 5, 7);
    } else {
      _tile_dpbssd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
  }
  alignas(64) int32_t sums[4][kRows * kRows];
  STORE_SUMS(sums[0], kRows * kRows, kUnit);
  for (int i = 0; i < kRows * kRows; i++)
    totals[i] += static_cast<float>((sums[0][i] + sums[2][i]) * 256 + (sums[1][i] + sums[3][i]));
}

// Rows `begin` to `end` of W times all inputs in bytes, with the results of `multiply`.
void multiply_in_tiles(const Linear& linear, const Inputs<1>& inputs, float* y, int64_t M, int64_t begin, int64_t end) {
  const auto* scales = static_cast<const float*>(linear.scales);
  int64_t shaped = 0;
  for (int64_t n = begin; n < end; n += kRows)
    for (int64_t m = 0; m < M; m += kRows) {
      const int64_t count = std::min<int64_t>(M - m, kRows), rows = std::min<int64_t>(end - n, kRows);
      float totals[kRows * kRows] = {};
      shape_tiles(count, shaped);
      for (int64_t k = 0; k < linear.K; k += WholeRows::kPanel)
        add_in_tiles(WholeRows(linear, n).codes, inputs, m, k, std::min(linear.K, k + WholeRows::kPanel), totals);
      for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < rows; r++) {
          const float found = totals[i * kRows + r] * scales[n + r] * inputs.scale(m + i);
          y[(m + i) * linear.N + n + r] = linear.bias ? found + linear.bias[n + r] : found;
        }
    }
  _tile_release();
}

#endif

// The rows of `tiles` tiles from n on, up to `end`, times all inputs.
template <class Tile, int tiles>
void multiply_rows(const Linear& linear, const Inputs<Tile::kPlanes>& inputs, float* y, int64_t M, int64_t n, int64_t end) {
  constexpr int vectors = tiles * kVectors;
  const Tile tile(linear, n);
  for (int64_t first = 0; first < M; first += kInputs) {
    const int64_t count = std::min(kInputs, M - first);
    Floats totals[kInputs][vectors];
    for (int64_t i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++) totals[i][v] = Floats{};
    for (int64_t k = 0; k < linear.K; k += Tile::kPanel)
      tile.template add<vectors>(inputs, first, count, k, std::min(linear.K - k, Tile::kPanel) + k, totals);
    for (int64_t i = 0; i < count; i++)
      for (int64_t v = 0, r = n; r < end && v < vectors; v++, r += kLanes) {
        const int64_t rows = std::min<int64_t>(kLanes, end - r);
        Floats found = Tile::finished(totals[i][v], linear, r, rows) * inputs.scale(first + i);
        if (linear.bias) found += some(linear.bias + r, rows);
        store_some(y + (first + i) * linear.N + r, found, rows);
      }
  }
}

// Rows `begin` to `end` of W times all inputs; `begin` is that of a tile.
template <class Tile>
void multiply(const Linear& linear, const void* memory, float* y, int64_t M, int64_t begin, int64_t end) {
  const Inputs<Tile::kPlanes> inputs(const_cast<void*>(memory), M, linear.K);
#ifdef __AMX_INT8__
  if constexpr (Tile::kPlanes == 1) {
    if (inputs.is_in_bytes()) return multiply_in_tiles(linear, inputs, y, M, begin, end);
  }
#endif
  int64_t n = begin;
  for (; M >= kMany && n + (kTiles - 1) * kRows < end; n += kTiles * kRows)
    multiply_rows<Tile, kTiles>(linear, inputs, y, M, n, end);
  for (; n < end; n += kRows) multiply_rows<Tile, 1>(linear, inputs, y, M, n, end);
}

template <template <bool> class Codes, int group, class Scale>
void multiply_groups(const Linear& linear, const void* memory, float* y, int64_t M, int64_t begin, int64_t end) {
  (linear.offsets ? multiply<Groups<Codes<true>, group, Scale, true>>
                  : multiply<Groups<Codes<false>, group, Scale, false>>)(linear, memory, y, M, begin, end);
}

}  // namespace

#define GROUP_KERNEL(name, Codes, group, Scale) KERNEL(name, Inputs<2>, (multiply_groups<Codes, group, Scale>))

extern "C" {

// The most rows of x whose products with groups are faster here than with PyTorch and floats.
int64_t most_rows_of_groups() {
#ifdef __AVX512VNNI__
  return std::numeric_limits<int64_t>::max();
#else
  return 128;
#endif
}

// Puts rows of `units` units of four bytes in the order of tiles, in the same memory.
void arrange_tiles(int32_t* rows, int64_t tiles, int64_t units) {
  std::vector<int32_t> tile(kRows * units);
  for (int64_t i = 0; i < tiles; i++, rows += kRows * units) {
    std::copy_n(rows, kRows * units, tile.data());
    for (int64_t unit = 0; unit < units; unit++)
      for (int row = 0; row < kRows; row++) rows[unit * kRows + row] = tile[row * units + unit];
  }
}

KERNEL(int8, Inputs<1>, multiply<WholeRows>)
OF_GROUPS(GROUP_KERNEL)
}
