// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W^T on tensor cores. One warp has the copy engine fill a ring of tiles;
// warpgroups walk K in ascending order with one accumulator per output. K is never split, and the
// order of a sum does not depend on the tile's shape: that makes rows invariant
// (docs/architecture.md).
//
// The kernel requests the ring's first weight tiles before it waits for its predecessor: weights do
// not depend on it, so the copy engine works while the previous kernel ends.

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/stage_copies.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"

namespace paceline::cuda {

inline constexpr int32_t kMaxStages = 12;

// The ring of a block. Each stage holds the steps of the weights, Tile::kWeightBytes each, then
// those of the tokens, which have as many rows as the launch's tiles have tokens.
template <class Tile>
struct Ring {
  std::byte* data;
  uint64_t* full;   // one phase per filling: all bytes of the stage have arrived
  uint64_t* empty;  // one phase per use: every warp of the consumers has read the stage
  int32_t num_stages;
  int32_t arriving_bytes;  // of a stage

  __device__ __forceinline__ std::byte* weights(int32_t stage) const {
    return data + stage * Tile::kStageBytes;
  }
  __device__ __forceinline__ std::byte* tokens(int32_t stage) const {
    return weights(stage) + Tile::kSteps * Tile::kWeightBytes;
  }
};

// How a block's tokens come to the stages.
template <class Tile>
__device__ __forceinline__ StageCopies<Tile::kSteps> token_copies(const CUtensorMap* map,
                                                                  const GemmArgs& args,
                                                                  int32_t first_token) {
  return {.map = map,
          .first_row = first_token,
          .copy_steps = args.copy_steps,
          .step_bytes = static_cast<int32_t>(args.token_step) * kDescriptorUnit,
          .is_pair = false,
          .policy = kEvictLast};
}

// How the weights of the tile at `first_column` of y come to the stages.
template <class Tile>
__device__ __forceinline__ StageCopies<Tile::kSteps> weight_copies(const CUtensorMap* map,
                                                                   const GemmArgs& args,
                                                                   int32_t first_column) {
  return {.map = map,
          .first_row = first_column,
          .copy_steps = args.copy_steps,
          .step_bytes = Tile::kWeightBytes,
          .is_pair = args.gated.up_row != 0,
          .policy = kEvictFirst};
}

// Fills the ring, block of K by block of K; called by one thread.
template <class Tile>
__device__ __forceinline__ void produce(const Ring<Tile>& ring,
                                        const StageCopies<Tile::kSteps>& weights,
                                        const StageCopies<Tile::kSteps>& tokens,
                                        int32_t num_blocks) {
  const auto request_weights = [&](int32_t block, int32_t stage) {
    barrier_expect(&ring.full[stage], ring.arriving_bytes);
    weights.request(ring.weights(stage), block, &ring.full[stage]);
  };
  const auto request_tokens = [&](int32_t block, int32_t stage) {
    tokens.request(ring.tokens(stage), block, &ring.full[stage]);
  };
  const int32_t num_ahead = min(ring.num_stages, num_blocks);
  for (int32_t block = 0; block < num_ahead; ++block) request_weights(block, block);
  wait_for_predecessor();
  for (int32_t block = 0; block < num_ahead; ++block) request_tokens(block, block);
  int32_t stage = 0;
  uint32_t parity = 0;
  for (int32_t block = num_ahead; block < num_blocks; ++block) {
    barrier_wait(&ring.empty[stage], parity);
    request_weights(block, stage);
    request_tokens(block, stage);
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Begins the products of the stage at `weights`, an address in shared memory, and adds them to
// `sums`; kIsFirst: instead of what they hold. `group` is the calling warpgroup.
template <class Tile, bool kIsFirst>
__device__ __forceinline__ void begin_products(uint32_t weights, uint32_t group,
                                               const GemmArgs& args, Accumulators<Tile>& sums) {
  constexpr auto kWeightStep = static_cast<uint32_t>(Tile::kWeightBytes / kDescriptorUnit);
  const uint32_t tokens = weights + Tile::kSteps * Tile::kWeightBytes;
  const uint32_t rows =
      (Tile::kWeightsAreRows ? weights : tokens) + group * Tile::kGroupRows * Tile::kRowBytes;
  const uint32_t columns = Tile::kWeightsAreRows ? tokens : weights;
  pin(sums);
  wgmma_begin();
  const uint64_t first_a = tile_descriptor(rows);
  const uint64_t first_b = tile_descriptor(columns);
  // The compiler reads an argument of the kernel into a uniform register, as products need it. A
  // value that it computes before the loop it would move there again for each step.
  const uint32_t row_step = Tile::kWeightsAreRows ? kWeightStep : args.token_step;
  const uint32_t column_step = Tile::kWeightsAreRows ? args.token_step : kWeightStep;
#pragma unroll
  for (uint32_t step = 0; step < Tile::kSteps; ++step) {
    const uint64_t a = descriptor_behind(first_a, step * row_step);
    const uint64_t b = descriptor_behind(first_b, step * column_step);
#pragma unroll
    for (int32_t i = 0; i < Tile::kDepth / 16; ++i) {
      if constexpr (kIsFirst) {
        if (step == 0 && i == 0) {
          wgmma_fresh<Tile::kColumns>(sums, a, b);
          continue;
        }
      }
      wgmma<Tile::kColumns>(sums, a + i * kNext16Columns, b + i * kNext16Columns);
    }
  }
  wgmma_commit();
  pin(sums);
}

// Multiplies the stages as they arrive; called by a warpgroup. A launch's tiles may have fewer
// tokens than a product reads. What lies behind them affects only outputs that are not written.
template <class Tile>
__device__ __forceinline__ void consume(const Ring<Tile>& ring, const GemmArgs& args,
                                        int32_t num_blocks, Accumulators<Tile>& sums) {
  // Addresses in shared memory, the same for the whole warp.
  const uint32_t group = uniform(threadIdx.x / 128);
  const uint32_t data = uniform(shared_address(ring.data));
  const uint32_t full = uniform(shared_address(ring.full));
  const uint32_t empty = uniform(shared_address(ring.empty));
  int32_t stage = 0;
  uint32_t parity = 0;
  int32_t previous = -1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(full + stage * static_cast<uint32_t>(sizeof(uint64_t)), parity);
    // What warps have written. They do not order it themselves: they would wait for their loads.
    if constexpr (!Tile::kWeightsArrive) fence_shared_for_wgmma();
    begin_products<Tile, /*kIsFirst=*/false>(uniform(data + stage * Tile::kStageBytes), group, args,
                                             sums);
    // The products of the previous block are done, so its stage can be filled again.
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) {
      barrier_arrive(empty + previous * static_cast<uint32_t>(sizeof(uint64_t)));
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

// Where the first output of a block lies.
struct TilePlace {
  int32_t first_token;
  int32_t first_column;  // of y
};

// The outputs of a tile along n; where gates and ups are joined, half of its weights.
template <class Tile>
__device__ __forceinline__ int32_t columns_of(const GemmArgs& args) {
  return args.gated.up_row != 0 ? Tile::kWeights / 2 : Tile::kWeights;
}

// Computes the sums by `multiply(sums)` and writes the tile; called by the consumers. They have
// `staging` when all of them have multiplied.
template <class Out, class Tile, class Multiply>
__device__ __forceinline__ void compute_tile(std::byte* staging, const GemmArgs& args,
                                             const TilePlace& place, const Multiply& multiply) {
  const int32_t first_token = place.first_token;
  const int32_t first_column = place.first_column;
  // The bias is a constant, which is read at the end.
  constexpr int32_t kLine = 32;  // floats of 128 bytes
  const int32_t of_bias = first_column + static_cast<int32_t>(threadIdx.x) * kLine;
  if (args.bias != nullptr && threadIdx.x * kLine < Tile::kWeights && of_bias < args.n) {
    prefetch_to_l2(args.bias + of_bias);
  }
  // Tokens arrive behind the predecessor only, so waiting here costs nothing, and the number of
  // rows is there when it is needed.
  wait_for_predecessor();
  if (args.delays_successor) let_successor_start();
  const int32_t num_rows = min(*args.num_rows, args.max_rows);
  const int32_t num_tokens = min(num_rows - first_token, args.block_tokens);
  const int32_t num_columns = min(args.n - first_column, columns_of<Tile>(args));
  using Staged = StagedTile<Out, Tile>;
  constexpr bool kMayAdd = Tile::kTokens <= kMaxAddedTokens && sizeof(Out) == 2;
  typename Staged::ResidualPiece residual;
  if constexpr (kMayAdd) {
    if (args.residual != nullptr) {
      Staged::read_residual(args.residual + first_token * args.y_stride + first_column,
                            args.y_stride, num_tokens, num_columns, residual);
    }
  }
  Accumulators<Tile> sums = {};
  multiply(sums);

  const Staged staged = {reinterpret_cast<Out*>(staging)};
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kConsumers) : "memory");
  staged.put(sums, [&](int32_t column) {
    return args.bias != nullptr && first_column + column < args.n ? args.bias[first_column + column]
                                                                  : 0.0f;
  });
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kConsumers) : "memory");
  if constexpr (kMayAdd) {
    if (args.residual != nullptr) return staged.add(residual);
  }
  Out* const y = static_cast<Out*>(args.y) + int64_t{first_token} * args.y_stride + first_column;
  if constexpr (sizeof(Out) == 2 && Tile::kWeights % 16 == 0) {
    if (args.gated.up_row != 0) {
      return staged.write_gated(y, args.y_stride, num_tokens, num_columns, args.gated);
    }
  }
  staged.write(y, args.y_stride, num_tokens, num_columns);
}

