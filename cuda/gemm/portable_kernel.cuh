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
#include <type_traits>
#include <utility>

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
  // Whether a warp skips products of rows that do not exist. In small tiles a branch costs more.
  static constexpr int32_t kProducts = row_tiles * column_tiles;  // of a warp, in a step
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

// Where a lane finds its operands in a stage: bytes from the stage for the first four steps. Later
// steps are whole lines of 128 bytes further.
template <class Shape>
struct OperandPlaces {
  static constexpr bool kIsNarrow = Shape::kColumnTiles == 1;
  static constexpr int32_t kPatterns = kIsNarrow ? 2 : 4;
  uint32_t rows[4];
  uint32_t columns[kPatterns];

  // Of operands that begin first_row and first_column bytes behind the stage.
  __device__ __forceinline__ OperandPlaces(uint32_t first_row, uint32_t first_column) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const auto at = [&](int32_t row, int32_t piece) {
      return static_cast<uint32_t>(row * Shape::kRowBytes + (piece ^ (lane % 8)) * 16);
    };
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) rows[i] = first_row + at(lane % 16, 2 * i + lane / 16);
#pragma unroll
    for (int32_t i = 0; i < kPatterns; ++i) {
      columns[i] = first_column + (kIsNarrow ? at(lane % 8, 4 * i + lane / 8)
                                             : at(lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
    }
#pragma unroll
    for (uint32_t& place : rows) keep_in_register(place);
#pragma unroll
    for (uint32_t& place : columns) keep_in_register(place);
  }
};

// What a lane needs for the products of kSteps steps of 16 columns.
template <class Shape>
struct Operands {
  static constexpr bool kIsNarrow = Shape::kColumnTiles == 1;
  static constexpr int32_t kSteps = kIsNarrow ? 2 : 1;  // ldmatrix reads four matrices

  uint32_t rows[kSteps][Shape::kRowTiles][4];
  uint32_t columns[kIsNarrow ? 1 : Shape::kColumnTiles / 2][4];

