// Chooses the next token of each row of logits, on a CPU in float32, in a few passes over the vocabulary and without
// sorting it. `warping.py` says the same in PyTorch and gives the sources.
//
// A gap is the distance of a score below the largest one, divided by the temperature, so e^-gap is proportional to the
// token's probability. Top-k, top-p and min-p each keep the tokens up to some (gap, id), in ascending order.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
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
constexpr int64_t kBlock = 64;  // tokens, a multiple of the vectors
constexpr float kNear = 4.001f;  // a gap that few tokens of a text have, and most of the probability
constexpr float kNearMass = 0.0183156f;  // e^-4

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

// The `kLanes` numbers of x (count,) from i on; `fill` stands for those behind the last one.
inline Floats some(const float* x, int64_t i, int64_t count, float fill) {
  if (i + kLanes <= count) return load<Floats>(x + i);
  Floats found = spread<Floats>(fill);
  if (i < count) std::memcpy(&found, x + i, (count - i) * sizeof(float));
  return found;
}

// The largest of `count` numbers that are not NaN, or -infinity; `is_finite` becomes false if one is infinite or NaN.
float largest(const float* x, int64_t count, bool& is_finite) {
  Floats found = spread<Floats>(-kInfinity), spoiled = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = some(x, i, count, x[0]);
    found = part > found ? part : found;
    spoiled += part * 0.f;
  }
  float top = -kInfinity;
  for (int j = 0; j < kLanes; j++) top = std::max(top, found[j]);
  is_finite = sum(spoiled) == 0;
  return top;
}

// Adds up to `totals` what `add(i, parts)` adds to each part for `kLanes` places from i on, `first` <= i < `count`.
template <int parts, class Add>
void add_totals(int64_t first, int64_t count, double (&totals)[parts], const Add& add) {
  for (int64_t begin = first; begin < count; begin += kBlock * kLanes) {
    const int64_t end = std::min(count, begin + kBlock * kLanes);
    Floats found[parts] = {};
    for (int64_t i = begin; i < end; i += kLanes) add(i, found);
    for (int part = 0; part < parts; part++) totals[part] += sum(found[part]);
  }
}

// The sum of f(0), ..., f(count - 1), `value(i)` being f of `kLanes` numbers from i on.
template <class Value>
double total_of(int64_t count, const Value& value) {
  double total[1] = {};
  add_totals(0, count, total, [&](int64_t i, Floats(&part)[1]) { part[0] += value(i); });
  return total[0];
}

// The end of the shortest beginning, in ascending order of keys (0 or more) and then of ids, whose weights reach
// `target`; without weights each counts 1. Infinite keys do not count.
End shortest(const float* keys, const float* weights, int64_t count, double target, Memory& memory) {
  target = std::max<double>(target, FLT_MIN);  // no beginning is empty
  auto& totals = memory.totals;
  totals.assign(bucket(FLT_MAX) + 1, 0.0);
  for (int64_t i = 0; i < count; i++)
    if (keys[i] <= FLT_MAX) totals[bucket(keys[i])] += weights ? weights[i] : 1.f;
  uint32_t last = 0;
  double before = 0;
  while (last + 1 < totals.size() && before + totals[last] < target) before += totals[last++];
  auto& ids = memory.ids;
  ids.clear();
  for (int64_t i = 0; i < count; i++)
    if (keys[i] <= FLT_MAX && bucket(keys[i]) == last) ids.push_back(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t one, int64_t other) { return keys[one] < keys[other]; });
  for (int64_t id : ids) {
    before += weights ? weights[id] : 1.f;
    if (before >= target) return {keys[id], id};
  }
  return {FLT_MAX, count};
}

// Every token has an exponentially distributed time, and its mass is the rate. The first tokens to arrive are found.
struct Race {
  struct Runner {
    double time = kInfinity;  // its logarithm, less that of the rate
    int64_t id = 0;
  };
  static constexpr int kPlaces = 8;
  Runner first[kPlaces];

