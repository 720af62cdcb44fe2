// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the chunks' results become a tile's result in the paged attention kernel: from registers when
// one block has all chunks, or two take turns (paged_attention_turns.cuh); from shared memory when
// the blocks of one cluster have one each; else by way of the workspace.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_chunk.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/mma.cuh"

namespace paceline::cuda::paged {

// The chunks of a tile in the workspace: of each the accumulators of all rows, then (max, sum) of
// each row.
template <class S>
struct Partials {
  float* data;
  int64_t chunk_floats;
  int32_t num_rows;

  __device__ __forceinline__ float* chunk(int32_t index) const {
    return data + index * chunk_floats;
  }
};

// Merges the maximum and the sum of a chunk for one row into the running ones. A row that sees no
// key of the chunk skips it; `merge` gets the factors for the others.
//
// This and the next functions take one row, because functions with the loop over the rows make the
// compiler allocate more registers in some instances.
template <class S>
__device__ __forceinline__ void merge_sum(int32_t packed, float chunk_max, float chunk_sum,
                                          const ChunkView<S>& view, float& running_max,
                                          float& running_sum, MergeWeights& merge) {
  merge = merge_weights(running_max, chunk_max);
  if (view.is_full || view.sees_any(packed)) {
    running_max = merge.max;
    running_sum = merge_value(running_sum, chunk_sum, merge);
  }
}

// The same for the products of one row with one slice of the values. `o` and `running` are of the
// row's MMA tile, in which the row is the lower (0) or upper (1) half.
template <class S>
__device__ __forceinline__ void merge_products(int32_t packed, int32_t half,
                                               const float (&o)[S::kWarpColumnTiles][4],
                                               const MergeWeights& merge, const ChunkView<S>& view,
                                               float (&running)[S::kWarpColumnTiles][4]) {
  if (!view.is_full && !view.sees_any(packed)) return;
#pragma unroll
  for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
#pragma unroll
    for (int32_t e = 2 * half; e < 2 * half + 2; ++e) {
      running[n][e] = merge_value(running[n][e], o[n][e], merge);
    }
  }
}

// Stores the products of one row with one slice of the values to a chunk's place in the workspace,
// or in shared memory.
template <class S>
__device__ __forceinline__ void store_products(int32_t packed, int32_t half,
                                               const float (&o)[S::kWarpColumnTiles][4],
                                               int32_t slice, const ChunkView<S>& view,
                                               const ThreadPosition& at, float* partial) {
  if (!view.rows.is_live(packed)) return;
  float* const to = partial + packed * S::kHeadDim + slice * S::kSlice + at.warp * S::kWarpColumns +
                    at.quad_lane * 2;
#pragma unroll
  for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
    *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
  }
}

// Stores the results of a block that has all chunks of its tile. `sinks` is of the KV head's group,
// or null.
template <class S>
__device__ __forceinline__ void store_running(const PerRow<S, float>& running_max,
                                              const PerRow<S, float>& running_sum,
                                              const Products<S> (&running)[S::kSlices],
                                              const float* sinks, const TileOutput<S>& output,
                                              const ThreadPosition& at) {
#pragma unroll
  for (int32_t m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t packed = packed_row(m, half, at);
      if (!output.rows.is_live(packed)) continue;
      const float factor =
          final_factor(running_max[m][half], running_sum[m][half],
                       sinks == nullptr ? nullptr : sinks + output.rows.head[packed]);
      __nv_bfloat16* const to = output.of(packed) + at.warp * S::kWarpColumns + at.quad_lane * 2;
#pragma unroll
      for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
        for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
          const float y0 = __fmul_rn(running[slice][m][n][2 * half], factor);
          const float y1 = __fmul_rn(running[slice][m][n][2 * half + 1], factor);
          *reinterpret_cast<__nv_bfloat162*>(to + slice * S::kSlice + n * 8) =
              __floats2bfloat162_rn(y0, y1);
        }
      }
    }
  }
}

// Whether this block is of the last cluster of its tile to arrive; all threads of the cluster call
// it and get the same answer. What other clusters wrote before is visible then. `is_last` is shared
// memory.
__device__ __forceinline__ bool is_last_to_arrive(const Plan& plan, int32_t cluster_rank,
                                                  int32_t num_splits, int64_t tile_index,
                                                  int32_t& is_last) {
  __threadfence();
  cluster_barrier();
  if (cluster_rank == 0 && threadIdx.x == 0) {
    const int32_t num_clusters = (num_splits - 1) / plan.cluster_blocks + 1;
    bool is_last_cluster = true;
    if (num_clusters > 1) {
      int32_t* const counter = plan.counters + tile_index;
      __threadfence();
      is_last_cluster = atomicAdd(counter, 1) == num_clusters - 1;
      if (is_last_cluster) *counter = 0;
      __threadfence();
    }
    for (int32_t rank = 0; rank < plan.cluster_blocks; ++rank) {
      store_to_cluster(&is_last, rank, is_last_cluster ? 1 : 0);
    }
  }
  cluster_barrier();
  return is_last != 0;
}

