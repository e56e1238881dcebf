// What takes long to read in GGUF files: the places of texts in a list of them, and the blocks of the commonest quantised
// types as the network stores them, without loss: integers, and a scale and
// perhaps an offset of each group in float32. The layouts are those of llama.cpp's ggml-common.h; block_decoding.py has
// them for all types. Integers of four bits lie in groups of 32: byte i has number i in its lower half, and number
// i + 16 in its upper half.

#include <algorithm>

#include "numbers.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr int kGroup = 32, kHalf = kGroup / 2;  // numbers of a group
constexpr int kGroups = 8;                      // of a block of 256 numbers
// Bytes of a file that are given back at a time; each time, the system interrupts all threads of the process.
constexpr int64_t kGivenBack = 1 << 21;

struct Out {
  uint8_t* numbers;
  float *scales, *offsets;
};

inline float half(const uint8_t* from) {
  Float16 found;
  std::memcpy(&found, from, sizeof(found));
  return widened(found);
}

// Scales and offsets of 6 bits, from 12 bytes: four of each, with the upper bits of the other four.
inline void six_bits(const uint8_t* from, float scale, float offset, Out out) {
  const uint8_t *first = from, *second = from + 4, *lower = from + 8;
  for (int i = 0; i < 4; i++) {
    out.scales[i] = scale * static_cast<float>(first[i] & 63);
    out.scales[i + 4] = scale * static_cast<float>((lower[i] & 15) | (first[i] >> 2 & 48));
    out.offsets[i] = offset * static_cast<float>(second[i] & 63);
    out.offsets[i + 4] = offset * static_cast<float>(lower[i] >> 4 | (second[i] >> 2 & 48));
  }
}

// Four bits of 32 numbers and a fifth bit of each.
inline void five_bits(const uint8_t* low, const uint8_t* high, int least, uint8_t* out) {
  uint32_t bits;
  std::memcpy(&bits, high, sizeof(bits));
  for (int i = 0; i < kHalf; i++) {
    out[i] = static_cast<uint8_t>(((low[i] & 15) | (bits >> i & 1) << 4) + least);
    out[i + kHalf] = static_cast<uint8_t>((low[i] >> 4 | (bits >> (i + kHalf) & 1) << 4) + least);
  }
}

// Gives back the whole pages of a mapped file from `begin` to `end`, and returns where they end.
const uint8_t* give_back(const uint8_t* begin, const uint8_t* end, uintptr_t page) {
#ifdef __linux__
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page * page;
  if (last <= first) return begin;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  return reinterpret_cast<const uint8_t*>(last);
#else
  return end;
#endif
}

// Decodes `count` blocks. With a `page` size they lie in a mapped file, whose pages need not stay in memory.
template <int kBytes, int kNumbers, int kScales, void decode_block(const uint8_t* from, Out out)>
inline void decode(const uint8_t* blocks, int64_t count, int64_t page, Out out) {
  const int64_t most = page > 0 ? kGivenBack / kBytes : count;
  const uint8_t* kept = blocks;
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t end = std::min(count, begin + most);
    for (int64_t i = begin; i < end; i++) {
      float* offsets = out.offsets == nullptr ? nullptr : out.offsets + i * kScales;
      decode_block(blocks + i * kBytes, Out{out.numbers + i * kNumbers, out.scales + i * kScales, offsets});
    }
    if (page > 0) kept = give_back(kept, blocks + end * kBytes, page);
  }
}

}  // namespace

// Defines the function for a type of blocks of so many bytes, numbers in memory and scales; the body decodes one.
#define BLOCKS(name, bytes, numbers, scales)                                                                          \
  static void name##_block(const uint8_t* from, Out out);                                                             \
  extern "C" void name(const uint8_t* blocks, int64_t count, int64_t page, uint8_t* out, float* scale, float* more) { \
    decode<bytes, numbers, scales, name##_block>(blocks, count, page, {out, scale, more});                            \
  }                                                                                                                   \
  static void name##_block(const uint8_t* from, Out out)

