// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W_e^T, e being the expert of its rows, for weights in bfloat16. The matrices of
// all experts lie in one tensor map. Each output is the sum that gemm_kernel.cuh computes: K in
// steps of 16, ascending, in one float32 accumulator; so the bits are equal.
//
// - Weights are the rows of the product. A warp has the copy engine bring them into the ring.
// - Further warps copy the tokens (token_copier.cuh).
// - Every stage has 128 columns. Columns beyond K are zero in both operands.
// - In a mixture of few rows there are many tiles, each of which takes less time than the latencies
// at
//   its beginning and end. So a block computes several, and the ring fills for the next tile while
//   one ends.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/token_copier.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"

namespace paceline::cuda {

struct ExpertGemmArgs {
  ExpertRows rows;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const int32_t* x_rows;  // or null
  const float* bias;      // [num_experts, bias_stride], or null
  int64_t bias_stride;
  void* y;
  int64_t y_stride;
  bool is_y_float;  // else bfloat16
  int32_t n;        // of y
  int32_t k;
  int32_t num_tiles;  // at most
  int32_t num_stages;
  GatedRows gated;
  uint64_t weight_policy;  // of L2
  bool follows_product;    // as in ExpertGemmParams
  // The weights of the shared expert, or null; a multiple of 16 bytes.
  const std::byte* shared_weights;
  int64_t shared_bytes;
};

// 64 weights for each warpgroup, by `tokens`.
template <int32_t groups, int32_t tokens>
struct ExpertShape : Tile<RowsAre::kWeights, groups, tokens, 2> {
  using Base = Tile<RowsAre::kWeights, groups, tokens, 2>;
  static constexpr int32_t kStageDepth = 2 * Base::kDepth;
  static constexpr int32_t kBoxBytes = Base::kRowBytes;  // which the swizzle spans
  static constexpr int32_t kTokenWarps = tokens <= 32 ? 1 : 4;
  static constexpr int32_t kThreads = Base::kConsumers + 32 * (1 + kTokenWarps);
  // Whether a block computes several tiles. Their outputs then pass through memory behind the ring,
  // else through the ring's, which is idle by then.
  static constexpr bool kIsPersistent = tokens <= 32;
  static constexpr int32_t kStagedBytes =
      kIsPersistent ? Base::kTokens * (Base::kWeights + 4) * static_cast<int32_t>(sizeof(float))
                    : 0;
  // Stages whose tokens are in flight before the producer waits for the oldest. With three, tiles
  // of 32 tokens would be too large for kRingBytes.
  static constexpr int32_t kStagesAhead = tokens == 16 || tokens == 64 ? 3 : 2;
  // When the producer waits for a stage, these are still in flight, and the consumers keep one more
  // until the next one has arrived.
  static constexpr int32_t kMinStages = kStagesAhead + 2;
  // Two narrow tiles share a multiprocessor: while one starts or ends, the other reads.
  static constexpr int32_t kRingBytes = (tokens <= 32 ? 100 : tokens <= 64 ? 160 : 200) << 10;
  static_assert(kMinStages * Base::kStageBytes <= kRingBytes);
};

// A stage of the ring, and the parity of its phase.
struct StageWalk {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int32_t num_stages) {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};
// Those who fill stages find them empty in the first round.
inline constexpr StageWalk kFirstFilling = {.stage = 0, .parity = 1};

// The tiles of a block.
struct TileWalk {
  const ExpertGemmArgs& args;
  int32_t tile_tokens;
  int32_t block;
  ExpertTile tile;

