// y = x W^T + b on a CPU for weights that are integers, as in `integers.cpp`, with inputs rounded to 8 bits.
//
// Of x every 32 neighbours become integers of 8 bits with a scale, so that their products with codes are exact sums of
// integers. The sums in float32 have one order and round every product, so a row of y is the same to the last bit
// whatever the other rows of x are, however many threads share the work, and on every processor.
//
// There are kernels where they are faster than exact ones: with AVX2 for weights in groups, and for whole rows of int8 with
// the instruction for products of bytes, but not with AMX, whose tiles multiply inputs of 16 bits as fast as single groups.

#include <cmath>

#include "integer_tiles.h"

#ifdef __AVX2__

namespace {

constexpr int kGroup = 32;        // neighbours in a row of x that share a scale
constexpr int kHalf = kGroup / 2;
constexpr int64_t kTogether = 16;              // rows of x whose groups lie together
constexpr int kTiles = kLanes == 16 ? 3 : 1;   // that meet
constexpr int64_t kFew = 4;                    // rows of x meet one tile at a time
constexpr int kInputs = kLanes == 16 ? 8 : 4;  // rows of x that pass together
constexpr int kSums = 4;                       // of them add products at a time, while sums before become floats
constexpr int64_t kLine = 64;                  // bytes that come from memory at once
constexpr int64_t kAhead = 4096;               // bytes that are on their way
#ifdef __AVX512VNNI__
constexpr bool kIsUnsigned = true;  // codes, in the products of the processor
#else
constexpr bool kIsUnsigned = false;
#endif

// total + the sums of four products of codes and inputs, which are at least -127. Codes have a sign, or not if they are
// below 128 or `kIsUnsigned`: then no product of pairs exceeds 16 bits.
template <bool has_sign>
inline Lanes add_products(Lanes total, Lanes codes, Lanes x) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Lanes>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(x)));
#elif defined(__AVX512BW__)
  __m512i sizes = reinterpret_cast<__m512i>(codes), moved = reinterpret_cast<__m512i>(x);
  if (has_sign) {
    moved = _mm512_mask_sub_epi8(moved, _mm512_movepi8_mask(sizes), __m512i{}, moved);
    sizes = _mm512_abs_epi8(sizes);
  }
  const __m512i pairs = _mm512_maddubs_epi16(sizes, moved);
  return total + reinterpret_cast<Lanes>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
  __m256i sizes = reinterpret_cast<__m256i>(codes), moved = reinterpret_cast<__m256i>(x);
  if (has_sign) moved = _mm256_sign_epi8(moved, sizes), sizes = _mm256_abs_epi8(sizes);
  const __m256i pairs = _mm256_maddubs_epi16(sizes, moved);
  return total + reinterpret_cast<Lanes>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

typedef int32_t Ints4 __attribute__((vector_size(16)));
typedef int32_t Ints8 __attribute__((vector_size(32)));

inline int32_t largest(Ints8 values) {
  Ints4 halves[2];
  std::memcpy(halves, &values, sizeof(values));
  const Ints4 tops = halves[0] > halves[1] ? halves[0] : halves[1];
  return std::max(std::max(tops[0], tops[1]), std::max(tops[2], tops[3]));
}

// Neighbours in a row of x: x = kScaling * scale * integer. `sums` are those of the integers of each half.
struct Group {
  int8_t integers[kGroup];
  float scale;
  int32_t sums[2];
};

constexpr float kScaling = 1 << 20;  // so that sums of products with codes overflow no sooner than those with weights

// Rows of x in groups. Integers beyond K are 0.
class Inputs {
 public:
  Inputs(void* memory, int64_t M, int64_t K)
      : groups_(static_cast<Group*>(memory)), M_(M), K_(K), count_((K + kGroup - 1) / kGroup) {}