// Where the lengths of `count` texts begin, of which each lies behind its length, from `place` of `size` bytes on. Returns
// the place behind the last text, or -1 if one would end beyond the bytes.
extern "C" int64_t text_places(const uint8_t* bytes, int64_t size, int64_t place, int64_t count, int64_t* begins) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t length;
    if (size - place < static_cast<int64_t>(sizeof(length))) return -1;
    std::memcpy(&length, bytes + place, sizeof(length));
    begins[i] = place;
    place += sizeof(length);
    if (length > static_cast<uint64_t>(size - place)) return -1;
    place += static_cast<int64_t>(length);
  }
  return place;
}

// Copies the texts whose lengths begin at `begins`, one after the other, and writes where each starts, and the last ends.
extern "C" void copy_texts(const uint8_t* bytes, const int64_t* begins, int64_t count, uint8_t* to, int64_t* starts) {
  starts[0] = 0;
  for (int64_t i = 0; i < count; i++) {
    uint64_t length;
    const uint8_t* text = bytes + begins[i];
    std::memcpy(&length, text, sizeof(length));
    std::memcpy(to + starts[i], text + sizeof(length), length);
    starts[i + 1] = starts[i] + static_cast<int64_t>(length);
  }
}

BLOCKS(q4_0, 18, kHalf, 1) {
  out.scales[0] = half(from);
  for (int i = 0; i < kHalf; i++) out.numbers[i] = from[2 + i] ^ 0x88;  // less 8, in two's complement
}

BLOCKS(q4_1, 20, kHalf, 1) {
  out.scales[0] = half(from);
  out.offsets[0] = half(from + 2);
  std::memcpy(out.numbers, from + 4, kHalf);
}

BLOCKS(q5_0, 22, kGroup, 1) {
  out.scales[0] = half(from);
  five_bits(from + 6, from + 2, -16, out.numbers);
}

BLOCKS(q5_1, 24, kGroup, 1) {
  out.scales[0] = half(from);
  out.offsets[0] = half(from + 2);
  five_bits(from + 8, from + 4, 0, out.numbers);
}

BLOCKS(q8_0, 34, kGroup, 1) {
  out.scales[0] = half(from);
  std::memcpy(out.numbers, from + 2, kGroup);
}

BLOCKS(q4_k, 144, kGroups * kHalf, kGroups) {
  six_bits(from + 4, half(from), -half(from + 2), out);
  for (int pair = 0; pair < kGroups / 2; pair++) {
    const uint8_t* low = from + 16 + pair * kGroup;
    uint8_t* to = out.numbers + pair * kGroup;
    for (int i = 0; i < kHalf; i++) {
      to[i] = static_cast<uint8_t>((low[i] & 15) | low[i + kHalf] << 4);
      to[i + kHalf] = static_cast<uint8_t>(low[i] >> 4 | (low[i + kHalf] & 240));
    }
  }
}

BLOCKS(q5_k, 176, kGroups * kGroup, kGroups) {
  six_bits(from + 4, half(from), -half(from + 2), out);
  const uint8_t *high = from + 16, *low = from + 48;
  for (int group = 0; group < kGroups; group++) {
    for (int i = 0; i < kGroup; i++) {
      const int nibble = low[group / 2 * kGroup + i] >> (group & 1) * 4 & 15;
      out.numbers[group * kGroup + i] = static_cast<uint8_t>(nibble | (high[i] >> group & 1) << 4);
    }
  }
}

BLOCKS(q6_k, 210, kGroups * kGroup, 2 * kGroups) {
  const float scale = half(from + 208);
  for (int i = 0; i < 2 * kGroups; i++) out.scales[i] = scale * static_cast<float>(static_cast<int8_t>(from[192 + i]));
  for (int group = 0; group < kGroups; group++) {
    const int part = group / 4, place = group % 4;  // of 128 numbers, and of 32 in it
    const uint8_t *low = from + part * 64 + place % 2 * kGroup, *high = from + 128 + part * kGroup;
    for (int i = 0; i < kGroup; i++) {
      const int six = (low[i] >> place / 2 * 4 & 15) | (high[i] >> place * 2 & 3) << 4;
      out.numbers[group * kGroup + i] = static_cast<uint8_t>(six - 32);
    }
  }
}
