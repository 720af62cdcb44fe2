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
#include "gemm/portable_copier.cuh"
#include "gemm/portable_operands.cuh"
#include "gemm/portable_shape.cuh"
#include "gemm/staged_rows.cuh"

namespace paceline::cuda::portable {

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
