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
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::prefill {

// The keys that the live rows of a warpgroup see.
struct GroupKeys {
  int32_t begin = paged::kIntMax;  // first key that any of them sees
  int32_t end = 0;
  int32_t common_begin = 0;  // all of them see [common_begin, common_end)
  int32_t common_end = paged::kIntMax;
};

__device__ __forceinline__ GroupKeys keys_of_group(const paged::TileRows& rows,
                                                   const Position& at) {
  GroupKeys keys;
#pragma unroll
  for (int32_t i = 0; i < 64; i += 32) {
    const int32_t packed = at.group * 64 + i + at.lane;
    if (!rows.is_live(packed)) continue;
    keys.begin = min(keys.begin, rows.begin[packed]);
    keys.end = max(keys.end, rows.end[packed]);
    keys.common_begin = max(keys.common_begin, rows.begin[packed]);
    keys.common_end = min(keys.common_end, rows.end[packed]);
  }
  __syncwarp();
  keys.begin = __reduce_min_sync(kFullWarp, keys.begin);
  keys.end = __reduce_max_sync(kFullWarp, keys.end);
  keys.common_begin = __reduce_max_sync(kFullWarp, keys.common_begin);
  keys.common_end = __reduce_min_sync(kFullWarp, keys.common_end);
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
  float max[2];
};

// Makes products scores.
template <class S>
__device__ __forceinline__ void finish_scores(const PagedAttentionParams& p, float scale,
                                              const GroupKeys& keys, const paged::TileRows& rows,
                                              const Position& at, int32_t chunk, Scores& s,
                                              RowsOfChunk& of_chunk) {
  const int32_t first_key = chunk * kChunk;
  scale_scores<S::kHasCap>(scale, p.soft_cap, s);
  of_chunk.sees[0] = of_chunk.sees[1] = true;
  if (first_key < keys.common_begin || first_key + kChunk > keys.common_end) {
    mask_scores(rows, first_key, at, s);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t packed = at.first_row + 8 * half;
      of_chunk.sees[half] = rows.begin[packed] < first_key + kChunk && rows.end[packed] > first_key;
    }
  }
  find_maxima(s, of_chunk.max);
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
                                            Place& place) {
#pragma unroll 1
  for (int32_t i = 0; i < count * 2 * S::kSlices; ++i) {
    barrier_wait(&ring.full[place.slot], place.parity);
    release<S>(ring, at, 1, place);
    place.next<S>();
  }
}

