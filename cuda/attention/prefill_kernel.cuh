// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention over a paged KV cache for sequences with many rows, in bfloat16. A block takes a tile
// of 64 packed rows (row of the sequence x query head of the group) for each of its warpgroups,
// which share one stream of keys and values. A further warpgroup copies that stream to a ring of
// slices (128 keys x 64 columns). Each warpgroup walks the chunks of 128 keys on its own pace:
//   1. S = Q K^T by wgmma
//   2. maxima, probabilities and sums in registers
//   3. O = P V by wgmma with P as the register operand, merged into the running state
// While one warpgroup is at 2, the tensor cores work for the others.
//
// Blocks take equal shares of the launch (prefill_shares.cuh), so a block computes parts of several
// tiles, one after the other, and its copies run ahead into the next part.
//
// A row has the bits of paged_attention_kernel.cuh: the same chunks, each with a fresh (max, sum,
// accumulator) that is merged in ascending order, and the same order within a chunk.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/prefill_chunk.cuh"
#include "attention/prefill_copy.cuh"
#include "attention/prefill_shape.cuh"
#include "attention/prefill_shares.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::prefill {

// The keys that the live rows of a warpgroup see.
struct GroupKeys {
  int32_t begin = paged::kIntMax;  // first key that any of them sees
  int32_t end = 0;
};
// Every warp finds the keys for itself and for no one else.
__device__ __forceinline__ GroupKeys keys_of_group(const paged::TileRows& rows, const Position& at,
                                                   float scale, CommonKeys& common) {
  GroupKeys keys;
  int32_t common_begin = 0;
  int32_t common_end = paged::kIntMax;
#pragma unroll
  for (int32_t i = 0; i < 64; i += 32) {
    const int32_t packed = at.group * 64 + i + at.lane;
    if (!rows.is_live(packed)) continue;
    keys.begin = min(keys.begin, rows.begin[packed]);
    keys.end = max(keys.end, rows.end[packed]);
    common_begin = max(common_begin, rows.begin[packed]);
    common_end = min(common_end, rows.end[packed]);
  }
  __syncwarp();
  keys.begin = __reduce_min_sync(kFullWarp, keys.begin);
  keys.end = __reduce_max_sync(kFullWarp, keys.end);
  common_begin = __reduce_max_sync(kFullWarp, common_begin);
  common_end = __reduce_min_sync(kFullWarp, common_end);
  if (at.lane == 0) common = {.begin = common_begin, .end = common_end, .scale = scale};
  __syncwarp();
  return keys;
}

// The state of a thread's two rows.
template <class S>
struct State {
  float max[2];
  float sum[2];
  SliceValues values[S::kSlices];
};

// What is known of a chunk for a thread's two rows.
struct RowsOfChunk {
  bool sees[2];  // any key of it
  float max[2];  // 0 if the row sees none
};

// Makes products scores, and finds the maxima of the scaled ones.
template <class S>
__device__ __forceinline__ void finish_scores(const PagedAttentionParams& p,
                                              const CommonKeys& common, const paged::TileRows& rows,
                                              const Position& at, int32_t chunk, Scores& s,
                                              RowsOfChunk& of_chunk) {
  const int32_t first_key = chunk * kChunk;
  if constexpr (S::kHasCap) cap_scores(p.scale, p.soft_cap, s);
  of_chunk.sees[0] = of_chunk.sees[1] = true;
  if (first_key < common.begin || first_key + kChunk > common.end) {
    mask_scores(rows, first_key, at, s);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t packed = at.first_row + 8 * half;
      of_chunk.sees[half] = rows.begin[packed] < first_key + kChunk && rows.end[packed] > first_key;
    }
  }
  find_maxima(s, of_chunk.max);
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    float& max = of_chunk.max[half];
    max = of_chunk.sees[half] ? __fmul_rn(max, common.scale) : 0.0f;
  }
}