// The same by the stages of a ring, which is idle when all of them have been multiplied.
template <class Out, class Tile>
__device__ __forceinline__ void compute_tile(const Ring<Tile>& ring, const GemmArgs& args,
                                             const TilePlace& place, int32_t num_blocks) {
  compute_tile<Out, Tile>(ring.data, args, place, [&](Accumulators<Tile>& sums) {
    consume<Tile>(ring, args, num_blocks, sums);
  });
}

template <class Tile>
__device__ __forceinline__ TilePlace place_of(const GemmArgs& args) {
  return {.first_token = static_cast<int32_t>(blockIdx.x) * args.block_tokens,
          .first_column = static_cast<int32_t>(blockIdx.y) * columns_of<Tile>(args)};
}

// The stages that hold all of K.
template <class Tile>
__device__ __forceinline__ int32_t num_blocks_of(const GemmArgs& args) {
  constexpr int32_t kBlockDepth = Tile::kSteps * Tile::kDepth;
  return (args.k + kBlockDepth - 1) / kBlockDepth;
}

// Makes a ring in dynamic and static shared memory, of which `arrivals` fill a stage, and lets the
// successor start. All threads of the block call it.
template <class Tile>
__device__ __forceinline__ Ring<Tile> begin_ring(std::byte* storage, uint64_t* full,
                                                 uint64_t* empty, const GemmArgs& args,
                                                 uint32_t arrivals) {
  if (threadIdx.x == 0) {
    for (int32_t stage = 0; stage < args.num_stages; ++stage) {
      barrier_init(&full[stage], arrivals);
      barrier_init(&empty[stage], Tile::kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (!args.delays_successor) let_successor_start();
  return {// Dynamic shared memory is aligned to 16 bytes only; the swizzle needs 1,024.
          .data = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(storage) + 1023) &
                                               ~uintptr_t{1023}),
          .full = full,
          .empty = empty,
          .num_stages = args.num_stages,
          .arriving_bytes = args.stage_bytes};
}

template <class Out, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap token_map,
                const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) std::byte ring_storage[];
  __shared__ uint64_t full[kMaxStages];
  __shared__ uint64_t empty[kMaxStages];
  const Ring<Tile> ring = begin_ring<Tile>(ring_storage, full, empty, args, /*arrivals=*/1);
  const TilePlace place = place_of<Tile>(args);
  const int32_t num_blocks = num_blocks_of<Tile>(args);
  if (threadIdx.x < Tile::kConsumers) return compute_tile<Out, Tile>(ring, args, place, num_blocks);
  if (threadIdx.x == Tile::kConsumers) {
    produce<Tile>(ring, weight_copies<Tile>(&weight_map, args, place.first_column),
                  token_copies<Tile>(&token_map, args, place.first_token), num_blocks);
  } else {
    wait_for_predecessor();
  }
}

}  // namespace paceline::cuda
