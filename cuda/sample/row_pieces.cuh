// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row of logits in the shared memory of a cluster: each of its eight blocks loads an eighth of
// the ids once. Without clusters one block has the row, for which its shared memory has no room: it
// reads the logits from the L2 cache each time.

#include <algorithm>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "sample/truncate_rules.h"

namespace paceline::cuda {

inline constexpr int32_t kClusterBlocks = 8;
inline constexpr int32_t kThreads = 512;
inline constexpr int32_t kWarps = kThreads / 32;
inline constexpr int32_t kStrip = kThreads * 4;  // ids that a block takes at once

inline constexpr int32_t kBlocksPerSm = 2;  // where shared memory allows it
inline constexpr size_t kSmSharedBytes = 228 << 10;
inline constexpr size_t kReservedSharedBytes = 1 << 10;  // per block, by the system

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Loads four logits, comparable; -inf from `count` on.
template <bool kIsVector>
__device__ __forceinline__ void load_comparable(const float* logits, int32_t count, int32_t i,
                                                float (&four)[4]) {
  if (kIsVector && i + 4 <= count) {
    load_vector(logits + i, four);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) four[j] = i + j < count ? logits[i + j] : negative_infinity();
  }
#pragma unroll
  for (float& value : four) value = comparable(value);
}

// A block's part of a row; of one block in place of a cluster, the row.
template <int32_t blocks, bool kIsVector>
struct Piece {
  static constexpr int32_t kBlocks = blocks;
  static constexpr bool kIsShared = kBlocks > 1;

  const float* logits;  // of the first id, in global memory
  int32_t count;        // ids in the piece
  const float* values;  // [size] comparable, in shared memory if kIsShared; -inf from `count` on
  int32_t size;         // a multiple of 4
  int32_t rank;         // of the block in its cluster

  __device__ __forceinline__ void load(int32_t i, float (&four)[4]) const {
    if constexpr (kIsShared) {
      load_vector(values + i, four);
    } else {
      load_comparable<kIsVector>(logits, count, i, four);
    }
  }
  __device__ __forceinline__ float at(int32_t i) const {
    if constexpr (kIsShared) return values[i];
    return comparable(logits[i]);
  }

  // Calls visit(index, values) with four values at a time.
  template <class Visit>
  __device__ __forceinline__ void for_quads(const Visit& visit) const {
    for (int32_t i = static_cast<int32_t>(threadIdx.x) * 4; i < size; i += kStrip) {
      float four[4];
      load(i, four);
      visit(i, four);
    }
  }

  // Calls visit(value) for the values that satisfy `is_wanted`. Those are few: a warp loops as
  // often as the lane with the most of them needs, and not once per value.
  template <class IsWanted, class Visit>
  __device__ __forceinline__ void for_matches(const IsWanted& is_wanted, const Visit& visit) const {
    constexpr int kQuads = 8;
    const int32_t own = static_cast<int32_t>(threadIdx.x) * 4;
    for (int32_t first = own; first < size; first += kQuads * kStrip) {
      uint32_t found = 0;
#pragma unroll
      for (int u = 0; u < kQuads; ++u) {
        if (first + u * kStrip >= size) break;
        float four[4];
        load(first + u * kStrip, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (is_wanted(four[j])) found |= 1u << (u * 4 + j);
        }
      }
      for (; found != 0; found &= found - 1) {
        const int32_t at = __ffs(static_cast<int>(found)) - 1;
        visit(this->at(first + at / 4 * kStrip + at % 4));
      }
    }
  }
};

// Fills `values` from the logits if they are shared. Returns the highest of those that this thread
// loaded.
template <int32_t kBlocks, bool kIsVector>
__device__ __forceinline__ float load_piece(const Piece<kBlocks, kIsVector>& piece, float* values) {
  if constexpr (kBlocks == 1) {
    float highest = negative_infinity();
    piece.for_quads([&](int32_t, const float (&four)[4]) {
#pragma unroll
      for (const float value : four) highest = fmaxf(highest, value);
    });
    return highest;
  }
  constexpr int kAhead = 5;  // loads in flight for each thread
  const int32_t own = static_cast<int32_t>(threadIdx.x) * 4;
  const int32_t vector_end = kIsVector ? piece.count / 4 * 4 : 0;
  float highest = negative_infinity();
  const auto store = [&](float (&four)[4], int32_t i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = comparable(four[j]);
      highest = fmaxf(highest, four[j]);
    }
    store_vector(four, values + i);
  };
  for (int32_t first = own; first < vector_end; first += kAhead * kStrip) {
    float four[kAhead][4];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int32_t i = first + u * kStrip;
      if (i < vector_end) load_vector(piece.logits + i, four[u]);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int32_t i = first + u * kStrip;
      if (i < vector_end) store(four[u], i);
    }
  }
  for (int32_t i = vector_end + own; i < piece.size; i += kStrip) {
    float four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = i + j < piece.count ? piece.logits[i + j] : negative_infinity();
    }
    store(four, i);
  }
  return highest;
}

