// Vectors of numbers for kernels that one compiler turns into the instructions of any processor.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t FloatBits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HighBits __attribute__((vector_size(2 * kLanes)));

template <class V, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));

inline float sum(Floats4 values) { return (values[0] + values[2]) + (values[1] + values[3]); }

// Halves are added until four numbers are left, always in the same order.
template <class V>
inline float sum(V values) {
  if constexpr (sizeof(V) == 64) {
    Floats8 halves[2];
    std::memcpy(halves, &values, sizeof(values));
    return sum(halves[0] + halves[1]);
  } else {
    Floats4 halves[2];
    std::memcpy(halves, &values, sizeof(values));
    return sum(halves[0] + halves[1]);
  }
}

template <class V>
inline V spread(float value) {
  V values;
  for (unsigned i = 0; i < sizeof(V) / sizeof(float); i++) values[i] = value;
  return values;
}

// total + a b, rounded once where the processor can, and the same wherever it is inlined: a compiler that chose for
// itself would round once in one place and twice in another.
inline Floats8 multiply_add(Floats8 total, Floats8 a, Floats8 b) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, total);
#else
  return total + a * b;
#endif
}
#ifdef __AVX512F__
inline Floats multiply_add(Floats total, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, total); }
#endif

// e^x for x <= 0: 2^n e^r with |r| <= ln 2 / 2, and a Taylor series for e^r whose error is below 2e-7.
inline Floats exponential(Floats x) {
  Floats scaled = x * 1.44269504f;
  Floats n = __builtin_convertvector(__builtin_convertvector(scaled - 0.5f, FloatBits), Floats);
  Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Floats e = 1.f + r * (1.f + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
  FloatBits bits = (__builtin_convertvector(n, FloatBits) + 127) << 23;
  return (x < -87.f) ? Floats{} : e * reinterpret_cast<Floats>(bits);
}

// bfloat16 is the upper half of a float32.
inline float single(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Divides the items 0 to `count` among threads, at least `least` each; `work(begin, end)` processes one share.
template <class Work>
inline void share(int64_t count, int64_t least, int64_t threads, const Work& work) {
  threads = least > 0 && count / least < threads ? count / least : threads;
  if (threads <= 1) {
    work(int64_t{0}, count);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++) work(count * i / threads, count * (i + 1) / threads);
}
