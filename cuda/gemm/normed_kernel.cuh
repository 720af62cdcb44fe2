// SPDX-License-Identifier: Apache-2.0
#pragma once

// y = norm(x) W^T for one row, in one launch. Each block normalises the row itself and keeps it in
// shared memory, then computes its share of the tiles. A norm of its own would cost a launch and a
// round through memory; here the ring of weights fills meanwhile. With four rows it took longer
// than two launches: every block must have read all rows before its first product.
//
// Bits are those of the two ops. The sum of squares has the order of norm/rms_norm.cu: that of its
// block's warps, which are virtual here, since this block has fewer. Each output is the sum that
// gemm_kernel.cuh computes.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"
#include "norm/register_rows.cuh"

namespace paceline::cuda {

// The norm before a product of one row.
struct NormOfRow {
  const float* x;       // [k]
  const float* weight;  // [k]
  float weight_offset;
  float eps;
  int32_t virtual_warps;  // of a row, at most kMaxVirtualWarps
};

struct NormedGemmArgs {
  GemmArgs gemm;
  NormOfRow norm;
  int32_t num_tiles;
};

inline constexpr int32_t kMaxVirtualWarps = kMaxRegisterThreads / 32;
// The swizzle spans eight rows; those behind the first are whatever lies there.
inline constexpr int32_t kNormedTileRows = 8;

// The block of a normed product with tiles of `weights` rows. `vectors` of a row are a lane's of a
// virtual warp.
template <int32_t weights, int32_t vectors>
struct NormedShape : Tile<RowsAre::kWeights, 1, 16, 2, 16, weights == 64 ? 0 : weights> {
  using Base = Tile<RowsAre::kWeights, 1, 16, 2, 16, weights == 64 ? 0 : weights>;
  static constexpr bool kMayBeGated = weights == 64;
  static constexpr int32_t kVectors = vectors;
  static constexpr int32_t kNormWarps = 8;  // the consumers, and as many others
  static constexpr int32_t kNormThreads = 32 * kNormWarps;
  static constexpr int32_t kThreads = kNormThreads + 32;
  static constexpr int32_t kLaneWarps = kMaxVirtualWarps / kNormWarps;
  static constexpr int32_t kStageBytes = Base::kSteps * Base::kWeightBytes;
  static constexpr int32_t kStageDepth = Base::kSteps * Base::kDepth;
};

// Writes the normalised row to shared memory, in tiles of 64 columns by kNormedTileRows rows, and
// ends with a barrier. Called by the warps of the norm.
template <class Shape>
__device__ __forceinline__ void normalise_row(const NormOfRow& norm, int32_t k, uint32_t tokens,
                                              float (&partials)[kMaxVirtualWarps]) {
  constexpr int32_t kVectors = Shape::kVectors;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t num_vectors = k / kPerVector;
  const float inverse_k = 1.0f / static_cast<float>(k);
  // The lane's vectors of each virtual warp of this warp; -1: none.
  int32_t vector[Shape::kLaneWarps][kVectors];
  float scale[Shape::kLaneWarps][kVectors][kPerVector] = {};
#pragma unroll
  for (int32_t w = 0; w < Shape::kLaneWarps; ++w) {
    const int32_t warp = thread / 32 + w * Shape::kNormWarps;
#pragma unroll
    for (int32_t v = 0; v < kVectors; ++v) {
      const int32_t at = (warp + v * norm.virtual_warps) * 32 + lane;
      vector[w][v] = warp < norm.virtual_warps && at < num_vectors ? at : -1;
      if (vector[w][v] >= 0) load_vector(norm.weight + at * kPerVector, scale[w][v]);
#pragma unroll
      for (int32_t i = 0; i < kPerVector; ++i) scale[w][v][i] += norm.weight_offset;
    }
  }
  wait_for_predecessor();
  float x[Shape::kLaneWarps][kVectors][kPerVector] = {};
#pragma unroll
  for (int32_t w = 0; w < Shape::kLaneWarps; ++w) {
#pragma unroll
    for (int32_t v = 0; v < kVectors; ++v) {
      if (vector[w][v] >= 0) load_vector(norm.x + vector[w][v] * kPerVector, x[w][v]);
    }
  }
#pragma unroll
  for (int32_t w = 0; w < Shape::kLaneWarps; ++w) {
    float squares = 0.0f;
#pragma unroll
    for (int32_t v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int32_t i = 0; i < kPerVector; ++i) squares = fmaf(x[w][v][i], x[w][v][i], squares);
    }
    squares = warp_sum(squares);
    if (lane == 0) partials[thread / 32 + w * Shape::kNormWarps] = squares;
  }
  asm volatile("bar.sync 2, %0;" ::"n"(Shape::kNormThreads) : "memory");
  const float factor = norm_factor(tree_sum<kMaxVirtualWarps>(partials), inverse_k, norm.eps);
#pragma unroll
  for (int32_t w = 0; w < Shape::kLaneWarps; ++w) {
#pragma unroll
    for (int32_t v = 0; v < kVectors; ++v) {
      if (vector[w][v] < 0) continue;
      uint32_t words[kPerVector / 2];
#pragma unroll
      for (int32_t i = 0; i < kPerVector; i += 2) {
        words[i / 2] = pack(x[w][v][i] * (factor * scale[w][v][i]),
                            x[w][v][i + 1] * (factor * scale[w][v][i + 1]));
      }
      // In the first row of a tile the swizzle changes nothing.
      const auto to = static_cast<uint32_t>(vector[w][v] / 8 * kNormedTileRows * Shape::kRowBytes +
                                            vector[w][v] % 8 * 16);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(tokens + to), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    }
  }
  fence_shared_for_wgmma();
  asm volatile("bar.sync 2, %0;" ::"n"(Shape::kNormThreads) : "memory");
}

