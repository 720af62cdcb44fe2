// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed codes of kInt4, converted to the bfloat16 operand of matrix products in registers.
//
// The value of a code is bfloat16((code - zero) * scale), rounded once.
// - A code in the lowest bits of a bfloat16 of 128 makes it 128 + code. From it 128 + zero is
//   subtracted, which is exact.
// - A scale in bfloat16 multiplies the difference, which has four bits: `mul.bf16x2` rounds the
//   exact product.
// - A scale in float16 has three bits more than a bfloat16. It is the sum of its first eight bits
//   and of the others. The difference times the others has at most seven bits, so it is exact, and
//   the multiply-add of the first eight bits rounds the exact product.

#include <cstddef>
#include <cstdint>

#include "common/packed_copies.cuh"
#include "common/reduce.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_elements.cuh"
#include "gemm/packed_weights.h"

namespace paceline::cuda {

// What codes of a group meet: bfloat16, for row g in the lower half and for row g + 8 in the upper
// one.
struct Int4Multipliers {
  uint32_t minus;  // -(128 + zero)
  uint32_t scale;  // its first eight bits
  uint32_t rest;   // the others, of a scale in float16
};

// The operand of 16 rows and 16 columns, of rows g (a[0], a[2]) and g + 8 (a[1], a[3]).
template <bool kIsFloat16>
__device__ __forceinline__ void convert_int4(uint32_t word, const Int4Multipliers& by,
                                             uint32_t (&a)[4]) {
  const auto value = [&]<bool kIsUpper>(uint32_t codes) {
    constexpr uint32_t kOf128 = 0x43004300u;
    const uint32_t difference =
        add_to_pair<kIsUpper>(masked_with<0x000f000fu>(codes, kOf128), by.minus);
    if constexpr (!kIsFloat16) return multiply_pair<kIsUpper>(difference, by.scale);
    const uint32_t rest = multiply_pair<kIsUpper>(difference, by.rest);
    return multiply_add_pair<kIsUpper>(difference, by.scale, rest);
  };
  a[0] = value.template operator()<false>(word);
  a[1] = value.template operator()<true>(word >> 4);
  a[2] = value.template operator()<false>(word >> 8);
  a[3] = value.template operator()<true>(word >> 12);
}

// What codes of a group meet. scale: those of rows g and g + 8; zeros: theirs, in 16 bits each.
template <bool kIsFloat16>
__device__ __forceinline__ Int4Multipliers int4_multipliers(uint32_t scale, uint32_t zeros) {
  constexpr uint32_t kMinus128 = 0xc300c300u;
  Int4Multipliers by = {.minus = kMinus128 | zeros, .scale = scale, .rest = 0};
  if constexpr (kIsFloat16) {
    const auto first_bits = [](float value) {
      return __uint_as_float(__float_as_uint(value) & 0xffff0000u);
    };
    const float low = half_of<false>(scale);
    const float high = half_of<true>(scale);
    by.scale = bfloat16_pair(low, high);
    by.rest = bfloat16_pair(low - first_bits(low), high - first_bits(high));
  }
  return by;
}

// The scales and zero points of a row tile. Four lanes share the rows g and g + 8. For each packed
// tile each of them reads one word: lanes 0 and 2 read scales and lanes 1 and 3 zero points, 0 and
// 1 of the first 32 columns and 2 and 3 of the last. Shuffles give the words to all four.
class Int4Groups {
 public:
  __device__ __forceinline__ Int4Groups(const PackedArgs& args, int32_t expert, int32_t row_tile)
      : reciprocal_(args.int4.reciprocal),
        last_group_(args.int4.num_groups - 1),
        group_columns_(args.int4.group_columns),
        is_float16_(args.int4.is_float16) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    is_zero_ = lane % 2;
    half_ = lane / 2 % 2;
    has_zeros_ = args.int4.zeros != nullptr;
    if (is_zero_ == 0) {
      words_ = args.scales.scales + expert * args.scales.expert_stride +
               int64_t{row_tile} * args.int4.num_groups * kPackedInt4ScaleBytes;
    } else if (has_zeros_) {
      words_ = args.int4.zeros + expert * args.int4.zeros_stride +
               int64_t{row_tile} * ((args.int4.num_groups + 1) / 2) * kPackedScaleBytes;
    } else {  // what it reads is not used
      words_ = args.scales.scales;
    }
    words_ += lane / 4 * 4;
  }

  // Bytes from the lane's words of a row tile to those of the next.
  __device__ __forceinline__ int32_t row_bytes() const {
    return ((last_group_ >> is_zero_) + 1) * kPackedScaleBytes;
  }

  // Whether every `columns` columns, counted from the first, have one scale a row.
  __device__ __forceinline__ bool are_whole(int32_t columns) const {
    return group_columns_ % columns == 0 || last_group_ == 0;
  }

  // Whether the scales are float16; else bfloat16.
  __device__ __forceinline__ bool has_float16_scales() const { return is_float16_; }

  // Whether the lane needs a word.
  __device__ __forceinline__ bool reads() const { return is_zero_ == 0 || has_zeros_; }

  // The lane's word for packed tile `tile` along k. Columns behind the last one are those of the
  // last group.
  __device__ __forceinline__ const std::byte* word_of(int32_t tile) const {
    static_assert(kPackedInt4ScaleBytes == kPackedScaleBytes);
    return words_ + (group_of(tile) >> is_zero_) * kPackedScaleBytes;
  }

  // What the codes of a tile meet, of its first and of its last 32 columns. `word` is what word_of
  // said. Without kHasHalves all columns of a tile are of one group. All lanes of a warp call it.
  template <bool kIsFloat16, bool kHasHalves>
  __device__ __forceinline__ void multipliers(uint32_t word, int32_t tile,
                                              Int4Multipliers (&by)[2]) const {
    // The bytes of an even group are the lower two of the word.
    const uint32_t zeros = __byte_perm(word, 0, group_of(tile) % 2 == 0 ? 0x4140 : 0x4342);
    word = is_zero_ == 0 ? word : has_zeros_ ? zeros : kInt4Zero * 0x00010001u;
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
    for (int32_t half = 0; half < (kHasHalves ? 2 : 1); ++half) {
      const int32_t first = lane / 4 * 4 + 2 * half;
      const uint32_t scale = __shfl_sync(kAllLanes, word, first);
      by[half] = int4_multipliers<kIsFloat16>(scale, __shfl_sync(kAllLanes, word, first + 1));
    }
    if constexpr (!kHasHalves) by[1] = by[0];
  }

 private:
  // The group of the columns that the lane's word is for.
  __device__ __forceinline__ int32_t group_of(int32_t tile) const {
    const auto twice = static_cast<uint32_t>(4 * tile + 2 * half_);
    return min(static_cast<int32_t>(__umulhi(twice, reciprocal_)), last_group_);
  }

  uint32_t reciprocal_;
  int32_t last_group_;
  int32_t is_zero_;
  int32_t half_;
  bool has_zeros_;
  int32_t group_columns_;
  bool is_float16_;
  const std::byte* words_;
};

}  // namespace paceline::cuda
