// SPDX-License-Identifier: Apache-2.0
#pragma once

// Latent attention in bfloat16 for entries of 512 + 64 elements. A block takes a tile of packed
// rows (row of the sequence x head), all rows of a sequence where they fit, so that an entry is
// read once for all of them. latent_chunk.cuh has the products, latent_shape.cuh what keeps rows
// invariant.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/latent_chunk.cuh"
#include "attention/latent_merge.cuh"
#include "attention/latent_ring.cuh"
#include "attention/latent_shape.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda::latent {

// The queries of the tile, zeros where there is no live row.
template <class S>
__device__ __forceinline__ void load_queries(const PagedAttentionParams& p, const TileRows& rows,
                                             uint32_t to) {
  constexpr int32_t kUnits = kWidth / 8;  // of 16 bytes
  const auto* const q = static_cast<const __nv_bfloat16*>(p.qkv);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < S::kRows * kUnits; i += kConsumers) {
    const int32_t packed = i / kUnits;
    const int32_t unit = i % kUnits;
    const bool is_live = rows.is_live(packed);
    const int64_t row = int64_t{rows.index[packed]} * p.num_qo_heads + rows.head[packed];
    const int32_t at = unit / 8 * S::kQSliceBytes + packed * 128 + ((unit % 8) ^ (packed % 8)) * 16;
    cp_async_16(to + static_cast<uint32_t>(at), is_live ? q + row * kWidth + unit * 8 : q, is_live);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_shared_for_wgmma();
}

