// Chooses the next token of each row of logits, on a CPU in float32, in a few passes over the vocabulary and without
// sorting it. `sampler.py` says the same in PyTorch and gives the sources.
//
// A gap is the distance of a score below the largest one, divided by the temperature, so e^-gap is proportional to the
// token's probability. Top-k, top-p and min-p each keep the tokens up to some (gap, id), in ascending order.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "native.h"

extern "C" {

// A temperature of 0 is greedy; a `top_k` of 0 keeps all tokens.
struct Settings {
  double temperature, top_p, min_p, typical_p;
  int64_t top_k, seed;
};

// A token that the text of a row must not choose yet.
struct Banned {
  int64_t row, id;
};

// Token, lead over the second, largest score, log of the sum of e^logit, logit of the token, and whether all logits are
// finite (1 or 0).
struct Choice {
  double token, lead, best, log_total, logit, usable;
};
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kRounding = 64 * FLT_EPSILON;
constexpr int kShift = 16;  // keys whose upper 16 bits are equal share a bucket
constexpr int64_t kBlock = 64;
constexpr float kNear = 4;  // a gap that few tokens of a text have, and most of the probability

struct End {
  float key;
  int64_t id;
  bool includes(float other, int64_t number) const { return other < key || (other == key && number <= id); }
};

inline uint32_t bucket(float key) {
  uint32_t bits;
  key += 0.f;  // the gap between -0 and 0 is -0, whose bits are those of a large number
  std::memcpy(&bits, &key, sizeof(bits));
  return bits >> kShift;
}

// Buffers of a thread.
struct Memory {
  std::vector<float> gaps, masses, keys, hidden;
  std::vector<double> totals;
  std::vector<int64_t> ids, hidden_ids;
};

// The largest of `count` numbers that are not NaN, or -infinity; `is_finite` becomes false if one is infinite or NaN.
float largest(const float* x, int64_t count, bool& is_finite) {
  Floats found = spread<Floats>(-kInfinity), spoiled = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats part = load<Floats>(x + i);
    found = part > found ? part : found;
    spoiled += part * 0.f;
  }
  float top = -kInfinity, rest = sum(spoiled);
  for (int j = 0; j < kLanes; j++) top = std::max(top, found[j]);
  for (; i < count; i++) top = x[i] > top ? x[i] : top, rest += x[i] * 0.f;
  is_finite &= rest == 0;
  return top;
}

float largest(const float* x, int64_t count) {
  bool is_finite = true;
  return largest(x, count, is_finite);
}

// The sum of f(begin), ..., f(end - 1), `value(i)` being f of `kLanes` numbers from i on and `rest(i)` f of one.
template <class Value, class Rest>
double total_of(int64_t count, const Value& value, const Rest& rest) {
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock * kLanes) {
    const int64_t end = std::min(count, begin + kBlock * kLanes);
    Floats part = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) part += value(i);
    total += sum(part);
    for (; i < end; i++) total += rest(i);
  }
  return total;
}

double total_of(const float* numbers, int64_t count) {
  return total_of(
      count, [&](int64_t i) { return load<Floats>(numbers + i); }, [&](int64_t i) { return numbers[i]; });
}

// Writes the gaps below `best` and e^-gap of each; returns the sum of these.
double write_masses(const float* scores, float best, float temperature, int64_t count, float* gaps, float* masses) {
  return total_of(
      count,
      [&](int64_t i) {
        const Floats gap = (best - load<Floats>(scores + i)) / temperature, mass = exponential(-gap);
        store(gaps + i, gap), store(masses + i, mass);
        return mass;
      },
      [&](int64_t i) {
        gaps[i] = (best - scores[i]) / temperature;
        return masses[i] = exponential(spread<Floats>(-gaps[i]))[0];
      });
}

// Calls `work(i)` for the keys up to `furthest`; most blocks of keys have none.
template <class Work>
void each_within(const float* keys, int64_t count, float furthest, const Work& work) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    Floats least = spread<Floats>(kInfinity);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats part = load<Floats>(keys + i);
      least = part < least ? part : least;
    }
    bool is_near = i < end;
    for (int j = 0; j < kLanes; j++) is_near |= least[j] <= furthest;
    for (i = is_near ? begin : end; i < end; i++)
      if (keys[i] <= furthest) work(i);
  }
}

