// What logits z = cap(x W^T + b) say about tokens, on a CPU, without writing the logits: of each row of x (R, K) the
// largest logit, its place, and the sum of e^(z - largest); of each token the number of larger logits.
//
// Products are first computed from integers of 16 bits, twice as fast as from floats. In every group of 32 neighbours x
// and W are multiplied by a number that makes their norms at most kNorm, so that no sum of 32 products overflows, and
// rounded. By the inequality of Cauchy and Schwarz a logit is then off by at most kError |x| |w|. Wherever that decides
// anything, and wherever a logit is within kNear of the largest, it is computed again in float32. The others differ from
// float32's by a few parts in 10,000, each at random. Parts of the vocabulary have fixed sizes, so that the result does
// not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));

constexpr int kGroup = 32, kHalf = kGroup / 2;
constexpr int kColumns = 2;                     // vectors of rows of W in a panel
constexpr int kPanel = kColumns * kLanes;       // rows of W
constexpr int kRows = kLanes == 16 ? 6 : 2;     // rows of x in a tile
constexpr int64_t kSlice = 256;                 // rows of W that have results of their own
constexpr float kNorm = 32767;                  // of 32 integers; that of their products is below 2^31
constexpr float kError = 2e-4f;                 // 2 sqrt(32) / 2 / kNorm, and the rounding of floats
constexpr float kSmallest = 1e-30f;             // square of a norm
constexpr float kNear = 4;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The sum of x[k] w[k], always added in the same order.
template <class T>
float product(const float* x, const T* w, int64_t K) {
  Floats total = {};
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) total = multiply_add(total, load<Floats>(x + k), read(w + k));
  float rest = sum(total);
  for (; k < K; k++) rest += x[k] * widened(w[k]);
  return rest;
}

inline float capped(float logit, float cap) { return cap > 0 ? cap * std::tanh(logit / cap) : logit; }

// Rounds the `count` <= 32 numbers of a group to `codes` (32,), and returns what a code is worth; NaN if the square of the
// norm is too large or too small for a float. Adds that square to `squares`.
template <class T>
float rounded_group(const T* numbers, int64_t count, int16_t* codes, float& squares) {
  constexpr int kParts = kGroup / kLanes;
  constexpr float kRound = 3 << 22;  // added to a number of at most 22 bits, it leaves an integer in the lower bits
  T padded[kGroup] = {};
  if (count < kGroup) {
    std::copy(numbers, numbers + count, padded);
    numbers = padded;
  }
  Floats values[kParts], total = {};
  for (int i = 0; i < kParts; i++) {
    values[i] = read(numbers + i * kLanes);
    total = multiply_add(total, values[i], values[i]);
  }
  const float square = sum(total);
  const bool fits = square >= kSmallest && square < kInfinity;
  const float factor = fits ? kNorm / std::sqrt(square) : 0;
  for (int i = 0; i < kParts; i++)
    store(codes + i * kLanes,
          __builtin_convertvector(reinterpret_cast<FloatBits>(values[i] * factor + kRound), Shorts));
  squares += square;
  return fits ? 1 / factor : square == 0 ? 0 : std::numeric_limits<float>::quiet_NaN();
}

struct Inputs {
  const float* x;               // (R, K)
  const int64_t* starts;        // (R + 1,): the tokens of row r are starts[r] to starts[r + 1]
  const float* own;             // logits of the tokens
  int64_t R, K, groups;
  std::vector<int16_t> codes;   // (R, groups * 32)
  std::vector<float> scales;    // (R, groups)
  std::vector<float> errors;    // (R,): kError |x|
};

// Of a slice: for each row of x the largest logit, its place and the sum, and for each token the number of larger logits.
struct Results {
  std::vector<float> tops;
  std::vector<int64_t> places;
  std::vector<Floats> sums;
  std::vector<int32_t> counts;
  Results(const float* known_tops, int64_t R, int64_t tokens)
      : tops(known_tops, known_tops + R), places(R, std::numeric_limits<int64_t>::max()), sums(R), counts(tokens) {}
};

// Some rows of W in integers.
template <class T>
struct Panel {
  const Inputs& in;
  const T* weights;   // (N, K)
  const float* bias;  // (N,), or null
  const float cap;    // 0 for none
  const int64_t first;         // the place of row 0 of `weights` in the vocabulary
  std::vector<int16_t> codes;  // (groups, 16, kPanel, 2)
  std::vector<float> scales;   // (groups, kPanel)
  float norms[kPanel], biases[kPanel];
  int32_t present[kPanel];  // -1, or 0 after the last row

