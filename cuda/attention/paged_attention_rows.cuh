// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows of the batch, and which chunks of keys, a block of the paged attention kernel
// computes.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/paged_attention_shape.cuh"
#include "ops/ops.h"

namespace paceline::cuda::paged {

// The rows of a sequence, and the tile's index among the tiles of that sequence.
struct Tile {
  int32_t first_row;
  int32_t num_rows;
  int32_t index;
};

// The packed rows of a tile: arrays in shared memory.
struct TileRows {
  int32_t* begin;  // visible keys; both 0: inert
  int32_t* end;
  int32_t* index;  // row of the batch, -1: none
  int32_t* head;   // query head in the group

  __device__ __forceinline__ bool is_live(int32_t packed) const { return end[packed] > 0; }
};

// The keys that the live rows of a tile see, and the rows' sequence slot. Here and in SliceRing the
// order of the members matters: it enters the compiler's allocation of registers.
struct TileKeys {
  int32_t seq_slot = -1;
  int32_t common_end = kIntMax;  // all of them see [common_begin, common_end)
  int32_t common_begin = 0;
  int32_t end = 0;          // one past the last key that any of them sees
  int32_t begin = kIntMax;  // first key that any of them sees
};

// The chunks of a tile. This block takes chunks first + split, first + split + num_splits, ...
struct Chunks {
  int32_t first;
  int32_t end;
  int32_t split;
  int32_t num_splits;
};

// Finds tile `at` in the list of the tiles of all sequences with at least min_rows and at most
// max_rows rows; every lane of the warp gets the same answer.
__device__ __forceinline__ bool find_tile(const int32_t* row_indptr, int32_t num_seqs,
                                          int32_t heads_per_group, int32_t tile_rows, int32_t at,
                                          Tile* tile, int32_t min_rows = 0,
                                          int32_t max_rows = kIntMax) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  for (int32_t first_seq = 0; first_seq < num_seqs; first_seq += 32) {
    const int32_t seq = first_seq + lane;
    const int32_t row = seq < num_seqs ? __ldcg(row_indptr + seq) : 0;
    const int32_t rows = seq < num_seqs ? __ldcg(row_indptr + seq + 1) - row : 0;
    const bool is_listed = rows >= min_rows && rows <= max_rows;
    const int32_t tiles = is_listed ? (rows * heads_per_group + tile_rows - 1) / tile_rows : 0;
    int32_t end = tiles;  // of this sequence's tiles among those of the 32 sequences
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t before = __shfl_up_sync(kFullWarp, end, step);
      if (lane >= step) end += before;
    }
    const uint32_t hits = __ballot_sync(kFullWarp, at < end);
    if (hits != 0) {
      const int32_t source = __ffs(static_cast<int>(hits)) - 1;
      tile->first_row = __shfl_sync(kFullWarp, row, source);
      tile->num_rows = __shfl_sync(kFullWarp, rows, source);
      tile->index = at - __shfl_sync(kFullWarp, end - tiles, source);
      return true;
    }
    at -= __shfl_sync(kFullWarp, end, 31);
  }
  return false;
}

// Returns the keys that the rows of a tile see, by a warp, which fills `rows` if it is the one that
// does.
template <class S>
__device__ __forceinline__ TileKeys read_rows_by_warp(const PagedAttentionParams& p,
                                                      const Tile& tile, int32_t num_rows,
                                                      int32_t heads_per_group, bool fills,
                                                      const TileRows& rows) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t first_packed = tile.index * S::kRows;
  TileKeys keys;
#pragma unroll
  for (int32_t packed = lane; packed < S::kRows; packed += 32) {
    const int32_t row_of_seq = (first_packed + packed) / heads_per_group;
    const int32_t row = tile.first_row + row_of_seq;
    const bool exists = row_of_seq < tile.num_rows && row < num_rows;
    int32_t begin = 0;
    int32_t end = 0;
    if (exists) {
      const int32_t seq_slot = __ldcg(p.seq_slot + row);
      end = __ldcg(p.kv_end + row);
      if (p.kv_begin != nullptr) begin = max(__ldcg(p.kv_begin + row), 0);
      if (seq_slot < 0 || begin >= end) {
        begin = 0;
        end = 0;
      } else {
        keys.seq_slot = seq_slot;
        keys.begin = min(keys.begin, begin);
        keys.end = max(keys.end, end);
        keys.common_begin = max(keys.common_begin, begin);
        keys.common_end = min(keys.common_end, end);
      }
    }
    if (fills) {
      rows.begin[packed] = begin;
      rows.end[packed] = end;
      rows.index[packed] = exists ? row : -1;
      rows.head[packed] = (first_packed + packed) - row_of_seq * heads_per_group;
    }
  }
  __syncwarp();
  keys.begin = __reduce_min_sync(kFullWarp, keys.begin);
  keys.end = __reduce_max_sync(kFullWarp, keys.end);
  keys.common_begin = __reduce_max_sync(kFullWarp, keys.common_begin);
  keys.common_end = __reduce_min_sync(kFullWarp, keys.common_end);
  keys.seq_slot = __reduce_max_sync(kFullWarp, keys.seq_slot);
  return keys;
}

// The same by all warps of the block: every warp computes the keys for itself, which saves a wait.
// Ends with a barrier.
template <class S>
__device__ __forceinline__ TileKeys read_rows(const PagedAttentionParams& p, const Tile& tile,
                                              int32_t num_rows, int32_t heads_per_group,
                                              const TileRows& rows) {
  const TileKeys keys = read_rows_by_warp<S>(p, tile, num_rows, heads_per_group,
                                             /*fills=*/threadIdx.x / 32 == 0, rows);
  __syncthreads();
  return keys;
}

// A tile without a key has no chunks, and one split.
__device__ __forceinline__ Chunks chunks_of_block(const Plan& plan, const TileKeys& keys) {
  const bool is_live = keys.begin < keys.end;
  const int32_t first = is_live ? keys.begin / kChunk : 0;
  const int32_t end = is_live ? (keys.end - 1) / kChunk + 1 : 0;
  const int32_t num_chunks = end - first;
  int32_t num_splits = 1;
  if (gridDim.z > 1 && (plan.takes_turns || num_chunks <= plan.chunk_capacity)) {
    num_splits = max(min(static_cast<int32_t>(gridDim.z), num_chunks), 1);
  }
  return {.first = first,
          .end = end,
          .split = static_cast<int32_t>(blockIdx.z),
          .num_splits = num_splits};
}

// Where the results of a tile go.
template <class S>
struct TileOutput {
  const PagedAttentionParams& p;
  int32_t kv_head;
  int32_t heads_per_group;
  const TileRows& rows;

  __device__ __forceinline__ __nv_bfloat16* of(int32_t packed) const {
    const int64_t head = int64_t{kv_head} * heads_per_group + rows.head[packed];
    return static_cast<__nv_bfloat16*>(p.y) +
           (int64_t{rows.index[packed]} * p.num_qo_heads + head) * S::kHeadDim;
  }

  // Rows that exist but see no key become zero.
  __device__ __forceinline__ void zero_inert_rows() const {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < S::kRows * S::kHeadUnits;
         i += kThreads) {
      const int32_t packed = i / S::kHeadUnits;
      if (rows.index[packed] < 0 || rows.is_live(packed)) continue;
      reinterpret_cast<uint4*>(of(packed))[i % S::kHeadUnits] = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace paceline::cuda::paged
