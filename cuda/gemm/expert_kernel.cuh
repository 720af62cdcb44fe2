// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W_e^T, e being the expert of its rows, for weights of any format. The matrices
// of all experts lie in one tensor map. Each output is the sum that gemm_kernel.cuh computes: K in
// steps of 16, ascending, in one float32 accumulator; so the bits are equal.
//
// - Weights are the rows of the product. The copy engine brings their bytes into the ring; plain
//   weights are multiplied there, others pass through registers (weight_fragments.cuh). A warpgroup
//   converts 64 columns of K while the tensor cores multiply the 64 before.
// - Tokens may lie anywhere in x (x_rows), which the copy engine of Hopper cannot follow. Producer
//   warps copy them with cp.async into the swizzled layout that the engine would have made: piece c
//   (16 bytes) of row r of a tile of 64 columns goes to piece c ^ (r % 8). Only rows that exist are
//   copied; the others are stale, and so are only outputs that are not written.
// - Every stage has 128 columns. Columns beyond K are zero in both operands.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/weight_fragments.cuh"
#include "gemm/weight_scales.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"

namespace paceline::cuda {

struct ExpertGemmArgs {
  ExpertRows rows;
  ScaleArgs scales;
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
};

template <WeightFormat format>
inline constexpr int32_t kWeightBits = format == WeightFormat::kMxfp4 ? 4
                                       : format == WeightFormat::kFp8 ? 8
                                                                      : 16;

// Weights of `format`, 64 for each warpgroup, by `tokens`.
template <WeightFormat format, int32_t groups, int32_t tokens>
struct ExpertShape : Tile<RowsAre::kWeights, groups, tokens, 2, kWeightBits<format>> {
  using Base = Tile<RowsAre::kWeights, groups, tokens, 2, kWeightBits<format>>;
  static constexpr WeightFormat kFormat = format;
  static constexpr bool kIsPlain = format == WeightFormat::kPlain;
  static constexpr int32_t kStageDepth = 2 * Base::kDepth;
  // A box of the weights has at most 128 bytes of a row, which is what a swizzle may span.
  static constexpr int32_t kBoxBytes = kIsPlain ? 128 : kStageDepth * kWeightBits<format> / 8;
  static constexpr int32_t kBoxes = kStageDepth * kWeightBits<format> / 8 / kBoxBytes;
  static constexpr int32_t kProducerWarps = tokens <= 32 ? 1 : 4;
  static constexpr int32_t kThreads = Base::kConsumers + 32 * kProducerWarps;
  // Stages whose tokens are in flight before the producer waits for the oldest.
  static constexpr int32_t kStagesAhead = tokens <= 64 ? 3 : 2;
  // When the producer waits for a stage, these are still in flight, and the consumers keep one more
  // until the next one has arrived.
  static constexpr int32_t kMinStages = kStagesAhead + 2;
  // Three narrow tiles or two of 64 tokens share a multiprocessor.
  static constexpr int32_t kRingBytes = (tokens <= 32 ? 64 : tokens <= 64 ? 96 : 200) << 10;
};

// Copies the rows of a tile, block of K by block of K; one object for each thread of the producer
// warps. Sixteen lanes copy a row's 256 bytes of a stage.
template <class Shape>
class TokenCopier {
 public:
  __device__ __forceinline__ TokenCopier(const ExpertGemmArgs& args, const ExpertTile& tile,
                                         int32_t thread)
      : x_(args.x), stride_(args.x_stride), k_(args.k), piece_(thread % 16) {
    const int32_t first = thread / 16;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first + i * kRowStep;
      const int32_t of_y = tile.first_row + row;
      sources_[i] = row >= tile.num_rows ? -1 : args.x_rows != nullptr ? args.x_rows[of_y] : of_y;
    }
    first_row_ = first;
  }

  __device__ __forceinline__ void copy(std::byte* tokens, int32_t block) const {
    const int32_t column = block * Shape::kStageDepth + piece_ * 8;
    const bool is_inside = column < k_;
    const uint32_t to =
        shared_address(tokens) + static_cast<uint32_t>(piece_ / 8 * Shape::kTokenBytes);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      if (sources_[i] < 0) continue;
      const int32_t row = first_row_ + i * kRowStep;
      const auto at =
          static_cast<uint32_t>(row * Shape::kRowBytes + ((piece_ % 8) ^ (row % 8)) * 16);
      cp_async_16(to + at, x_ + sources_[i] * stride_ + (is_inside ? column : 0), is_inside);
    }
  }

 private:
  static constexpr int32_t kRowStep = 2 * Shape::kProducerWarps;
  static constexpr int32_t kRows = Shape::kTokens / kRowStep;
  static_assert(kRows * kRowStep == Shape::kTokens);

  const __nv_bfloat16* x_;
  int64_t stride_;
  int32_t k_;
  int32_t piece_;
  int32_t first_row_;
  int32_t sources_[kRows];  // rows of x; -1: none
};

