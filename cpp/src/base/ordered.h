// SPDX-License-Identifier: Apache-2.0
#pragma once

// Floats as integers of the same order, for maxima and selections that are made on bits.

#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace paceline {

[[nodiscard]] PACELINE_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

[[nodiscard]] PACELINE_HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// A score as comparisons see it: NaN becomes -inf, and -0 becomes 0.
[[nodiscard]] PACELINE_HOST_DEVICE inline float comparable(float score) {
  return score != score ? float_of(0xff800000u) : score + 0.0f;
}

// -0 and 0 stay different, and no float maps to 0. The function inverts all bits of negative
// numbers and the sign bit of others, without a branch, so that loops vectorise.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint32_t to_ordered(float value) {
  const uint32_t bits = bits_of(value);
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

[[nodiscard]] PACELINE_HOST_DEVICE inline float from_ordered(uint32_t ordered) {
  return float_of(ordered ^ (((ordered >> 31) - 1u) | 0x80000000u));
}

}  // namespace paceline
