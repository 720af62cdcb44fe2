// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W_e^T on every GPU since sm_80, e being the expert of its rows, for weights in
// bfloat16. One matrix is a mixture of one expert (expert_tiles.cuh).
//
// - All threads copy both operands into a ring by cp.async.
// - Warps multiply by mma.sync. Each output is the sum that gemm_kernel.cuh computes: K in steps of
//   16, ascending, in one float32 accumulator; so the bits are equal on one device.
// - The 16 byte pieces of a row of the ring are in an order that depends on the row, so that eight
//   rows of a matrix that ldmatrix reads lie in different banks.
// - Columns beyond K are zero in both operands. Rows of a tile without a token keep stale values,
//   which affect only outputs that are not written.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
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

// Copies both operands; one object for each thread of the block.
template <class Shape>
class Copier {
 public:
  __device__ __forceinline__ explicit Copier(const Args& args)
      : args_(args),
        row_(static_cast<int32_t>(threadIdx.x) / kPieces),
        piece_(static_cast<int32_t>(threadIdx.x) % kPieces) {
#pragma unroll
    for (int32_t i = 0; i < kPatterns; ++i) {
      patterns_[i] =
          static_cast<uint32_t>(row_ * Shape::kRowBytes + (piece_ ^ ((row_ + i * kStep) % 8)) * 16);
    }
  }

  // first_column: of y.
  __device__ __forceinline__ void set_weights(int32_t expert, int32_t first_column) {
    weights_ = args_.weights + expert * args_.expert_stride +
               int64_t{first_column + row_} * args_.k + piece_ * 8;
    num_columns_ = args_.n - first_column - row_;
  }
  __device__ __forceinline__ void set_tokens(const ExpertTile& tile) {
#pragma unroll
    for (int32_t i = 0; i < kTokenRows; ++i) {
      const int32_t row = row_ + i * kStep;
      const int32_t of_y = tile.first_row + row;
      sources_[i] = row >= tile.num_rows ? -1 : args_.x_rows != nullptr ? args_.x_rows[of_y] : of_y;
    }
  }

  // `to`: the shared address of the stage.
  __device__ __forceinline__ void copy_weights(uint32_t to, int32_t block) const {
    const int32_t column = block * Shape::kDepth;
    const bool is_inside = column + piece_ * 8 < args_.k;
    const bool is_gated = args_.gated.up_row != 0;
#pragma unroll
    for (int32_t i = 0; i < kWeightRows; ++i) {
      // The second half of a gated tile has the ups of the first half's gates.
      const bool is_up = is_gated && i * kStep >= kHalf;
      const int32_t at = i * kStep - (is_up ? kHalf : 0);
      const bool is_live = is_inside && at < num_columns_;
      const int64_t row = at + (is_up ? args_.gated.up_row : 0);
      cp_async_16(to + pattern(i), is_live ? weights_ + (row * args_.k + column) : args_.weights,
                  is_live);
    }
  }
  __device__ __forceinline__ void copy_tokens(uint32_t to, int32_t block) const {
    const int32_t column = block * Shape::kDepth + piece_ * 8;
    const bool is_inside = column < args_.k;
    const __nv_bfloat16* const from = args_.x + (is_inside ? column : 0);
#pragma unroll
    for (int32_t i = 0; i < kTokenRows; ++i) {
      if (sources_[i] < 0) continue;
      cp_async_16(to + Shape::kWeightBytes + pattern(i), from + sources_[i] * args_.x_stride,
                  is_inside);
    }
  }

 private:
  static constexpr int32_t kPieces = Shape::kDepth / 8;  // of a row
  static constexpr int32_t kStep = Shape::kThreads / kPieces;
  static constexpr int32_t kWeightRows = Shape::kWeights / kStep;
  static constexpr int32_t kTokenRows = Shape::kTokens / kStep;
  static constexpr int32_t kHalf = Shape::kWeights / 2;
  static constexpr int32_t kPatterns = kStep < 8 ? 8 / kStep : 1;
  static_assert(kTokenRows * kStep == Shape::kTokens && kHalf % kStep == 0);
  static_assert(kStep % 8 == 0 || 8 % kStep == 0);

  // Where the thread's piece of its row number i lies in an operand of the stage. Rows kPatterns
  // further on are in the same order.
  [[nodiscard]] __device__ __forceinline__ uint32_t pattern(int32_t i) const {
    return patterns_[i % kPatterns] + static_cast<uint32_t>(i * kStep * Shape::kRowBytes);
  }

  const Args& args_;
  int32_t row_;
  int32_t piece_;
  const __nv_bfloat16* weights_ = nullptr;
  int32_t num_columns_ = 0;      // of y, from the thread's first row on
  int32_t sources_[kTokenRows];  // rows of x; -1: none
  uint32_t patterns_[kPatterns];
};

