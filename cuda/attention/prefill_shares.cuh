// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the blocks of a prefill attention launch share its work. A launch of more tiles than
// multiprocessors would leave many of them idle at its end, so its blocks take equal shares of all
// chunks. A share begins and ends anywhere in a tile; so a tile can have parts in two blocks, or in
// more if it is longer than a share. The block with the first part stores the running state behind
// it, and the block with the next part goes on from there, chunk by chunk: the bits are those of
// one block.
//
// A block begins with the part that another one waits for, and ends with the part that it must
// itself wait for, which the other block has begun with. Shares go to blocks in the order in which
// they start. So a block waits only for one that runs already, and a launch ends however few of its
// blocks run at once.

#include <algorithm>
#include <cstdint>

#include "attention/paged_attention_rows.cuh"
#include "attention/prefill_shape.cuh"
#include "common/reduce.cuh"
#include "gemm/wgmma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::prefill {

// Where a share begins or ends: before `chunk` of the tile's own chunks. The tiles of all KV heads
// are numbered head by head.
struct Boundary {
  int32_t tile;
  int32_t chunk;
};

// The shares of a launch.
struct SharePlan {
  bool is_shared;      // else a block has one tile
  int32_t max_tiles;   // of a KV head
  uint32_t* counters;  // [2 + blocks * groups], where is_shared: blocks that have begun, and that
                       // have ended; whether a warpgroup has stored its state
  float* states;       // [blocks, groups, state_floats]
};

// What a block computes, in shared memory.
struct Share {
  int32_t block;      // the number of the share
  int32_t num_tiles;  // of a KV head
  Boundary begin;
  Boundary end;
};

// A part of a tile: its chunks [first, end) among those that its rows see.
struct Part {
  int32_t tile;
  int32_t first;
  int32_t end;
  bool resumes;    // from the state that the block before has stored
  bool publishes;  // its state, for the block behind
};

// The part `index` of a share; false: there is none. In this order: what the next block waits for,
// whole tiles, what this block waits for.
__device__ __forceinline__ bool part_of(const Share& share, int32_t index, Part* part) {
  const Boundary begin = share.begin;
  const Boundary end = share.end;
  if (begin.tile == end.tile) {
    *part = {.tile = begin.tile,
             .first = begin.chunk,
             .end = end.chunk,
             .resumes = begin.chunk > 0,
             .publishes = true};
    return index == 0 && begin.chunk < end.chunk;
  }
  if (end.chunk > 0) {
    *part = {.tile = end.tile, .first = 0, .end = end.chunk, .resumes = false, .publishes = true};
    if (index-- == 0) return true;
  }
  const int32_t first_whole = begin.tile + (begin.chunk > 0 ? 1 : 0);
  const int32_t num_whole = end.tile - first_whole;
  const bool is_whole = index < num_whole;
  *part = {.tile = is_whole ? first_whole + index : begin.tile,
           .first = is_whole ? 0 : begin.chunk,
           .end = paged::kIntMax,
           .resumes = !is_whole,
           .publishes = false};
  return is_whole || (index == num_whole && begin.chunk > 0);
}

// The chunks that the rows of a tile see, or an estimate of them where rows see nothing: what a
// tile is expected to cost. Each thread may ask for another tile; -1: there is no such tile.
template <class S>
__device__ __forceinline__ int32_t count_chunks(const PagedAttentionParams& p, int32_t num_seqs,
                                                int32_t num_rows, int32_t heads_per_group,
                                                int32_t min_rows, int32_t tile) {
  for (int32_t seq = 0; seq < num_seqs; ++seq) {
    const int32_t first = p.row_indptr[seq];
    const int32_t rows = p.row_indptr[seq + 1] - first;
    const int32_t tiles = rows >= min_rows ? (rows * heads_per_group + S::kRows - 1) / S::kRows : 0;
    if (tile >= tiles) {
      tile -= tiles;
      continue;
    }
    const int32_t first_row = first + tile * S::kRows / heads_per_group;
    const int32_t behind = ((tile + 1) * S::kRows + heads_per_group - 1) / heads_per_group;
    const int32_t last_row = min(first + min(behind, rows), num_rows) - 1;
    if (first_row > last_row) return 0;
    const int32_t end = p.kv_end[last_row];
    const int32_t begin = p.kv_begin == nullptr ? 0 : max(p.kv_begin[first_row], 0);
    return begin < end ? (end - 1) / kChunk + 1 - begin / kChunk : 0;
  }
  return -1;
}

// Parts of fewer chunks are not worth passing a state.
inline constexpr int32_t kLeastPart = 2;

