// The race of the tokens of a row, whose winner is a sample, for `sampling.cpp`.

#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "native.h"

// For functions whose loops need all registers, which they lack in a large function.
#define NOINLINE [[gnu::noinline]]

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;  // tokens, a multiple of the vectors

// The `kLanes` numbers of x (count,) from i on; `fill` stands for those behind the last one.
inline Floats some(const float* x, int64_t i, int64_t count, float fill) {
  if (i + kLanes <= count) return load<Floats>(x + i);
  Floats found = spread<Floats>(fill);
  if (i < count) std::memcpy(&found, x + i, (count - i) * sizeof(float));
  return found;
}

// The last of some tokens in ascending order of keys, and then of ids.
struct End {
  float key;
  int64_t id;
  bool includes(float other, int64_t number) const { return other < key || (other == key && number <= id); }
};

// The gaps of a row's tokens, computed where they are needed: to write them down takes longer.
struct Gaps {
  const float* scores;
  int64_t count;
  float best, temperature;

  template <class V>
  V gap(V score) const { return (best - score) / temperature; }
  float of(int64_t id) const { return gap(scores[id]); }
  Floats from(int64_t id) const { return gap(some(scores, id, count, -kInfinity)); }

  // The least score whose gap is below `limit`, or infinity: gaps do not grow with the score.
  float least_score(float limit) const {
    int32_t above = ordered(-kInfinity), found = ordered(best);
    if (!(gap(best) < limit)) return kInfinity;
    while (found - int64_t{above} > 1) {
      const int32_t middle = (int64_t{above} + found) >> 1;
      (gap(score(middle)) < limit ? found : above) = middle;
    }
    return score(found);
  }

 private:
  // The bits of floats as integers of the same order, and back.
  static int32_t ordered(float score) {
    const int32_t bits = std::bit_cast<int32_t>(score);
    return bits < 0 ? INT32_MIN - bits : bits;
  }
  static float score(int32_t bits) { return std::bit_cast<float>(bits < 0 ? INT32_MIN - bits : bits); }
};

// Every token has an exponentially distributed time, and its mass is the rate. The first tokens to arrive are found.
struct Race {
  struct Runner {
    double time = kInfinity;  // its logarithm, less that of the rate
    int64_t id = 0;
  };
  static constexpr int kPlaces = 8;
  Runner first[kPlaces];

  explicit Race(uint64_t seed) : seed_(seed) {}

  // The upper 31 bits of SplitMix64 (Steele, Lea and Flood 2014), whose last step changes only the others.
  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    return (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  }

  // Lets the tokens up to `end` run, but for those with a mass of 0; `count` is that of whole blocks.
  NOINLINE void run(const Gaps& gaps, const float* masses, int64_t count, const End& end) {
    const float least = std::max(std::exp(-end.key) * 0.999f, FLT_MIN);
    float bound = kInfinity, slow = least;
    uint64_t counters[kBlock];
    for (int64_t i = 0; i < kBlock; i++) counters[i] = (i + 1) * kStep;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      // A time -log(1 - u) is at least u, so most tokens are known to be slower than the last of the first.
      FloatBits fast = {};
      for (int64_t i = begin; i < begin + kBlock; i += kLanes) fast |= load<Floats>(masses + i) >= slow;
      if (!any(fast)) continue;
      float numbers[kBlock];
      for (int64_t i = 0; i < kBlock; i++) {
        const uint64_t bits = mixed(seed_ + begin * kStep + counters[i]);
        numbers[i] = (static_cast<int32_t>(bits >> 41) + 0.5f) * (2 * kLeast);
      }
      FloatBits arrived = {};
      for (int64_t i = 0; i < kBlock; i += kLanes)
        arrived |= load<Floats>(numbers + i) <= bound * load<Floats>(masses + begin + i);
      if (!any(arrived)) continue;
      for (int64_t i = begin; i < begin + kBlock; i++) {
        if (!(numbers[i - begin] <= bound * masses[i]) || !end.includes(gaps.of(i), i)) continue;
        insert({std::log(-std::log1p(-numbers[i - begin])) + gaps.of(i), i});
        bound = std::exp(first[kPlaces - 1].time) * 1.001;
        slow = std::max(least, kLeast / bound);
      }
    }
  }

 private:
  static constexpr float kLeast = 0x1p-24f;  // of the random numbers
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
  uint64_t seed_;

  void insert(Runner runner) {
    for (Runner& place : first)
      if (runner.time < place.time) std::swap(runner, place);
  }
};
