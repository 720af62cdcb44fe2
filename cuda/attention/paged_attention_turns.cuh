// SPDX-License-Identifier: Apache-2.0
#pragma once

// Two blocks of a cluster that take the chunks of a tile by turns. The second one stores the result
// of each of its chunks in the first one's shared memory, and the first merges all in ascending
// order. So nothing goes through the workspace, and no chunk waits for a merge: the first block
// takes a result of the other one where it would merge its own next one.

#include <cstddef>
#include <cstdint>

#include "attention/paged_attention_chunk.cuh"
#include "attention/paged_attention_merge.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda::paged {

// The barriers of a block: in the first, `full` ends a phase with each result that has arrived; in
// the second, `empty` with each that the first has read.
struct TurnBarriers {
  uint64_t full;
  uint64_t empty;
};

// Of the first block of a cluster and of the second one.
template <class S>
class ChunkTurns {
 public:
  // shared: the block's dynamic memory.
  __device__ __forceinline__ ChunkTurns(std::byte* shared, TurnBarriers& barriers)
      : barriers_(barriers),
        values_(reinterpret_cast<float4*>(shared + S::kTurnsOffset)),
        max_(reinterpret_cast<float*>(shared + S::kTurnsOffset + S::kResultBytes)),
        sum_(max_ + S::kRows) {}

  // All threads of both blocks call begin(), and then meet(), before anything else.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      barrier_init(&barriers_.full, 1);
      barrier_init(&barriers_.empty, kWarps);
      barrier_init_fence();
    }
    cluster_arrive();
  }
  __device__ __forceinline__ void meet() const { cluster_wait(); }

  // --- the second block ---

  // Waits until the first block has read the result before. Then give_sum and give_products, which
  // together give the whole result, may be called.
  __device__ __forceinline__ void wait_for_room() {
    if (turn_ > 0) barrier_wait(&barriers_.empty, (turn_ - 1) % 2);
    ++turn_;
  }
  __device__ __forceinline__ void give_sum(int32_t packed, const ThreadPosition& at, float max,
                                           float sum) const {
    if (at.warp != 0 || at.quad_lane != 0) return;
    store_async(max_ + packed, 0, max, &barriers_.full);
    store_async(sum_ + packed, 0, sum, &barriers_.full);
  }
  __device__ __forceinline__ void give_products(int32_t slice, const Products<S>& o) const {
#pragma unroll
    for (int32_t m = 0; m < S::kMTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
        const float (&four)[4] = o[m][n];
        store_async(place(slice, m, n), 0, make_float4(four[0], four[1], four[2], four[3]),
                    &barriers_.full);
      }
    }
  }

  // --- the first block ---

  // Merges the result of the other block for `view`. gives_more: the other block has a chunk behind
  // that one.
  __device__ __forceinline__ void take(const ChunkView<S>& view, const ThreadPosition& at,
                                       bool gives_more, PerRow<S, float>& running_max,
                                       PerRow<S, float>& running_sum,
                                       Products<S> (&running)[S::kSlices]) {
    if (threadIdx.x == 0) barrier_expect(&barriers_.full, S::kTurnBytes);
    barrier_wait(&barriers_.full, turn_ % 2);
    ++turn_;
    PerRow<S, MergeWeights> merge;
#pragma unroll
    for (int32_t m = 0; m < S::kMTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t packed = packed_row(m, half, at);
        merge_sum<S>(packed, max_[packed], sum_[packed], view, running_max[m][half],
                     running_sum[m][half], merge[m][half]);
      }
    }
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
      for (int32_t m = 0; m < S::kMTiles; ++m) {
        float o[S::kWarpColumnTiles][4];
#pragma unroll
        for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
          const float4 four = *place(slice, m, n);
          o[n][0] = four.x;
          o[n][1] = four.y;
          o[n][2] = four.z;
          o[n][3] = four.w;
        }
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          merge_products<S>(packed_row(m, half, at), half, o, merge[m][half], view,
                            running[slice][m]);
        }
      }
    }
    __syncwarp();
    if (gives_more && at.lane == 0) barrier_arrive_in_cluster(&barriers_.empty, 1);
  }

 private:
  // Where a thread of the first block finds what the same thread of the second one has stored.
  __device__ __forceinline__ float4* place(int32_t slice, int32_t m, int32_t n) const {
    return values_ + ((slice * S::kMTiles + m) * S::kWarpColumnTiles + n) * kThreads + threadIdx.x;
  }

  TurnBarriers& barriers_;
  float4* values_;
  float* max_;
  float* sum_;
  uint32_t turn_ = 0;  // results given, or taken
};

}  // namespace paceline::cuda::paged