// The chunks of a tile as merge_row reads them, from the first that a row sees on: in the
// workspace, past L1, which does not see what other SMs have written.
struct WorkspaceChunks {
  static constexpr int32_t kBatch = kMergeBatch;
  const float* first;
  int64_t chunk_floats;

  template <class T>
  __device__ __forceinline__ T load(int32_t index, int32_t at) const {
    return __ldcg(reinterpret_cast<const T*>(first + index * chunk_floats + at));
  }
};

// The same in the shared memory of the cluster's blocks, a chunk each.
struct ClusterChunks {
  static constexpr int32_t kBatch = 4;
  const float* own;  // of the calling block
  int32_t first_rank;

  template <class T>
  __device__ __forceinline__ T load(int32_t index, int32_t at) const {
    return *reinterpret_cast<const T*>(in_cluster(own + at, first_rank + index));
  }
};

// Merges the chunks of one row, four columns a thread, and stores the result. The chunks that a row
// sees are consecutive, so the others are not visited. values_at, sums_at: where a chunk has those
// of the row.
template <class Chunks>
__device__ __forceinline__ void merge_row(const Chunks& chunks, int32_t values_at, int32_t sums_at,
                                          int32_t num_chunks, const float* sink, __nv_bfloat16* y) {
  float running_max = negative_infinity();
  float running_sum = 0.0f;
  float running[4] = {};
  for (int32_t first = 0; first < num_chunks; first += Chunks::kBatch) {
    float2 max_sum[Chunks::kBatch];
    float4 values[Chunks::kBatch];
#pragma unroll
    for (int32_t i = 0; i < Chunks::kBatch; ++i) {
      // Beyond the last chunk the last one is loaded again, and dropped below.
      const int32_t index = min(first + i, num_chunks - 1);
      max_sum[i] = chunks.template load<float2>(index, sums_at);
      values[i] = chunks.template load<float4>(index, values_at);
    }
#pragma unroll
    for (int32_t i = 0; i < Chunks::kBatch; ++i) {
      if (first + i < num_chunks) {
        const MergeWeights merge = merge_weights(running_max, max_sum[i].x);
        running_max = merge.max;
        running_sum = merge_value(running_sum, max_sum[i].y, merge);
        running[0] = merge_value(running[0], values[i].x, merge);
        running[1] = merge_value(running[1], values[i].y, merge);
        running[2] = merge_value(running[2], values[i].z, merge);
        running[3] = merge_value(running[3], values[i].w, merge);
      }
    }
  }
  const float factor = final_factor(running_max, running_sum, sink);
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) store_as(y + i, __fmul_rn(running[i], factor));
}

// Merges the tile's chunks; the blocks of the cluster share the rows. Neighbouring rows go to
// different blocks, so that even a few rows occupy all of them. chunks_from(chunk): the chunks from
// that one on, counted from the tile's first.
template <class S, class ChunksFrom>
__device__ __forceinline__ void merge_chunks(const ChunksFrom& chunks_from, int32_t num_rows,
                                             int32_t first_chunk, int32_t cluster_rank,
                                             int32_t cluster_blocks, const float* sinks,
                                             const TileOutput<S>& output) {
  constexpr int32_t kRowThreads = S::kHeadDim / 4;
  constexpr int32_t kRowsAtOnce = kThreads / kRowThreads;
  const TileRows& rows = output.rows;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t column = thread % kRowThreads * 4;
  for (int32_t packed = thread / kRowThreads * cluster_blocks + cluster_rank; packed < num_rows;
       packed += kRowsAtOnce * cluster_blocks) {
    if (!rows.is_live(packed)) continue;
    const int32_t row_first_chunk = rows.begin[packed] / kChunk;
    const int32_t row_chunks = (rows.end[packed] - 1) / kChunk + 1 - row_first_chunk;
    merge_row(chunks_from(row_first_chunk - first_chunk), packed * S::kHeadDim + column,
              num_rows * S::kHeadDim + packed * 2, row_chunks,
              sinks == nullptr ? nullptr : sinks + rows.head[packed], output.of(packed) + column);
  }
}

}  // namespace paceline::cuda::paged