  // `number`: of these operands in the stage at the shared address `stage`.
  __device__ __forceinline__ void load(uint32_t stage, const OperandPlaces<Shape>& places,
                                       int32_t number) {
    constexpr int32_t kPatterns = OperandPlaces<Shape>::kPatterns;
#pragma unroll
    for (int32_t s = 0; s < kSteps; ++s) {
      const int32_t step = number * kSteps + s;
      const uint32_t from = stage + places.rows[step % 4] + static_cast<uint32_t>(step / 4 * 128);
#pragma unroll
      for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
        ldmatrix_x4(rows[s][i], from + static_cast<uint32_t>(16 * i * Shape::kRowBytes));
      }
    }
    const uint32_t from = stage + places.columns[number % kPatterns] +
                          static_cast<uint32_t>(number / kPatterns * 128);
#pragma unroll
    for (int32_t j = 0; j < (kIsNarrow ? 1 : Shape::kColumnTiles / 2); ++j) {
      ldmatrix_x4(columns[j], from + static_cast<uint32_t>(16 * j * Shape::kRowBytes));
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

// Calls f with the numbers of the sequence as constants.
template <class F, int32_t... numbers>
__device__ __forceinline__ void for_each_load(const F& f,
                                              std::integer_sequence<int32_t, numbers...>) {
  (f(std::integral_constant<int32_t, numbers>{}), ...);
}

// Waits until at most `pending` of the thread's groups of copies are in flight.
__device__ __forceinline__ void wait_for_group(int32_t pending) {
  static_assert(kMaxStages == 8);
  // Most rings are full, and a jump by a table takes a while.
  if (pending == kMaxStages - 2) return cp_async_wait<kMaxStages - 2>();
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
  using Copies = Copier<Shape>;
  const uint32_t ring = shared_address(shared);
  const auto stage_at = [&](int32_t stage) {
    return ring + static_cast<uint32_t>(stage * Shape::kStageBytes);
  };
  const int32_t num_ahead = min(args.num_stages - 1, num_blocks);
  Copies copier(args);
  copier.set_weights(
      args, tile.expert,
      tile.column_tile * (args.gated.up_row != 0 ? Shape::kWeights / 2 : Shape::kWeights));
  // These weights all belong to the first group of copies, so that the products wait for all of
  // them. That is worth it only while the predecessor runs.
  const bool requests_early = knows_weights && args.starts_early;
  if (requests_early) {
    for (int32_t block = 0; block < num_ahead; ++block) {
      copier.template copy<0, Copies::kWeightRows>(stage_at(block), copier.has_columns(block));
      copier.advance_weights();
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
  copier.set_tokens(args, tile);
  for (int32_t block = 0; block < args.num_stages - 1; ++block) {
    if (block < num_ahead) {
      if (!requests_early) {
        copier.template copy<0, Copies::kWeightRows>(stage_at(block), copier.has_columns());
        copier.advance_weights();
      }
      copier.template copy<Copies::kWeightRows, Copies::kCopies>(stage_at(block),
                                                                 copier.has_columns());
      copier.advance_tokens();
    }
    cp_async_commit();  // an empty group, too: groups are counted
  }

  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t first_token = warp % Shape::kTokenWarps * Shape::kWarpTokens;
  const auto of_weights =
      static_cast<uint32_t>(warp / Shape::kTokenWarps * Shape::kWarpWeights * Shape::kRowBytes);
  const auto of_tokens =
      static_cast<uint32_t>(Shape::kWeightBytes + first_token * Shape::kRowBytes);
  const bool has_tokens = !Shape::kSkipsRows || first_token < tile.num_rows;
  const OperandPlaces<Shape> places(Shape::kTokensAreRows ? of_tokens : of_weights,
                                    Shape::kTokensAreRows ? of_weights : of_tokens);
  // Operands are multiplied while the next ones are loaded, from one stage into the next, and the
  // copies of the stage that is filled are spread over the loads. So neither delays the chain of
  // products. The first products are of zeros, which change no sum.
  constexpr int32_t kLoads = Shape::kDepth / 16 / Operands<Shape>::kSteps;
  static_assert(kLoads % 2 == 0);
  Operands<Shape> operands[2] = {};
  float sums[Shape::kRowTiles][Shape::kColumnTiles][4] = {};
  uint32_t stage = ring;
  uint32_t to_fill = stage_at(args.num_stages - 1);
  uint32_t last_stage = to_fill;
  int32_t pending = args.num_stages - 2;
  int32_t blocks_to_copy = num_blocks - num_ahead;
  keep_in_register(last_stage);
  keep_in_register(pending);
  for (int32_t blocks_left = num_blocks; blocks_left > 0; --blocks_left) {
    // The stage has arrived for all threads, and all have read the one before, which is filled
    // next.
    wait_for_group(pending);
    if constexpr (Shape::kThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    const bool copies = blocks_to_copy > 0;
    const bool has_columns = copier.has_columns();
    const auto make_load = [&](auto number) {
      constexpr int32_t kLoad = decltype(number)::value;
      constexpr int32_t kFirst = kLoad * Copies::kCopies / kLoads;
      constexpr int32_t kLast = (kLoad + 1) * Copies::kCopies / kLoads;
      if (has_tokens) operands[kLoad % 2].load(stage, places, kLoad);
      if (copies) copier.template copy<kFirst, kLast>(to_fill, has_columns);
      if (has_tokens) operands[(kLoad + 1) % 2].multiply(sums);
    };
    for_each_load(make_load, std::make_integer_sequence<int32_t, kLoads>{});
    cp_async_commit();
    copier.advance_weights();
    copier.advance_tokens();
    --blocks_to_copy;
    to_fill = stage;
    stage = stage == last_stage ? ring : stage + Shape::kStageBytes;
  }
  if (has_tokens) operands[1].multiply(sums);
  cp_async_wait<0>();
  __syncthreads();
  if (args.is_y_float) {
    write_outputs<float, Shape>(args, tile, shared, sums);
  } else {
    write_outputs<__nv_bfloat16, Shape>(args, tile, shared, sums);
  }
}

}  // namespace paceline::cuda::portable
