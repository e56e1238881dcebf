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

template <class V>
inline float sum(V values) {
  for (int width = sizeof(V) / sizeof(values[0]) / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) values[i] += values[i + width];
  return values[0];
}

// bfloat16 is the upper half of a float32.
inline float single(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Shares the items 0 to `count` between threads, at least `least` each; `work(begin, end)` does a share.
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