// The end of the shortest beginning, in ascending order of keys (0 or more) and then of ids, whose weights reach
// `target`; without weights each counts 1. Keys above `furthest` are known to lie beyond it.
End shortest(const float* keys, const float* weights, int64_t count, float furthest, double target, Memory& memory) {
  target = std::max<double>(target, FLT_MIN);  // no beginning is empty
  auto& totals = memory.totals;
  totals.assign(bucket(furthest) + 1, 0.0);
  each_within(keys, count, furthest, [&](int64_t i) { totals[bucket(keys[i])] += weights ? weights[i] : 1.f; });
  uint32_t last = 0;
  double before = 0;
  while (last + 1 < totals.size() && before + totals[last] < target) before += totals[last++];
  auto& ids = memory.ids;
  ids.clear();
  each_within(keys, count, furthest, [&](int64_t i) {
    if (bucket(keys[i]) == last) ids.push_back(i);
  });
  auto precedes = [&](int64_t one, int64_t other) {
    return keys[one] < keys[other] || (keys[one] == keys[other] && one < other);
  };
  if (!std::is_sorted(ids.begin(), ids.end(), precedes)) std::sort(ids.begin(), ids.end(), precedes);
  for (int64_t id : ids) {
    before += weights ? weights[id] : 1.f;
    if (before >= target) return {keys[id], id};
  }
  return {furthest, count};
}

struct Race {
  uint64_t seed;
  double first = kInfinity, second = kInfinity;  // logarithms of times, less those of the rates
  int64_t winner = 0;

  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  // Lets the tokens `begin` to `end` of a block run; those with a mass of 0 do not.
  void run(const float* gaps, const float* masses, int64_t begin, int64_t end) {
    float numbers[kBlock];
    for (int64_t i = begin; i < end; i++) {
      const uint64_t bits = mixed(seed + (i + 1) * 0x9E3779B97F4A7C15u);
      numbers[i - begin] = (static_cast<int32_t>(bits >> 41) + 0.5f) * 0x1p-23f;
    }
    // A time -log(1 - u) is at least u, so most tokens are known to be slower than the second.
    float bound = std::exp(second) * 1.001;
    for (int64_t i = begin; i < end; i++) {
      if (!(numbers[i - begin] <= bound * masses[i])) continue;
      const double time = std::log(-std::log1p(-numbers[i - begin])) + gaps[i];
      if (time < first) {
        second = first, first = time, winner = i;
      } else if (time < second) {
        second = time;
      }
      bound = std::exp(second) * 1.001;
    }
  }
};

// Keeps the fewest tokens that reach `typical_p`, by the distance of their information from the entropy; the masses of
// others become 0.
void keep_typical(double typical_p, const float* gaps, float* masses, int64_t count, Memory& memory) {
  memory.keys.resize(count);
  float* keys = memory.keys.data();
  for (int64_t i = 0; i < count; i++) keys[i] = masses[i] > 0 ? masses[i] * gaps[i] : 0.f;
  const double total = total_of(masses, count);
  const float mean = total_of(keys, count) / total;
  for (int64_t i = 0; i < count; i++) keys[i] = masses[i] > 0 ? std::abs(gaps[i] - mean) : FLT_MAX;
  const End end = shortest(keys, masses, count, FLT_MAX, (typical_p - kRounding) * total, memory);
  for (int64_t i = 0; i < count; i++)
    if (!end.includes(keys[i], i)) masses[i] = 0;
}