// A row that sees no key of the chunk skips it.
template <class S>
__device__ __forceinline__ void merge_sums(const RowsOfChunk& of_chunk, const float (&chunk_sum)[2],
                                           State<S>& state, MergeWeights (&merge)[2]) {
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    merge[half] = merge_weights(state.max[half], of_chunk.max[half]);
    if (of_chunk.sees[half]) {
      state.max[half] = merge[half].max;
      state.sum[half] = merge_value(state.sum[half], chunk_sum[half], merge[half]);
    }
  }
}
// Where no maximum of the warp's rows has changed, the factor of the running values is exactly 1.
__device__ __forceinline__ void merge_values(const RowsOfChunk& of_chunk,
                                             const MergeWeights (&merge)[2], const SliceValues& o,
                                             SliceValues& values) {
  const bool (&sees)[2] = of_chunk.sees;
  if (__all_sync(kFullWarp, sees[0] && sees[1] && merge[0].keep == 1.0f && merge[1].keep == 1.0f)) {
#pragma unroll
    for (int32_t i = 0; i < kSliceColumns / 2; ++i) {
      values[i] = __fmaf_rn(o[i], merge[i / 2 % 2].take, values[i]);
    }
    return;
  }
#pragma unroll
  for (int32_t i = 0; i < kSliceColumns / 2; ++i) {
    const float merged = merge_value(values[i], o[i], merge[i / 2 % 2]);
    values[i] = sees[i / 2 % 2] ? merged : values[i];
  }
}

// Waits for the slices of chunks that no row of the warpgroup sees, and gives them back.
template <class S>
__device__ __forceinline__ void skip_chunks(const Ring& ring, const Position& at, int32_t count,
                                            Place<S>& place) {
#pragma unroll 1
  for (int32_t i = 0; i < count * 2 * S::kSlices; ++i) {
    barrier_wait(&ring.full[place.slot()], place.parity());
    release<S>(ring, at, 1, place);
    place.next();
  }
}

// --- parts ---------------------------------------------------------------------------------------

// Finds the rows and the keys of a part; called by one warp.
template <class S>
__device__ __forceinline__ void prepare_part(const PagedAttentionParams& p, int32_t min_rows,
                                             const Share& share, int32_t index, Parts<S>& parts) {
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const int32_t num_seqs = min(*p.num_seqs, p.max_seqs);
  const int32_t heads_per_group = p.num_qo_heads / p.num_kv_heads;
  // A part without keys can be over before its copying warps have looked at it.
  if (index >= 2)
    barrier_wait(&parts.are_copied[index % 2], static_cast<uint32_t>(index / 2 - 1) % 2);
  Part part;
  paged::Tile tile;
  PartKeys of_part = {};
  if (part_of(share, index, &part) &&
      paged::find_tile(p.row_indptr, num_seqs, heads_per_group, S::kRows,
                       part.tile % share.num_tiles, &tile, min_rows)) {
    const paged::TileKeys keys =
        paged::read_rows_by_warp<S>(p, tile, num_rows, heads_per_group,
                                    /*fills=*/true, parts.prepared[index % 2].rows());
    const bool is_live = keys.begin < keys.end;
    const int32_t first = is_live ? keys.begin / kChunk : 0;
    const int32_t end = is_live ? (keys.end - 1) / kChunk + 1 : 0;
    of_part = {.index = index,
               .exists = true,
               .resumes = part.resumes,
               .publishes = part.publishes,
               .kv_head = part.tile / share.num_tiles,
               .seq_slot = keys.seq_slot,
               .begin = keys.begin,
               .end = keys.end,
               .first_chunk = min(first + part.first, end),
               .end_chunk = part.end < end - first ? first + part.end : end};
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    parts.prepared[index % 2].keys = of_part;
    barrier_arrive(&parts.are_ready[index % 2]);
  }
}

// The state of a thread in the workspace.
template <class S>
__device__ __forceinline__ void store_state(const State<S>& state, float* to) {
  to += threadIdx.x % 128;
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    to[256 * half] = state.max[half];
    to[256 * half + 128] = state.sum[half];
  }
#pragma unroll
  for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
    for (int32_t i = 0; i < kSliceColumns / 2; ++i) {
      to[(4 + slice * (kSliceColumns / 2) + i) * 128] = state.values[slice][i];
    }
  }
}
template <class S>
__device__ __forceinline__ void load_state(const float* from, State<S>& state) {
  from += threadIdx.x % 128;
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    state.max[half] = __ldcg(from + 256 * half);
    state.sum[half] = __ldcg(from + 256 * half + 128);
  }
