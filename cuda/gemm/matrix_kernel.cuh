// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W^T of one matrix, for packed weights of 8 bits and many rows. The sums are
// those of wide_kernel.cuh, so the bits are equal.
//
// What differs from wide_kernel.cuh:
// - Tokens of one matrix are neighbours in x, so the copy engine brings them. Warps that copy take
//   instructions from those that convert weights, and these are the bound.
// - The two warpgroups share the tokens or the weights of a tile. Where they share the weights,
// both
//   convert them, and a tile has 64 weights only: few weights fill the multiprocessors better.

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/packed_args.h"
#include "gemm/wgmma.cuh"
#include "gemm/wide_kernel.cuh"
#include "gemm/wide_operand.cuh"
#include "gemm/wide_ring.cuh"

namespace paceline::cuda {

// 64 * groups weights by at most 128 tokens. Each of two warpgroups has 64 weights: with two groups
// of weights all tokens, with one half of them.
template <int32_t groups>
struct MatrixShape : WideShape<WeightFormat::kFp8, groups, 128> {
  using Base = WideShape<WeightFormat::kFp8, groups, 128>;
  static constexpr bool kSharesTokens = groups == 2;
  static constexpr int32_t kGroupTokens = kSharesTokens ? 128 : 64;
  static constexpr int32_t kConsumers = 256;
  // A warp for the tokens and one for the weights. Where the warpgroups move registers, those that
  // copy must be a whole one.
  static constexpr bool kMovesRegisters = kSharesTokens;
  static constexpr int32_t kProducerRegisters = 72;
  static constexpr int32_t kConsumerRegisters = 216;
  static constexpr int32_t kThreads = kConsumers + (kMovesRegisters ? 128 : 64);
  // Arrivals at a full stage: the announcements of the weights and of the tokens, and the lanes
  // that copy scales.
  static constexpr int32_t kArrivals = 1 + 1 + 32;
  // The outputs pass through the ring's memory, too.
  static constexpr int32_t kMinStages =
      std::max(3, (Base::kStagedBytes + Base::kTileBytes - 1) / Base::kTileBytes);
  static constexpr int32_t stages_in(int32_t bytes) {
    return std::clamp((bytes - 1024) / Base::kStageBytes, kMinStages, kMaxWideStages);
  }
};

// Multiplies the stages as they arrive with the tokens of the calling warpgroup.
template <class Shape, bool kHasTileSums>
__device__ __forceinline__ void multiply_matrix(const PackedArgs& args, const WideRing<Shape>& ring,
                                                int32_t num_blocks, uint32_t group,
                                                int32_t row_tile,
                                                float (&sums)[Shape::kGroupTokens / 2]) {
  static_assert(Shape::kParts == 2);
  constexpr int32_t kTokens = Shape::kGroupTokens;
  StageOperand<Shape, kHasTileSums> operand(args, row_tile);
  uint32_t a[2][4 * Shape::kSteps];
  float parts[kTokens / 2] = {};  // of a stage
  float by[2] = {0.0f, 0.0f};
  RingPlace place;
  const uint32_t group_tokens = ring.tokens(0) + (Shape::kSharesTokens ? 0 : group * kTokens * 128);
  const auto begin_products = [&](float (&to)[kTokens / 2], uint32_t tokens_at) {
    const uint64_t tokens = tile_descriptor(tokens_at);
    multiply_part<kTokens, kHasTileSums>(a[0], tokens, to);
    multiply_part<kTokens, false>(a[1], tokens + (Shape::kTokenBytes >> 4), to);
  };
  const auto end_products = [&](float (&to)[kTokens / 2], int32_t stage) {
    wgmma_wait<0>();
    pin(to);
    __syncwarp();  // the arrival of one lane hands back what all lanes have read
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[stage]);
  };
  const auto read_first = [&] {
    operand.read(ring.weights(place.stage), 0);
    operand.read_scales(ring.scales(place.stage));
  };
  barrier_wait(&ring.full[0], 0);
  read_first();
  operand.convert(0, a[0]);
  operand.read(ring.weights(0), 1);
  operand.convert(1, a[1]);
  for (int32_t block = 0; block < num_blocks; ++block) {
    const int32_t stage = place.stage;
    if constexpr (kHasTileSums) {
      by[0] = operand.scale(0);
      by[1] = operand.scale(1);
    }
    const uint32_t tokens_at =
        uniform(group_tokens + static_cast<uint32_t>(stage * Shape::kTileBytes));
    if constexpr (kHasTileSums) {
      begin_products(parts, tokens_at);
    } else {
      begin_products(sums, tokens_at);
    }
    place.next(ring.num_stages);
    // After the last stage it does not wait: what it reads is not used.
    if (block != num_blocks - 1) barrier_wait(&ring.full[place.stage], place.parity);
    read_first();
    wgmma_wait<1>();
    operand.convert(0, a[0]);
    operand.read(ring.weights(place.stage), 1);
    if constexpr (kHasTileSums) {
      end_products(parts, stage);
      add_parts(sums, parts, by);
    } else {
      end_products(sums, stage);
    }
    operand.convert(1, a[1]);
  }
}

