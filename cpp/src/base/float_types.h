// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scalar conversions between float32 and the 16-bit formats, round to nearest even, and from the
// formats of 8 and 4 bits, which are exact.

#include <bit>
#include <cstdint>

namespace paceline {

[[nodiscard]] inline float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

[[nodiscard]] inline uint16_t float_to_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN stays NaN
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

[[nodiscard]] inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent == 0) {  // zero, subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits. There is no infinity; 0x7f and 0xff are
// NaN.
[[nodiscard]] inline float e4m3_to_float(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {  // zero, subnormal: mantissa * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// A power of two without sign or mantissa: 2^(bits - 127); 255 is NaN.
[[nodiscard]] inline float e8m0_to_float(uint8_t bits) {
  if (bits == 0) return 0x1p-127f;
  return std::bit_cast<float>(bits == 255 ? 0x7fc00000u : static_cast<uint32_t>(bits) << 23);
}

// The low four bits: 1 sign bit, 2 exponent bits with bias 1, 1 mantissa bit.
[[nodiscard]] inline float e2m1_to_float(uint8_t bits) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitudes[bits & 7u];
  return (bits & 8u) != 0 ? -magnitude : magnitude;
}

}  // namespace paceline
