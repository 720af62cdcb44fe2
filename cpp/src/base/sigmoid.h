// SPDX-License-Identifier: Apache-2.0
#pragma once

// A sigmoid with the same bits on the CPU and on a GPU, for choices that must agree.

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "base/ordered.h"

namespace paceline {

// 1 / (1 + exp(-x)) within 4 ulp; 0 where that is below the normal numbers. NaN counts as -inf. All
// roundings are explicit: nothing is left that one compiler might fuse and another not.
[[nodiscard]] PACELINE_HOST_DEVICE inline float sigmoid_same_bits(float x) {
  x = comparable(x);
  // exp(-|x|), by Cody-Waite reduction and the polynomial of vector_math.h. At the limit, 2^n is
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
  const float power = float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23);  // 2^n
  const float below = p * power;
  if (fabsf(x) >= 87.0f && x < 0.0f) return 0.0f;
  return (x < 0.0f ? below : 1.0f) / fmaf(p, power, 1.0f);
}

}  // namespace paceline
