// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W_e^T, e being the expert of its rows, for weights in bfloat16. The matrices of
// all experts lie in one tensor map. Each output is the sum that gemm_kernel.cuh computes: K in
// steps of 16, ascending, in one float32 accumulator; so the bits are equal.
//
// - Weights are the rows of the product. The copy engine brings them into the ring.
// - Producer warps copy the tokens (token_copier.cuh).
// - Every stage has 128 columns. Columns beyond K are zero in both operands.

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
  const float* bias;      // [num_experts, n], or null
  void* y;
  int64_t y_stride;
  bool is_y_float;  // else bfloat16
  int32_t n;
  int32_t k;
  int32_t num_stages;
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
  static constexpr int32_t kThreads = Base::kConsumers + 32 * kTokenWarps;
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

// Announces and requests a stage's weights; called by one thread.
template <class Shape>
__device__ __forceinline__ void request_weights(const Ring<Shape>& ring, const CUtensorMap* map,
                                                const ExpertTile& tile, int32_t block,
                                                int32_t stage, uint64_t policy) {
  barrier_expect(&ring.full[stage], ring.arriving_bytes);
#pragma unroll
  for (int32_t step = 0; step < Shape::kSteps; ++step) {
    copy_box(ring.weights(stage) + step * Shape::kWeightBytes, map,
             (block * Shape::kSteps + step) * Shape::kBoxBytes, tile.column_tile * Shape::kWeights,
             tile.expert, &ring.full[stage], policy);
  }
}

// Fills the ring; called by all threads of the producer warps. The weights of the first
// `num_requested` stages have been requested.
template <class Shape>
__device__ __forceinline__ void produce(const Ring<Shape>& ring, const CUtensorMap* map,
                                        const ExpertGemmArgs& args, const ExpertTile& tile,
                                        int32_t num_requested, int32_t num_blocks) {
  const auto thread = static_cast<int32_t>(threadIdx.x) - Shape::kConsumers;
  const TokenCopier<Shape> copier(args.x, args.x_stride, args.x_rows, args.k, tile, thread);
  // The tokens of this warp have arrived in the stage.
  const auto arrive = [&](int32_t stage) {
    fence_shared_for_wgmma();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(&ring.full[stage]);
  };
  int32_t stage = 0;
  int32_t oldest = 0;  // the stage whose tokens have been in flight longest
  uint32_t parity = 1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    // The first round finds the stages empty.
    if (block >= ring.num_stages) barrier_wait(&ring.empty[stage], parity);
    if (thread == 0 && block >= num_requested) {
      request_weights<Shape>(ring, map, tile, block, stage, args.weight_policy);
    }
    copier.copy(shared_address(ring.tokens(stage)), block);
    cp_async_commit();
    if (block >= Shape::kStagesAhead) {
      cp_async_wait<Shape::kStagesAhead>();
      arrive(oldest);
      if (++oldest == ring.num_stages) oldest = 0;
    }
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  cp_async_wait<0>();
  for (int32_t left = min(Shape::kStagesAhead, num_blocks); left > 0; --left) {
    arrive(oldest);
    if (++oldest == ring.num_stages) oldest = 0;
  }
}

// Multiplies the stages as they arrive with their first kTokens tokens; called by a warpgroup.
template <class Shape, int32_t kTokens>
__device__ __forceinline__ void consume(const Ring<Shape>& ring, int32_t num_blocks,
                                        float (&sums)[kTokens / 2]) {
  const auto group = static_cast<int32_t>(threadIdx.x) / 128;
  int32_t stage = 0;
  uint32_t parity = 0;
  int32_t previous = -1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(&ring.full[stage], parity);
#pragma unroll
    for (int32_t step = 0; step < Shape::kSteps; ++step) {
      // The products before the last are done: at the second step the previous stage may be filled
      // again.
      wgmma_wait<1>();
      if (step == 1 && previous >= 0 && threadIdx.x % 32 == 0) {
        barrier_arrive(&ring.empty[previous]);
      }
      const uint64_t tokens = tile_descriptor(ring.tokens(stage) + step * Shape::kTokenBytes);
      const uint64_t weights = tile_descriptor(ring.weights(stage) + step * Shape::kWeightBytes +
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
    previous = stage;
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
  pin(sums);
}

// Writes the tile's outputs, through the ring's memory, which is idle by now.
template <class Out, class Shape>
__device__ __forceinline__ void write_outputs(const ExpertGemmArgs& args, const ExpertTile& tile,
                                              std::byte* ring_data,
                                              const Accumulators<Shape>& sums) {
  using Staged = StagedTile<Out, Shape>;
  const Staged staged = {reinterpret_cast<Out*>(ring_data)};
  const int32_t first_column = tile.column_tile * Shape::kWeights;
  const float* const bias =
      args.bias != nullptr ? args.bias + int64_t{tile.expert} * args.n + first_column : nullptr;
  staged.put(sums, [&](int32_t column) {
    return bias != nullptr && first_column + column < args.n ? bias[column] : 0.0f;
  });
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  staged.write(static_cast<Out*>(args.y) + tile.first_row * args.y_stride + first_column,
               args.y_stride, tile.num_rows, min(args.n - first_column, Shape::kWeights));
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
  if (is_early) let_successor_start();

  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    if (!is_early) {
      if (thread == 0) prefetch_shared(args);
      wait_for_predecessor();
      let_successor_start();
    }
    tile = find_tile</*kIsEarly=*/true>(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      wait_for_predecessor();
      return;
    }
  }
  if (thread >= Shape::kConsumers) {
    const int32_t num_ahead = min(args.num_stages, num_blocks);
    if (thread == Shape::kConsumers) {
      for (int32_t block = 0; block < num_ahead; ++block) {
        request_weights<Shape>(ring, &weight_map, tile, block, block, args.weight_policy);
      }
    }
    if (is_early) wait_for_predecessor();
    if (!is_mixture) tile = find_tile(args.rows, Shape::kTokens);
    produce<Shape>(ring, &weight_map, args, tile, num_ahead, num_blocks);
    return;
  }

  if (is_early) wait_for_predecessor();
  if (!is_mixture) tile = find_tile(args.rows, Shape::kTokens);
  Accumulators<Shape> sums = {};
  // The last rows of an expert often fill less than half of a tile.
  constexpr int32_t kHalf = Shape::kTokens / 2;
  if (Shape::kTokens >= 64 && tile.num_rows <= kHalf) {
    if constexpr (Shape::kTokens >= 64) {
      float low[kHalf / 2] = {};
      consume<Shape, kHalf>(ring, num_blocks, low);
#pragma unroll
      for (int32_t i = 0; i < kHalf / 2; ++i) sums[i] = low[i];
    }
  } else {
    consume<Shape, Shape::kTokens>(ring, num_blocks, sums);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  if (args.is_y_float) {
    write_outputs<float, Shape>(args, tile, ring.data, sums);
  } else {
    write_outputs<__nv_bfloat16, Shape>(args, tile, ring.data, sums);
  }
}

}  // namespace paceline::cuda