  explicit Race(uint64_t seed) : seed_(seed) {}

  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  // Lets the tokens up to `end` run, but for those with a mass of 0; `count` is that of whole blocks.
  void run(const float* gaps, const float* masses, int64_t count, const End& end) {
    const float least = std::exp(-end.key) * 0.999f;
    float bound = kInfinity;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      Floats most = {};
      for (int64_t i = begin; i < begin + kBlock; i += kLanes) {
        const Floats mass = load<Floats>(masses + i);
        most = mass > most ? mass : most;
      }
      float top = 0;
      for (int j = 0; j < kLanes; j++) top = std::max(top, most[j]);
      // A time -log(1 - u) is at least u, so most tokens are known to be slower than the last of the first.
      if (!(top >= least && top * bound >= kLeast)) continue;
      float numbers[kBlock];
      for (int64_t i = 0; i < kBlock; i++) {
        const uint64_t bits = mixed(seed_ + (begin + i + 1) * 0x9E3779B97F4A7C15u);
        numbers[i] = (static_cast<int32_t>(bits >> 41) + 0.5f) * (2 * kLeast);
      }
      FloatBits arrived = {};
      for (int64_t i = 0; i < kBlock; i += kLanes)
        arrived |= load<Floats>(numbers + i) <= bound * load<Floats>(masses + begin + i);
      if (!any(arrived)) continue;
      for (int64_t i = begin; i < begin + kBlock; i++) {
        if (!(numbers[i - begin] <= bound * masses[i]) || !end.includes(gaps[i], i)) continue;
        insert({std::log(-std::log1p(-numbers[i - begin])) + gaps[i], i});
        bound = std::exp(first[kPlaces - 1].time) * 1.001;
      }
    }
  }

 private:
  static constexpr float kLeast = 0x1p-24f;  // of the random numbers
  uint64_t seed_;

  void insert(Runner runner) {
    for (Runner& place : first)
      if (runner.time < place.time) std::swap(runner, place);
  }
};

// Keeps the fewest tokens that reach `typical_p`, by the distance of their information from the entropy; the masses of
// others become 0.
void keep_typical(double typical_p, const float* gaps, float* masses, int64_t count, Memory& memory) {
  memory.keys.resize(count);
  float* keys = memory.keys.data();
  for (int64_t i = 0; i < count; i++) keys[i] = masses[i] > 0 ? masses[i] * gaps[i] : 0.f;
  const double total = total_of(count, [&](int64_t i) { return load<Floats>(masses + i); });
  const float mean = total_of(count, [&](int64_t i) { return load<Floats>(keys + i); }) / total;
  for (int64_t i = 0; i < count; i++) keys[i] = masses[i] > 0 ? std::abs(gaps[i] - mean) : FLT_MAX;
  const End end = shortest(keys, masses, count, (typical_p - kRounding) * total, memory);
  for (int64_t i = 0; i < count; i++)
    if (!end.includes(keys[i], i)) masses[i] = 0;
}

// The masses of the tokens before each of two: of smaller gaps, or of the same and with smaller ids.
void masses_before(const float* gaps, const float* masses, int64_t count, int64_t one, int64_t other, double (&found)[2]) {
  const int64_t ids[] = {one, other}, bounds[] = {0, std::min(one, other), std::max(one, other), count};
  found[0] = found[1] = 0;
  for (int part = 0; part < 3; part++) {
    float limits[2];
    for (int k = 0; k < 2; k++)
      limits[k] = bounds[part] < ids[k] ? std::nextafter(gaps[ids[k]], kInfinity) : gaps[ids[k]];
    const int64_t end = bounds[part + 1];
    add_totals(bounds[part], end, found, [&](int64_t i, Floats(&parts)[2]) {
      const Floats gap = some(gaps, i, end, kInfinity), mass = some(masses, i, end, 0.f);
      for (int k = 0; k < 2; k++) parts[k] += gap < limits[k] ? mass : Floats{};
    });
  }
}

// Lets the tokens up to `end` run of which less than the mass `target` lies before. That is tested for the few that come
// first, so that the last one of them all need not be known.
void choose_first(uint64_t seed, double target, End end, const float* gaps, const float* masses, int64_t count,
                  Race::Runner (&chosen)[2]) {
  for (bool is_done = false; !is_done;) {
    Race race(seed);
    race.run(gaps, masses, count, end);
    is_done = race.first[Race::kPlaces - 1].time == kInfinity;  // no others have come
    int kept = 0;
    double before[2] = {};
    for (int i = 0; i < Race::kPlaces && kept < 2; i++) {
      const Race::Runner& runner = race.first[i];
      if (runner.time == kInfinity) break;
      if (i % 2 == 0 && target < kInfinity)
        masses_before(gaps, masses, count, runner.id, race.first[i + 1].id, before);
      if (before[i % 2] < target) {
        chosen[kept++] = runner;
      } else if (end.includes(gaps[runner.id], runner.id)) {
        end = {gaps[runner.id], runner.id - 1};
      }
    }
    is_done |= kept == 2;
  }
}