  Panel(const Inputs& inputs, const T* matrix, const float* added, float soft_cap, int64_t place)
      : in(inputs), weights(matrix), bias(added), cap(soft_cap), first(place), codes(in.groups * kGroup * kPanel),
        scales(in.groups * kPanel) {}

  void pack(int64_t begin, int64_t end) {
    for (int i = 0; i < kPanel; i++) {
      const bool exists = begin + i < end;
      float squares = 0;
      for (int64_t g = 0; g < in.groups; g++) {
        int16_t found[kGroup] = {};
        const T* group = weights + (begin + i) * in.K + g * kGroup;
        scales[g * kPanel + i] =
            exists ? rounded_group(group, std::min<int64_t>(kGroup, in.K - g * kGroup), found, squares) : 0;
        for (int k = 0; k < kHalf; k++) std::memcpy(&codes[((g * kHalf + k) * kPanel + i) * 2], found + 2 * k, 4);
      }
      norms[i] = std::sqrt(squares);
      biases[i] = exists && bias ? bias[begin + i] : 0;
      present[i] = -exists;
    }
  }

  // The logits of B rows of x from m on, for the panel.
  template <int B>
  void tile(int64_t m, Floats (&logits)[kRows][kColumns]) const {
    Floats totals[B][kColumns] = {};
    for (int64_t g = 0; g < in.groups; g++) {
      FloatBits products[B][kColumns] = {};
      for (int k = 0; k < kHalf; k++) {
        Pairs w[kColumns];
        for (int c = 0; c < kColumns; c++) w[c] = load<Pairs>(&codes[((g * kHalf + k) * kPanel + c * kLanes) * 2]);
        for (int b = 0; b < B; b++) {
          const FloatBits pair = FloatBits{} + load<int32_t>(&in.codes[((m + b) * in.groups + g) * kGroup + 2 * k]);
          for (int c = 0; c < kColumns; c++)
            products[b][c] = add_pairs(products[b][c], w[c], reinterpret_cast<Pairs>(pair));
        }
      }
      for (int b = 0; b < B; b++)
        for (int c = 0; c < kColumns; c++)
          totals[b][c] = multiply_add(totals[b][c], __builtin_convertvector(products[b][c], Floats),
                                      load<Floats>(&scales[g * kPanel + c * kLanes]) * in.scales[(m + b) * in.groups + g]);
    }
    for (int b = 0; b < B; b++)
      for (int c = 0; c < kColumns; c++) logits[b][c] = totals[b][c];
  }

  template <int B>
  void upto(int64_t m, Floats (&logits)[kRows][kColumns]) const {
    if constexpr (B > 1) {
      if (in.R - m < B) return upto<B - 1>(m, logits);
    }
    tile<B>(m, logits);
  }

  // Adds what the products of row m with the rows of `weights` from n on tell.
  void add(int64_t m, int64_t n, Floats z, int lane, Results& out) const {
    const Floats error = in.errors[m] * load<Floats>(norms + lane);
    z += load<Floats>(biases + lane);
    if (cap > 0) {
      const Floats twice = z * (2 / cap), e = exponential(twice < 0 ? twice : -twice), bounded = (1 - e) / (1 + e) * cap;
      z = twice < 0 ? -bounded : bounded;
    }
    const auto exists = load<FloatBits>(present + lane);
    z = exists ? z : Floats{} - kInfinity;
    float top = out.tops[m];
    FloatBits needed = ~(z + error < top - kNear);
    for (int64_t t = in.starts[m]; t < in.starts[m + 1]; t++)
      needed |= (z - error <= in.own[t]) & (z + error >= in.own[t]);
    needed &= exists;
    if (any(needed)) {
      for (int i = 0; i < kLanes; i++)
        if (needed[i]) {
          const int64_t place = n + lane + i;
          z[i] = capped(product(in.x + m * in.K, weights + place * in.K, in.K) + (bias ? bias[place] : 0), cap);
          if (z[i] > top || (z[i] == top && first + place < out.places[m])) {
            if (z[i] > top) out.sums[m] *= top > -kInfinity ? std::exp(top - z[i]) : 0;
            top = z[i];
            out.places[m] = first + place;
          }
        }
      out.tops[m] = top;
    }
    if (std::isfinite(top))
      out.sums[m] += exponential(z - top);
    else
      for (int i = 0; i < kLanes; i++) out.sums[m][i] += std::isnan(z[i]) ? z[i] : z[i] == top && top > 0;
    for (int64_t t = in.starts[m]; t < in.starts[m + 1]; t++) {
      const FloatBits larger = z > in.own[t];
      if (any(larger))
        for (int i = 0; i < kLanes; i++) out.counts[t] -= larger[i];
    }
  }

