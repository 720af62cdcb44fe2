// SPDX-License-Identifier: Apache-2.0
#pragma once

// Merges the states that the blocks of a tile have stored: chunks into segments, and segments into
// the results, in ascending order and by the operations of the registers. The blocks wait for each
// other, and then each merges a part of the values.
//
// A block only waits for blocks that run already, so a launch ends however few of its blocks run at
// once: beside other kernels, other engines, or on a part of a GPU. Each block counts itself when
// it begins and when it has stored its states. A block that has stored them waits only if all
// blocks of its tile have begun, and these store theirs without waiting. Else it leaves. If any
// block has left, the last block to store its states merges everything. It does not wait, since all
// states are stored by then.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/latent_shape.cuh"
#include "common/launch.cuh"
#include "common/ordering.cuh"

namespace paceline::cuda::latent {

inline constexpr int32_t kMergeBatch = 8;  // states whose loads are in flight together

__device__ __forceinline__ __nv_bfloat16* output_of(const PagedAttentionParams& p,
                                                    const TileRows& rows, int32_t packed) {
  const int64_t row = int64_t{rows.index[packed]} * p.num_qo_heads + rows.head[packed];
  return static_cast<__nv_bfloat16*>(p.y) + row * kRank;
}

// What a thread merges: four accumulators of two rows, and those rows' maxima and sums.
struct Part {
  float values[4] = {};
  float max[2] = {negative_infinity(), negative_infinity()};
  float sum[2] = {};

