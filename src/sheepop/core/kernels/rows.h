// What blocks compute of single rows: norms, and the activations of feed-forward networks.

#pragma once

#include <cmath>

#include "native.h"

enum NormKind : int64_t { kNone, kLayerNorm, kRMSNorm, kZeroCenteredRMSNorm };

struct Norm {
  NormKind kind;
  const float *weight, *bias;
  int64_t width;
  double eps;
};

enum Activation : int64_t { kReLU, kReLUSquared, kGELU, kGELUTanh, kSiLU, kClampedSiLU };

constexpr float kClamp = 7.f;  // where kClampedSiLU clamps

template <class Term>
inline float total(int64_t count, const Term& term) {
  Floats totals = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats terms;
    for (int j = 0; j < kLanes; j++) terms[j] = term(i + j);
    totals += terms;
  }
  float found = sum(totals);
  for (; i < count; i++) found += term(i);
  return found;
}

inline void normalise(const Norm& norm, const float* x, float* y) {
  const int64_t width = norm.width;
  const float mean = norm.kind == kLayerNorm ? total(width, [&](int64_t i) { return x[i]; }) / width : 0.f;
  const float square = total(width, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / width;
  const float factor = 1.f / std::sqrt(square + static_cast<float>(norm.eps)), more = norm.kind == kZeroCenteredRMSNorm;
  for (int64_t i = 0; i < width; i++) y[i] = (x[i] - mean) * factor * (norm.weight[i] + more);
  if (norm.bias)
    for (int64_t i = 0; i < width; i++) y[i] += norm.bias[i];
}

// e^-|x| and 1 / (1 + e^-x).
inline Floats sigmoid(Floats x) {
  const Floats small = exponential(x < 0.f ? x : -x), other = 1.f / (1.f + small);
  return x < 0.f ? small * other : other;
}

// Abramowitz and Stegun 7.1.26, wrong by at most 1.5e-7.
inline Floats error_function(Floats x) {
  const Floats size = x < 0.f ? -x : x, t = 1.f / (1.f + 0.3275911f * size);
  const Floats series =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const Floats found = 1.f - series * exponential(-size * size);
  return x < 0.f ? -found : found;
}

inline Floats activated(Activation activation, Floats x) {
  switch (activation) {
    case kReLU:
      return x < 0.f ? Floats{} : x;
    case kReLUSquared:
      return x < 0.f ? Floats{} : x * x;
    case kGELU:
      return 0.5f * x * (1.f + error_function(x * 0.707106781f));
    case kGELUTanh:
      return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    case kClampedSiLU:
      x = x > kClamp ? spread<Floats>(kClamp) : x;
      return x * sigmoid(1.702f * x);
    default:
      return x * sigmoid(x);
  }
}

// What a gate multiplies: the numbers themselves, or clamped ones, plus 1 (gpt-oss, 2025).
inline Floats gated(Activation activation, Floats x) {
  if (activation != kClampedSiLU) return x;
  x = x > kClamp ? spread<Floats>(kClamp) : x;
  return 1.f + (x < -kClamp ? spread<Floats>(-kClamp) : x);
}

// hidden = act(hidden), or with a gate act(gate) * gated(hidden).
inline void activate(Activation activation, float* hidden, const float* gate, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats found = activated(activation, load<Floats>((gate ? gate : hidden) + i));
    store(hidden + i, gate ? found * gated(activation, load<Floats>(hidden + i)) : found);
  }
}