  // All threads of a warp call it.
  __device__ __forceinline__ bool advance() {
    block += static_cast<int32_t>(gridDim.x);
    if (block >= args.num_tiles) return false;
    tile = find_tile</*kIsEarly=*/true>(args.rows, tile_tokens, block);
    return tile.num_rows > 0;
  }
};

// Requests the weights of all tiles; called by one warp. With GatedRows a box of weights is half of
// a tile.
template <class Shape>
__device__ __forceinline__ void request_weights(const Ring<Shape>& ring, const CUtensorMap* map,
                                                TileWalk walk, int32_t num_blocks) {
  const ExpertGemmArgs& args = walk.args;
  const bool is_gated = args.gated.up_row != 0;
  const int32_t box_rows = is_gated ? Shape::kWeights / 2 : Shape::kWeights;
  StageWalk at = kFirstFilling;
  do {
    if (threadIdx.x % 32 == 0) {
      const ExpertTile& tile = walk.tile;
      const int32_t row = tile.column_tile * box_rows;
      for (int32_t block = 0; block < num_blocks; ++block) {
        uint64_t* const full = &ring.full[at.stage];
        barrier_wait(&ring.empty[at.stage], at.parity);
        barrier_expect(full, ring.arriving_bytes);
#pragma unroll
        for (int32_t step = 0; step < Shape::kSteps; ++step) {
          std::byte* const to = ring.weights(at.stage) + step * Shape::kWeightBytes;
          const int32_t byte = (block * Shape::kSteps + step) * Shape::kBoxBytes;
          copy_box(to, map, byte, row, tile.expert, full, args.weight_policy);
          if (!is_gated) continue;
          copy_box(to + Shape::kWeightBytes / 2, map, byte, args.gated.up_row + row, tile.expert,
                   full, args.weight_policy);
        }
        at.advance(args.num_stages);
      }
    }
    __syncwarp();
  } while (walk.advance());
}

// Copies the tokens of all tiles; called by all threads of the warps that do.
template <class Shape>
__device__ __forceinline__ void copy_tokens(const Ring<Shape>& ring, TileWalk walk,
                                            int32_t num_blocks) {
  const ExpertGemmArgs& args = walk.args;
  const auto thread = static_cast<int32_t>(threadIdx.x) - Shape::kConsumers - 32;
  StageWalk at = kFirstFilling;
  int32_t oldest = 0;  // the stage whose tokens have been in flight longest
  // The tokens of this warp have arrived in it.
  const auto arrive = [&] {
    fence_shared_for_wgmma();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(&ring.full[oldest]);
    if (++oldest == ring.num_stages) oldest = 0;
  };
  do {
    const TokenCopier<Shape> copier(args.x, args.x_stride, args.x_rows, args.k, walk.tile, thread);
    for (int32_t block = 0; block < num_blocks; ++block) {
      barrier_wait(&ring.empty[at.stage], at.parity);
      copier.copy(shared_address(ring.tokens(at.stage)), block);
      cp_async_commit();
      if (block >= Shape::kStagesAhead) {
        cp_async_wait<Shape::kStagesAhead>();
        arrive();
      }
      at.advance(ring.num_stages);
    }
    cp_async_wait<0>();
    for (int32_t left = min(Shape::kStagesAhead, num_blocks); left > 0; --left) arrive();
  } while (walk.advance());
}

// Multiplies the stages of a tile as they arrive with their first kTokens tokens; called by a
// warpgroup.
template <class Shape, int32_t kTokens>
__device__ __forceinline__ void consume(const Ring<Shape>& ring, int32_t num_blocks, StageWalk& at,
                                        float (&sums)[kTokens / 2]) {
  const auto group = static_cast<int32_t>(threadIdx.x) / 128;
  int32_t previous = -1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(&ring.full[at.stage], at.parity);
#pragma unroll
    for (int32_t step = 0; step < Shape::kSteps; ++step) {
      // The products before the last are done: at the second step the previous stage may be filled
      // again.
      wgmma_wait<1>();
      if (step == 1 && previous >= 0 && threadIdx.x % 32 == 0) {
        barrier_arrive(&ring.empty[previous]);
      }
      const uint64_t tokens = tile_descriptor(ring.tokens(at.stage) + step * Shape::kTokenBytes);
      const uint64_t weights = tile_descriptor(ring.weights(at.stage) + step * Shape::kWeightBytes +
                                               group * Shape::kGroupRows * Shape::kRowBytes);
      pin(sums);
      wgmma_begin();
#pragma unroll
      for (int32_t i = 0; i < Shape::kDepth / 16; ++i) {
        wgmma<kTokens>(sums, weights + i * kNext16Columns, tokens + i * kNext16Columns);
      }
      wgmma_commit();
      pin(sums);
    }
    previous = at.stage;
    at.advance(ring.num_stages);
  }
  wgmma_wait<0>();
  pin(sums);
  if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[previous]);
}

// Writes the tile's outputs through `staging`.
template <class Out, class Shape>
__device__ __forceinline__ void write_outputs(const ExpertGemmArgs& args, const ExpertTile& tile,
                                              std::byte* staging, const Accumulators<Shape>& sums) {
  using Staged = StagedTile<Out, Shape>;
  const Staged staged = {reinterpret_cast<Out*>(staging)};
  const bool is_gated = args.gated.up_row != 0;
  const int32_t tile_columns = is_gated ? Shape::kWeights / 2 : Shape::kWeights;  // of y
  const int32_t first_column = tile.column_tile * tile_columns;
  const int32_t num_columns = min(args.n - first_column, tile_columns);
  const float* const bias =
      args.bias != nullptr ? args.bias + tile.expert * args.bias_stride + first_column : nullptr;
  staged.put(sums, [&](int32_t row) {
    if (bias == nullptr) return 0.0f;
    const bool is_up = row >= tile_columns;  // of gated rows
    const int32_t column = is_up ? row - tile_columns : row;
    return column < num_columns ? bias[is_up ? args.gated.up_row + column : column] : 0.0f;
  });
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  Out* const y = static_cast<Out*>(args.y) + tile.first_row * args.y_stride + first_column;
  if constexpr (sizeof(Out) == 2) {
    if (is_gated) {
      return staged.write_gated(y, args.y_stride, tile.num_rows, num_columns, args.gated);
    }
  }
  staged.write(y, args.y_stride, tile.num_rows, num_columns);
}