#pragma unroll
  for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
    for (int32_t i = 0; i < kSliceColumns / 2; ++i) {
      state.values[slice][i] = __ldcg(from + (4 + slice * (kSliceColumns / 2) + i) * 128);
    }
  }
}

// Writes the results of a thread's rows. Rows that exist but see no key become zero.
template <class S>
__device__ __forceinline__ void write_results(const PagedAttentionParams& p, int32_t kv_head,
                                              const paged::TileRows& rows, const Position& at,
                                              const State<S>& state) {
  const paged::TileOutput<S> output = {
      .p = p, .kv_head = kv_head, .heads_per_group = p.num_qo_heads / p.num_kv_heads, .rows = rows};
  const float* const sinks =
      p.sinks == nullptr ? nullptr : p.sinks + int64_t{output.kv_head} * output.heads_per_group;
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t packed = at.first_row + 8 * half;
    if (rows.index[packed] < 0) continue;
    const bool is_live = rows.is_live(packed);
    const float factor = final_factor(state.max[half], state.sum[half],
                                      sinks == nullptr ? nullptr : sinks + rows.head[packed]);
    __nv_bfloat16* const to = output.of(packed) + at.quad_lane * 2;
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
      for (int32_t j = 0; j < kSliceColumns / 8; ++j) {
        const float* const v = state.values[slice] + 4 * j + 2 * half;
        *reinterpret_cast<uint32_t*>(to + slice * kSliceColumns + j * 8) =
            is_live ? pack_bf16(__fmul_rn(v[0], factor), __fmul_rn(v[1], factor)) : 0;
      }
    }
  }
}

// What a warpgroup does with its 64 packed rows of a part.
template <class S>
__device__ __forceinline__ void attend(const PagedAttentionParams& p, const SharePlan& plan,
                                       int32_t block, PreparedPart<S>& prepared, const Position& at,
                                       uint32_t queries, const Ring& ring, CommonKeys& common,
                                       Place<S>& place) {
  const PartKeys& part = prepared.keys;
  const paged::TileRows rows = prepared.rows();
  const GroupKeys keys = keys_of_group(rows, at, weight_scale(p.scale, p.soft_cap), common);
  const int32_t end_chunk = part.end_chunk;
  const int32_t begin = min(max(keys.begin / kChunk, part.first_chunk), end_chunk);
  const int32_t end = max(min((keys.end - 1) / kChunk + 1, end_chunk), begin);
  skip_chunks<S>(ring, at, begin - part.first_chunk, place);

  State<S> state;
  if (part.resumes) {
    const StoredState stored = StoredState::of<S>(plan, block - 1, at.group);
    wait_for_state(stored, at.group);
    load_state<S>(stored.values, state);
  } else {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      state.max[half] = negative_infinity();
      state.sum[half] = 0.0f;
    }
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
      for (int32_t i = 0; i < kSliceColumns / 2; ++i) state.values[slice][i] = 0.0f;
    }
  }