// Stores a piece's state for merge_states.
template <class S>
__device__ __forceinline__ void store_state(const State<S>& state, const Position& at, float* to) {
#pragma unroll
  for (int32_t i = 0; i < kGroupSlices; ++i) {
#pragma unroll
    for (int32_t n = 0; n < S::kRowTiles; ++n) {
      const float* const v = state.values[i] + 4 * n;
      *reinterpret_cast<float4*>(to + state_at<S>(2 * i + at.group, n, at.warp, at.lane)) =
          make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  float* const tail = to + S::kStateValues;
  if (at.thread < S::kGroupRows) tail[2 * (group_row<S>(at, 0) + at.thread)] = state.max;
#pragma unroll
  for (int32_t i = 0; i < State<S>::kSumTiles; ++i) {
    const int32_t tile = at.warp + 4 * i;
    if (tile < S::kGroupRowTiles && at.quad_row == 0) {
      float* const sums = tail + 2 * (group_row<S>(at, tile) + 2 * at.quad_lane) + 1;
      sums[0] = state.sums[i][0];
      sums[2] = state.sums[i][1];
    }
  }
}

// What single threads hold of the total of earlier segments; its accumulators are in the workspace.
template <class S>
struct Total {
  float max;
  float sums[State<S>::kSumTiles][2];
};

// Merges a segment into the total, whose accumulators are at `at_total`. After the last segment the
// state is the total.
template <class S>
__device__ __forceinline__ void add_to_total(bool is_first, bool is_last, const Position& at,
                                             SharedArrays<S>& shared, float* at_total,
                                             Total<S>& total, State<S>& state) {
  if (is_first) {
    total.max = negative_infinity();
#pragma unroll
    for (int32_t i = 0; i < State<S>::kSumTiles; ++i) total.sums[i][0] = total.sums[i][1] = 0.0f;
  }
  if (at.thread < S::kGroupRows) {
    const Factors factors = merge_factors(total.max, state.max);
    total.max = factors.max;
    shared.totals[group_row<S>(at, 0) + at.thread] = make_float2(factors.keep, factors.take);
  }
  sync_threads<kConsumers>(kConsumerBarrier);
#pragma unroll
  for (int32_t i = 0; i < State<S>::kSumTiles; ++i) {
    const int32_t tile = at.warp + 4 * i;
    if (tile >= S::kGroupRowTiles) break;
    const float4 factors =
        *reinterpret_cast<const float4*>(&shared.totals[group_row<S>(at, tile) + 2 * at.quad_lane]);
    total.sums[i][0] = merged(total.sums[i][0], state.sums[i][0], factors.x, factors.y);
    total.sums[i][1] = merged(total.sums[i][1], state.sums[i][1], factors.z, factors.w);
    state.sums[i][0] = total.sums[i][0];
    state.sums[i][1] = total.sums[i][1];
  }
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; ++n) {
    const float4 factors =
        *reinterpret_cast<const float4*>(&shared.totals[8 * n + 2 * at.quad_lane]);
#pragma unroll
    for (int32_t i = 0; i < kGroupSlices; ++i) {
      float* const v = state.values[i] + 4 * n;
      auto* const memory =
          reinterpret_cast<float4*>(at_total + state_at<S>(2 * i + at.group, n, at.warp, at.lane));
      const float4 old = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *memory;
      v[0] = merged(old.x, v[0], factors.x, factors.y);
      v[1] = merged(old.y, v[1], factors.z, factors.w);
      v[2] = merged(old.z, v[2], factors.x, factors.y);
      v[3] = merged(old.w, v[3], factors.z, factors.w);
      if (!is_last) *memory = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

// Writes the tile's results by way of the queries' memory. Rows that see nothing become zero.
template <class S>
__device__ __forceinline__ void store_results(const PagedAttentionParams& p, const TileRows& rows,
                                              const State<S>& state, const Position& at,
                                              SharedArrays<S>& shared, std::byte* staged) {
#pragma unroll
  for (int32_t i = 0; i < State<S>::kSumTiles; ++i) {
    const int32_t tile = at.warp + 4 * i;
    if (tile < S::kGroupRowTiles && at.quad_row == 0) {
      *reinterpret_cast<float2*>(&shared.normal[group_row<S>(at, tile) + 2 * at.quad_lane]) =
          make_float2(__fdiv_rn(1.0f, state.sums[i][0]), __fdiv_rn(1.0f, state.sums[i][1]));
    }
  }
  sync_threads<kConsumers>(kConsumerBarrier);
  // As in store_weights, with columns of values for entries.
  const int32_t row = at.lane / 16 * 8 + at.lane % 8;
  const uint32_t to =
      shared_address(staged) + static_cast<uint32_t>(row * S::kStagedRowBytes + at.group * 128 +
                                                     at.warp * 32 + at.lane / 8 % 2 * 16);
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; n += 2) {
    float2 normal[2];
    normal[0] = *reinterpret_cast<const float2*>(&shared.normal[8 * n + 2 * at.quad_lane]);
    normal[1] = *reinterpret_cast<const float2*>(&shared.normal[8 * n + 8 + 2 * at.quad_lane]);
#pragma unroll
    for (int32_t i = 0; i < kGroupSlices; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const float* const v = state.values[i] + 4 * n + 2 * j;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(v[0], normal[j / 2].x),
                                                          __fmul_rn(v[1], normal[j / 2].y));
        pairs[j] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      stmatrix_x4_transposed(to + n * 8 * S::kStagedRowBytes + i * 256, pairs[0], pairs[1],
                             pairs[2], pairs[3]);
    }
  }
  sync_threads<kConsumers>(kConsumerBarrier);
  constexpr int32_t kUnits = kRank / 8;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < S::kRows * kUnits; i += kConsumers) {
    const int32_t packed = i / kUnits;
    const int32_t unit = i % kUnits;
    if (rows.index[packed] < 0) continue;
    const uint4 value =
        rows.is_live(packed)
            ? *reinterpret_cast<const uint4*>(staged + packed * S::kStagedRowBytes + unit * 16)
            : make_uint4(0, 0, 0, 0);
    reinterpret_cast<uint4*>(output_of(p, rows, packed))[unit] = value;
  }
}

// Computes this block's pieces of the tile; called by both consumer warpgroups.
template <class S>
__device__ __forceinline__ void attend(const PagedAttentionParams& p, const Plan& plan,
                                       const Work& work, int32_t tile, const TileKeys& keys,
                                       const TileRows& rows, const Ring& ring, std::byte* memory,
                                       const Position& at, SharedArrays<S>& shared,
                                       RingPlace<S>& place) {
  const uint32_t queries = uniform(shared_address(memory));
  const uint32_t weights = queries + S::kQBytes;
  const int32_t split = static_cast<int32_t>(blockIdx.y);
  const float scale = __fmul_rn(p.scale, kLog2E);
  load_queries<S>(p, rows, queries);
  sync_threads<kConsumers>(kConsumerBarrier);

  State<S> state;
  Total<S> total;
  bool is_first_chunk = true;
  for (int32_t piece = split; piece < work.num_pieces; piece += work.num_splits) {
    state.clear();
    const int32_t end = work.end_chunk(piece);
    const bool is_last_piece = piece + work.num_splits >= work.num_pieces;
#pragma unroll 1
    for (int32_t chunk = work.first_chunk(piece); chunk < end; ++chunk) {
      const RingPlace<S> of_chunk = {static_cast<int32_t>(uniform(place.slot)), place.parity};
      Scores<S> s;
      score<S>(ring, of_chunk, queries, at, s);
      const int32_t first_key = chunk * kChunk;
      if (first_key + kChunk > keys.common_end) mask_scores<S>(rows, first_key, at, s);
      store_warp_maxima<S>(s, at, shared);
      // P and the factors of the previous chunk are read until then.
      if (!is_first_chunk) sync_threads<kConsumers>(kDoneBarrier + at.group);
      sync_threads<128>(kGroupBarrier + at.group);
      take_maxima<S>(scale, at, state, shared);
      sync_threads<128>(kGroupBarrier + at.group);
      store_weights<S>(scale, s, at, shared, weights);
      fence_shared_for_wgmma();
      sync_threads<kConsumers>(kConsumerBarrier);
      if (at.group == 0 && at.lane == 0) {
        barrier_arrive(&ring.empty[of_chunk.of_slice(kValueSlices).slot]);  // scored by both groups
      }
      add_values<S>(ring, of_chunk, at, shared, weights, state);
      if (chunk + 1 < end || !is_last_piece) {
        arrive_threads<kConsumers>(kDoneBarrier + (at.group ^ 1));
      }
      is_first_chunk = false;
      place = place.after(kSlices);
    }
    if (work.stores_states) {
      const int64_t index = int64_t{tile} * plan.capacity + piece;
      store_state<S>(state, at, plan.states + index * S::kStateFloats);
    } else if (work.num_pieces > 1) {
      const int32_t block = static_cast<int32_t>(blockIdx.y * gridDim.x + blockIdx.x);
      add_to_total<S>(piece == 0, is_last_piece, at, shared,
                      plan.totals + int64_t{block} * S::kStateFloats, total, state);
    }
  }
  if (work.stores_states) {
    merge_states<S>(p, plan, work, tile, rows, at, reinterpret_cast<float4*>(memory));
  } else {
    store_results<S>(p, rows, state, at, shared, memory);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    latent_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                            const __grid_constant__ Plan plan) {
  extern __shared__ std::byte storage[];
  __shared__ SharedArrays<S> shared;
  __shared__ alignas(16) int32_t row_end[S::kRows];
  __shared__ int32_t row_begin[S::kRows];
  __shared__ int32_t row_index[S::kRows];
  __shared__ int32_t row_head[S::kRows];
  const TileRows rows = {.begin = row_begin, .end = row_end, .index = row_index, .head = row_head};
  // Aligned for the swizzle.
  std::byte* const memory = storage + (-shared_address(storage) & 1023u);
  const Ring ring = {.slots = shared_address(memory) + S::kRingOffset,
                     .landed = shared.landed,
                     .full = shared.full,
                     .empty = shared.empty,
                     .addresses = shared.addresses};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < S::kSlots) {
    barrier_init(&shared.landed[thread], kCopiers);
    barrier_init(&shared.full[thread], 1);
    barrier_init(&shared.empty[thread], 4);
  }
  barrier_init_fence();
  __syncthreads();
  let_successor_start();
  wait_for_predecessor();

  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const int32_t split = static_cast<int32_t>(blockIdx.y);
  RingPlace<S> place;
  // Goes through this block's tiles; all threads call it.
  const auto for_each_tile = [&](const auto& compute) {
    for (int32_t at = static_cast<int32_t>(blockIdx.x); at < plan.num_tiles;
         at += static_cast<int32_t>(gridDim.x)) {
      Tile tile;
      if (!find_tile(p, plan, S::kRows, at, &tile)) continue;
      __syncthreads();  // the rows of the tile before are no longer read
      const TileKeys keys = paged::read_rows<S>(p, tile, num_rows, p.num_qo_heads, rows);
      const Work work = divide(plan, keys.end);
      if (split >= work.num_splits) continue;
      compute(at, keys, work);
    }
  };
  if (thread >= kConsumers) {
    give_registers<40>();
    for_each_tile([&](int32_t, const TileKeys& keys, const Work& work) {
      if (thread < kConsumers + kCopiers) {
        produce<S>(p, work, keys, split, ring, place);
      } else if (thread < kConsumers + kCopiers + 32) {
        announce<S>(work, split, ring, place);
      }
    });
  } else {
    take_registers<232>();
    const Position at = {.group = static_cast<int32_t>(uniform(thread / 128)),
                         .thread = thread % 128,
                         .warp = thread % 128 / 32,
                         .lane = thread % 32,
                         .quad_row = thread % 32 / 4,
                         .quad_lane = thread % 4};
    for_each_tile([&](int32_t tile, const TileKeys& keys, const Work& work) {
      if (work.num_chunks > 0) {
        attend<S>(p, plan, work, tile, keys, rows, ring, memory, at, shared, place);
      } else {
        // No row sees anything.
        for (int32_t i = thread; i < S::kRows * (kRank / 8); i += kConsumers) {
          const int32_t packed = i / (kRank / 8);
          if (rows.index[packed] < 0) continue;
          reinterpret_cast<uint4*>(output_of(p, rows, packed))[i % (kRank / 8)] =
              make_uint4(0, 0, 0, 0);
        }
      }
    });
  }
}

}  // namespace paceline::cuda::latent