// Requests the tokens of every stage; called by one thread.
template <class Shape>
__device__ __forceinline__ void request_tokens(const WideRing<Shape>& ring, const CUtensorMap* map,
                                               int32_t first_row, int32_t num_rows,
                                               int32_t num_blocks) {
  RingPlace place;
  place.parity = 1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    // The first round finds the stages empty.
    if (block >= ring.num_stages) barrier_wait(&ring.empty[place.stage], place.parity);
    uint64_t* const full = &ring.full[place.stage];
    barrier_expect(full, static_cast<uint32_t>(num_rows) * 2 * 128);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      copy_box(ring.tokens(place.stage) + half * Shape::kTokenBytes, map,
               block * Shape::kStageDepth + half * kPackedColumns, first_row, full, kEvictLast);
    }
    place.next(ring.num_stages);
  }
}

// block_tokens: the rows of a block and of a box of token_map. Rows of the tile behind them are
// stale, and so are only outputs that are not written.
template <class Shape, bool kHasTileSums>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matrix_gemm_kernel(const __grid_constant__ CUtensorMap token_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ PackedArgs args, int32_t block_tokens) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ uint64_t full[kMaxWideStages];
  __shared__ uint64_t empty[kMaxWideStages];
  // Aligned for the swizzle.
  std::byte* const ring_data = storage + (-shared_address(storage) & 1023u);
  const uint32_t data = shared_address(ring_data);
  const uint32_t scale_data = data + static_cast<uint32_t>(args.num_stages * Shape::kTileBytes);
  const WideRing<Shape> ring = {.data = data,
                                .scale_data = scale_data,
                                .full = full,
                                .empty = empty,
                                .num_stages = args.num_stages};
  const int32_t num_blocks = (args.k + Shape::kStageDepth - 1) / Shape::kStageDepth;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) {
    for (int32_t stage = 0; stage < args.num_stages; ++stage) {
      barrier_init(&full[stage], Shape::kArrivals);
      barrier_init(&empty[stage], Shape::kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (!args.rows.delays_successor) let_successor_start();

  if (thread >= Shape::kConsumers) {
    if constexpr (Shape::kMovesRegisters) give_registers<Shape::kProducerRegisters>();
    const int32_t warp = thread / 32 - Shape::kConsumers / 32;
    if (warp == 0) {
      wait_for_predecessor();
      const ExpertTile tile = find_tile(args.rows, block_tokens);
      if (thread % 32 == 0) {
        request_tokens<Shape>(ring, &token_map, tile.first_row, block_tokens, num_blocks);
      }
      return;
    }
    // Weights do not depend on the predecessor.
    if (warp == 1) {
      produce_weights<Shape>(ring, args, &weight_map,
                             {.expert = 0,
                              .column_tile = column_tile_of(args.rows, block_tokens),
                              .first_row = 0,
                              .num_rows = 0},
                             num_blocks);
    }
    wait_for_predecessor();
    return;
  }
  if constexpr (Shape::kMovesRegisters) take_registers<Shape::kConsumerRegisters>();
  const uint32_t group = uniform(threadIdx.x / 128);
  const int32_t row_tile = Shape::kSharesTokens ? thread / 32 : thread / 32 % 4;
  float sums[Shape::kGroupTokens / 2] = {};
  multiply_matrix<Shape, kHasTileSums>(args, ring, num_blocks, group, row_tile, sums);
  wait_for_predecessor();
  const ExpertTile tile = find_tile(args.rows, block_tokens);
  if constexpr (!kHasTileSums) {
    if (args.scales.use == ScaleUse::kRowSums) {
      scale_rows(args, tile.expert,
                 tile.column_tile * Shape::kWeights + row_tile * kPackedRows + thread % 32 / 4,
                 sums);
    }
  }
  // The other warpgroup may still read the ring.
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  const int32_t first_token =
      Shape::kSharesTokens ? 0 : static_cast<int32_t>(group) * Shape::kGroupTokens;
  if (args.is_y_float) {
    write_wide_tile<float, Shape>(args, tile, ring_data, row_tile, first_token, sums);
  } else {
    write_wide_tile<__nv_bfloat16, Shape>(args, tile, ring_data, row_tile, first_token, sums);
  }
}

}  // namespace paceline::cuda
