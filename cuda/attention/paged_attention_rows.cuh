// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows of the batch a block of the paged attention kernel computes.

#include <cstdint>

#include "attention/paged_attention_shape.cuh"

namespace paceline::cuda::paged {

// The rows that a tile is made of.
struct Tile {
  int32_t first_row;  // of the sequence
  int32_t num_rows;   // of the sequence
  int32_t index;      // of the tile in the sequence
};

// Finds tile `at` in the row of all sequences' tiles; every lane of the warp gets the same answer.
__device__ __forceinline__ bool find_tile(const int32_t* row_indptr, int32_t num_seqs,
                                          int32_t heads_per_group, int32_t tile_rows, int32_t at,
                                          Tile* tile) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  for (int32_t first_seq = 0; first_seq < num_seqs; first_seq += 32) {
    const int32_t seq = first_seq + lane;
    const int32_t row = seq < num_seqs ? row_indptr[seq] : 0;
    const int32_t rows = seq < num_seqs ? row_indptr[seq + 1] - row : 0;
    const int32_t tiles = (rows * heads_per_group + tile_rows - 1) / tile_rows;
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
}  // namespace paceline::cuda::paged