void draw(const float* scores, int64_t count, const Settings& settings, Choice& choice, Memory& memory) {
  memory.gaps.resize(count), memory.masses.resize(count);
  float *gaps = memory.gaps.data(), *masses = memory.masses.data();
  const float temperature = std::max(static_cast<float>(settings.temperature), FLT_MIN);
  double total = write_masses(scores, choice.best, temperature, count, gaps, masses);
  End end = {FLT_MAX, count};
  auto narrow = [&](End other) {
    if (end.includes(other.key, other.id)) end = other;
  };
  auto drop_others = [&]() {
    const auto rest = [&](int64_t i) { return masses[i] = end.includes(gaps[i], i) ? masses[i] : 0.f; };
    total = total_of(
        count,
        [&](int64_t i) {
          const Floats keys = load<Floats>(gaps + i), mass = load<Floats>(masses + i);
          // Lanes that tie with the end are kept up to its token.
          const auto is_kept = i + kLanes - 1 <= end.id ? keys <= end.key : keys < end.key;
          store(masses + i, is_kept ? mass : Floats{});
          if (i <= end.id && end.id < i + kLanes - 1)
            for (int j = 0; j < kLanes; j++) masses[i + j] = end.includes(keys[j], i + j) ? mass[j] : 0.f;
          return load<Floats>(masses + i);
        },
        rest);
  };
  if (settings.top_k && settings.top_k < count) {
    narrow(shortest(gaps, nullptr, count, FLT_MAX, settings.top_k, memory));
    drop_others();
  }
  if (settings.top_p < 1) {
    // All tokens beyond this gap together have less than 1 - p, and often those beyond a smaller one.
    double furthest = std::max(0.0, std::log(count / ((1 - settings.top_p) * total)) + 1e-3);
    const double near = total_of(
        count,
        [&](int64_t i) { return load<Floats>(gaps + i) <= kNear ? load<Floats>(masses + i) : Floats{}; },
        [&](int64_t i) { return gaps[i] <= kNear ? masses[i] : 0.f; });
    if (near > (settings.top_p + kRounding) * total) furthest = std::min<double>(furthest, kNear);
    narrow(shortest(gaps, masses, count, furthest, (settings.top_p - kRounding) * total, memory));
  }
  if (settings.min_p > 0) narrow({-std::log(static_cast<float>(settings.min_p)), count});
  if (end.key < FLT_MAX) drop_others();
  if (settings.typical_p < 1) keep_typical(settings.typical_p, gaps, masses, count, memory);
  Race race{static_cast<uint64_t>(settings.seed)};
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t stop = std::min(count, begin + kBlock);
    if (largest(masses + begin, stop - begin) > 0) race.run(gaps, masses, begin, stop);
  }
  choice.token = race.winner;
  choice.lead = (race.second - race.first) * temperature;
}

// The first of the largest scores, that score, and its lead over the second.
void take_likeliest(const float* scores, int64_t count, Choice& choice) {
  Floats first = spread<Floats>(-kInfinity), second = first;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats part = load<Floats>(scores + i), lower = part > first ? first : part;
    first = part > first ? part : first;
    second = lower > second ? lower : second;
  }
  float two[2] = {-kInfinity, -kInfinity};
  auto insert = [&](float x) {
    if (x > two[0]) {
      two[1] = two[0], two[0] = x;
    } else if (x > two[1]) {
      two[1] = x;
    }
  };
  for (int j = 0; j < kLanes; j++) insert(first[j]), insert(second[j]);
  for (; i < count; i++) insert(scores[i]);
  const float* found = std::find(scores, scores + count, two[0]);
  choice.token = found == scores + count ? 0 : found - scores;
  choice.lead = two[0] - two[1];
  choice.best = two[0];
}

// The `hidden_ids` cannot be chosen: their scores are -infinity meanwhile.
void choose_one(const float* logits, float* scores, int64_t count, const Settings& settings, Choice& choice,
                Memory& memory) {
  bool is_finite = true;
  const float most = largest(logits, count, is_finite);
  const auto exponential_at = [&](int64_t i) { return exponential(load<Floats>(logits + i) - most); };
  choice.log_total =
      most + std::log(total_of(count, exponential_at, [&](int64_t i) { return std::exp(logits[i] - most); }));
  choice.usable = is_finite;
  memory.hidden.clear();
  for (int64_t id : memory.hidden_ids) {
    memory.hidden.push_back(scores[id]);
    scores[id] = -kInfinity;
  }
  if (settings.temperature == 0) {
    take_likeliest(scores, count, choice);
  } else {
    choice.best = largest(scores, count);
    draw(scores, count, settings, choice, memory);
  }
  for (size_t i = memory.hidden.size(); i-- > 0;) scores[memory.hidden_ids[i]] = memory.hidden[i];
  choice.logit = logits[static_cast<int64_t>(choice.token)];
}

}  // namespace

extern "C" {

// Logits and scores are (rows, count) and may be the same; no row chooses one of the `hidden` tokens, nor one that is
// `banned` in it.
void choose(const float* logits, float* scores, const int64_t* hidden, const Banned* banned, const Settings* settings,
            Choice* choices, int64_t num_hidden, int64_t num_banned, int64_t rows, int64_t count, int64_t threads) {
  share(rows, 1, threads, [&](int64_t begin, int64_t end) {
    thread_local Memory memory;  // stays, because new pages cost more than a pass over the vocabulary
    for (int64_t row = begin; row < end; row++) {
      memory.hidden_ids.assign(hidden, hidden + num_hidden);
      for (const Banned* one = banned; one < banned + num_banned; one++)
        if (one->row == row) memory.hidden_ids.push_back(one->id);
      choose_one(logits + row * count, scores + row * count, count, settings[row], choices[row], memory);
    }
  });
}
}