// Announces and requests a stage's weights; called by one thread.
template <class Shape>
__device__ __forceinline__ void request_weights(const Ring<Shape>& ring, const CUtensorMap* map,
                                                const ExpertTile& tile, int32_t block,
                                                int32_t stage, uint64_t policy) {
  barrier_expect(&ring.full[stage], ring.arriving_bytes);
#pragma unroll
  for (int32_t box = 0; box < Shape::kBoxes; ++box) {
    copy_box(ring.weights(stage) + box * Shape::kWeights * Shape::kBoxBytes, map,
             (block * Shape::kBoxes + box) * Shape::kBoxBytes, tile.column_tile * Shape::kWeights,
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
  const TokenCopier<Shape> copier(args, tile, thread);
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
    copier.copy(ring.tokens(stage), block);
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

// The products of 64 columns of K with the first kTokens tokens, begun but not awaited. a: the
// weights, if they pass through registers.
template <class Shape, int32_t kTokens>
__device__ __forceinline__ void multiply_half(const Ring<Shape>& ring, int32_t stage, int32_t half,
                                              const uint32_t (&a)[16], float (&sums)[kTokens / 2]) {
  const uint64_t tokens = tile_descriptor(ring.tokens(stage) + half * Shape::kTokenBytes);
  pin(sums);
  wgmma_begin();
  if constexpr (Shape::kIsPlain) {
    const auto group = static_cast<int32_t>(threadIdx.x) / 128;
    const uint64_t weights = tile_descriptor(ring.weights(stage) + half * Shape::kWeightBytes +
                                             group * Shape::kGroupRows * Shape::kRowBytes);
#pragma unroll
    for (int32_t i = 0; i < Shape::kDepth / 16; ++i) {
      wgmma<kTokens>(sums, weights + i * kNext16Columns, tokens + i * kNext16Columns);
    }
  } else {
#pragma unroll
    for (int32_t i = 0; i < Shape::kDepth / 16; ++i) {
      wgmma<kTokens>(sums, a + 4 * i, tokens + i * kNext16Columns);
    }
  }
  wgmma_commit();
  pin(sums);
}

// The accumulators of rows g (i = 0) and g + 8 (i = 1) of a thread.
template <int kCount, class Function>
__device__ __forceinline__ void for_each_sum(float (&sums)[kCount], const Function& function) {
#pragma unroll
  for (int32_t j = 0; j < kCount; ++j) function(j / 2 % 2, j, sums[j]);
}

struct NoScales {};

// Multiplies the stages as they arrive with their first kTokens tokens; called by a warpgroup. With
// kHasTileSums, `sums` collects the sums of 128 columns times their scales.
template <class Shape, int32_t kTokens, bool kHasTileSums, class Scales>
__device__ __forceinline__ void consume(const Ring<Shape>& ring, int32_t num_blocks,
                                        const Scales& scales, bool is_twice, int32_t row_in_tile,
                                        float (&sums)[kTokens / 2]) {
  uint32_t a[2][16] = {};
  float parts[kTokens / 2] = {};
  float (&running)[kTokens / 2] = kHasTileSums ? parts : sums;
  int32_t stage = 0;
  uint32_t parity = 0;
  int32_t previous = -1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(&ring.full[stage], parity);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      // The products before the last are done: a[half] may change, and at the second half the
      // previous stage may be filled again.
      wgmma_wait<1>();
      if (half == 1 && previous >= 0 && threadIdx.x % 32 == 0) {
        barrier_arrive(&ring.empty[previous]);
      }
      if constexpr (!Shape::kIsPlain) {
        const WeightFragments<Shape::kFormat> fragments(row_in_tile);
        const auto load = [&]<bool kIsTwice>() {
          fragments.template load<kIsTwice>(a[half], ring.weights(stage), half,
                                            scales.template multipliers<kIsTwice>(block, half));
        };
        is_twice ? load.template operator()<true>() : load.template operator()<false>();
      }
      multiply_half<Shape, kTokens>(ring, stage, half, a[half], running);
    }
    if constexpr (kHasTileSums) {
      wgmma_wait<0>();
      pin(parts);
      const float by[2] = {scales.scale(0, block), scales.scale(1, block)};
      for_each_sum(parts, [&](int32_t i, int32_t j, float& part) {
        sums[j] = __fmaf_rn(by[i], part, sums[j]);
        part = 0.0f;
      });
    }
    previous = stage;
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
  pin(running);
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

template <class Shape, bool kHasTileSums>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    expert_gemm_kernel(const __grid_constant__ CUtensorMap weight_map, const ExpertGemmArgs args) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ uint64_t full[kMaxStages];
  __shared__ uint64_t empty[kMaxStages];
  __shared__ int32_t has_large_scale;
  const Ring<Shape> ring = {
      // Aligned for the swizzle. The compiler sees that the sum of a shared array and an offset is
      // in shared memory; from a pointer made of an integer it would load by slower instructions.
      .data = storage + (-shared_address(storage) & 1023u),
      .full = full,
      .empty = empty,
      .num_stages = args.num_stages,
      .arriving_bytes = Shape::kSteps * Shape::kWeightBytes};
  // Two sets of accumulators of two wide warpgroups; the producers give them some registers.
  constexpr bool kMovesRegisters = kHasTileSums && Shape::kThreads == 384;
  const bool is_mixture = args.rows.expert_begin != nullptr;
  const int32_t num_blocks = (args.k + Shape::kStageDepth - 1) / Shape::kStageDepth;
  const auto thread = static_cast<int32_t>(threadIdx.x);

  if (thread == Shape::kConsumers) prefetch_map(&weight_map);
  if (thread == 0) {
    for (int32_t stage = 0; stage < args.num_stages; ++stage) {
      barrier_init(&full[stage], 1 + Shape::kProducerWarps);
      barrier_init(&empty[stage], Shape::kGroups * 4);
    }
    barrier_init_fence();
    has_large_scale = 0;
  }
  __syncthreads();
  let_successor_start();

  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    wait_for_predecessor();
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) return;
  }
  if (thread >= Shape::kConsumers) {
    if constexpr (kMovesRegisters) give_registers<88>();
    const int32_t num_ahead = min(args.num_stages, num_blocks);
    if (thread == Shape::kConsumers) {
      for (int32_t block = 0; block < num_ahead; ++block) {
        request_weights<Shape>(ring, &weight_map, tile, block, block, args.weight_policy);
      }
    }
    if (!is_mixture) {
      wait_for_predecessor();
      tile = find_tile(args.rows, Shape::kTokens);
    }
    produce<Shape>(ring, &weight_map, args, tile, num_ahead, num_blocks);
    return;
  }

  if constexpr (kMovesRegisters) take_registers<208>();
  Accumulators<Shape> sums = {};
  const int32_t lane = thread % 32;
  const int32_t row_in_tile = thread / 32 * 16 + lane / 4;
  const auto multiply = [&](const auto& scales) {
    if (!is_mixture) {
      wait_for_predecessor();
      tile = find_tile(args.rows, Shape::kTokens);
    }
    const int32_t first_row = thread / 32 * 16;
    if constexpr (Shape::kTokens >= 64) {
      // The last rows of an expert often fill less than half of a tile.
      constexpr int32_t kHalf = Shape::kTokens / 2;
      if (tile.num_rows <= kHalf) {
        float low[kHalf / 2] = {};
        consume<Shape, kHalf, kHasTileSums>(ring, num_blocks, scales, has_large_scale != 0,
                                            first_row, low);
#pragma unroll
        for (int32_t i = 0; i < kHalf / 2; ++i) sums[i] = low[i];
        return;
      }
    }
    consume<Shape, Shape::kTokens, kHasTileSums>(ring, num_blocks, scales, has_large_scale != 0,
                                                 first_row, sums);
  };
  if constexpr (Shape::kIsPlain) {
    multiply(NoScales{});
  } else {
    using Scales = WeightScales<Shape::kFormat>;
    const Scales scales(ring.data + args.num_stages * Shape::kStageBytes, args.scales, row_in_tile);
    const int32_t first_row = tile.column_tile * Shape::kWeights;
    if (scales.copy(args.scales, tile.expert, first_row, min(args.n - first_row, Shape::kWeights),
                    Shape::kWeights, thread, Shape::kConsumers)) {
      atomicOr(&has_large_scale, 1);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
    multiply(scales);
    if constexpr (Shape::kFormat == WeightFormat::kFp8 && !kHasTileSums) {
      if (args.scales.use == ScaleUse::kRowSums) {
        const float by[2] = {scales.scale(0, 0), scales.scale(1, 0)};
        for_each_sum(sums, [&](int32_t i, int32_t, float& sum) { sum = __fmul_rn(by[i], sum); });
      }
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  if (args.is_y_float) {
    write_outputs<float, Shape>(args, tile, ring.data, sums);
  } else {
    write_outputs<__nv_bfloat16, Shape>(args, tile, ring.data, sums);
  }
}

}  // namespace paceline::cuda