  __device__ __forceinline__ void add(const float4& part, const float4& max_sums) {
    const Factors low = merge_factors(max[0], max_sums.x);
    const Factors high = merge_factors(max[1], max_sums.z);
    max[0] = low.max;
    max[1] = high.max;
    sum[0] = merged(sum[0], max_sums.y, low.keep, low.take);
    sum[1] = merged(sum[1], max_sums.w, high.keep, high.take);
    values[0] = merged(values[0], part.x, low.keep, low.take);
    values[1] = merged(values[1], part.y, high.keep, high.take);
    values[2] = merged(values[2], part.z, low.keep, low.take);
    values[3] = merged(values[3], part.w, high.keep, high.take);
  }
  [[nodiscard]] __device__ __forceinline__ float4 all_values() const {
    return make_float4(values[0], values[1], values[2], values[3]);
  }
  [[nodiscard]] __device__ __forceinline__ float4 max_sums() const {
    return make_float4(max[0], sum[0], max[1], sum[1]);
  }
};

// Called by all consumers when they have stored the block's states.
__device__ __forceinline__ void finish_states() {
  __threadfence();
  sync_threads<kConsumers>(kConsumerBarrier);
}

// The counter of a tile has four numbers of blocks, a byte each: those that have begun, stored
// their states, left without waiting, and ended their part of the merge.
inline constexpr uint32_t kBegun = 1;
inline constexpr uint32_t kStored = 1u << 8;
inline constexpr uint32_t kLeft = 1u << 16;
inline constexpr uint32_t kEnded = 1u << 24;
inline constexpr int32_t kMaxSplits = 255;

__device__ __forceinline__ uint32_t number_of(uint32_t blocks, uint32_t counter) {
  return counter / blocks % 256;
}

// Called by one thread of each block that will store states, early.
__device__ __forceinline__ void count_begun(uint32_t* counter) { add_relaxed<kBegun>(counter); }

// The part of a merge that a block does: part `index` of `count`, or nothing if count is 0.
struct MergeShare {
  int32_t index;
  int32_t count;
};

// Returns once all blocks of the tile have stored their states, or at once if that may need blocks
// which do not run yet. The last block to return sets the counter to zero. One thread calls it,
// when finish_states has returned.
__device__ __forceinline__ MergeShare wait_for_states(uint32_t* counter, int32_t split,
                                                      int32_t num_splits) {
  const auto all = static_cast<uint32_t>(num_splits);
  uint32_t seen = add_and_acquire<kStored>(counter) + kStored;
  const bool is_last = number_of(kStored, seen) == all;
  // A block leaves only while the counter shows that another one has not begun. Once all have
  // begun, the number of blocks that left is final, and every block that waits reads the same
  // number.
  while (number_of(kBegun, seen) < all) {
    const uint32_t now = atomicCAS(counter, seen, seen + kLeft);
    if (now == seen) return {.index = 0, .count = 0};
    seen = now;
  }
  if (!is_last) {
    do {
      seen = poll_and_acquire(counter);
    } while (number_of(kStored, seen) < all);
  }
  const uint32_t left = number_of(kLeft, seen);
  if (number_of(kEnded, atomicAdd(counter, kEnded)) == all - left - 1) *counter = 0;
  if (left == 0) return {.index = split, .count = num_splits};
  return {.index = 0, .count = is_last ? 1 : 0};
}

// The pieces [begin, begin + count) of a segment, merged.
template <class S>
__device__ __forceinline__ Part merge_segment(const float* states, int32_t begin, int32_t count,
                                              int32_t offset, int32_t row) {
  Part part;
  if (count <= 0) return part;
  const float* const from = states + int64_t{begin} * S::kStateFloats;
#pragma unroll 1
  for (int32_t done = 0; done < count; done += kMergeBatch) {
    float4 loaded[kMergeBatch];
    float4 loaded_sums[kMergeBatch];
#pragma unroll
    for (int32_t i = 0; i < kMergeBatch; ++i) {
      // Beyond the last state the last one is loaded again, and dropped below.
      const float* const state = from + int64_t{min(done + i, count - 1)} * S::kStateFloats;
      loaded[i] = __ldcg(reinterpret_cast<const float4*>(state + offset));
      loaded_sums[i] = __ldcg(reinterpret_cast<const float4*>(state + S::kStateValues + 2 * row));
    }
#pragma unroll
    for (int32_t i = 0; i < kMergeBatch; ++i) {
      if (done + i < count) part.add(loaded[i], loaded_sums[i]);
    }
  }
  return part;
}

// Merges this block's part of a tile's states and writes its results; called by the adders.
// `exchange` is room for 257 float4.
template <class S>
__device__ __forceinline__ void merge_states(const PagedAttentionParams& p, const Plan& plan,
                                             const Work& work, int32_t tile, const TileRows& rows,
                                             const Position& at, float4* exchange) {
  auto* const share = reinterpret_cast<MergeShare*>(exchange + kAdders);
  if (threadIdx.x == 0) {
    *share =
        wait_for_states(plan.counters + tile, static_cast<int32_t>(blockIdx.y), work.num_splits);
  }
  sync_threads<kAdders>(kAdderBarrier);
  const int32_t index = share->index;
  const int32_t count = share->count;
  if (count == 0) return;
  const float* const states =
      plan.states + int64_t{tile} * plan.capacity * static_cast<int64_t>(S::kStateFloats);
  // Pieces that are merged first, and then with others. Segments have no others.
  const int32_t of_segment = work.piece_chunks == 1 ? kSegmentChunks : work.num_pieces;
  const int32_t num_segments = (work.num_pieces + of_segment - 1) / of_segment;
  // The warpgroups take segments by turns; if there is one, they take different parts of it.
  const bool shares = num_segments > 1;
  constexpr int32_t kUnits = kValueSlices * S::kRowTiles;
  const int32_t step = shares ? count : count * kGroups;
  for (int32_t unit = shares ? index : index * kGroups + at.group; unit < kUnits; unit += step) {
    const int32_t row_tile = unit % S::kRowTiles;
    const int32_t slice = unit / S::kRowTiles;
    const int32_t offset = state_at<S>(slice, row_tile, at.warp, at.lane);
    const int32_t row = 8 * row_tile + 2 * at.quad_lane;
    Part result;
    for (int32_t first = 0; first < num_segments; first += kGroups) {
      const int32_t begin = (first + (shares ? at.group : 0)) * of_segment;
      const Part part =
          merge_segment<S>(states, begin, min(of_segment, work.num_pieces - begin), offset, row);
      if (shares) {
        if (at.group == 1) {
          exchange[at.thread] = part.all_values();
          exchange[128 + at.thread] = part.max_sums();
        }
        sync_threads<kAdders>(kAdderBarrier);
      }
      result.add(part.all_values(), part.max_sums());
      if (shares) {
        if (first + 1 < num_segments) result.add(exchange[at.thread], exchange[128 + at.thread]);
        sync_threads<kAdders>(kAdderBarrier);
      }
    }
    if (shares && at.group == 1) continue;
#pragma unroll
    for (int32_t e = 0; e < 2; ++e) {
      if (rows.index[row + e] < 0) continue;
      const bool is_live = rows.is_live(row + e);
      const float normal = __fdiv_rn(1.0f, result.sum[e]);
      __nv_bfloat16* const y =
          output_of(p, rows, row + e) + slice * kSliceColumns + at.warp * 16 + at.quad_row;
      store_as(y, is_live ? __fmul_rn(result.values[e], normal) : 0.0f);
      store_as(y + 8, is_live ? __fmul_rn(result.values[e + 2], normal) : 0.0f);
    }
  }
}

}  // namespace paceline::cuda::latent
