// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tokens may lie anywhere in x (x_rows), which the copy engine of Hopper cannot follow. Producer
// warps copy them with cp.async into the swizzled layout that the engine would have made: piece c
// (16 bytes) of row r of a tile of 64 columns goes to piece c ^ (r % 8). Only rows that exist are
// copied; the others are stale, and so are only outputs that are not written. Columns beyond K are
// zero.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/mma.cuh"
#include "gemm/expert_tiles.cuh"

namespace paceline::cuda {

// Copies the rows of a tile, 128 columns of K by 128 columns; one object for each thread of the
// kTokenWarps warps. Sixteen lanes copy a row's 256 bytes of a stage.
template <class Shape>
class TokenCopier {
 public:
  // x_rows: the row of x for each row of y, or null.
  __device__ __forceinline__ TokenCopier(const __nv_bfloat16* x, int64_t stride,
                                         const int32_t* x_rows, int32_t k, const ExpertTile& tile,
                                         int32_t thread)
      : x_(reinterpret_cast<const std::byte*>(x)), k_(k), piece_(thread % 16) {
    const int32_t first = thread / 16;
    num_rows_ = (tile.num_rows - first + kRowStep - 1) / kRowStep;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t of_y = tile.first_row + first + i * kRowStep;
      const int64_t row = i >= num_rows_ ? 0 : x_rows != nullptr ? x_rows[of_y] : of_y;
      sources_[i] = static_cast<uint32_t>(row * stride * 2 + piece_ * 16);
    }
#pragma unroll
    for (int32_t i = 0; i < kPatterns; ++i) {
      const int32_t row = first + i * kRowStep;
      patterns_[i] = static_cast<uint32_t>(first * 128 + ((piece_ % 8) ^ (row % 8)) * 16);
    }
  }

  // `to`: the shared address of the stage's tokens.
  __device__ __forceinline__ void copy(uint32_t to, int32_t block) const {
    const bool is_inside = block * Shape::kStageDepth + piece_ * 8 < k_;
    const uint32_t tile = to + static_cast<uint32_t>(piece_ / 8 * Shape::kTokenBytes);
    // The same for all lanes, which need no 64-bit arithmetic of their own. Beyond K nothing is
    // read.
    const std::byte* const from = x_ + int64_t{block} * (Shape::kStageDepth * 2);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      if (i >= num_rows_) continue;
      const uint32_t at = patterns_[i % kPatterns] + static_cast<uint32_t>(i * kRowStep * 128);
      cp_async_16(tile + at, from + sources_[i], is_inside);
    }
  }

 private:
  static constexpr int32_t kRowStep = 2 * Shape::kTokenWarps;
  static constexpr int32_t kRows = Shape::kTokens / kRowStep;
  static constexpr int32_t kPatterns = 8 / kRowStep;
  static_assert(kRows * kRowStep == Shape::kTokens && kPatterns * kRowStep == 8);

  const std::byte* x_;
  int32_t k_;
  int32_t piece_;
  int32_t num_rows_;         // of this thread
  uint32_t sources_[kRows];  // bytes from x; what is not a row has any value
  // Where the pieces of the first rows lie. Those kPatterns rows further on are in the same order.
  uint32_t patterns_[kPatterns];
};

}  // namespace paceline::cuda
