// Chooses the next token of each row of logits, on a CPU in float32, in a few passes over the vocabulary and without
// sorting it. `warping.py` says the same in PyTorch and gives the sources.
//
// A gap is the distance of a score below the largest one, divided by the temperature, so e^-gap is proportional to the
// token's probability. Top-k, top-p and min-p each keep the tokens up to some (gap, id), in ascending order.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <vector>

#include "race.h"

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

constexpr float kRounding = 64 * FLT_EPSILON;
constexpr int kShift = 16;  // keys whose upper 16 bits are equal share a bucket
constexpr int64_t kChunk = kBlock * kLanes;  // tokens that are added up in floats
constexpr float kNear = 4.001f;  // a gap that few tokens of a text have, and most of the probability
constexpr float kNearMass = 0.0183156f;  // e^-4

inline uint32_t bucket(float key) {
  uint32_t bits;
  key += 0.f;  // the gap between -0 and 0 is -0, whose bits are those of a large number
  std::memcpy(&bits, &key, sizeof(bits));
  return bits >> kShift;
}

// Buffers of a thread.
struct Memory {
  std::vector<float> masses, keys, tops, hidden;
  std::vector<double> totals;
  std::vector<int64_t> ids, likely, hidden_ids;
};

// The two largest of some numbers that are not NaN, or -infinity, and whether all numbers are finite.
struct Top {
  float first, second;
  bool is_finite;
};

// Keeps the larger numbers of two vectors in `first`, and the larger ones of the others and of `second` there.
inline void rank(Floats part, Floats& first, Floats& second) {
  const Floats lower = part > first ? first : part;
  first = part > first ? part : first;
  second = lower > second ? lower : second;
}

// The `tops` become the largest number of each lane of each chunk.
NOINLINE Top largest(const float* x, int64_t count, std::vector<float>& tops) {
  Floats first = spread<Floats>(-kInfinity), second = first, spoiled = {};
  tops.resize((count + kChunk - 1) / kChunk * kLanes);
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    Floats top = spread<Floats>(-kInfinity), next = top;
    for (int64_t i = begin; i < std::min(count, begin + kChunk); i += kLanes) {
      rank(some(x, i, count, -kInfinity), top, next);
      spoiled += some(x, i, count, 0.f) * 0.f;
    }
    rank(top, first, second);
    rank(next, first, second);
    store(&tops[begin / kChunk * kLanes], top);
  }
  float all[2 * kLanes];
  store(all, first), store(all + kLanes, second);
  std::partial_sort(all, all + 2, all + 2 * kLanes, std::greater<float>());
  return {all[0], all[1], sum(spoiled) == 0};
}

