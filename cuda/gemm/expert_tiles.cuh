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

#include "common/early_start.cuh"
#include "common/reduce.cuh"

namespace paceline::cuda {

struct ExpertRows {
  const int32_t* expert_begin;  // [num_experts + 1]; null: one expert with all rows
  const int32_t* num_rows;      // [1] read without expert_begin
  int32_t num_experts;
  int32_t max_rows;
  int32_t column_tiles;
  bool delays_successor = false;  // as in GemmParams; without expert_begin
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

// Looks for the tile of a block among the experts from `first` on, in kRounds rounds of one expert
// for each lane, whose loads are in flight together. `before` counts the row tiles of the experts
// before, and at the end those of the rounds, too. Returns whether it found the tile.
template <bool kIsEarly, int32_t kRounds>
__device__ __forceinline__ bool find_tile_from(const ExpertRows& rows, int32_t tile_rows,
                                               int32_t block, int32_t first, int32_t& before,
                                               ExpertTile& tile) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  int32_t begins[kRounds + 1];
#pragma unroll
  for (int32_t i = 0; i <= kRounds; ++i) {
    const int32_t* const from = rows.expert_begin + min(first + 32 * i + lane, rows.num_experts);
    begins[i] = min(kIsEarly ? __ldcg(from) : *from, rows.max_rows);
  }
  int32_t round = -1;  // of the block's tile
  int32_t begin = 0;
  int32_t count = 0;
  int32_t row_tiles = 0;
#pragma unroll
  for (int32_t i = 0; i < kRounds; ++i) {
    if (round >= 0 || first + 32 * i >= rows.num_experts) continue;
    begin = begins[i];
    // Of the expert in the next lane, which for the last lane is in the next round.
    const int32_t end = __shfl_sync(kAllLanes, lane == 0 ? begins[i + 1] : begin, lane + 1);
    count = max(end - begin, 0);
    row_tiles = (count + tile_rows - 1) / tile_rows;
    const int32_t through = before + __reduce_add_sync(kAllLanes, row_tiles);
    if (block < through * rows.column_tiles) {
      round = i;
    } else {
      before = through;
    }
  }
  if (round < 0) return false;
  const int32_t through = before + sum_up_to_lane(row_tiles, lane);
  const uint32_t below = __ballot_sync(kAllLanes, block < through * rows.column_tiles);
  const int32_t owner = __ffs(static_cast<int32_t>(below)) - 1;
  tile.expert = first + 32 * round + owner;
  if (lane == owner) {
    const int32_t at = block - (through - row_tiles) * rows.column_tiles;
    const int32_t skipped = at % row_tiles * tile_rows;
    tile.column_tile = at / row_tiles;
    tile.first_row = begin + skipped;
    tile.num_rows = min(count - skipped, tile_rows);
  }
  tile.column_tile = __shfl_sync(kAllLanes, tile.column_tile, owner);
  tile.first_row = __shfl_sync(kAllLanes, tile.first_row, owner);
  tile.num_rows = __shfl_sync(kAllLanes, tile.num_rows, owner);
  return true;
}

// The tile of a block, the same in every thread of a warp; all threads of a warp call it, after
// wait_for_predecessor(). With kIsEarly they may call it before, for an expert_begin that is
// complete: it is read from L2, as L1 may have what an earlier kernel read. Of a product with
// delays_successor it lets the successor start.
template <bool kIsEarly = false>
__device__ __forceinline__ ExpertTile find_tile(const ExpertRows& rows, int32_t tile_rows,
                                                int32_t block = static_cast<int32_t>(blockIdx.x)) {
  if (rows.expert_begin == nullptr) {
    if (rows.delays_successor) let_successor_start();
    const int32_t row_tiles = (rows.max_rows + tile_rows - 1) / tile_rows;
    const int32_t first_row = block % row_tiles * tile_rows;
    const int32_t num_rows = min(*rows.num_rows, rows.max_rows) - first_row;
    return {.expert = 0,
            .column_tile = block / row_tiles,
            .first_row = first_row,
            .num_rows = min(max(num_rows, 0), tile_rows)};
  }
  ExpertTile tile = {.expert = 0, .column_tile = 0, .first_row = 0, .num_rows = 0};
  int32_t before = 0;
  if (rows.num_experts <= 32) {
    find_tile_from<kIsEarly, 1>(rows, tile_rows, block, 0, before, tile);
    return tile;
  }
  constexpr int32_t kRounds = 9;  // for 256 experts and a shared one
#pragma unroll 1
  for (int32_t first = 0; first < rows.num_experts; first += 32 * kRounds) {
    if (find_tile_from<kIsEarly, kRounds>(rows, tile_rows, block, first, before, tile)) break;
  }
  return tile;
}

}  // namespace paceline::cuda