// Divides the launch; called by all threads of the block, with room for max_tiles numbers in
// shared memory. A tile counts as its chunks and one more, which its beginning takes.
template <class S>
__device__ __forceinline__ void find_share(const PagedAttentionParams& p, const SharePlan& plan,
                                           int32_t num_seqs, int32_t num_rows,
                                           int32_t heads_per_group, int32_t min_rows,
                                           int32_t* through, Share& share) {
  __shared__ int32_t of_warps[S::kThreads / 32];
  __shared__ int32_t block;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  if (thread == 0) block = static_cast<int32_t>(atomicAdd(plan.counters, 1u));
  // through[tile]: the costs of the tiles of a head up to this one.
  int32_t num_tiles = 0;
  int32_t before = 0;
  for (int32_t first = 0; first < plan.max_tiles; first += S::kThreads) {
    const int32_t tile = first + thread;
    const int32_t chunks = tile < plan.max_tiles ? count_chunks<S>(p, num_seqs, num_rows,
                                                                   heads_per_group, min_rows, tile)
                                                 : -1;
    const int32_t sum = sum_up_to_lane(chunks + 1, lane);
    if (lane == 31) of_warps[warp] = sum;
    num_tiles += __syncthreads_count(chunks >= 0);
    int32_t cost = before;
#pragma unroll
    for (int32_t w = 0; w < S::kThreads / 32; ++w) {
      if (w < warp) cost += of_warps[w];
      before += of_warps[w];
    }
    if (tile < plan.max_tiles) through[tile] = cost + sum;
    __syncthreads();
  }
  if (thread < 2) {
    // The first thread finds the end, the second one the beginning.
    const int64_t all = int64_t{before} * p.num_kv_heads;
    // A share costs at least two of the smallest parts. So two boundaries never fall together.
    const int64_t num_shares = max(min(int64_t{gridDim.x}, all / (2 * kLeastPart)), int64_t{1});
    const int64_t at = all * min(int64_t{block + 1 - thread}, num_shares) / num_shares;
    const auto head = static_cast<int32_t>(before > 0 ? at / before : 0);
    const auto cost = static_cast<int32_t>(at - int64_t{head} * before);
    int32_t low = 0;  // the first tile with through > cost
    for (int32_t high = num_tiles; low < high;) {
      const int32_t middle = (low + high) / 2;
      if (through[middle] > cost) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    Boundary boundary = {.tile = head * num_tiles + low, .chunk = 0};
    if (low < num_tiles) {
      const int32_t begin = low > 0 ? through[low - 1] : 0;
      const int32_t chunk = cost - begin - 1;
      // Where a head begins, the launch begins or the head before ends.
      if (cost > 0 && through[low] - cost < kLeastPart) {
        ++boundary.tile;
      } else if (chunk >= kLeastPart) {
        boundary.chunk = chunk;
      }
    }
    (thread == 0 ? share.end : share.begin) = boundary;
    if (thread == 0) {
      share.block = block;
      share.num_tiles = num_tiles;
    }
  }
  fence_shared_for_wgmma();  // the copy engine writes to the same memory next
  __syncthreads();
}

// --- states --------------------------------------------------------------------------------------

// The place of the state that a warpgroup of share `block` stores, and whether it is there.
struct StoredState {
  float* values;
  uint32_t* is_stored;

  template <class S>
  static __device__ __forceinline__ StoredState of(const SharePlan& plan, int32_t block,
                                                   int32_t group) {
    const int64_t index = int64_t{block} * S::kGroups + group;
    return {.values = plan.states + index * S::kStateFloats,
            .is_stored = plan.counters + 2 + index};
  }
};

// Announces the state that the threads of the warpgroup have stored.
__device__ __forceinline__ void announce_state(const StoredState& state, int32_t group) {
  __threadfence();
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  if (threadIdx.x % 128 == 0) {
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(state.is_stored) : "memory");
  }
}

// Waits for the state; the counter is zero again then.
__device__ __forceinline__ void wait_for_state(const StoredState& state, int32_t group) {
  if (threadIdx.x % 128 == 0) {
    uint32_t is_stored = 0;
    while (is_stored == 0) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(is_stored)
                   : "l"(state.is_stored)
                   : "memory");
    }
    *state.is_stored = 0;
  }
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// The last block of the launch leaves the counters at zero. One thread of each block calls it, when
// nothing is left to begin.
__device__ __forceinline__ void end_share(const SharePlan& plan) {
  if (atomicAdd(plan.counters + 1, 1u) == gridDim.x - 1) {
    plan.counters[0] = 0;
    plan.counters[1] = 0;
  }
}

}  // namespace paceline::cuda::prefill
