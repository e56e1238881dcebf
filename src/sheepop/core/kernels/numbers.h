// Numbers of 16 and 8 bits, which are exact in float32. They are written rounded to the nearest, ties to even.

#pragma once

#include <cmath>

#include "native.h"

// Half of a float32: 8 bits of exponent and 7 of fraction.
struct BFloat16 {
  uint16_t bits;
};

// IEEE 754 binary16: 5 bits of exponent and 10 of fraction.
struct Float16 {
  uint16_t bits;
};

// Finite e4m3: 4 bits of exponent and 3 of fraction, up to 448.
struct Float8 {
  uint8_t bits;
};

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Floats read(const float* from) { return load<Floats>(from); }

// Integers of 16 and 8 bits in 32 bits. Intrinsics are one instruction, where compilers make several of a conversion.
inline FloatBits widened_bits(const uint16_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<FloatBits>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<FloatBits>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load<HighBits>(from), FloatBits);
#endif
}

typedef int8_t FewBytes __attribute__((vector_size(kLanes)));

inline FloatBits widened_bits(const int8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<FloatBits>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<FloatBits>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load<FewBytes>(from), FloatBits);
#endif
}

inline Floats read(const BFloat16* from) { return reinterpret_cast<Floats>(widened_bits(&from->bits) << 16); }

inline Floats read(const int8_t* from) { return __builtin_convertvector(widened_bits(from), Floats); }

inline Floats read(const Float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  const FloatBits bits = widened_bits(&from->bits), size = (bits & 0x7fff) << 13;
  // A product with 2^112 moves the exponent, also that of subnormal numbers.
  const Floats found = reinterpret_cast<Floats>(size) * 0x1p112f;
  const FloatBits special = size >= 0x0f800000 ? FloatBits{} + 0x7f800000 : FloatBits{};
  return reinterpret_cast<Floats>(reinterpret_cast<FloatBits>(found) | special | (bits & 0x8000) << 16);
#endif
}

// The bits are those of a float32 whose exponent is 120 too small, which a product corrects, also that of subnormals.
inline Floats read(const Float8* from) {
  const FloatBits bits = widened_bits(reinterpret_cast<const int8_t*>(&from->bits)) << 20;
  return reinterpret_cast<Floats>(bits & static_cast<int32_t>(0x87ffffff)) * 0x1p120f;
}

// Two neighbouring short numbers for each lane.
typedef int16_t Pairs __attribute__((vector_size(4 * kLanes)));

// total + the products of neighbours, two to each total.
inline FloatBits add_pairs(FloatBits total, Pairs a, Pairs b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<FloatBits>(_mm512_dpwssd_epi32(
      reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  return total + reinterpret_cast<FloatBits>(
                     _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return total + reinterpret_cast<FloatBits>(
                     _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  for (int i = 0; i < kLanes; i++) total[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return total;
#endif
}

inline float widened(float x) { return x; }
inline float widened(int8_t x) { return x; }
inline float widened(BFloat16 x) { return single(x.bits); }
template <class T>
inline float widened(T x) {
  T numbers[kLanes] = {x};
  return read(numbers)[0];
}

inline void narrow(float x, float* to) { *to = x; }

inline void narrow(float x, BFloat16* to) {
  const auto bits = same_bits<uint32_t>(x);
  to->bits = static_cast<uint16_t>(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40);
}

inline void narrow(float x, Float16* to) {
  const auto all = same_bits<uint32_t>(x), bits = all & 0x7fffffff;
  uint32_t found;
  if (bits >= 0x47800000) {  // 2^16
    found = x == x ? 0x7c00 : 0x7e00;
  } else if (bits < 0x38800000) {  // below 2^-14 it is subnormal: a sum with 0.5 has its bits at the end
    found = same_bits<uint32_t>(same_bits<float>(bits) + 0.5f) - 0x3f000000;
  } else {
    found = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(found | (all >> 16 & 0x8000));
}

inline void narrow(float x, int8_t* to) { *to = static_cast<int8_t>(std::nearbyint(x)); }

// A finite x, of at most 448.
inline void narrow(float x, Float8* to) {
  const auto all = same_bits<uint32_t>(x), bits = all & 0x7fffffff;
  const uint32_t found = bits < 0x3c800000  // 2^-6; smaller ones are subnormal: a sum with 2^14 has their bits at the end
                             ? same_bits<uint32_t>(same_bits<float>(bits) + 0x1p14f) - 0x46800000
                             : (bits - 0x3c000000 + 0x7ffff + (bits >> 20 & 1)) >> 20;
  to->bits = static_cast<uint8_t>(found | (all >> 24 & 0x80));
}