  void run(int64_t begin, int64_t end, Results& out) {
    for (int64_t n = begin; n < end; n += kPanel) {
      pack(n, end);
      for (int64_t m = 0; m < in.R; m += kRows) {
        Floats logits[kRows][kColumns];
        upto<kRows>(m, logits);
        for (int64_t b = 0; b < std::min<int64_t>(kRows, in.R - m); b++)
          for (int c = 0; c < kColumns; c++) add(m + b, n, logits[b][c], c * kLanes, out);
      }
    }
  }
};

Inputs rounded_inputs(const float* x, const int64_t* starts, const float* own, int64_t R, int64_t K, int64_t threads) {
  const int64_t groups = (K + kGroup - 1) / kGroup;
  Inputs in{x, starts, own, R, K, groups, std::vector<int16_t>(R * groups * kGroup), std::vector<float>(R * groups),
            std::vector<float>(R)};
  share(R, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      float squares = 0;
      for (int64_t g = 0; g < groups; g++)
        in.scales[m * groups + g] = rounded_group(x + m * K + g * kGroup, std::min<int64_t>(kGroup, K - g * kGroup),
                                                  &in.codes[(m * groups + g) * kGroup], squares);
      in.errors[m] = kError * std::sqrt(squares);
    }
  });
  return in;
}

// Adds N rows of the vocabulary, from the place `first` on, to the results for the rows before them.
template <class T>
void score(const float* x, const T* weights, const float* bias, const int64_t* starts, const float* own, float* tops,
           int64_t* places, double* sums, int64_t* counts, float cap, int64_t R, int64_t K, int64_t N, int64_t first,
           int64_t threads) {
  const Inputs in = rounded_inputs(x, starts, own, R, K, threads);
  const int64_t slices = (N + kSlice - 1) / kSlice, tokens = starts[R];
  for (int64_t m = 0; m < R; m++)
    for (int64_t t = starts[m]; t < starts[m + 1]; t++)
      if (own[t] > tops[m]) tops[m] = own[t];
  std::vector<Results> found(slices, Results(tops, R, tokens));
  share(slices, 1, threads, [&](int64_t begin, int64_t end) {
    Panel<T> panel(in, weights, bias, cap, first);
    for (int64_t s = begin; s < end; s++) panel.run(s * kSlice, std::min(N, (s + 1) * kSlice), found[s]);
  });
  for (const Results& slice : found) {
    for (int64_t m = 0; m < R; m++) {
      const float top = slice.tops[m];
      const double added = sum(slice.sums[m]);
      if (top == tops[m]) {
        places[m] = std::min(places[m], slice.places[m]);
        sums[m] += added;
      } else if (top > tops[m]) {
        places[m] = slice.places[m];
        sums[m] = sums[m] * std::exp(static_cast<double>(tops[m]) - top) + added;
        tops[m] = top;
      } else {
        sums[m] += added * std::exp(static_cast<double>(top) - tops[m]);
      }
    }
    for (int64_t t = 0; t < tokens; t++) counts[t] += slice.counts[t];
  }
}

// The logits of tokens, whose rows of W are `weights` (M, K), after the rows of x that `starts` gives them.
template <class T>
void own_logits(const float* x, const T* weights, const float* bias, const int64_t* starts, float* logits, float cap,
                int64_t R, int64_t K, int64_t threads) {
  share(R, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++)
      for (int64_t t = starts[m]; t < starts[m + 1]; t++)
        logits[t] = capped(product(x + m * K, weights + t * K, K) + (bias ? bias[t] : 0), cap);
  });
}

}  // namespace

#define SCORING(name, T)                                                                                            \
  void own_logits_##name(const float* x, const T* weights, const float* bias, const int64_t* starts, float* logits, \
                         double cap, int64_t R, int64_t K, int64_t threads) {                                       \
    own_logits<T>(x, weights, bias, starts, logits, cap, R, K, threads);                                            \
  }                                                                                                                 \
  void score_##name(const float* x, const T* weights, const float* bias, const int64_t* starts, const float* own,   \
                    float* tops, int64_t* places, double* sums, int64_t* counts, double cap, int64_t R, int64_t K,  \
                    int64_t N, int64_t first, int64_t threads) {                                                    \
    score<T>(x, weights, bias, starts, own, tops, places, sums, counts, cap, R, K, N, first, threads);              \
  }

extern "C" {
SCORING(float32, float)
SCORING(bfloat16, BFloat16)
}