// What a lane needs for the products of kSteps steps of 16 columns.
template <class Shape>
struct Operands {
  static constexpr bool kIsNarrow = Shape::kColumnTiles == 1;
  static constexpr int32_t kSteps = kIsNarrow ? 2 : 1;  // ldmatrix reads four matrices

  uint32_t rows[kSteps][Shape::kRowTiles][4];
  uint32_t columns[kIsNarrow ? 1 : Shape::kColumnTiles / 2][4];

  // Shared addresses of what the warp multiplies in a stage. `step`: the number of these operands
  // in the stage.
  __device__ __forceinline__ void load(uint32_t first_row, uint32_t first_column, int32_t step) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const auto at = [&](int32_t row, int32_t piece) {
      return static_cast<uint32_t>(row * Shape::kRowBytes + (piece ^ (lane % 8)) * 16);
    };
#pragma unroll
    for (int32_t s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
        ldmatrix_x4(rows[s][i],
                    first_row + at(16 * i + lane % 16, 2 * (step * kSteps + s) + lane / 16));
      }
    }
    if constexpr (kIsNarrow) {
      ldmatrix_x4(columns[0], first_column + at(lane % 8, 4 * step + lane / 8));
    } else {
#pragma unroll
      for (int32_t j = 0; j < Shape::kColumnTiles / 2; ++j) {
        ldmatrix_x4(columns[j],
                    first_column + at(16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
      }
    }
  }

  __device__ __forceinline__ void multiply(
      float (&sums)[Shape::kRowTiles][Shape::kColumnTiles][4]) const {
#pragma unroll
    for (int32_t s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
        for (int32_t j = 0; j < Shape::kColumnTiles; ++j) {
          const int32_t first = kIsNarrow ? 2 * s : j % 2 * 2;
          mma_16x8x16(sums[i][j], rows[s][i], columns[j / 2][first], columns[j / 2][first + 1]);
        }
      }
    }
  }
};

// Waits until at most `pending` of the thread's groups of copies are in flight.
__device__ __forceinline__ void wait_for_group(int32_t pending) {
  static_assert(kMaxStages == 8);
  switch (pending) {
    case 1:
      return cp_async_wait<1>();
    case 2:
      return cp_async_wait<2>();
    case 3:
      return cp_async_wait<3>();
    case 4:
      return cp_async_wait<4>();
    case 5:
      return cp_async_wait<5>();
    case 6:
      return cp_async_wait<6>();
    default:
      return cp_async_wait<0>();
  }
}

