// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed weights of 4 and 8 bits (packed_weights.h), converted to the bfloat16 operand of matrix
// products in registers.
//
// The conversion is exact. Take the bits of an element apart from its sign, exponent and mantissa
// side by side, and move them to where a bfloat16 has the lowest exponent bits and the highest
// mantissa bits:
//   e2m1  s ee m      ->  s 000000ee m000000    e2m1 has the exponent bias 1, bfloat16 127
//   e4m3  s eeee mmm  ->  s 0000eeee mmm0000    e4m3 has the exponent bias 7
// Read as a bfloat16, that is the element times 2^(1 - 127) or 2^(7 - 127). This holds for
// subnormal elements as well, because their bits become those of a subnormal bfloat16. A
// multiplication by a power of two makes it the element, or the element times its scale;
// `mul.bf16x2` does not flush subnormals. NaN, which e4m3 has and e2m1 does not, becomes 480.
//
// A packed word has its elements' bits where few shifts and masks suffice to move them, for both
// halves of a register at once.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/packed_copies.cuh"
#include "ops/weight_matrix.h"

namespace paceline::cuda {

// What multiplies the elements of 32 columns: bfloat16, for row g in the lower half and for row g +
// 8 in the upper one. Where a scale times the power of two above would overflow, `first` is the
// power alone and `second` the scale.
struct RowMultipliers {
  uint32_t first;
  uint32_t second;
};

template <bool kIsUpper, bool kIsTwice>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, const RowMultipliers& by) {
  const uint32_t product = multiply_pair<kIsUpper>(pair, by.first);
  return kIsTwice ? multiply_pair<kIsUpper>(product, by.second) : product;
}

// The bfloat16 `low` and `high` in one register.
__device__ __forceinline__ uint32_t bfloat16_pair(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// Of a lane's four words of four-bit elements, that of a step of 16 columns.
__device__ __forceinline__ uint32_t word_of_step(const uint4& words, int32_t step) {
  return step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
}

template <WeightFormat format>
struct PackedElements;

template <>
struct PackedElements<WeightFormat::kMxfp4> {
  static constexpr float kPower = 0x1p126f;
  // The largest byte of a scale whose product with kPower is a bfloat16; the scale is 2.
  static constexpr uint32_t kMaxScaleByte = 128;

  // The operand of 16 rows and 16 columns, of rows g (a[0], a[2]) and g + 8 (a[1], a[3]).
  template <bool kIsTwice>
  __device__ __forceinline__ static void convert(uint32_t word, const RowMultipliers& by,
                                                 uint32_t (&a)[4]) {
    constexpr uint32_t kMask = 0x81c081c0u;
    a[0] = multiply_pair<false, kIsTwice>(word & kMask, by);
    a[1] = multiply_pair<true, kIsTwice>(__funnelshift_r(word, word, 4) & kMask, by);
    a[2] = multiply_pair<false, kIsTwice>((word << 6) & kMask, by);
    const uint32_t rest = ((word << 2) & 0x80c080c0u) | ((word >> 6) & 0x01000100u);
    a[3] = multiply_pair<true, kIsTwice>(rest, by);
  }
};

template <>
struct PackedElements<WeightFormat::kFp8> {
  static constexpr float kPower = 0x1p120f;
  // The largest scale whose product with kPower is a bfloat16.
  static constexpr float kMaxScale = 0x1p7f;

  // The same; `word` is of row g and `word_high` of row g + 8.
  template <bool kIsTwice>
  __device__ __forceinline__ static void convert(uint32_t word, uint32_t word_high,
                                                 const RowMultipliers& by, uint32_t (&a)[4]) {
    a[0] = multiply_pair<false, kIsTwice>(first(word), by);
    a[1] = multiply_pair<true, kIsTwice>(first(word_high), by);
    a[2] = multiply_pair<false, kIsTwice>(second(word), by);
    a[3] = multiply_pair<true, kIsTwice>(second(word_high), by);
  }

 private:
  __device__ __forceinline__ static uint32_t first(uint32_t word) { return word & 0x87f087f0u; }
  __device__ __forceinline__ static uint32_t second(uint32_t word) {
    return ((word << 4) & 0x80f080f0u) | ((word >> 4) & 0x07000700u);
  }
};

// The scales of a packed tile's word `scales`, for its first (0) or last (1) 32 columns. kIsTwice:
// whether a scale may need its second factor.
template <bool kIsTwice>
__device__ __forceinline__ RowMultipliers mxfp4_multipliers(uint32_t scales, int32_t group) {
  using Elements = PackedElements<WeightFormat::kMxfp4>;
  // A bfloat16 2^e has the bits (e + 127) << 7; the scale is 2^(byte - 127), or 2^-127, which is
  // subnormal.
  constexpr uint32_t kOne = 0x00800080u;
  const uint32_t bytes = __byte_perm(scales, 0, group == 0 ? 0x4140u : 0x4342u);
  if (!kIsTwice) return {.first = bytes * 0x80u + 126 * kOne, .second = 0};
  const uint32_t low = bytes % 0x10000u == 0 ? 0x40u : bytes % 0x10000u * 0x80u;
  const uint32_t high = bytes / 0x10000u == 0 ? 0x40u : bytes / 0x10000u * 0x80u;
  return {.first = bfloat16_pair(Elements::kPower, Elements::kPower), .second = high << 16 | low};
}

// The operand of a step of 16 columns of kMxfp4; scales: of its packed tile.
template <bool kIsTwice>
__device__ __forceinline__ void convert_elements(uint32_t word, uint32_t scales, int32_t step,
                                                 uint32_t (&a)[4]) {
  const RowMultipliers by = mxfp4_multipliers<kIsTwice>(scales, step / 2);
  PackedElements<WeightFormat::kMxfp4>::convert<kIsTwice>(word, by, a);
}

// Scales, or 1, of the rows of kFp8.
template <bool kIsTwice>
__device__ __forceinline__ RowMultipliers fp8_multipliers(float low, float high) {
  constexpr float kPower = PackedElements<WeightFormat::kFp8>::kPower;
  constexpr float kMaxScale = PackedElements<WeightFormat::kFp8>::kMaxScale;
  if (!kIsTwice) return {.first = bfloat16_pair(low * kPower, high * kPower), .second = 0};
  const bool is_low_large = fabsf(low) > kMaxScale;
  const bool is_high_large = fabsf(high) > kMaxScale;
  return {.first = bfloat16_pair(is_low_large ? kPower : low * kPower,
                                 is_high_large ? kPower : high * kPower),
          .second = bfloat16_pair(is_low_large ? low : 1.0f, is_high_large ? high : 1.0f)};
}

}  // namespace paceline::cuda
