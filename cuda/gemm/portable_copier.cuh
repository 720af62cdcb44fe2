// SPDX-License-Identifier: Apache-2.0
#pragma once

// How weights and tokens reach the ring of a portable product.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/mma.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/portable_shape.cuh"

namespace paceline::cuda::portable {

// Copies both operands; one object for each thread of the block. A warp alone on its part of a
// multiprocessor issues an instruction in every few clocks at best, so a copy takes few of them:
// two to find the next row of weights, or one to find the token.
template <class Shape>
class Copier {
 public:
  static constexpr int32_t kPieces = Shape::kDepth / 8;  // of a row
  static constexpr int32_t kStep = Shape::kThreads / kPieces;
  static constexpr int32_t kWeightRows = Shape::kWeights / kStep;
  static constexpr int32_t kTokenRows = Shape::kTokens / kStep;
  static constexpr int32_t kCopies = kWeightRows + kTokenRows;  // of a stage

  __device__ __forceinline__ explicit Copier(const Args& args)
      : row_(static_cast<int32_t>(threadIdx.x) / kPieces),
        columns_left_(args.k - static_cast<int32_t>(threadIdx.x) % kPieces * 8),
        row_step_(int64_t{2 * kStep} * args.k) {
    const int32_t piece = static_cast<int32_t>(threadIdx.x) % kPieces;
    tokens_ = reinterpret_cast<const std::byte*>(args.x) + piece * 16;
#pragma unroll
    for (int32_t i = 0; i < kPatterns; ++i) {
      patterns_[i] =
          static_cast<uint32_t>(row_ * Shape::kRowBytes + (piece ^ ((row_ + i * kStep) % 8)) * 16);
    }
    keep_in_register(row_step_);
    keep_in_register(tokens_);
  }

  // first_column: of y. The second half of a gated tile has the ups of the first half's gates.
  __device__ __forceinline__ void set_weights(const Args& args, int32_t expert,
                                              int32_t first_column) {
    const int32_t piece = static_cast<int32_t>(threadIdx.x) % kPieces;
    const __nv_bfloat16* const first = args.weights + expert * args.expert_stride;
    weights_ = reinterpret_cast<const std::byte*>(first + int64_t{first_column + row_} * args.k) +
               piece * 16;
    const bool is_gated = args.gated.up_row != 0;
    first_rows_ = args.n - first_column - row_;
    second_rows_ = first_rows_ + (is_gated ? kHalf : 0);
    second_step_ = row_step_ + (is_gated ? int64_t{2} * (args.gated.up_row - kHalf) * args.k : 0);
    keep_in_register(second_step_);
  }
  __device__ __forceinline__ void set_tokens(const Args& args, const ExpertTile& tile) {
#pragma unroll
    for (int32_t i = 0; i < kTokenRows; ++i) {
      const int32_t row = row_ + i * kStep;
      token_at_[i] = kNone;
      if (row >= tile.num_rows) continue;
      const int32_t of_y = tile.first_row + row;
      const int64_t source = args.x_rows != nullptr ? args.x_rows[of_y] : of_y;
      token_at_[i] = static_cast<uint32_t>(source * args.x_stride / 8);
    }
  }

  // Go on to the next stage.
  __device__ __forceinline__ void advance_weights() { weights_ += Shape::kRowBytes; }
  __device__ __forceinline__ void advance_tokens() {
    tokens_ += Shape::kRowBytes;
    columns_left_ -= Shape::kDepth;
  }
  // Whether the thread's columns of a stage `stages` behind the tokens' exist.
  [[nodiscard]] __device__ __forceinline__ bool has_columns(int32_t stages = 0) const {
    return columns_left_ > stages * Shape::kDepth;
  }

  // Makes the copies [first, last) to the stage at the shared address `to`: those of the thread's
  // rows of weights, and then those of its tokens. Calls for a stage go from row to row.
  template <int32_t first, int32_t last>
  __device__ __forceinline__ void copy(uint32_t to, bool has_columns) {
#pragma unroll
    for (int32_t i = first; i < last; ++i) {
      if (i < kWeightRows) {
        if (i == 0) {
          row_of_weights_ = weights_;
        } else {
          row_of_weights_ += i * kStep == kHalf ? second_step_ : row_step_;
        }
        if (i * kStep < (i * kStep < kHalf ? first_rows_ : second_rows_)) {
          cp_async_16(to + pattern(i), row_of_weights_, has_columns);
        }
      } else {
        const uint32_t token = token_at_[i - kWeightRows];
        if (token != kNone) {
          cp_async_16(to + Shape::kWeightBytes + pattern(i - kWeightRows),
                      tokens_ + uint64_t{16} * token, has_columns);
        }
      }
    }
  }

 private:
  static constexpr int32_t kHalf = Shape::kWeights / 2;
  static constexpr int32_t kPatterns = kStep < 8 ? 8 / kStep : 1;
  static constexpr uint32_t kNone = ~0u;
  static_assert(kTokenRows * kStep == Shape::kTokens && kHalf % kStep == 0);
  static_assert(kStep % 8 == 0 || 8 % kStep == 0);

  // Where the thread's piece of its row number i lies in an operand of the stage. Rows kPatterns
  // further on are in the same order.
  [[nodiscard]] __device__ __forceinline__ uint32_t pattern(int32_t i) const {
    return patterns_[i % kPatterns] + static_cast<uint32_t>(i * kStep * Shape::kRowBytes);
  }

  int32_t row_;
  int32_t columns_left_;     // of x, from the thread's piece of the next stage of tokens on
  int64_t row_step_;         // bytes from one of the thread's rows of weights to the next
  int64_t second_step_ = 0;  // the same into the second half
  const std::byte* weights_ = nullptr;         // the thread's first row, in the next stage
  const std::byte* row_of_weights_ = nullptr;  // the row copied last
  const std::byte* tokens_ = nullptr;          // the thread's piece of row 0, in the next stage
  int32_t first_rows_ = 0;                     // of weights that exist, from the thread's first on
  int32_t second_rows_ = 0;                    // the same for the second half
  uint32_t token_at_[kTokenRows];              // 16 bytes; kNone: no token
  uint32_t patterns_[kPatterns];
};

}  // namespace paceline::cuda::portable