// The key of the highest logit of the row, in all threads of the cluster. `highest_of_block` is
// shared memory that other blocks read: the caller must not write it again before the next
// cluster_barrier. Only this block uses `warp_words`.
template <int32_t kBlocks>
__device__ __forceinline__ uint32_t highest_key(float highest_of_thread, uint32_t& highest_of_block,
                                                uint32_t (&warp_words)[kWarps]) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const uint32_t of_warp = __reduce_max_sync(kAllLanes, to_ordered(highest_of_thread));
  if (thread % 32 == 0) warp_words[thread / 32] = of_warp;
  __syncthreads();
  if (thread < 32) {
    const uint32_t of_block = __reduce_max_sync(kAllLanes, warp_words[thread % kWarps]);
    if (thread == 0) highest_of_block = of_block;
  }
  cluster_barrier();
  const uint32_t of_other = *in_cluster(&highest_of_block, thread % kBlocks);
  return __reduce_max_sync(kAllLanes, of_other);
}

// Calls visit(row) for the rows that satisfy `is_wanted`, one after the other; the clusters of the
// grid take turns. All threads of the grid call it, and all threads of a cluster visit the same
// rows. `votes` is shared memory; only this block uses it.
template <class IsWanted, class Visit>
__device__ __forceinline__ void for_wanted_rows(int32_t num_rows, uint32_t (&votes)[kWarps],
                                                const IsWanted& is_wanted, const Visit& visit) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t cluster = static_cast<int32_t>(blockIdx.y);
  const int32_t num_clusters = static_cast<int32_t>(gridDim.y);
  int32_t turn = 0;  // the cluster that takes the next wanted row
  for (int32_t first = 0; first < num_rows; first += kThreads) {
    // Each thread checks one row.
    const bool is_own_wanted = first + thread < num_rows && is_wanted(first + thread);
    const uint32_t votes_of_warp = __ballot_sync(kAllLanes, is_own_wanted);
    if (__syncthreads_or(is_own_wanted) == 0) continue;
    if (thread % 32 == 0) votes[thread / 32] = votes_of_warp;
    __syncthreads();
    for (int32_t word = 0; word < kWarps; ++word) {
      for (uint32_t bits = votes[word]; bits != 0; bits &= bits - 1) {
        if (turn == cluster) visit(first + word * 32 + __ffs(static_cast<int>(bits)) - 1);
        turn = turn + 1 == num_clusters ? 0 : turn + 1;
      }
    }
  }
}

// Enqueues kOneBlock(p, size of a row), the kernel without clusters, for rows of `num_ids`. Blocks
// loop over the rows.
template <auto* kOneBlock, class Params>
void launch_whole_rows(CudaContext& ctx, const char* name, int32_t num_ids, int32_t max_rows,
                       const Params& p) {
  launch(ctx, name, kOneBlock,
         dim3(1, static_cast<unsigned>(std::min(max_rows, kBlocksPerSm * ctx.num_sms))),
         dim3(kThreads), 0, p, (num_ids + 3) / 4 * 4);
}

// Enqueues kKernel(p, size of a piece), a kernel of clusters, for rows of `num_ids`. The grid has
// as many clusters as run at once, and these loop over the rows: one more would only start when
// another has finished.
template <auto* kKernel, class Params>
void launch_row_pieces(CudaContext& ctx, const char* name, int32_t num_ids, int32_t max_rows,
                       const Params& p) {
  // The driver's limits for a number of blocks per SM. They depend on the layout of the chip, not
  // only on its number of SMs, because a cluster stays within a group of SMs.
  struct Occupancy {
    size_t value_bytes;  // of a block, at most
    int32_t num_clusters;
  };
  const auto occupancy_of = [&](int32_t blocks_per_sm) {
    cudaFuncAttributes attributes = {};
    check(cudaFuncGetAttributes(&attributes, kKernel), name);
    const size_t reserved = attributes.sharedSizeBytes + kReservedSharedBytes;
    const size_t value_bytes = (kSmSharedBytes / blocks_per_sm - reserved) / 16 * 16;
    allow_shared_bytes(kKernel, value_bytes, name);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kClusterBlocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = value_bytes;
    int num_clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&num_clusters, kKernel, &config), name);
    return Occupancy{value_bytes, std::max(num_clusters, 1)};
  };
  struct Occupancies {
    Occupancy preferred;
    Occupancy largest;  // last, because it sets the kernel's highest limit
  };
  static std::array<Occupancies, kMaxCudaDevices> of_devices;
  static OncePerDevice measure;
  const auto device = static_cast<size_t>(measure([&] {
    const Occupancy preferred = occupancy_of(kBlocksPerSm);
    of_devices[static_cast<size_t>(current_device())] = {preferred, occupancy_of(1)};
  }));
  const auto& [preferred, largest] = of_devices[device];
  const int32_t ids_per_block = (num_ids + kClusterBlocks - 1) / kClusterBlocks;
  const int32_t piece_size = (ids_per_block + 3) / 4 * 4;
  const size_t value_bytes = sizeof(float) * static_cast<size_t>(piece_size);
  if (value_bytes > largest.value_bytes) {  // raised at the start, when programs are captured
    throw Unsupported(concat("vocab_size is ", num_ids, "; allowed on device cuda: at most ",
                             kClusterBlocks * (largest.value_bytes / sizeof(float)), ", for ",
                             name));
  }
  const Occupancy& occupancy = value_bytes <= preferred.value_bytes ? preferred : largest;
  launch(ctx, name, kKernel,
         dim3(kClusterBlocks, static_cast<unsigned>(std::min(max_rows, occupancy.num_clusters))),
         dim3(kThreads), value_bytes, p, piece_size);
}

}  // namespace paceline::cuda
