// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which part of a mixture's product a block computes. Expert rows are sorted by expert, and only
// the device knows how many each expert has. So the grid is fixed, large enough for any routing,
// and every block finds its tile in the list
//   expert by expert: columns of weights, and for each of them all tiles of the expert's rows.
// Neighbours thus read the same weights. Blocks beyond the list have nothing to do.
//
// A product of one matrix with all rows of a pass is a mixture of one expert, without expert_begin.

#include <algorithm>
#include <cstdint>

#include "common/reduce.cuh"

namespace paceline::cuda {

struct ExpertRows {
  const int32_t* expert_begin;  // [num_experts + 1]; null: one expert with all rows
  const int32_t* num_rows;      // [1] read without expert_begin
  int32_t num_experts;
  int32_t max_rows;
  int32_t column_tiles;
};

struct ExpertTile {
  int32_t expert;
  int32_t column_tile;
  int32_t first_row;
  int32_t num_rows;  // 0: the block has nothing to do
};

// An upper bound on the tiles of `tile_rows` rows: every expert that can have a row has one that is
// not full.
inline int64_t max_row_tiles(bool is_mixture, int32_t num_experts, int32_t max_rows,
                             int32_t tile_rows) {
  if (!is_mixture) return (max_rows + tile_rows - 1) / tile_rows;
  const int32_t hit = std::min(num_experts, max_rows);
  return hit + (max_rows - hit) / tile_rows;
}

// The column tile of a block of a product without expert_begin. It does not depend on the number of
// rows, so weights can be requested before that number is known.
__device__ __forceinline__ int32_t column_tile_of(const ExpertRows& rows, int32_t tile_rows) {
  const int32_t row_tiles = (rows.max_rows + tile_rows - 1) / tile_rows;
  return static_cast<int32_t>(blockIdx.x) / row_tiles;
}

// The tile of the calling block, the same in every thread of a warp; all threads of a warp call it,
// after wait_for_predecessor(). With kIsEarly they may call it before, for an expert_begin that is
// complete: it is read from L2, as L1 may have what an earlier kernel read.
template <bool kIsEarly = false>
__device__ __forceinline__ ExpertTile find_tile(const ExpertRows& rows, int32_t tile_rows) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  if (rows.expert_begin == nullptr) {
    const int32_t row_tiles = (rows.max_rows + tile_rows - 1) / tile_rows;
    const int32_t first_row = block % row_tiles * tile_rows;
    const int32_t num_rows = min(*rows.num_rows, rows.max_rows) - first_row;
    return {.expert = 0,
            .column_tile = block / row_tiles,
            .first_row = first_row,
            .num_rows = min(max(num_rows, 0), tile_rows)};
  }
  // Lanes take one expert each, 32 experts at a time; `before` counts the row tiles of those
  // before.
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  int32_t before = 0;
  for (int32_t first = 0; first < rows.num_experts; first += 32) {
    const int32_t expert = min(first + lane, rows.num_experts - 1);
    const auto begin_of = [&](int32_t e) {
      const int32_t* const from = rows.expert_begin + e;
      return min(kIsEarly ? __ldcg(from) : *from, rows.max_rows);
    };
    const int32_t begin = begin_of(expert);
    const int32_t end = begin_of(expert + 1);
    const int32_t count = first + lane < rows.num_experts ? max(end - begin, 0) : 0;
    const int32_t row_tiles = (count + tile_rows - 1) / tile_rows;
    int32_t through = row_tiles;  // of the lanes up to this one
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, through, step);
      if (lane >= step) through += other;
    }
    const bool is_below = block < (before + through) * rows.column_tiles;
    const uint32_t below = __ballot_sync(kAllLanes, is_below);
    if (below != 0) {
      const int32_t owner = __ffs(static_cast<int32_t>(below)) - 1;
      const int32_t at = block - (before + through - row_tiles) * rows.column_tiles;
      ExpertTile tile = {.expert = expert, .column_tile = 0, .first_row = begin, .num_rows = 0};
      if (lane == owner) {
        const int32_t skipped = at % row_tiles * tile_rows;
        tile.column_tile = at / row_tiles;
        tile.first_row = begin + skipped;
        tile.num_rows = min(count - skipped, tile_rows);
      }
      tile.expert = __shfl_sync(kAllLanes, tile.expert, owner);
      tile.column_tile = __shfl_sync(kAllLanes, tile.column_tile, owner);
      tile.first_row = __shfl_sync(kAllLanes, tile.first_row, owner);
      tile.num_rows = __shfl_sync(kAllLanes, tile.num_rows, owner);
      return tile;
    }
    before += __shfl_sync(kAllLanes, through, 31);
  }
  return {.expert = 0, .column_tile = 0, .first_row = 0, .num_rows = 0};
}

}  // namespace paceline::cuda