#pragma unroll 1
  for (int32_t chunk = begin; chunk < end; ++chunk) {
    Scores s;
    const Place<S> of_keys = place;
    begin_scores<S>(ring, queries, place, s);
    wgmma_wait<0>();
    pin(s);
    release<S>(ring, at, S::kSlices, of_keys);
    RowsOfChunk of_chunk;
    finish_scores<S>(p, common, rows, at, chunk, s, of_chunk);
    Weights weights;
    float chunk_sum[2];
    make_weights(s, common.scale, of_chunk.max, chunk_sum, weights);
    MergeWeights merge[2];
    merge_sums<S>(of_chunk, chunk_sum, state, merge);
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
      SliceValues o;
      const Place<S> of_slice = place;
      begin_values<S>(ring, weights, place, o);
      wgmma_wait<0>();
      pin(o);
      release<S>(ring, at, 1, of_slice);
      merge_values(of_chunk, merge, o, state.values[slice]);
    }
  }
  skip_chunks<S>(ring, at, end_chunk - end, place);

  if (part.publishes) {
    const StoredState stored = StoredState::of<S>(plan, block, at.group);
    store_state<S>(state, stored.values);
    announce_state(stored, at.group);
  } else {
    write_results<S>(p, part.kv_head, rows, position_here(), state);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                             const __grid_constant__ KvMaps maps,
                             const __grid_constant__ SharePlan plan, int32_t min_rows) {
  extern __shared__ std::byte storage[];
  __shared__ Parts<S> parts;
  __shared__ Share share;
  __shared__ uint64_t full[S::kSlots];
  __shared__ uint64_t empty[S::kSlots];
  static_assert(sizeof(parts) + sizeof(share) + sizeof(full) + sizeof(empty) + S::kSharedBytes <=
                227 << 10);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < S::kSlots) {
    barrier_init(&full[thread], kCopyWarps);
    barrier_init(&empty[thread], 4 * S::kGroups);
  }
  if (thread < 2) {
    barrier_init(&parts.are_ready[thread], 1);
    barrier_init(&parts.are_copied[thread], kCopyWarps);
  }
  barrier_init_fence();
  let_successor_start();
  wait_for_predecessor();

  // Aligned for the swizzle.
  const uint32_t queries = (shared_address(storage) + 1023u) & ~1023u;
  const Ring ring = {.slots = queries + S::kQBytes, .full = full, .empty = empty};
  if (plan.is_shared) {
    // The costs of the tiles are where queries and keys will be.
    find_share<S>(p, plan, min(*p.num_seqs, p.max_seqs), min(*p.num_rows, p.max_rows),
                  p.num_qo_heads / p.num_kv_heads, min_rows, reinterpret_cast<int32_t*>(storage),
                  share);
  } else if (thread == 0) {
    // Later tiles of a prompt see more keys and take longer, so they go first.
    // The KV heads of a tile are neighbours, so that all long ones go before all short ones.
    const auto block = static_cast<int32_t>(blockIdx.x);
    const int32_t index = (static_cast<int32_t>(gridDim.x) - 1 - block) / p.num_kv_heads;
    const int32_t tile = block % p.num_kv_heads * plan.max_tiles + index;
    share = {.block = 0,
             .num_tiles = plan.max_tiles,
             .begin = {.tile = tile, .chunk = 0},
             .end = {.tile = tile + 1, .chunk = 0}};
  }
  __syncthreads();
  constexpr int32_t kLeader = kCopyWarps;  // the warp that prepares parts
  if (thread / 32 == kLeader) prepare_part<S>(p, min_rows, share, 0, parts);
  __syncthreads();

  if (thread < 128) {
    give_registers<S::kCopyRegisters>();
    Copier<S> copier(ring);
#pragma unroll 1
    for (int32_t index = 0;; ++index) {
      barrier_wait_idle(&parts.are_ready[index % 2], static_cast<uint32_t>(index / 2 % 2));
      if (!parts.keys_of(index).exists) break;
      copy_chunks<S>(p, maps, parts, index, copier);
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(&parts.are_copied[index % 2]);
    }
    if (plan.is_shared && thread == 0) end_share(plan);
  } else {
    take_registers<S::kRegisters>();
    const Position at = position_here();
    Place<S> place;
    PreparedPart<S>* prepared = &parts.prepared[0];
#pragma unroll 1
    for (;;) {
      // The part is prepared, and the one before it is computed.
      asm volatile("bar.sync %0, %1;" ::"n"(S::kGroups + 1), "n"(128 * S::kGroups) : "memory");
      if (!prepared->keys.exists) break;
      if (thread_here() / 32 == kLeader) {
        prepare_part<S>(p, min_rows, share, prepared->keys.index + 1, parts);
      }
      load_queries<S>(p, prepared->keys.kv_head, p.num_qo_heads / p.num_kv_heads, prepared->rows(),
                      at.group, queries);
      asm volatile("bar.sync %0, 128;" ::"r"(at.group + 1) : "memory");
      attend<S>(p, plan, share.block, *prepared, position_here(),
                uniform(queries + static_cast<uint32_t>(at.group * 64 * 128)), ring,
                parts.common[thread_here() / 32 - kCopyWarps], place);
      prepared = &parts.prepared[prepared->keys.index % 2 ^ 1];
    }
  }
}

}  // namespace paceline::cuda::prefill
