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
// kTokenWarps warps. Four lanes copy 64 bytes of a row at once, and each lane four pieces of its
// rows, so that it has one address and one condition for four copies.
template <class Shape>
class TokenCopier {
 public:
  // x_rows: the row of x for each row of y, or null.
  __device__ __forceinline__ TokenCopier(const __nv_bfloat16* x, int64_t stride,
                                         const int32_t* x_rows, int32_t k, const ExpertTile& tile,
                                         int32_t thread)
      : k_(k), piece_(thread % 4) {
    const int32_t first = thread / 4;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first + i * kRowStep;
      exists_[i] = row < tile.num_rows;
      const int32_t of_y = tile.first_row + row;
      const int64_t of_x = !exists_[i] ? 0 : x_rows != nullptr ? x_rows[of_y] : of_y;
      from_[i] = reinterpret_cast<const std::byte*>(x + of_x * stride + piece_ * 8);
    }
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      offsets_[i] = static_cast<uint32_t>(first * 128 + ((4 * i + piece_) ^ (first % 8)) * 16);
    }
  }

  // `to`: the shared address of the stage's tokens.
  __device__ __forceinline__ void copy(uint32_t to, int32_t block) const {
    if ((block + 1) * Shape::kStageDepth <= k_) {
      copy_pieces(to, block, [](int32_t) { return true; });
    } else {
      copy_pieces(to, block, [&](int32_t i) {
        return block * Shape::kStageDepth + (4 * i + piece_) * 8 < k_;
      });
    }
  }

 private:
  static constexpr int32_t kRowStep = 8 * Shape::kTokenWarps;
  static constexpr int32_t kRows = Shape::kTokens / kRowStep;
  static_assert(kRows * kRowStep == Shape::kTokens);

  // is_inside: whether piece i of this lane lies before the end of K. Beyond it nothing is read.
  template <class IsInside>
  __device__ __forceinline__ void copy_pieces(uint32_t to, int32_t block,
                                              const IsInside& is_inside) const {
    const uint32_t halves[2] = {to + offsets_[0], to + offsets_[1]};
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      if (!exists_[i]) continue;
      const std::byte* const from = from_[i] + int64_t{block} * (Shape::kStageDepth * 2);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const uint32_t at =
            halves[j % 2] + static_cast<uint32_t>(j / 2 * Shape::kTokenBytes + i * kRowStep * 128);
        const bool copies = is_inside(j);
        cp_async_16(at, copies ? from + j * 64 : from, copies);
      }
    }
  }

  int32_t k_;
  int32_t piece_;  // the first of this lane's: it copies every fourth
  bool exists_[kRows];
  const std::byte* from_[kRows];
  uint32_t offsets_[2];  // of a piece in either half of a row of 128 bytes
};

}  // namespace paceline::cuda
