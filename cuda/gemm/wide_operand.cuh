// SPDX-License-Identifier: Apache-2.0
#pragma once

// A lane's part of the packed weights of a stage, and its conversion to the register operand of
// `wgmma` m64k16. Warp w of a warpgroup has row tile w.

#include <cstdint>

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/nvfp4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_elements.cuh"
#include "gemm/wide_ring.cuh"

namespace paceline::cuda {

// Whether `flag` is set in any thread of the calling warpgroup, whose barrier is 2 and its number.
__device__ __forceinline__ bool any_in_warpgroup(bool flag) {
  uint32_t is_any;
  asm volatile(
      "{\n"
      ".reg .pred flag, any;\n"
      "setp.ne.u32 flag, %2, 0;\n"
      "bar.red.or.pred any, %1, 128, flag;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(is_any)
      : "r"(2 + threadIdx.x / 128), "r"(flag ? 1 : 0)
      : "memory");
  return is_any != 0;
}

// Whether four scales of kMxfp4 have one that is too large for one multiplication, or nearly.
__device__ __forceinline__ bool is_large_mxfp4(uint32_t scales) {
  static_assert(PackedElements<WeightFormat::kMxfp4>::kMaxScaleByte == 128);
  return (scales & 0x80808080u) != 0;
}

// How the weights of a tile are converted, as StageOperand's kVariant: of kMxfp4, with two
// multiplications, as a scale of the warpgroup's rows is too large for one; of kInt4, with scales
// in float16. The same in all warps of the warpgroup, which call it.
template <class Shape>
__device__ __forceinline__ bool variant_of(const PackedArgs& args, const ExpertTile& tile,
                                           int32_t row_tile) {
  if constexpr (Shape::kFormat == WeightFormat::kInt4) return args.int4.is_float16;
  if constexpr (!Shape::kScansScales) return false;
  const int32_t last = (args.n - 1) / kPackedRows;
  const int64_t row_bytes =
      int64_t{(args.k + kPackedColumns - 1) / kPackedColumns} * kPackedScaleBytes;
  const std::byte* const scales =
      args.scales.scales + tile.expert * args.scales.expert_stride +
      min(tile.column_tile * Shape::kRowTiles + row_tile, last) * row_bytes;
  uint32_t bits = 0;  // of all bytes
  for (auto at = static_cast<int64_t>(threadIdx.x % 32) * 16; at < row_bytes; at += 32 * 16) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(scales + at));
    bits |= four.x | four.y | four.z | four.w;
  }
  return any_in_warpgroup(is_large_mxfp4(bits));
}

// kVariant: see variant_of. Of kFp8, and of kMxfp4 in a shape that does not scan its scales, the
// scales of each stage tell.
template <class Shape, bool kHasTileSums, bool kVariant = false>
class StageOperand {
 public:
  static constexpr bool kIsFp8 = Shape::kFormat == WeightFormat::kFp8;
  static constexpr bool kIsInt4 = Shape::kFormat == WeightFormat::kInt4;
  static constexpr bool kIsMxfp4 = Shape::kFormat == WeightFormat::kMxfp4;
  static constexpr bool kIsNvfp4 = Shape::kFormat == WeightFormat::kNvfp4;
  using Elements = PackedElements<Shape::kFormat>;