// Brings the shared expert's weights to L2 while the router still runs and memory is idle. The
// first blocks take a piece each.
__device__ __forceinline__ void prefetch_shared(const ExpertGemmArgs& args) {
  constexpr int32_t kPiece = 64 << 10;
  const int64_t at = int64_t{blockIdx.x} * kPiece;
  if (args.shared_weights == nullptr || at >= args.shared_bytes) return;
  const auto bytes =
      static_cast<uint32_t>(args.shared_bytes - at < kPiece ? args.shared_bytes - at : kPiece);
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(args.shared_weights + at),
               "r"(bytes)
               : "memory");
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    expert_gemm_kernel(const __grid_constant__ CUtensorMap weight_map, const ExpertGemmArgs args) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ uint64_t full[kMaxStages];
  __shared__ uint64_t empty[kMaxStages];
  const Ring<Shape> ring = {
      // Aligned for the swizzle. The compiler sees that the sum of a shared array and an offset is
      // in shared memory; from a pointer made of an integer it would load by slower instructions.
      .data = storage + (-shared_address(storage) & 1023u),
      .full = full,
      .empty = empty,
      .num_stages = args.num_stages,
      .arriving_bytes = Shape::kSteps * Shape::kWeightBytes};
  const bool is_mixture = args.rows.expert_begin != nullptr;
  const int32_t num_blocks = (args.k + Shape::kStageDepth - 1) / Shape::kStageDepth;
  const auto thread = static_cast<int32_t>(threadIdx.x);

  if (thread == Shape::kConsumers) prefetch_map(&weight_map);
  if (thread == 0) {
    for (int32_t stage = 0; stage < args.num_stages; ++stage) {
      barrier_init(&full[stage], 1 + Shape::kTokenWarps);
      barrier_init(&empty[stage], Shape::kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // A mixture's blocks let their successors start only when they have waited for expert_begin. So a
  // product behind them that has the same expert_begin, and any kernel between the two, starts when
  // it is complete, and reads it before its own predecessor has ended.
  const bool is_early = !is_mixture || args.follows_product;
  if (is_early && !args.rows.delays_successor) let_successor_start();

  TileWalk walk = {.args = args,
                   .tile_tokens = Shape::kTokens,
                   .block = static_cast<int32_t>(blockIdx.x),
                   .tile = {.expert = 0,
                            .column_tile = column_tile_of(args.rows, Shape::kTokens),
                            .first_row = 0,
                            .num_rows = 0}};
  if (is_mixture) {
    if (!is_early) {
      if (thread == 0) prefetch_shared(args);
      wait_for_predecessor();
      let_successor_start();
    }
    walk.tile = find_tile</*kIsEarly=*/true>(args.rows, Shape::kTokens);
    if (walk.tile.num_rows == 0) {
      wait_for_predecessor();
      return;
    }
  }
  if (thread >= Shape::kConsumers && thread < Shape::kConsumers + 32) {
    request_weights<Shape>(ring, &weight_map, walk, num_blocks);
    if (is_early) wait_for_predecessor();
    return;
  }
  if (is_early) wait_for_predecessor();
  if (!is_mixture) walk.tile = find_tile(args.rows, Shape::kTokens);
  if (thread >= Shape::kConsumers) return copy_tokens<Shape>(ring, walk, num_blocks);

  std::byte* const staging =
      Shape::kIsPersistent ? ring.data + args.num_stages * Shape::kStageBytes : ring.data;
  StageWalk at;
  do {
    Accumulators<Shape> sums = {};
    // The last rows of an expert often fill less than half of a tile.
    constexpr int32_t kHalf = Shape::kTokens / 2;
    if (Shape::kTokens >= 64 && walk.tile.num_rows <= kHalf) {
      if constexpr (Shape::kTokens >= 64) {
        float low[kHalf / 2] = {};
        consume<Shape, kHalf>(ring, num_blocks, at, low);
#pragma unroll
        for (int32_t i = 0; i < kHalf / 2; ++i) sums[i] = low[i];
      }
    } else {
      consume<Shape, Shape::kTokens>(ring, num_blocks, at, sums);
    }
    // The memory that outputs pass through is idle.
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
    if (args.is_y_float) {
      write_outputs<float, Shape>(args, walk.tile, staging, sums);
    } else {
      write_outputs<__nv_bfloat16, Shape>(args, walk.tile, staging, sums);
    }
  } while (walk.advance());
}

}  // namespace paceline::cuda