// Writes the tile's outputs, through the ring's memory, which is idle by now.
template <class Out, class Shape>
__device__ __forceinline__ void write_outputs(
    const Args& args, const ExpertTile& tile, std::byte* ring,
    const float (&sums)[Shape::kRowTiles][Shape::kColumnTiles][4]) {
  using Staged = typename Shape::template Staged<Out>;
  const Staged staged = {reinterpret_cast<Out*>(ring)};
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  const bool is_gated = args.gated.up_row != 0;
  const int32_t tile_columns = is_gated ? Shape::kWeights / 2 : Shape::kWeights;  // of y
  const int32_t first_column = tile.column_tile * tile_columns;
  const float* const bias =
      args.bias != nullptr ? args.bias + int64_t{tile.expert} * args.n + first_column : nullptr;
  const auto bias_of = [&](int32_t column) {
    return bias != nullptr && first_column + column < args.n ? bias[column] : 0.0f;
  };
  const int32_t first_weight = warp / Shape::kTokenWarps * Shape::kWarpWeights;
  const int32_t first_token = warp % Shape::kTokenWarps * Shape::kWarpTokens;
#pragma unroll
  for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
    for (int32_t j = 0; j < Shape::kColumnTiles; ++j) {
      // The first of the lane's sums; the second is one column further, the others eight rows.
      const int32_t row = 16 * i + lane / 4;
      const int32_t column = 8 * j + 2 * (lane % 4);
      const int32_t weight = first_weight + (Shape::kTokensAreRows ? column : row);
      const int32_t token = first_token + (Shape::kTokensAreRows ? row : column);
      constexpr int32_t kNextRow = Shape::kTokensAreRows ? 8 * Staged::kPitch : 8;
      constexpr int32_t kNextColumn = Shape::kTokensAreRows ? 1 : Staged::kPitch;
      const float low = bias_of(weight);
      const float high = bias_of(weight + (Shape::kTokensAreRows ? 1 : 8));
      Out* const to = staged.data + token * Staged::kPitch + weight;
      const float* const s = sums[i][j];
      to[0] = to_out<Out>(s[0] + low);
      to[kNextColumn] = to_out<Out>(s[1] + (Shape::kTokensAreRows ? high : low));
      to[kNextRow] = to_out<Out>(s[2] + (Shape::kTokensAreRows ? low : high));
      to[kNextRow + kNextColumn] = to_out<Out>(s[3] + high);
    }
  }
  __syncthreads();
  Out* const y = static_cast<Out*>(args.y) + int64_t{tile.first_row} * args.y_stride + first_column;
  const int32_t num_columns = min(args.n - first_column, tile_columns);
  if constexpr (sizeof(Out) == 2) {
    if (is_gated) {
      return staged.write_gated(y, args.y_stride, tile.num_rows, num_columns, args.gated);
    }
  }
  staged.write(y, args.y_stride, tile.num_rows, num_columns);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) gemm_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) std::byte shared[];
  const bool is_mixture = args.rows.expert_begin != nullptr;
  const int32_t num_blocks = (args.k + Shape::kDepth - 1) / Shape::kDepth;
  // As in expert_kernel.cuh: blocks of a mixture let their successors start only when they have
  // waited for expert_begin.
  const bool knows_weights = !is_mixture || args.follows_product;
  if (knows_weights && !args.rows.delays_successor) let_successor_start();

  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    if (!knows_weights) {
      wait_for_predecessor();
      let_successor_start();
    }
    tile = find_tile</*kIsEarly=*/true>(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      wait_for_predecessor();
      return;
    }
  }
  const uint32_t ring = shared_address(shared);
  const auto stage_at = [&](int32_t stage) {
    return ring + static_cast<uint32_t>(stage * Shape::kStageBytes);
  };
  const int32_t num_ahead = min(args.num_stages - 1, num_blocks);
  Copier<Shape> copier(args);
  copier.set_weights(tile.expert, tile.column_tile * (args.gated.up_row != 0 ? Shape::kWeights / 2
                                                                             : Shape::kWeights));
  // These weights all belong to the first group of copies, so that the products wait for all of
  // them. That is worth it only while the predecessor runs.
  const bool requests_early = knows_weights && args.starts_early;
  if (requests_early) {
    for (int32_t block = 0; block < num_ahead; ++block) {
      copier.copy_weights(stage_at(block), block);
    }
  }
  if (knows_weights) wait_for_predecessor();
  if (!is_mixture) {
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      cp_async_wait<0>();
      return;
    }
  }
  copier.set_tokens(tile);
  for (int32_t block = 0; block < args.num_stages - 1; ++block) {
    if (block < num_ahead) {
      if (!requests_early) copier.copy_weights(stage_at(block), block);
      copier.copy_tokens(stage_at(block), block);
    }
    cp_async_commit();  // an empty group, too: groups are counted
  }

  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t first_token = warp % Shape::kTokenWarps * Shape::kWarpTokens;
  const auto of_weights =
      static_cast<uint32_t>(warp / Shape::kTokenWarps * Shape::kWarpWeights * Shape::kRowBytes);
  const auto of_tokens =
      static_cast<uint32_t>(Shape::kWeightBytes + first_token * Shape::kRowBytes);
  const bool has_tokens = first_token < tile.num_rows;
  float sums[Shape::kRowTiles][Shape::kColumnTiles][4] = {};
  int32_t stage = 0;
  int32_t to_fill = args.num_stages - 1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    wait_for_group(args.num_stages - 2);
    // The stage has arrived for all threads, and all have read the stage that is filled next.
    __syncthreads();
    const int32_t next = block + args.num_stages - 1;
    if (next < num_blocks) {
      copier.copy_weights(stage_at(to_fill), next);
      copier.copy_tokens(stage_at(to_fill), next);
    }
    cp_async_commit();
    if (has_tokens) {
      constexpr int32_t kLoads = Shape::kDepth / 16 / Operands<Shape>::kSteps;
      const uint32_t rows = stage_at(stage) + (Shape::kTokensAreRows ? of_tokens : of_weights);
      const uint32_t columns = stage_at(stage) + (Shape::kTokensAreRows ? of_weights : of_tokens);
      Operands<Shape> operands[2];
      operands[0].load(rows, columns, 0);
#pragma unroll
      for (int32_t i = 0; i < kLoads; ++i) {
        if (i + 1 < kLoads) operands[(i + 1) % 2].load(rows, columns, i + 1);
        operands[i % 2].multiply(sums);
      }
    }
    if (++stage == args.num_stages) stage = 0;
    if (++to_fill == args.num_stages) to_fill = 0;
  }
  cp_async_wait<0>();
  __syncthreads();
  if (args.is_y_float) {
    write_outputs<float, Shape>(args, tile, shared, sums);
  } else {
    write_outputs<__nv_bfloat16, Shape>(args, tile, shared, sums);
  }
}

}  // namespace paceline::cuda::portable