// Requests the weights of all tiles of the block; called by one thread. They depend on no kernel
// before.
template <class Shape>
__device__ __forceinline__ void request_tiles(const Ring<Shape>& ring, const CUtensorMap* map,
                                              const NormedGemmArgs& args, int32_t num_blocks) {
  const int32_t tile_columns = columns_of<Shape>(args.gemm);
  int32_t stage = 0;
  uint32_t parity = 1;  // the first round finds all stages empty
  for (auto tile = static_cast<int32_t>(blockIdx.x); tile < args.num_tiles;
       tile += static_cast<int32_t>(gridDim.x)) {
    const auto weights = weight_copies<Shape>(map, args.gemm, tile * tile_columns);
#pragma unroll 1
    for (int32_t block = 0; block < num_blocks; ++block) {
      uint64_t* const full = &ring.full[stage];
      barrier_wait(&ring.empty[stage], parity);
      barrier_expect(full, Shape::kStageBytes);
      weights.request(ring.weights(stage), block, full);
      if (++stage == ring.num_stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    normed_gemm_kernel(const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ NormedGemmArgs args) {
  extern __shared__ __align__(1024) std::byte normed_storage[];
  __shared__ uint64_t full[kMaxStages];
  __shared__ uint64_t empty[kMaxStages];
  __shared__ __align__(16) float partials[kMaxVirtualWarps];
  const GemmArgs& gemm = args.gemm;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const Ring<Shape> ring = {
      .data = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(normed_storage) + 1023) &
                                           ~uintptr_t{1023}),
      .full = full,
      .empty = empty,
      .num_stages = gemm.num_stages,
      .arriving_bytes = Shape::kStageBytes};
  // Behind the ring: the row, in tiles of 64 columns, and the tile of y.
  constexpr int32_t kTileBytes = kNormedTileRows * Shape::kRowBytes;
  std::byte* const rows = ring.data + gemm.num_stages * Shape::kStageBytes;
  const int32_t num_blocks = gemm.k / Shape::kStageDepth;

  if (thread == 0) {
    for (int32_t stage = 0; stage < gemm.num_stages; ++stage) {
      barrier_init(&full[stage], 1);
      barrier_init(&empty[stage], 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (!gemm.delays_successor) let_successor_start();

  if (thread >= Shape::kNormThreads) {
    if (thread == Shape::kNormThreads) request_tiles<Shape>(ring, &weight_map, args, num_blocks);
    return;
  }
  normalise_row<Shape>(args.norm, gemm.k, shared_address(rows), partials);
  if (gemm.delays_successor) let_successor_start();  // the norm has waited
  if (thread >= Shape::kConsumers) return;

  const int32_t num_rows = min(*gemm.num_rows, gemm.max_rows);
  const bool is_gated = gemm.gated.up_row != 0;
  const int32_t tile_columns = columns_of<Shape>(gemm);
  using Staged = StagedTile<__nv_bfloat16, typename Shape::Base>;
  const Staged staged = {
      reinterpret_cast<__nv_bfloat16*>(rows + gemm.k / Shape::kDepth * kTileBytes + 1024)};
  const uint32_t data = uniform(shared_address(ring.data));
  const uint32_t tokens = uniform(shared_address(rows));
  int32_t stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (auto tile = static_cast<int32_t>(blockIdx.x); tile < args.num_tiles;
       tile += static_cast<int32_t>(gridDim.x)) {
    Accumulators<typename Shape::Base> sums = {};
    int32_t previous = -1;
#pragma unroll 1
    for (int32_t block = 0; block < num_blocks; ++block) {
      barrier_wait(&full[stage], parity);
      const uint32_t weights = uniform(data + static_cast<uint32_t>(stage * Shape::kStageBytes));
      const uint32_t of_block = tokens + static_cast<uint32_t>(block * Shape::kSteps * kTileBytes);
      pin(sums);
      wgmma_begin();
#pragma unroll
      for (int32_t step = 0; step < Shape::kSteps; ++step) {
        const uint64_t a = tile_descriptor(weights + step * Shape::kWeightBytes);
        const uint64_t b = tile_descriptor(of_block + static_cast<uint32_t>(step * kTileBytes));
#pragma unroll
        for (int32_t i = 0; i < Shape::kDepth / 16; ++i) {
          wgmma<Shape::kColumns>(sums, a + i * kNext16Columns, b + i * kNext16Columns);
        }
      }
      wgmma_commit();
      pin(sums);
      wgmma_wait<1>();
      if (previous >= 0 && thread % 32 == 0) barrier_arrive(&empty[previous]);
      previous = stage;
      if (++stage == gemm.num_stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    wgmma_wait<0>();
    pin(sums);
    if (thread % 32 == 0) barrier_arrive(&empty[previous]);

    const int32_t first_column = tile * tile_columns;
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
    staged.put(sums, [&](int32_t column) {
      return gemm.bias != nullptr && first_column + column < gemm.n
                 ? gemm.bias[first_column + column]
                 : 0.0f;
    });
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
    auto* const y = static_cast<__nv_bfloat16*>(gemm.y) + first_column;
    const int32_t num_columns = min(gemm.n - first_column, tile_columns);
    if constexpr (Shape::kMayBeGated) {
      if (is_gated) {
        staged.write_gated(y, gemm.y_stride, num_rows, num_columns, gemm.gated);
        continue;
      }
    }
    staged.write(y, gemm.y_stride, num_rows, num_columns);
  }
}

}  // namespace paceline::cuda