  // The group of row m that begins with column k. Groups with the same columns lie together in `rows(m)` rows.
  Group* at(int64_t m, int64_t k) const {
    const int64_t first = m / kTogether * kTogether;
    return groups_ + first * count_ + k / kGroup * rows(m) + m - first;
  }
  int64_t count() const { return M_; }
  int64_t rows(int64_t m) const { return std::min(kTogether, M_ - m / kTogether * kTogether); }

  // A group with a number that is not finite has such a scale, so that no product of the row is finite.
  void round(const float* x, int64_t m) const {
    constexpr float kLeast = 1e-28f;  // numbers are rounded as if the largest were at least this, so that no scale is 0
    const Ints8 rounding = Ints8{} + 0x4b400000;  // 3 * 2^22, whose sum with a small number ends with the nearest integer
    Group* to = at(m, 0);
    for (int64_t k = 0, stride = rows(m); k < K_; k += kGroup, to += stride) {
      Floats8 numbers[4] = {load<Floats8>(x + k), load<Floats8>(x + k + 8)};
      if (k + kHalf < K_) numbers[2] = load<Floats8>(x + k + kHalf), numbers[3] = load<Floats8>(x + k + kHalf + 8);
      Ints8 tops = {};
      for (const Floats8& part : numbers) {
        const Ints8 sizes = reinterpret_cast<Ints8>(part) & 0x7fffffff;
        tops = sizes > tops ? sizes : tops;
      }
      const float size = std::max(same_bits<float>(largest(tops)), kLeast);
      to->scale = size * (1 / (127 * kScaling));
      const Floats8 factor = spread<Floats8>(127 / size);
      __m256i found[4];
      for (int i = 0; i < 4; i++) {
        const Floats8 total = multiply_add(reinterpret_cast<Floats8>(rounding), numbers[i], factor);
        found[i] = reinterpret_cast<__m256i>(reinterpret_cast<Ints8>(total) - rounding);
      }
      // Of the two halves of vectors, packing takes four numbers of each in turn.
      const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(found[0], found[1]), _mm256_packs_epi32(found[2], found[3]));
      const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      store(to->integers, bytes);
      const auto sums = reinterpret_cast<Ints8>(_mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), __m256i{}));
      to->sums[0] = sums[0] + sums[2] - 128 * kHalf, to->sums[1] = sums[4] + sums[6] - 128 * kHalf;
    }
  }

 private:
  Group* groups_;
  int64_t M_, K_, count_;
};

// Kinds of codes: `read` gives the codes of four columns of a tile's rows, plus `kMore`, from the bytes of 32 columns.
template <bool>
struct Bytes {
  static constexpr int kBits = 8, kMore = kIsUnsigned ? 128 : 0;
  static constexpr bool kHasSign = !kIsUnsigned;
  template <int half>
  static Lanes read(const char* at, int unit) {
    const Lanes found = load<Lanes>(at + (kHalf / 4 * half + unit) * kUnit);
    return kIsUnsigned ? found ^ static_cast<int32_t>(0x80808080) : found;
  }
};

// Byte i holds code i in its lower half and code i + 16 in its upper one; codes have a sign unless there are offsets.
template <bool has_offset>
struct Nibbles {
  static constexpr int kBits = 4, kMore = has_offset ? 0 : 8;
  static constexpr bool kHasSign = false;
  template <int half>
  static Lanes read(const char* at, int unit) {
    const Lanes found = load<Lanes>(at + unit * kUnit) >> 4 * half & 0x0f0f0f0f;
    return has_offset ? found : found ^ 0x08080808;
  }
};

// Tiles of W from row n on. Weights have a scale, and perhaps an offset, for each `group` neighbours, or 0: for each row.
template <class Codes, int group, class Scale, bool has_offset>
struct Tiles {
  static constexpr int64_t kColumn = kRows * Codes::kBits / 8;  // bytes
  const char* codes;
  const Scale *scales, *offsets;
  int64_t K, tile;  // bytes of codes of a tile