  // row_tile: of the calling warp in the block's tile.
  __device__ __forceinline__ StageOperand(const PackedArgs& args, int32_t row_tile)
      : has_values_(args.scales.use == ScaleUse::kValues),
        groups_(args, /*expert=*/0, /*row_tile=*/0) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    weights_at_ = static_cast<uint32_t>(row_tile * Shape::kRowTileBytes + lane * 16);
    scales_at_ =
        static_cast<uint32_t>(kIsInt4    ? row_tile * 256 + lane * 4
                              : kIsNvfp4 ? row_tile * 2 * kPackedNvfp4ScaleBytes + lane / 4 * 32
                                         : row_tile * 64 + lane / 4 * 4);
  }

  // Reads a part of a stage; `weights` is its shared address.
  __device__ __forceinline__ void read(uint32_t weights, int32_t part) {
    // A read of four bits has 64 columns, which may be two parts.
    if (!kIsFp8 && part * Shape::kSteps % 4 != 0) return;
#pragma unroll
    for (int32_t i = 0; i < kPieces; ++i) {
      const int32_t piece = part * Shape::kSteps / (kIsFp8 ? 2 : 4) + i;
      pieces_[i] = load_shared_16(weights + weights_at_ + static_cast<uint32_t>(piece * 512));
    }
  }

  // Reads the scales of the next stage; those of kNvfp4 are read by convert.
  __device__ __forceinline__ void read_scales(uint32_t scales) {
    if constexpr (kIsNvfp4) {
      scales_[0] = scales + scales_at_;
      return;
    }
    // kFp8: of row g and of row g + 8; else of the first and of the last 64 columns.
    scales_[0] = load_shared_4(scales + scales_at_);
    scales_[1] = load_shared_4(scales + scales_at_ + (kIsInt4 ? 128 : 32));
    ++stage_;
    if constexpr (kHasTileSums) return;
    if constexpr (kIsFp8) {
      if (!has_values_) scales_[0] = scales_[1] = __float_as_uint(1.0f);
      const float most = fmaxf(fabsf(scale(0)), fabsf(scale(1)));
      is_twice_ = __any_sync(kAllLanes, most > Elements::kMaxScale);
    } else if constexpr (kIsMxfp4 && !Shape::kScansScales) {
      is_twice_ = __any_sync(kAllLanes, is_large_mxfp4(scales_[0] | scales_[1]));
    }
  }

  // The operands of the part that has been read.
  __device__ __forceinline__ void convert(int32_t part, uint32_t (&a)[4 * Shape::kSteps]) const {
    if constexpr (kIsInt4) {
      convert_codes<kVariant>(part, a);
    } else if constexpr (kIsNvfp4) {
      convert_lines(part, a);
    } else if (is_twice_) {
      convert_elements<true>(part, a);
    } else {
      convert_elements<kVariant>(part, a);
    }
  }

  // kFp8: the scale of row g (0) or row g + 8 (1).
  __device__ __forceinline__ float scale(int32_t i) const { return __uint_as_float(scales_[i]); }

 private:
  static constexpr int32_t kPieces = kIsFp8 ? Shape::kSteps / 2 : 1;  // of a part

  template <bool kIsTwice>
  __device__ __forceinline__ void convert_elements(int32_t part,
                                                   uint32_t (&a)[4 * Shape::kSteps]) const {
#pragma unroll
    for (int32_t i = 0; i < Shape::kSteps; ++i) {
      const int32_t step = (part * Shape::kSteps + i) % 4;  // of 64 columns
      const RowMultipliers by = multipliers<kIsTwice>(part * Shape::kSteps / 4, step / 2);
      uint32_t to[4];
      if constexpr (kIsFp8) {
        const uint4& two = pieces_[i / 2];
        Elements::template convert<kIsTwice>(step % 2 == 0 ? two.x : two.z,
                                             step % 2 == 0 ? two.y : two.w, by, to);
      } else {
        const uint4& four = pieces_[0];
        const uint32_t word = word_of_step(four, step);
        Elements::template convert<kIsTwice>(word, by, to);
      }
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) a[4 * i + j] = to[j];
    }
  }

  // The same of kInt4, whose parts are packed tiles.
  template <bool kIsFloat16>
  __device__ __forceinline__ void convert_codes(int32_t part,
                                                uint32_t (&a)[4 * Shape::kSteps]) const {
    static_assert(!kIsInt4 || Shape::kSteps == 4);
    Int4Multipliers by[2];
    groups_.template multipliers<kIsFloat16, /*kHasHalves=*/true>(scales_[part], 2 * stage_ + part,
                                                                  by);
    const uint4& four = pieces_[0];
#pragma unroll
    for (int32_t step = 0; step < 4; ++step) {
      const uint32_t word = word_of_step(four, step);
      uint32_t to[4];
      convert_int4<kIsFloat16>(word, by[step / 2], to);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) a[4 * step + j] = to[j];
    }
  }

  // The same of kNvfp4.
  __device__ __forceinline__ void convert_lines(int32_t part,
                                                uint32_t (&a)[4 * Shape::kSteps]) const {
    static_assert(!kIsNvfp4 || Shape::kSteps == 4);
    const uint4& four = pieces_[0];
#pragma unroll
    for (int32_t step = 0; step < 4; ++step) {
      const uint32_t word = word_of_step(four, step);
      const uint2 line = load_shared_8(
          scales_[0] + static_cast<uint32_t>(part * kPackedNvfp4ScaleBytes + step * 8));
      uint32_t to[4];
      convert_nvfp4(word, {.slope = line.x, .offset = line.y}, to);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) a[4 * step + j] = to[j];
    }
  }

  // Of the 32 columns `group` (0 or 1) of 64 columns `half`.
  template <bool kIsTwice>
  __device__ __forceinline__ RowMultipliers multipliers(int32_t half, int32_t group) const {
    if constexpr (!kIsFp8) {
      return mxfp4_multipliers<kIsTwice>(scales_[half], group);
    } else if constexpr (kHasTileSums) {
      return fp8_multipliers<false>(1.0f, 1.0f);
    } else {
      return fp8_multipliers<kIsTwice>(scale(0), scale(1));
    }
  }

  bool has_values_;        // kFp8: the scales are part of the values
  int32_t stage_ = -1;     // kInt4: whose scales have been read
  Int4Groups groups_;      // kInt4
  bool is_twice_ = false;  // by the stage's scales; the same in all lanes of the warp
  uint32_t weights_at_;
  uint32_t scales_at_;
  uint4 pieces_[kPieces];
  uint32_t scales_[2];  // kNvfp4: the shared address of the lane's lines
};

}  // namespace paceline::cuda