void draw(const float* scores, int64_t count, const Settings& settings, Choice& choice, Memory& memory) {
  const int64_t padded = (count + kBlock - 1) / kBlock * kBlock;
  memory.gaps.resize(padded), memory.masses.resize(padded);
  float *gaps = memory.gaps.data(), *masses = memory.masses.data();
  const float temperature = std::max(static_cast<float>(settings.temperature), FLT_MIN);
  const float best = choice.best;
  double totals[2] = {};  // of all masses, and of those that are near
  const double &total = totals[0], &near = totals[1];
  const auto add = [](Floats mass, Floats(&parts)[2]) {
    parts[0] += mass;
    parts[1] += mass >= kNearMass ? mass : Floats{};
  };
  add_totals(0, padded, totals, [&](int64_t i, Floats(&parts)[2]) {
    const Floats gap = (best - some(scores, i, count, -kInfinity)) / temperature, mass = exponential(-gap);
    store(gaps + i, gap), store(masses + i, mass);
    add(mass, parts);
  });
  End end = {FLT_MAX, count};
  double target = kInfinity;
  auto narrow = [&](End other) {
    if (end.includes(other.key, other.id)) end = other;
  };
  auto drop_others = [&]() {
    for (int64_t i = 0; i < padded; i++) masses[i] = end.includes(gaps[i], i) ? masses[i] : 0.f;
    totals[0] = totals[1] = 0;
    add_totals(0, padded, totals, [&](int64_t i, Floats(&parts)[2]) { add(load<Floats>(masses + i), parts); });
  };
  if (settings.top_k && settings.top_k < count) {
    narrow(shortest(gaps, nullptr, padded, settings.top_k, memory));
    drop_others();
  }
  if (settings.top_p < 1) target = std::max<double>((settings.top_p - kRounding) * total, FLT_MIN);
  if (settings.min_p > 0) narrow({-std::log(static_cast<float>(settings.min_p)), count});
  if (settings.typical_p < 1) {
    if (settings.top_p < 1) narrow(shortest(gaps, masses, padded, target, memory));
    drop_others();
    keep_typical(settings.typical_p, gaps, masses, padded, memory);
    target = kInfinity;
  } else if (settings.top_p < 1) {
    // Where near tokens have enough of the mass, no others are kept; else the rest beyond a gap has less than 1 - p.
    const double furthest = std::log(count / ((1 - settings.top_p) * total)) + 1e-3;
    narrow({near > target ? kNear : static_cast<float>(std::max(0.0, furthest)), count});
  }
  Race::Runner chosen[2];
  choose_first(settings.seed, target, end, gaps, masses, padded, chosen);
  choice.token = chosen[0].id;
  choice.lead = (chosen[1].time - chosen[0].time) * temperature;
}

// The place of the first of `count` numbers that is `wanted`, or 0 if none is.
int64_t place_of(float wanted, const float* x, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    FloatBits equal = {};
    for (int64_t i = begin; i < begin + kBlock; i += kLanes) equal |= some(x, i, count, NAN) == wanted;
    if (any(equal)) return std::find(x + begin, x + count, wanted) - x;
  }
  return 0;
}

// The first of the largest scores, that score, and its lead over the second.
void take_likeliest(const float* scores, int64_t count, Choice& choice) {
  Floats first = spread<Floats>(-kInfinity), second = first;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = some(scores, i, count, -kInfinity), lower = part > first ? first : part;
    first = part > first ? part : first;
    second = lower > second ? lower : second;
  }
  float all[2 * kLanes];
  store(all, first), store(all + kLanes, second);
  std::partial_sort(all, all + 2, all + 2 * kLanes, std::greater<float>());
  choice.token = place_of(all[0], scores, count);
  choice.lead = all[0] - all[1];
  choice.best = all[0];
}

// The `hidden_ids` cannot be chosen: their scores are -infinity meanwhile.
void choose_one(const float* logits, float* scores, int64_t count, const Settings& settings, Choice& choice,
                Memory& memory) {
  bool is_finite, is_same = scores == logits;
  const float most = largest(logits, count, is_finite);
  choice.log_total =
      most + std::log(total_of(count, [&](int64_t i) { return exponential(some(logits, i, count, -kInfinity) - most); }));
  choice.usable = is_finite;
  memory.hidden.clear();
  for (int64_t id : memory.hidden_ids) {
    is_same &= scores[id] < most;
    memory.hidden.push_back(scores[id]);
    scores[id] = -kInfinity;
  }
  if (settings.temperature == 0) {
    take_likeliest(scores, count, choice);
  } else {
    choice.best = is_same ? most : largest(scores, count, is_finite);
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
  together(std::min(rows, threads), [&](Worker& worker) {
    worker.share(rows, [&](int64_t row) {
      thread_local Memory memory;  // stays, because new pages cost more than a pass over the vocabulary
      memory.hidden_ids.assign(hidden, hidden + num_hidden);
      for (const Banned* one = banned; one < banned + num_banned; one++)
        if (one->row == row) memory.hidden_ids.push_back(one->id);
      choose_one(logits + row * count, scores + row * count, count, settings[row], choices[row], memory);
    });
  });
}
}