// Adds up to `totals` what `add(i, parts)` adds to each part for `kLanes` places from i on, `first` <= i < `count`.
template <int parts, class Add>
void add_totals(int64_t first, int64_t count, double (&totals)[parts], const Add& add) {
  for (int64_t begin = first; begin < count; begin += kChunk) {
    const int64_t end = std::min(count, begin + kChunk);
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

// log(e^x[0] + ... + e^x[count - 1]); `most` is the largest of x.
NOINLINE double log_total(const float* x, int64_t count, float most) {
  return most + std::log(total_of(count, [&](int64_t i) { return exponential(some(x, i, count, -kInfinity) - most); }));
}

// The end of the shortest beginning, in ascending order of keys (0 or more) and then of ids, whose weights reach
// `target`; without weights each counts 1. Infinite keys do not count.
End shortest(const float* keys, const float* weights, int64_t count, double target, Memory& memory) {
  target = std::max<double>(target, FLT_MIN);  // no beginning is empty
  uint32_t last = 0;
  double before = 0;
  const bool are_many = count > kChunk;  // so that the bucket of the last one is found first
  if (are_many) {
    auto& totals = memory.totals;
    totals.assign(bucket(FLT_MAX) + 1, 0.0);
    for (int64_t i = 0; i < count; i++)
      if (keys[i] <= FLT_MAX) totals[bucket(keys[i])] += weights ? weights[i] : 1.f;
    while (last + 1 < totals.size() && before + totals[last] < target) before += totals[last++];
  }
  auto& ids = memory.ids;
  ids.clear();
  for (int64_t i = 0; i < count; i++)
    if (keys[i] <= FLT_MAX && (!are_many || bucket(keys[i]) == last)) ids.push_back(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t one, int64_t other) { return keys[one] < keys[other]; });
  for (int64_t id : ids) {
    before += weights ? weights[id] : 1.f;
    if (before >= target) return {keys[id], id};
  }
  return {FLT_MAX, count};
}

// Keeps the fewest tokens that reach `typical_p`, by the distance of their information from the entropy; the masses of
// others become 0.
void keep_typical(double typical_p, const Gaps& gaps, float* masses, int64_t count, Memory& memory) {
  memory.keys.assign(count + kLanes, 0.f);
  float* keys = memory.keys.data();
  for (int64_t i = 0; i < count; i++) keys[i] = masses[i] > 0 ? masses[i] * gaps.of(i) : 0.f;
  const double total = total_of(count, [&](int64_t i) { return load<Floats>(masses + i); });
  const float mean = total_of(count, [&](int64_t i) { return load<Floats>(keys + i); }) / total;
  for (int64_t i = 0; i < count; i++) keys[i] = masses[i] > 0 ? std::abs(gaps.of(i) - mean) : FLT_MAX;
  const End end = shortest(keys, masses, count, (typical_p - kRounding) * total, memory);
  for (int64_t i = 0; i < count; i++)
    if (!end.includes(keys[i], i)) masses[i] = 0;
}

// Whether less than the mass `target` of the `total` lies before each of two tokens: of smaller gaps, or of the same and
// with smaller ids. Stops as soon as so much mass is known not to lie before either token that both are early.
NOINLINE void are_early(double target, double total, const Gaps& gaps, const float* masses, const int64_t (&ids)[2],
                     bool (&early)[2]) {
  const int64_t bounds[] = {0, std::min(ids[0], ids[1]), std::max(ids[0], ids[1]), gaps.count};
  const double rest = total * (1 + kRounding) - target;
  double totals[4] = {};  // before each, and not before each
  for (int part = 0; part < 3; part++) {
    float least[2];  // of the scores before each
    for (int k = 0; k < 2; k++) {
      const float gap = gaps.of(ids[k]);
      least[k] = gaps.least_score(bounds[part] < ids[k] ? std::nextafter(gap, kInfinity) : gap);
    }
    for (int64_t begin = bounds[part]; begin < bounds[part + 1] && std::min(totals[2], totals[3]) <= rest; begin += kChunk) {
      const int64_t end = std::min(bounds[part + 1], begin + kChunk);
      add_totals(begin, end, totals, [&](int64_t i, Floats(&parts)[4]) {
        const Floats score = some(gaps.scores, i, end, -kInfinity), mass = some(masses, i, end, 0.f);
        for (int k = 0; k < 2; k++) {
          const Floats before = score >= least[k] ? mass : Floats{};
          parts[k] += before, parts[2 + k] += mass - before;
        }
      });
    }
  }
  for (int k = 0; k < 2; k++) early[k] = totals[k] < target;
}

// Lets the tokens up to `end` run of which less than the mass `target` lies before. That is tested for the few that come
// first, so that the last one of them all need not be known.
void choose_first(uint64_t seed, double target, double total, End end, const Gaps& gaps, const float* masses,
                  int64_t padded, Race::Runner (&chosen)[2]) {
  for (bool is_done = false; !is_done;) {
    Race race(seed);
    race.run(gaps, masses, padded, end);
    is_done = race.first[Race::kPlaces - 1].time == kInfinity;  // no others have come
    int kept = 0;
    bool early[2] = {true, true};
    for (int i = 0; i < Race::kPlaces && kept < 2; i++) {
      const Race::Runner& runner = race.first[i];
      if (runner.time == kInfinity) break;
      if (i % 2 == 0 && target < kInfinity)
        are_early(target, total, gaps, masses, {runner.id, race.first[i + 1].id}, early);
      if (early[i % 2]) {
        chosen[kept++] = runner;
      } else if (end.includes(gaps.of(runner.id), runner.id)) {
        end = {gaps.of(runner.id), runner.id - 1};
      }
    }
    is_done |= kept == 2;
  }
}

// Finds the end of the first `top_k` tokens and writes the masses of those; returns their sum.
NOINLINE double keep_first(int64_t top_k, const Gaps& gaps, End& end, Memory& memory) {
  // At least `place` tokens score as much as the place-th largest of the tops, or more; some of them may be hidden since.
  auto& tops = memory.tops;
  const int64_t place = top_k + memory.hidden_ids.size();
  float least = -FLT_MAX;
  if (place <= static_cast<int64_t>(tops.size())) {
    std::nth_element(tops.begin(), tops.begin() + place - 1, tops.end(), std::greater<float>());
    least = gaps.least_score(std::nextafter(gaps.gap(tops[place - 1]), kInfinity));
  }
  auto& likely = memory.likely;
  likely.clear();
  for (int64_t i = 0; i < gaps.count; i += kLanes) {
    if (!any(some(gaps.scores, i, gaps.count, -kInfinity) >= least)) continue;
    for (int64_t id = i; id < std::min(gaps.count, i + kLanes); id++)
      if (gaps.scores[id] >= least) likely.push_back(id);
  }
  const int64_t count = likely.size();
  auto& keys = memory.keys;
  keys.assign((count + kLanes - 1) / kLanes * kLanes, kInfinity);
  for (int64_t i = 0; i < count; i++) keys[i] = gaps.of(likely[i]);
  const End last = shortest(keys.data(), nullptr, count, top_k, memory);
  if (last.id < count) end = {last.key, likely[last.id]};
  double total = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats found = exponential(-load<Floats>(&keys[i]));
    for (int64_t j = i; j < std::min(count, i + kLanes); j++) {
      if (end.includes(keys[j], likely[j])) total += memory.masses[likely[j]] = found[j - i];
    }
  }
  return total;
}