  Tiles(const Linear& linear, int64_t n) : K(linear.K), tile(K * kColumn) {
    codes = static_cast<const char*>(linear.weights) + n / kRows * tile;
    scales = static_cast<const Scale*>(linear.scales) + n * (group ? K / std::max(group, 1) : 1);
    offsets = has_offset ? static_cast<const Scale*>(linear.offsets) + n * (K / group) : nullptr;
  }

  const char* at(int64_t k, int v) const {
    return codes + v / kVectors * tile + k * kColumn + v % kVectors * sizeof(Lanes);
  }

  // Where the scales of the group with column k are.
  int64_t place(int64_t k, int v) const {
    return v / kVectors * kRows * (K / group) + k / group * kRows + v % kVectors * kLanes;
  }

  // Adds the products of the group of columns from k on with the groups of `size` rows of x.
  template <int size, int vectors>
  void add(const Group* x, int64_t k, Floats (*totals)[vectors]) const {
    Floats found[size][vectors];
    if constexpr (group == kHalf) {
      add_part<0, 1, size, vectors>(x, k, found);
      if (k + kHalf < K) add_part<1, 1, size, vectors>(x, k, found);
    } else {
      add_part<0, 2, size, vectors>(x, k, found);
    }
    for (int i = 0; i < size; i++)
      for (int v = 0; v < vectors; v++) totals[i][v] = multiply_add(totals[i][v], found[i][v], spread<Floats>(x[i].scale));
  }

  // Adds `halves` halves of the group from `half` on to `found`, or begins with them.
  template <int half, int halves, int size, int vectors>
  void add_part(const Group* x, int64_t k, Floats (*found)[vectors]) const {
    Lanes sums[size][vectors];
    int32_t inputs[size];
    for (int i = 0; i < size; i++) {
      inputs[i] = x[i].sums[half] + (halves == 2 ? x[i].sums[1] : 0);
      for (int v = 0; v < vectors; v++) sums[i][v] = Lanes{} - Codes::kMore * inputs[i];
    }
    add_half<half, size, vectors>(x, k, sums);
    if (halves == 2 && k + kHalf < K) add_half<1, size, vectors>(x, k, sums);
    for (int v = 0; v < vectors; v++) {
      Floats scale = {}, offset = {};
      if constexpr (group) {
        scale = read(scales + place(k + half * kHalf, v));
        if constexpr (has_offset) offset = read(offsets + place(k + half * kHalf, v));
      }
      for (int i = 0; i < size; i++) {
        Floats part = floats(sums[i][v]);
        if (has_offset) {
          part = part * scale + offset * static_cast<float>(inputs[i]);
        } else if (group) {
          part *= scale;
        }
        found[i][v] = half ? found[i][v] + part : part;
      }
    }
  }

  // The loop stays a loop, because compilers that see all of its sums change their order and run out of registers.
  template <int half, int size, int vectors>
  void add_half(const Group* x, int64_t k, Lanes (*sums)[vectors]) const {
#pragma GCC unroll 1
    for (int unit = 0; unit < kHalf / 4; unit++) {
      Lanes codes[vectors];
      for (int v = 0; v < vectors; v++) codes[v] = Codes::template read<half>(at(k, v), unit);
      for (int i = 0; i < size; i++) {
        const Lanes four = Lanes{} + load<int32_t>(x[i].integers + half * kHalf + 4 * unit);
        for (int v = 0; v < vectors; v++) sums[i][v] = add_products<Codes::kHasSign>(sums[i][v], codes[v], four);
      }
    }
  }

