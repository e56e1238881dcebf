// Vectors of numbers for kernels that one compiler turns into the instructions of any processor.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>
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

// Before a short loop, so that an array of vectors in it stays in registers.
#define UNROLLED _Pragma("GCC unroll 24")

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

#ifdef __clang__
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(32)));
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

// The first sum of `sum`, of eight numbers.
inline Floats8 halved(Floats values) {
  if constexpr (kLanes == 8) return load<Floats8>(&values);
  Floats8 halves[kLanes / 8];
  std::memcpy(halves, &values, sizeof(values));
  return halves[0] + halves[kLanes / 8 - 1];
}

// The sums of four vectors and of four others, each added up as `sum` does.
inline Floats8 sums(const Floats* one, const Floats* other) {
  Floats8 of_key[4];
  UNROLLED for (int j = 0; j < 4; j++) {
    const Floats8 a = halved(one[j]), b = halved(other[j]);
    of_key[j] = CHOSEN(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + CHOSEN(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  const auto pairs = [](Floats8 a, Floats8 b) {
    return CHOSEN(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + CHOSEN(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  };
  const Floats8 a = pairs(of_key[0], of_key[1]), b = pairs(of_key[2], of_key[3]);
  return CHOSEN(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + CHOSEN(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// Whether a comparison is true in some lane.
inline bool any(FloatBits truths) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(truths), reinterpret_cast<__m512i>(truths));
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; i++) found |= truths[i];
  return found;
#endif
}

// A difference from 0 is the number itself, and compilers make one instruction of it.
template <class V>
inline V spread(float value) {
  return value - V{};
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

// e^x for x <= 0: 2^n e^r with |r| <= ln 2 / 2, and for e^r the polynomial 1 + r + ... of degree 5 with the smallest
// relative error, 1.2e-7; with rounding it is below 2e-7. Beside 1.5 2^23, the numbers that a float can represent are
// integers, so n is in the lowest bits of a sum, with the offset of exponents.
inline Floats exponential(Floats x) {
  constexpr float kIntegers = 0x1.8p23f + 127;
  const Floats shifted = multiply_add(spread<Floats>(kIntegers), x, spread<Floats>(1.44269504f));
  const Floats n = shifted - kIntegers;
  Floats r = multiply_add(x, n, spread<Floats>(-0.693145752f));
  r = multiply_add(r, n, spread<Floats>(-1.42860677e-6f));
  Floats e = spread<Floats>(0.00832147896f);
  for (float each : {0.0418906696f, 0.166670114f, 0.499992311f, 1.f, 1.f}) e = multiply_add(spread<Floats>(each), e, r);
  return (x < -87.f) ? Floats{} : e * reinterpret_cast<Floats>(reinterpret_cast<FloatBits>(shifted) << 23);
}

// tanh x, wrong by at most 2e-7 of it: near 0 a polynomial of Cephes, elsewhere 1 - 2 / (e^2x + 1).
inline Floats tangent(Floats x) {
  const Floats size = x < 0.f ? -x : x, square = x * x, small = exponential(-2.f * size);
  Floats series = 0.0537397154f - square * (0.0206390888f - square * 5.70498872e-3f);
  series = 0.333332819f - square * (0.133331413f - square * series);
  const Floats far = (1.f - small) / (1.f + small), near = size - size * square * series;
  const Floats found = size < 0.625f ? near : far;
  return x < 0.f ? -found : found;
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

// The items that a thread takes at a time, because each fetches the memory of the next.
inline int64_t items_together(int64_t count, int64_t threads) { return std::clamp<int64_t>(count / (4 * threads), 1, 8); }

#ifdef _OPENMP
extern "C" int omp_get_thread_num();
#else
inline int omp_get_thread_num() { return 0; }
#endif

// Threads that call the same functions and share the loops in them. No thread waits for another, only for the items of
// a loop that others have taken: one that comes late, because another process has its processor, finds the loops before
// finished and joins the current one. So outside of shared loops the threads only compute what all of them need.
struct Team {
  struct alignas(64) Queue {
    std::atomic<uint64_t> next{0};  // the current loop in the upper half, its next item in the lower one
  };
  explicit Team(int64_t threads) : queues(threads) {}
  std::vector<Queue> queues;                 // of each thread's own items
  alignas(64) std::atomic<int64_t> done{0};  // items of all loops
};

// The own items of a thread among `count`: from `first_of(thread)` to that of the next one.
inline int64_t first_of(int64_t thread, int64_t count, int64_t threads) { return count * thread / threads; }

class Worker {
 public:
  Worker(Team& team, int64_t thread) : team_(team), thread_(thread) {}
  int64_t threads() const { return team_.queues.size(); }

  // Calls `work(i)` for the items 0 to `count`, each in one of the threads, and returns when all are done.
  template <class Work>
  void share(int64_t count, const Work& work) {
    const int64_t threads = this->threads();
    share_parts([=](int64_t owner) { return first_of(owner + 1, count, threads) - first_of(owner, count, threads); },
                [&](int64_t owner, int64_t i) { work(first_of(owner, count, threads) + i); });
  }

  // Calls `work(owner, i)` for the items 0 to `size(owner)` of each thread. A thread begins with its own items, which are
  // the same in every pass, so that it reads memory that is near its processor, and then takes those of others.
  template <class Size, class Work>
  void share_parts(const Size& size, const Work& work) {
    const int64_t threads = this->threads();
    loop_++;
    for (int64_t owner = 0; owner < threads; owner++) expected_ += size(owner);
    for (int64_t turn = 0; turn < threads; turn++) {
      const int64_t owner = (thread_ + turn) % threads, count = size(owner);
      if (count == 0) continue;
      for (int64_t i = take(owner, count); i < count; i = take(owner, count)) {
        work(owner, i);
        if (team_.done.fetch_add(1, std::memory_order_acq_rel) + 1 == expected_) team_.done.notify_all();
      }
    }
    int64_t seen = team_.done.load(std::memory_order_acquire);
    for (int turns = 0; seen < expected_; seen = team_.done.load(std::memory_order_acquire)) {
      if (++turns > kTurns) team_.done.wait(seen);
    }
  }

 private:
  static constexpr int kTurns = 4000;  // before a thread that waits leaves its processor to others
  Team& team_;
  int64_t thread_;
  uint64_t loop_ = 0;
  int64_t expected_ = 0;

  int64_t take(int64_t owner, int64_t count) {
    std::atomic<uint64_t>& next = team_.queues[owner].next;
    uint64_t seen = next.load(std::memory_order_acquire);
    while (seen >> 32 <= loop_) {
      const int64_t item = seen >> 32 == loop_ ? static_cast<int64_t>(seen & 0xffffffff) : 0;
      if (item >= count) break;
      if (next.compare_exchange_weak(seen, loop_ << 32 | (item + 1), std::memory_order_acq_rel)) return item;
    }
    return count;
  }
};

// Calls `work(worker)` in each thread of a team.
template <class Work>
inline void together(int64_t threads, const Work& work) {
  Team team(std::max<int64_t>(threads, 1));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker worker(team, omp_get_thread_num());
    work(worker);
  }
}

// A matrix W (N, K) in a stored format, and the functions that multiply with it.
struct Linear {
  // Rounds row m of x (M, K) into memory of `rounded_floats(M, K)`; null if x is used as it is.
  void (*round)(const float* x, int64_t m, void* memory, int64_t M, int64_t K);
  // y (M, N) = x W^T + b for rows `begin` to `end` of W; `inputs` is x or what `round` made of it.
  void (*multiply)(const Linear* linear, const void* inputs, float* y, int64_t M, int64_t begin, int64_t end);
  const void *weights, *scales, *offsets;  // the latter two may be null
  const float* bias;                       // (N,), or null
  int64_t K, N;
};

inline int64_t rounded_floats(int64_t M, int64_t K) { return M * (K + K / 2 + 64); }

// One of several products of the same x, whose rows are shared out together.
struct Product {
  const Linear* linear;
  const void* inputs;
  float* y;
};

// The rows, of `total` rows of matrices, that a thread takes at a time.
inline int64_t rows_together(int64_t total, int64_t threads) {
  constexpr int64_t kRows = 48, kMost = 16;  // whole tiles of every kernel; tiles at a time
  return kRows * std::clamp<int64_t>(total / (kRows * 4 * threads), 1, kMost);
}

// Multiplies with all products at once. Each thread's own rows are the same share of every matrix.
template <int count>
inline void multiply(Worker& worker, const Product (&products)[count], int64_t M, int64_t threads) {
  int64_t total = 0, pieces[count];
  for (const Product& product : products) total += product.linear->N;
  const int64_t rows = rows_together(total, threads);
  for (int i = 0; i < count; i++) pieces[i] = (products[i].linear->N + rows - 1) / rows;
  const auto first = [&](int64_t owner, int i) { return first_of(owner, pieces[i], worker.threads()); };
  const auto size = [&](int64_t owner) {
    int64_t found = 0;
    for (int i = 0; i < count; i++) found += first(owner + 1, i) - first(owner, i);
    return found;
  };
  worker.share_parts(size, [&](int64_t owner, int64_t item) {
    int i = 0;
    for (; item >= first(owner + 1, i) - first(owner, i); i++) item -= first(owner + 1, i) - first(owner, i);
    const auto& [linear, inputs, y] = products[i];
    const int64_t begin = (first(owner, i) + item) * rows;
    linear->multiply(linear, inputs, y, M, begin, std::min(linear->N, begin + rows));
  });
}