// What a warpgroup does with its 64 packed rows.
template <class S>
__device__ __forceinline__ void attend(const paged::TileOutput<S>& output, const GroupKeys& keys,
                                       const Position& at, int32_t first_chunk, int32_t end_chunk,
                                       uint32_t queries, const Ring& ring) {
  const PagedAttentionParams& p = output.p;
  const paged::TileRows& rows = output.rows;
  const float scale = S::kHasCap ? p.scale : __fmul_rn(p.scale, kLog2E);
  Place place;
  if (keys.begin >= keys.end) return skip_chunks<S>(ring, at, end_chunk - first_chunk, place);
  const int32_t begin = keys.begin / kChunk;
  const int32_t end = (keys.end - 1) / kChunk + 1;
  skip_chunks<S>(ring, at, begin - first_chunk, place);

  State<S> state;
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
#pragma unroll 1
  for (int32_t chunk = begin; chunk < end; ++chunk) {
    Scores s;
    const Place of_keys = place;
    begin_scores<S>(ring, queries, place, s);
    wgmma_wait<0>();
    pin(s);
    release<S>(ring, at, S::kSlices, of_keys);
    RowsOfChunk of_chunk;
    finish_scores<S>(p, scale, keys, rows, at, chunk, s, of_chunk);
    Weights weights;
    float chunk_sum[2];
    make_weights(s, of_chunk.sees, of_chunk.max, chunk_sum, weights);
    MergeWeights merge[2];
    merge_sums<S>(of_chunk, chunk_sum, state, merge);
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
      SliceValues o;
      const Place of_slice = place;
      begin_values<S>(ring, weights, place, o);
      wgmma_wait<0>();
      pin(o);
      release<S>(ring, at, 1, of_slice);
      merge_values(of_chunk, merge, o, state.values[slice]);
    }
  }
  skip_chunks<S>(ring, at, end_chunk - end, place);

  const float* const sinks =
      p.sinks == nullptr ? nullptr : p.sinks + int64_t{output.kv_head} * output.heads_per_group;
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t packed = at.first_row + 8 * half;
    if (!rows.is_live(packed)) continue;
    const float factor = final_factor(state.max[half], state.sum[half],
                                      sinks == nullptr ? nullptr : sinks + rows.head[packed]);
    __nv_bfloat16* const to = output.of(packed) + at.quad_lane * 2;
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
      for (int32_t j = 0; j < kSliceColumns / 8; ++j) {
        const float* const v = state.values[slice] + 4 * j + 2 * half;
        *reinterpret_cast<uint32_t*>(to + slice * kSliceColumns + j * 8) =
            pack_bf16(__fmul_rn(v[0], factor), __fmul_rn(v[1], factor));
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                             const __grid_constant__ KvMaps maps, int32_t min_rows) {
  extern __shared__ std::byte storage[];
  __shared__ int32_t row_begin[S::kRows];
  __shared__ int32_t row_end[S::kRows];
  __shared__ int32_t row_index[S::kRows];
  __shared__ int32_t row_head[S::kRows];
  __shared__ uint64_t full[S::kSlots];
  __shared__ uint64_t empty[S::kSlots];
  const paged::TileRows rows = {
      .begin = row_begin, .end = row_end, .index = row_index, .head = row_head};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < S::kSlots) {
    barrier_init(&full[thread], kCopyWarps);
    barrier_init(&empty[thread], 4 * S::kGroups);
  }
  barrier_init_fence();
  let_successor_start();
  wait_for_predecessor();

  const int32_t heads_per_group = p.num_qo_heads / p.num_kv_heads;
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const int32_t num_seqs = min(*p.num_seqs, p.max_seqs);
  // Later tiles of a prompt see more keys and take longer, so they go first.
  // The KV heads of a tile are neighbours, so that all long ones go before all short ones.
  const auto index = static_cast<int32_t>((gridDim.x - 1 - blockIdx.x) / p.num_kv_heads);
  const auto kv_head = static_cast<int32_t>(blockIdx.x % p.num_kv_heads);
  paged::Tile tile;
  if (!paged::find_tile(p.row_indptr, num_seqs, heads_per_group, S::kRows, index, &tile, min_rows))
    return;
  // Its barrier also publishes those of the ring.
  const paged::TileKeys keys = paged::read_rows<S>(p, tile, num_rows, heads_per_group, rows);
  const paged::TileOutput<S> output = {
      .p = p, .kv_head = kv_head, .heads_per_group = heads_per_group, .rows = rows};
  const bool is_live = keys.begin < keys.end;
  const int32_t first_chunk = is_live ? keys.begin / kChunk : 0;
  const int32_t end_chunk = is_live ? (keys.end - 1) / kChunk + 1 : 0;
  // Aligned for the swizzle.
  const uint32_t queries = (shared_address(storage) + 1023u) & ~1023u;
  const Ring ring = {.slots = queries + S::kQBytes, .full = full, .empty = empty};
  if (thread < 128) {
    give_registers<S::kCopyRegisters>();
    output.zero_inert_rows();
    if (is_live) copy_chunks<S>(p, maps, kv_head, keys, first_chunk, end_chunk, ring);
  } else {
    take_registers<S::kRegisters>();
    if (!is_live) return;
    const int32_t group = static_cast<int32_t>(uniform(static_cast<uint32_t>(thread / 128 - 1)));
    const int32_t lane = thread % 32;
    const Position at = {.group = group,
                         .lane = lane,
                         .quad_lane = lane % 4,
                         .first_row = group * 64 + thread % 128 / 32 * 16 + lane / 4};
    load_queries<S>(p, kv_head, heads_per_group, rows, group, queries);
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    attend<S>(output, keys_of_group(rows, at), at, first_chunk, end_chunk,
              uniform(queries + static_cast<uint32_t>(group * 64 * 128)), ring);
  }
}

}  // namespace paceline::cuda::prefill