  // The first of these tiles, up to row `end`, times `size` rows of x from m on.
  template <int size, int tiles>
  void multiply(const Linear& linear, const Inputs& inputs, float* y, int64_t m, int64_t n, int64_t end) const {
    constexpr int vectors = tiles * kVectors;
    Floats totals[size][vectors];
    for (int i = 0; i < size; i++)
      for (int v = 0; v < vectors; v++) totals[i][v] = Floats{};
    const Group* x = inputs.at(m, 0);
    // Meanwhile the next tiles come from memory, a part of them with each of the first rows of x, and so do the places of
    // results; few rows of x read one stream, and fetch what follows soon. Compilers drop functions that only fetch.
    constexpr int64_t kLines = kGroup * kColumn / kLine;
    const bool is_few = inputs.count() <= kFew;
    const int64_t part = m / kInputs, parts = std::min((inputs.count() + kInputs - 1) / kInputs, kLines);
    for (int64_t k = 0, i = 0, stride = inputs.rows(m); k < K; k += kGroup, i++, x += stride) {
#pragma GCC unroll 1  // compilers would keep an address in memory for each line
      for (int64_t line = 0; is_few && line < kLines; line++) __builtin_prefetch(at(k, 0) + kAhead + line * kLine, 0, 2);
      for (int v = vectors; !is_few && part < parts && v < 2 * vectors; v += kVectors) {
        for (int64_t line = part; line < kLines; line += parts) __builtin_prefetch(at(k, v) + line * kLine, 0, 2);
        if constexpr (group) __builtin_prefetch(scales + place(k, v), 0, 2);
        if constexpr (has_offset) __builtin_prefetch(offsets + place(k, v), 0, 2);
      }
      for (int v = 0; !is_few && i < size && v < vectors; v += kLine / sizeof(Floats))
        __builtin_prefetch(y + (m + i) * linear.N + n + v * kLanes, 1);
      UNROLLED for (int s = 0; s < size; s += kSums) add<std::min(size, kSums), vectors>(x + s, k, totals + s);
    }
    for (int i = 0; i < size; i++)
      for (int64_t v = 0, r = n; r < end && v < vectors; v++, r += kLanes) {
        const int64_t rows = std::min<int64_t>(kLanes, end - r);
        store_some(y + (m + i) * linear.N + r, finished(linear, totals[i][v], r, rows), rows);
      }
  }

  static Floats finished(const Linear& linear, Floats total, int64_t n, int64_t rows) {
    if constexpr (group == 0) total *= some(static_cast<const float*>(linear.scales) + n, rows);
    total *= kScaling;
    return linear.bias ? total + some(linear.bias + n, rows) : total;
  }
};

using WholeRows = Tiles<Bytes<false>, 0, float, false>;

// The rows of `tiles` tiles from n on, up to `end`, times all inputs.
template <class Tile, int tiles>
void multiply_tiles(const Linear& linear, const Inputs& inputs, float* y, int64_t n, int64_t end) {
  const Tile tile(linear, n);
  for (int64_t first = 0; first < inputs.count(); first += kTogether)
    by_size<kInputs>(inputs.rows(first), [&]<int size>(int64_t i) {
      tile.template multiply<size, tiles>(linear, inputs, y, first + i, n, end);
    });
}

// Rows `begin` to `end` of W times all inputs; `begin` is that of a tile.
template <class Tile>
void multiply(const Linear& linear, const void* memory, float* y, int64_t M, int64_t begin, int64_t end) {
  const Inputs inputs(const_cast<void*>(memory), M, linear.K);
  int64_t n = begin;
  for (; M > kFew && n + (kTiles - 1) * kRows < end; n += kTiles * kRows)
    multiply_tiles<Tile, kTiles>(linear, inputs, y, n, end);
  for (; n < end; n += kRows) multiply_tiles<Tile, 1>(linear, inputs, y, n, end);
}

template <template <bool> class Codes, int group, class Scale>
void multiply_groups(const Linear& linear, const void* memory, float* y, int64_t M, int64_t begin, int64_t end) {
  (linear.offsets ? multiply<Tiles<Codes<true>, group, Scale, true>>
                  : multiply<Tiles<Codes<false>, group, Scale, false>>)(linear, memory, y, M, begin, end);
}

}  // namespace

#define GROUP_KERNEL(name, Codes, group, Scale) \
  KERNEL(name##_rounded, Inputs, (multiply_groups<Codes, group, Scale>))

extern "C" {
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
KERNEL(int8_rounded, Inputs, multiply<WholeRows>)
#endif
OF_GROUPS(GROUP_KERNEL)
}

#endif