NOINLINE void draw(const float* scores, int64_t count, const Settings& settings, Choice& choice, Memory& memory) {
  const int64_t padded = (count + kBlock - 1) / kBlock * kBlock;
  const bool has_end = settings.top_k && settings.top_k < count;
  memory.masses.resize(padded);
  if (has_end) std::fill(memory.masses.begin(), memory.masses.end(), 0.f);
  float* masses = memory.masses.data();
  const float temperature = std::max(static_cast<float>(settings.temperature), FLT_MIN);
  const Gaps gaps = {scores, count, static_cast<float>(choice.best), temperature};
  const auto masses_from = [&](int64_t i) {
    const Floats mass = exponential(-gaps.from(i));
    store(masses + i, mass);
    return mass;
  };
  End end = {FLT_MAX, count};
  double total = has_end ? keep_first(settings.top_k, gaps, end, memory) : total_of(padded, masses_from);
  double target = kInfinity;
  auto narrow = [&](End other) {
    if (end.includes(other.key, other.id)) end = other;
  };
  if (settings.top_p < 1) target = std::max<double>((settings.top_p - kRounding) * total, FLT_MIN);
  if (settings.min_p > 0) narrow({-std::log(static_cast<float>(settings.min_p)), count});
  if (settings.typical_p < 1) {
    if (settings.top_p < 1) {
      memory.keys.resize(padded);
      for (int64_t i = 0; i < padded; i += kLanes) store(&memory.keys[i], gaps.from(i));
      narrow(shortest(memory.keys.data(), masses, count, target, memory));
    }
    for (int64_t i = 0; i < count; i++) masses[i] = end.includes(gaps.of(i), i) ? masses[i] : 0.f;
    keep_typical(settings.typical_p, gaps, masses, count, memory);
    target = kInfinity;
  } else if (settings.top_p < 1) {
    // Where near tokens have enough of the mass, no others are kept; else the rest beyond a gap has less than 1 - p.
    const auto near = [&](int64_t i) { return load<Floats>(masses + i) >= kNearMass ? load<Floats>(masses + i) : Floats{}; };
    const bool may_be_few = !has_end && total < count * kNearMass;
    const double furthest = std::log(count / ((1 - settings.top_p) * total)) + 1e-3;
    narrow({may_be_few && total_of(padded, near) > target ? kNear : static_cast<float>(std::max(0.0, furthest)), count});
  }
  Race::Runner chosen[2];
  choose_first(settings.seed, target, total, end, gaps, masses, padded, chosen);
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

// The `hidden_ids` cannot be chosen: their scores are -infinity meanwhile.
void choose_one(const float* logits, float* scores, int64_t count, const Settings& settings, Choice& choice,
                Memory& memory) {
  Top top = largest(logits, count, memory.tops);
  bool is_same = scores == logits;
  choice.log_total = log_total(logits, count, top.first);
  choice.usable = top.is_finite;
  memory.hidden.clear();
  for (int64_t id : memory.hidden_ids) {
    is_same &= scores[id] < top.second;
    memory.hidden.push_back(scores[id]);
    scores[id] = -kInfinity;
  }
  if (!is_same) top = largest(scores, count, memory.tops);
  choice.best = top.first;
  if (settings.temperature == 0) {
    choice.token = place_of(top.first, scores, count);
    choice.lead = top.first - top.second;
  } else {
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
