// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arguments of a portable product, and the shapes of its tiles.

#include <cuda_bf16.h>

#include <cstdint>

#include "gemm/expert_tiles.cuh"
#include "gemm/gemm_args.h"
#include "gemm/staged_rows.cuh"

namespace paceline::cuda::portable {

struct Args {
  ExpertRows rows;
  const __nv_bfloat16* weights;
  int64_t expert_stride;  // elements from expert to expert
  const __nv_bfloat16* x;
  int64_t x_stride;
  const int32_t* x_rows;  // or null
  const float* bias;      // [num_experts, n], or null
  void* y;
  int64_t y_stride;
  bool is_y_float;  // else bfloat16
  int32_t n;        // of y
  int32_t k;
  int32_t num_stages;
  bool starts_early;     // before the predecessor has ended, if the device can do that
  bool follows_product;  // as in ExpertGemmParams
  GatedRows gated;       // only of bfloat16 outputs without a bias
};

inline constexpr int32_t kMaxStages = 8;

// The operand that forms the rows of a product, 16 at a time; the other one forms its columns, 8 at
// a time. With few tokens as rows, a block has twice as many warps for its weights.
enum class Rows : uint8_t { kWeights, kTokens };

// A block has weight_warps x token_warps warps, and each of them row_tiles x column_tiles products
// of 16 rows by 8 columns. A stage of the ring holds `depth` columns of K. Up to `blocks` blocks
// share a multiprocessor.
template <Rows rows, int32_t weight_warps, int32_t token_warps, int32_t row_tiles,
          int32_t column_tiles, int32_t depth, int32_t blocks>
struct TileShape {
  static constexpr bool kTokensAreRows = rows == Rows::kTokens;
  static constexpr int32_t kTokenWarps = token_warps;
  static constexpr int32_t kRowTiles = row_tiles;
  static constexpr int32_t kColumnTiles = column_tiles;
  static constexpr int32_t kWarpWeights = kTokensAreRows ? 8 * column_tiles : 16 * row_tiles;
  static constexpr int32_t kWarpTokens = kTokensAreRows ? 16 * row_tiles : 8 * column_tiles;
  static constexpr int32_t kWeights = weight_warps * kWarpWeights;
  static constexpr int32_t kTokens = token_warps * kWarpTokens;
  static constexpr int32_t kThreads = 32 * weight_warps * token_warps;
  static constexpr int32_t kDepth = depth;
  static constexpr int32_t kRowBytes = 2 * depth;
  static constexpr int32_t kWeightBytes = kWeights * kRowBytes;
  static constexpr int32_t kStageBytes = kWeightBytes + kTokens * kRowBytes;
  static constexpr int32_t kBlocks = blocks;
  static constexpr int32_t kProducts = row_tiles * column_tiles;  // of a warp, in a step
  // Whether a warp skips products of rows that do not exist. In small tiles a branch costs more.
  static constexpr bool kSkipsRows = token_warps > 1 && kProducts > 8;
  template <class Out>
  using Staged = StagedRows<Out, kWeights, kTokens, kThreads>;

  // The outputs pass through the ring's memory, too.
  static constexpr int32_t kStagesOfOutputs =
      (Staged<float>::kBytes + kStageBytes - 1) / kStageBytes;
  static constexpr int32_t kMinStages = kStagesOfOutputs < 3 ? 3 : kStagesOfOutputs;
  static_assert(kMinStages <= kMaxStages);
  static_assert(column_tiles == 1 || column_tiles % 2 == 0);
  static_assert(depth == 64 || depth == 128);
};

}  // namespace paceline::cuda::portable
