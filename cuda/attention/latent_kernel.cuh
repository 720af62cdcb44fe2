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
#pragma unroll 4
  for (int32_t i = thread_here(); i < S::kRows * kUnits; i += kConsumers) {
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

// Stores a piece's state for merge_states: adders its values, scorers the rest.
template <class S>
__device__ __forceinline__ void store_values(const Values<S>& state, const Position& at,
                                             float* to) {
#pragma unroll
  for (int32_t i = 0; i < kGroupSlices; ++i) {
#pragma unroll
    for (int32_t n = 0; n < S::kRowTiles; ++n) {
      const float* const v = state[i] + 4 * n;
      *reinterpret_cast<float4*>(to + state_at<S>(2 * i + at.group, n, at.warp, at.lane)) =
          make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}
template <class S>
__device__ __forceinline__ void store_rows(float max, const Position& at,
                                           const SharedArrays<S>& shared, float* to) {
  float* const tail = to + S::kStateValues;
  if (at.thread < S::kRows) tail[2 * at.thread] = max;
  for_each_sum<S>(at, [&](int32_t row) {
    tail[2 * row + 1] = shared.sums[row];
    tail[2 * row + 3] = shared.sums[row + 1];
  });
}

// Merges a segment into the total; after the last segment the state is the total. The adders' total
// of earlier segments is in the workspace.
template <class S>
__device__ __forceinline__ void add_rows_to_total(bool is_first, const Position& at, float max,
                                                  float& total_max, SharedArrays<S>& shared) {
  if (at.thread < S::kRows) {
    const Factors factors = merge_factors(total_max, max);
    total_max = factors.max;
    shared.weights[at.thread] = make_float2(factors.keep, factors.take);
  }
  sync_threads<kConsumers>(kConsumerBarrier);
  for_each_sum<S>(at, [&](int32_t row) {
#pragma unroll
    for (int32_t e = 0; e < 2; ++e) {
      const float2 factors = shared.weights[row + e];
      const float total = is_first ? 0.0f : shared.total_sums[row + e];
      shared.total_sums[row + e] = merged(total, shared.sums[row + e], factors.x, factors.y);
      shared.sums[row + e] = shared.total_sums[row + e];
    }
  });
  // The factors of the next segment take the place of these.
  sync_threads<kConsumers>(kConsumerBarrier);
}
template <class S>
__device__ __forceinline__ void add_values_to_total(bool is_first, bool is_last, const Position& at,
                                                    const SharedArrays<S>& shared, float* at_total,
                                                    Values<S>& state) {
  sync_threads<kConsumers>(kConsumerBarrier);
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; ++n) {
    const float4 factors =
        *reinterpret_cast<const float4*>(&shared.weights[8 * n + 2 * at.quad_lane]);
#pragma unroll
    for (int32_t i = 0; i < kGroupSlices; ++i) {
      float* const v = state[i] + 4 * n;
      // Any order will do, as no one else reads the total. Single floats, unlike groups of four,
      // may be in any registers.
      float* const memory = at_total + ((2 * i + at.group) * S::kRowTiles + n) * 512 + at.thread;
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        const float old = is_first ? 0.0f : memory[e * 128];
        v[e] = e % 2 == 0 ? merged(old, v[e], factors.x, factors.y)
                          : merged(old, v[e], factors.z, factors.w);
        if (!is_last) memory[e * 128] = v[e];
      }
      // Loads of what follows would take registers that accumulators need.
      asm volatile("" ::: "memory");
    }
  }
  sync_threads<kConsumers>(kConsumerBarrier);
}

// Writes the tile's results by way of the queries' memory. Rows that see nothing become zero.
template <class S>
__device__ __forceinline__ void store_normals(const Position& at, SharedArrays<S>& shared) {
  for_each_sum<S>(at, [&](int32_t row) {
    shared.sums[row] = __fdiv_rn(1.0f, shared.sums[row]);
    shared.sums[row + 1] = __fdiv_rn(1.0f, shared.sums[row + 1]);
  });
  sync_threads<kConsumers>(kConsumerBarrier);
}
template <class S>
__device__ __forceinline__ void store_results(const PagedAttentionParams& p, const TileRows& rows,
                                              const Values<S>& state, const Position& at,
                                              const SharedArrays<S>& shared, std::byte* staged) {
  sync_threads<kConsumers>(kConsumerBarrier);
  // As in store_weights, with columns of values for entries.
  const int32_t row = at.lane / 16 * 8 + at.lane % 8;
  const uint32_t to =
      shared_address(staged) + static_cast<uint32_t>(row * S::kStagedRowBytes + at.group * 128 +
                                                     at.warp * 32 + at.lane / 8 % 2 * 16);
#pragma unroll
  for (int32_t n = 0; n < S::kRowTiles; n += 2) {
    float2 normal[2];
    normal[0] = *reinterpret_cast<const float2*>(&shared.sums[8 * n + 2 * at.quad_lane]);
    normal[1] = *reinterpret_cast<const float2*>(&shared.sums[8 * n + 8 + 2 * at.quad_lane]);
#pragma unroll
    for (int32_t i = 0; i < kGroupSlices; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const float* const v = state[i] + 4 * n + 2 * j;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(v[0], normal[j / 2].x),
                                                          __fmul_rn(v[1], normal[j / 2].y));
        pairs[j] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      stmatrix_x4_transposed(to + n * 8 * S::kStagedRowBytes + i * 256, pairs[0], pairs[1],
                             pairs[2], pairs[3]);
    }
  }
  sync_threads<kAdders>(kAdderBarrier);
  constexpr int32_t kUnits = kRank / 8;
#pragma unroll 4
  for (int32_t i = thread_here(); i < S::kRows * kUnits; i += kAdders) {
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

// What this block does with one tile.
template <class S>
struct TileWork {
  const PagedAttentionParams& p;
  const Plan& plan;
  const BlockTile& tile;
  const TileRows& rows;
  std::byte* memory;

  [[nodiscard]] __device__ __forceinline__ int32_t split() const {
    return static_cast<int32_t>(blockIdx.y);
  }
  [[nodiscard]] __device__ __forceinline__ bool is_last(int32_t piece) const {
    return piece + tile.work.num_splits >= tile.work.num_pieces;
  }
  [[nodiscard]] __device__ __forceinline__ float* stored(int32_t piece) const {
    return plan.states + (int64_t{tile.index} * plan.capacity + piece) * S::kStateFloats;
  }
};

// The scorers' part of this block's pieces.
template <class S>
__device__ __forceinline__ void score_pieces(const TileWork<S>& of, const Ring& ring,
                                             SharedArrays<S>& shared, RingPlace<S>& place) {
  const uint32_t weights = uniform(shared_address(of.memory)) + S::kQBytes;
  const float scale = __fmul_rn(of.p.scale, kLog2E);
  float total_max = negative_infinity();  // of a thread's row
  int32_t turn = 0;
  bool is_first_chunk = true;
  for (int32_t piece = of.split(); piece < of.tile.work.num_pieces;
       piece += of.tile.work.num_splits) {
    float max = negative_infinity();
    for_each_sum<S>(position_of(thread_here()),
                    [&](int32_t row) { shared.sums[row] = shared.sums[row + 1] = 0.0f; });
    const int32_t end = of.tile.work.end_chunk(piece);
#pragma unroll 1
    for (int32_t chunk = of.tile.work.first_chunk(piece); chunk < end; ++chunk) {
      const Position at = position_of(thread_here());
      const RingPlace<S> of_chunk = {static_cast<int32_t>(uniform(place.slot)), place.parity};
      place = place.after(kSlices);
      Scores<S> s;
      // Uniform here, so that no descriptors of queries are kept from chunk to chunk.
      score<S>(ring, of_chunk, uniform(weights - S::kQBytes), s);
      // Adders do not need the slice that is no part of the values.
      if (at.lane == 0) barrier_arrive(&ring.empty[of_chunk.of_slice(kValueSlices).slot]);
      const int32_t first_key = chunk * kChunk;
      if (first_key + kChunk > of.tile.common_end) mask_scores<S>(of.rows, first_key, at, s);
      store_warp_maxima<S>(s, at, shared);
      sync_threads<kScorers>(kScorerBarrier);
      take_maxima<S>(scale, turn, at, max, shared);
      sync_threads<kScorers>(kScorerBarrier);
      uint32_t pairs[S::kRows / 4];
      make_weights<S>(scale, s, at, shared, pairs);
      // P of the chunk before, and the factors of the one before that, are read until then.
      if (!is_first_chunk) sync_threads<kConsumers>(kDoneBarrier);
      is_first_chunk = false;
      store_weights<S>(pairs, at, weights);
      fence_shared_for_wgmma();
      arrive_threads<kConsumers>(kReadyBarrier);
      sync_threads<kScorers>(kScorerBarrier);
      add_sums<S>(at, turn, weights, shared);
      turn ^= 1;
    }
    if (of.tile.work.stores_states) {
      store_rows<S>(max, position_of(thread_here()), shared, of.stored(piece));
    } else if (of.tile.work.num_pieces > 1) {
      add_rows_to_total<S>(piece == 0, position_of(thread_here()), max, total_max, shared);
    }
  }
  if (of.tile.work.stores_states) {
    finish_states();
  } else {
    store_normals<S>(position_of(thread_here()), shared);
  }
}

// The adders' part of this block's pieces.
template <class S>
__device__ __forceinline__ void add_pieces(const TileWork<S>& of, const Ring& ring,
                                           SharedArrays<S>& shared, RingPlace<S>& place) {
  const uint32_t weights = uniform(shared_address(of.memory)) + S::kQBytes;
  const Position at = position_of(static_cast<int32_t>(threadIdx.x));
  Values<S> state;
  int32_t turn = 0;
  int32_t piece = of.split();
  // There is a piece, and a piece has a chunk. Loops that could end at once would make the compiler
  // keep accumulators twice.
  do {
#pragma unroll
    for (int32_t i = 0; i < kGroupSlices; ++i) {
#pragma unroll
      for (int32_t n = 0; n < S::kRows / 2; ++n) state[i][n] = 0.0f;
    }
    const int32_t end = of.tile.work.end_chunk(piece);
    int32_t chunk = of.tile.work.first_chunk(piece);
#pragma unroll 1
    do {
      const RingPlace<S> of_chunk = {static_cast<int32_t>(uniform(place.slot)), place.parity};
      place = place.after(kSlices);
      sync_threads<kConsumers>(kReadyBarrier);
      add_values<S>(ring, of_chunk, turn, at, shared, weights, state);
      if (chunk + 1 < end || !of.is_last(piece)) arrive_threads<kConsumers>(kDoneBarrier);
      turn ^= 1;
    } while (++chunk < end);
    if (of.tile.work.stores_states) {
      store_values<S>(state, at, of.stored(piece));
    } else if (of.tile.work.num_pieces > 1) {
      const int32_t block = static_cast<int32_t>(blockIdx.y * gridDim.x + blockIdx.x);
      add_values_to_total<S>(piece == 0, of.is_last(piece), at, shared,
                             of.plan.totals + int64_t{block} * S::kStateFloats, state);
    }
    piece += of.tile.work.num_splits;
  } while (piece < of.tile.work.num_pieces);
  if (of.tile.work.stores_states) {
    finish_states();
    merge_states<S>(of.p, of.plan, of.tile.work, of.tile.index, of.rows, at,
                    reinterpret_cast<float4*>(of.memory));
  } else {
    store_results<S>(of.p, of.rows, state, at, shared, of.memory);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    latent_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                            const __grid_constant__ EntryMap entries,
                            const __grid_constant__ Plan plan) {
  extern __shared__ std::byte storage[];
  __shared__ SharedArrays<S> shared;
  __shared__ BlockTile tile;
  __shared__ alignas(16) int32_t row_end[S::kRows];
  __shared__ int32_t row_begin[S::kRows];
  __shared__ int32_t row_index[S::kRows];
  __shared__ int32_t row_head[S::kRows];
  static_assert(sizeof(shared) + sizeof(tile) + 4 * sizeof(int32_t) * S::kRows + S::kSharedBytes <=
                227 << 10);
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
  // Copiers need not wait for the queries that the predecessor makes.
  if (!p.reads_early) wait_for_predecessor();

  RingPlace<S> place;
  // Goes through this block's tiles; all threads call it.
  const auto for_each_tile = [&](const auto& compute) {
    auto next = static_cast<int32_t>(blockIdx.x);
    while (next < plan.num_tiles) {
      // Early, as the way to the first entry is a chain of latencies.
      const int32_t num_rows = min(__ldcg(p.num_rows), p.max_rows);
      Tile of_next;
      if (find_tile(p, plan, S::kRows, next, &of_next)) {
        sync_threads<kThreads>(kBlockBarrier);  // the tile before is no longer read
        const TileKeys keys = paged::read_rows<S>(p, of_next, num_rows, p.num_qo_heads, rows);
        if (thread == 0) {
          tile = {.index = next,
                  .seq_slot = keys.seq_slot,
                  .common_end = keys.common_end,
                  .end = keys.end,
                  .work = divide(plan, keys.end)};
          // Where tiles are split, a block has one tile at most.
          if (tile.work.stores_states && static_cast<int32_t>(blockIdx.y) < tile.work.num_splits) {
            count_begun(plan.counters + next);
          }
        }
        sync_threads<kThreads>(kBlockBarrier);
        if (static_cast<int32_t>(blockIdx.y) < tile.work.num_splits) compute();
        next = tile.index;
      }
      next += static_cast<int32_t>(gridDim.x);
    }
  };
  // The queries are loaded by all consumers.
  const auto begin_tile = [&] {
    wait_for_predecessor();
    load_queries<S>(p, rows, shared_address(memory));
    sync_threads<kConsumers>(kConsumerBarrier);
    return TileWork<S>{.p = p, .plan = plan, .tile = tile, .rows = rows, .memory = memory};
  };
  if (thread >= kConsumers) {
    give_registers<S::kCopierRegisters>();
    uint32_t landed_phases = 0;
    for_each_tile([&] {
      if (thread < kConsumers + kCopiers) {
        produce<S>(p, tile, entries, ring, place);
      } else if (thread < kConsumers + kCopiers + 32) {
        announce<S>(p, tile, entries, ring, place, landed_phases);
      }
    });
  } else if (thread >= kAdders) {
    give_registers<S::kScorerRegisters>();
    for_each_tile([&] {
      if (tile.work.num_chunks > 0) score_pieces<S>(begin_tile(), ring, shared, place);
    });
  } else {
    take_registers<S::kAdderRegisters>();
    for_each_tile([&] {
      if (tile.work.num_chunks > 0) {
        add_pieces<S>(begin_tile(), ring, shared, place);
        return;
      }
      // No row sees anything.
      wait_for_predecessor();
      for (int32_t i = thread_here(); i < S::kRows * (kRank / 8); i += kAdders) {
        const int32_t packed = i / (kRank / 8);
        if (rows.index[packed] < 0) continue;
        reinterpret_cast<uint4*>(output_of(p, rows, packed))[i % (kRank / 8)] =
            make_uint4(0, 0, 0, 0);
      }
    });
  }
  wait_for_predecessor();  // also where there was nothing to do
}

}  // namespace paceline::cuda::latent
