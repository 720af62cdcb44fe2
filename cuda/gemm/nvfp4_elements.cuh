// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed elements of kNvfp4, converted to the bfloat16 operand of matrix products in registers.
//
// The value of an element e with the scale s is bfloat16(float(e * s)). A magnitude of e2m1 is 0 or
// a power of two p times 1 or 1.5, and the limits of scales keep all values normal, so that
// rounding does not depend on p. Hence a value is p times r1 = bfloat16(s) or r15 = bfloat16(float(
// 1.5 s)), with the sign of e. Both lie on one line in e / p, from 1 to 1.5:
//   value = e * slope + p * offset, with slope = 2 (r15 - r1) and offset = r1 - slope
// - slope and offset are bfloat16 numbers: differences of numbers of eight bits that lie so close
//   have few bits.
// - p is e without its mantissa, and so it is 0 with e.
// - p * offset is exact, also where it is subnormal, and the multiply-add rounds a sum that is a
//   bfloat16. Where e is 0, so is the value, of either sign.
// tests/cuda/nvfp4_lines_test.cc tries every mantissa of a scale.

#include <cstdint>

#include "common/packed_copies.cuh"
#include "common/reduce.cuh"
#include "gemm/packed_elements.cuh"

namespace paceline::cuda {

// What the elements of 16 columns meet: bfloat16, for row g in the lower half and for row g + 8 in
// the upper one.
struct Nvfp4Lines {
  uint32_t slope;
  uint32_t offset;
};

// The operand of 16 rows and 16 columns, of rows g (a[0], a[2]) and g + 8 (a[1], a[3]).
__device__ __forceinline__ void convert_nvfp4(uint32_t word, const Nvfp4Lines& by,
                                              uint32_t (&a)[4]) {
  using Elements = PackedElements<WeightFormat::kMxfp4>;
  const RowMultipliers power = {.first = bfloat16_pair(Elements::kPower, Elements::kPower),
                                .second = 0};
  Elements::convert<false>(word, power, a);
  const auto value = [&]<bool kIsUpper>(uint32_t elements) {
    constexpr uint32_t kNoMantissa = 0xff80ff80u;
    return multiply_add_pair<kIsUpper>(elements, by.slope,
                                       multiply_pair<kIsUpper>(elements & kNoMantissa, by.offset));
  };
  a[0] = value.template operator()<false>(a[0]);
  a[1] = value.template operator()<true>(a[1]);
  a[2] = value.template operator()<false>(a[2]);
  a[3] = value.template operator()<true>(a[3]);
}

// The operand of a step of 16 columns. own: the lines of the calling lane, which of the four lanes
// with its rows has those of step `lane % 4` of the packed tile. All lanes of a warp call it.
template <bool kIsTwice>
__device__ __forceinline__ void convert_elements(uint32_t word, const Nvfp4Lines& own, int32_t step,
                                                 uint32_t (&a)[4]) {
  static_assert(!kIsTwice);
  const int32_t from = static_cast<int32_t>(threadIdx.x) % 32 / 4 * 4 + step;
  convert_nvfp4(word,
                {.slope = __shfl_sync(kAllLanes, own.slope, from),
                 .offset = __shfl_sync(kAllLanes, own.offset, from)},
                a);
}

}  // namespace paceline::cuda
