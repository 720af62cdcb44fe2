// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row of logits in the shared memory of a cluster: eight blocks, each with an eighth of its ids,
// which it loads once.

#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "sample/truncate_rules.h"

namespace paceline::cuda {

inline constexpr int32_t kBlocks = 8;  // of a cluster
inline constexpr int32_t kThreads = 512;
inline constexpr int32_t kWarps = kThreads / 32;

inline constexpr size_t kMaxSharedBytes = 227 << 10;  // of a block
inline constexpr int32_t kBlocksPerSm = 2;            // where shared memory allows for it

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// A block's part of a row.
struct Piece {
  const float* logits;  // of the first id, in global memory
  int32_t count;        // ids that there are
  const float* values;  // [size] comparable, in shared memory; -inf behind `count`
  int32_t size;         // a multiple of 4
  int32_t rank;         // of the block in its cluster

  // Calls visit(index, values) with four values at a time.
  template <class Visit>
  __device__ __forceinline__ void for_quads(const Visit& visit) const {
    for (int32_t i = static_cast<int32_t>(threadIdx.x) * 4; i < size; i += kThreads * 4) {
      float four[4];
      load_vector(values + i, four);
      visit(i, four);
    }
  }
};

template <bool kIsVector>
__device__ __forceinline__ float load_piece(const Piece& piece, float* values) {
  float highest = negative_infinity();
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * 4; i < piece.size; i += kThreads * 4) {
    float four[4];
    if (kIsVector && i + 4 <= piece.count) {
      load_vector(piece.logits + i, four);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        four[j] = i + j < piece.count ? piece.logits[i + j] : negative_infinity();
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = comparable(four[j]);
      highest = fmaxf(highest, four[j]);
    }
    store_vector(four, values + i);
  }
  return highest;
}

// The key of the highest logit of the row, in all threads of the cluster. `shared` has the block's
// `warp_words` and its `highest`, which other blocks may read until the next cluster_barrier.
template <class Shared>
__device__ __forceinline__ uint32_t highest_key(float highest_of_thread, Shared& shared) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const uint32_t of_warp = __reduce_max_sync(kAllLanes, to_ordered(highest_of_thread));
  if (thread % 32 == 0) shared.warp_words[thread / 32] = of_warp;
  __syncthreads();
  if (thread < 32) {
    const uint32_t of_block = __reduce_max_sync(kAllLanes, shared.warp_words[thread % kWarps]);
    if (thread == 0) shared.highest = of_block;
  }
  cluster_barrier();
  const uint32_t of_other = *in_cluster(&shared.highest, thread % kBlocks);
  return __reduce_max_sync(kAllLanes, of_other);
}

// Clusters that run at once where `blocks_per_sm` of their blocks share a multiprocessor.
inline int32_t num_row_clusters(const CudaContext& ctx, int32_t blocks_per_sm) {
  // A cluster stays within a group of processors, of which 16 or 18 share one: two of eight fit.
  // One cluster more than run at once would double the time of a batch.
  constexpr int32_t kGroupSms = 16;
  const int32_t num_groups = std::max(ctx.num_sms / kGroupSms, 1);
  return num_groups * blocks_per_sm * (kGroupSms / kBlocks);
}

}  // namespace paceline::cuda
