// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores with the same bits on the CPU and on a GPU, for choices that must agree. All roundings are
// explicit: nothing is left that one compiler might fuse and another not.

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "base/ordered.h"

namespace paceline {

// exp(-|x|) = polynomial * power, where the power is one of two. Where |x| is above 87, that of 87.
struct SameBitsExp {
  float polynomial;
  float power;
};
[[nodiscard]] PACELINE_HOST_DEVICE inline SameBitsExp exp_of_minus_abs(float x) {
  // By Cody-Waite reduction and the polynomial of vector_math.h. At the limit, 2^n is
  // still a normal number.
  const float magnitude = fabsf(x) < 87.0f ? fabsf(x) : 87.0f;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer in the low mantissa bits
  const float shifted = fmaf(magnitude, -1.44269504f, kRound);
  const float n = shifted - kRound;
  float r = fmaf(n, -0.693359375f, -magnitude);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = fmaf(r, 1.9875691500e-4f, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(fmaf(p, r, 1.0f), r, 1.0f);
  return {p, float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23)};
}

// 1 / (1 + exp(-x)) within 4 ulp; 0 where that is below the normal numbers. NaN counts as -inf.
[[nodiscard]] PACELINE_HOST_DEVICE inline float sigmoid_same_bits(float x) {
  x = comparable(x);
  const auto [p, power] = exp_of_minus_abs(x);
  const float below = p * power;
  if (fabsf(x) >= 87.0f && x < 0.0f) return 0.0f;
  return (x < 0.0f ? below : 1.0f) / fmaf(p, power, 1.0f);
}

// sqrt(log(1 + exp(x))) within 4 ulp; 0 where x is at most -87. NaN counts as -inf.
[[nodiscard]] PACELINE_HOST_DEVICE inline float sqrt_softplus_same_bits(float x) {
  x = comparable(x);
  if (x <= -87.0f) return 0.0f;
  const auto [p, power] = exp_of_minus_abs(x);
  const float u = p * power;
  // log(1 + u) = 2 atanh(s) with s at most 1/3: 2 s (1 + s^2 / 3 + s^4 / 5 + ...).
  const float s = u / (u + 2.0f);
  const float square = s * s;
  float series = fmaf(square, 1.0f / 15.0f, 1.0f / 13.0f);
  series = fmaf(series, square, 1.0f / 11.0f);
  series = fmaf(series, square, 1.0f / 9.0f);
  series = fmaf(series, square, 1.0f / 7.0f);
  series = fmaf(series, square, 1.0f / 5.0f);
  series = fmaf(series, square, 1.0f / 3.0f);
  series = fmaf(series, square, 1.0f);
  const float twice = s + s;
  return sqrtf(x > 0.0f ? fmaf(twice, series, x) : twice * series);
}

}  // namespace paceline
