// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of few rows with packed fp8 weights whose scales multiply the sums of 128 columns. Those
// sums begin anew for every 128 columns, so the four warps of a block take them by turns for the
// same 16 rows of weights. After every round the block adds up the scaled sums in the order of K:
// the bits are those of narrow_kernel.cuh.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/narrow_kernel.cuh"
#include "gemm/packed_elements.cuh"
#include "gemm/packed_weights.h"

namespace paceline::cuda {

// 16 rows of weights by at most 8 * token_tiles tokens.
template <int32_t token_tiles>
struct PartsShape : NarrowShape<WeightFormat::kFp8, token_tiles, 4, 4> {
  using Base = NarrowShape<WeightFormat::kFp8, token_tiles, 4, 4>;
  static constexpr int32_t kWarps = 4;
  static constexpr int32_t kRows = kPackedRows;
  static constexpr int32_t kGroupStep = kWarps;
  static_assert(Base::kChunkGroups == kWarps, "a chunk of tokens is what a round needs");

  // The sums of a round: [warp][token][kPitch], rows in front. The pitch spreads what the lanes of
  // a warp store over all banks. Two rounds take turns.
  static constexpr int32_t kPitch = 20;
  static constexpr int32_t kPartFloats = Base::kTokens * kPitch;  // of a warp
  static constexpr int32_t kPartsAt = Base::kSharedBytes;
  static constexpr int32_t kSharedBytes = kPartsAt + 2 * kWarps * kPartFloats * 4;
};

// The sums that a thread adds up: of row `row` of the tile and tokens `token`, `token + 8`, ...
template <class Shape>
class ThreadSums {
 public:
  __device__ __forceinline__ ThreadSums(const PackedArgs& args, int32_t first_row) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    row_ = thread % kPackedRows;
    token_ = thread / kPackedRows;
    const int32_t row = min(first_row + row_, args.n - 1);
    last_column_ = args.scales.columns - 1;
    scales_ = reinterpret_cast<const float*>(args.scales.scales) +
              int64_t{row >> args.scales.row_shift} * args.scales.columns;
    load_scales(0);
  }

  // Adds the sums of round `round`, whose first `num_parts` warps had columns.
  __device__ __forceinline__ void add(const float* parts, int32_t round, int32_t num_parts) {
    float scales[Shape::kWarps];
#pragma unroll
    for (int32_t w = 0; w < Shape::kWarps; ++w) scales[w] = next_[w];
    load_scales(round + 1);
#pragma unroll
    for (int32_t w = 0; w < Shape::kWarps; ++w) {
      if (w >= num_parts) break;
#pragma unroll
      for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
        const float part = parts[w * Shape::kPartFloats + (token_ + 8 * j) * Shape::kPitch + row_];
        sums_[j] = __fmaf_rn(scales[w], part, sums_[j]);
      }
    }
  }

  __device__ __forceinline__ void write(const PackedArgs& args, const ExpertTile& tile,
                                        int32_t first_row) const {
    const int32_t column = first_row + row_;
    if (column >= args.n) return;
    const float bias = args.bias != nullptr ? args.bias[column] : 0.0f;
#pragma unroll
    for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
      const int32_t token = token_ + 8 * j;
      if (token >= tile.num_rows) break;
      store_output(args, (tile.first_row + token) * args.y_stride + column,
                   __fadd_rn(sums_[j], bias));
    }
  }

 private:
  __device__ __forceinline__ void load_scales(int32_t round) {
#pragma unroll
    for (int32_t w = 0; w < Shape::kWarps; ++w) {
      next_[w] = __ldg(scales_ + min(round * Shape::kWarps + w, last_column_));
    }
  }

  int32_t row_;
  int32_t token_;
  int32_t last_column_;
  const float* scales_;
  float next_[Shape::kWarps];  // of the next round
  float sums_[Shape::kTokenTiles] = {};
};

// One matrix only: args.rows has no expert_begin.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    parts_gemm_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte packed_storage[];
  constexpr int32_t kRoundsAhead = Shape::kChunkSlots - 1;
  auto* const parts = reinterpret_cast<float*>(packed_storage + Shape::kPartsAt);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const uint32_t tokens_at = shared_address(packed_storage);
  const uint32_t weights_at =
      tokens_at + static_cast<uint32_t>(Shape::kTokensBytes + warp * Shape::kWarpBytes);
  if (!args.rows.delays_successor) let_successor_start();
  const int32_t first_row = column_tile_of(args.rows, Shape::kTokens) * Shape::kRows;
  LaneWeights<Shape> weights(args, 0, first_row, weights_at, warp);
  const int32_t num_tiles = weights.num_tiles();
  const int32_t num_groups = (num_tiles + 1) / 2;
  const int32_t num_rounds = (num_groups + Shape::kWarps - 1) / Shape::kWarps;
#pragma unroll
  for (int32_t slot = 0; slot < Shape::kSlots; ++slot) {
    weights.request(slot * Shape::kWarps + warp, slot);
    cp_async_commit();
  }
  ThreadSums<Shape> sums(args, first_row);
  wait_for_predecessor();
  const ExpertTile tile = find_tile(args.rows, Shape::kTokens);
  const ChunkCopier<Shape> tokens(args, tile, tokens_at);
  for (int32_t round = 0; round < kRoundsAhead; ++round) tokens.request(round);
  cp_async_commit();

  const RowMultipliers one = fp8_multipliers<false>(1.0f, 1.0f);
  const RowMultipliers by[1][2] = {{one, one}};
  int32_t slot = 0;
  for (int32_t round = 0; round < num_rounds; ++round) {
    // Round r commits the tokens of round r + kRoundsAhead, and weights of a later one.
    if (round == 0) {
      cp_async_wait<0>();
    } else {
      cp_async_wait<kRoundsAhead - 1>();
    }
    __syncthreads();  // the tokens of this round and the sums of the last are complete
    tokens.request(round + kRoundsAhead);
    LaneGroup<Shape> group;
    weights.load(slot, group);
    weights.request((round + Shape::kSlots) * Shape::kWarps + warp, slot);
    cp_async_commit();
    if (++slot == Shape::kSlots) slot = 0;
    if (round > 0) {
      sums.add(parts + (round - 1) % 2 * Shape::kWarps * Shape::kPartFloats, round - 1,
               Shape::kWarps);
    }
    const int32_t first_tile = 2 * (round * Shape::kWarps + warp);
    if (first_tile >= num_tiles) continue;
    WarpSums<Shape> part = {};
    const uint32_t chunk =
        tokens_at + static_cast<uint32_t>(round % Shape::kChunkSlots * Shape::kChunkBytes);
    multiply_tile<Shape, false>(group, 0, by, chunk, 8 * warp, part);
    if (first_tile + 1 < num_tiles) {
      multiply_tile<Shape, false>(group, 1, by, chunk, 8 * warp + 4, part);
    }
    float* const to = parts + (round % 2 * Shape::kWarps + warp) * Shape::kPartFloats +
                      lane % 4 * 2 * Shape::kPitch + lane / 4;
#pragma unroll
    for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
      float* const of_tile = to + 8 * j * Shape::kPitch;
      of_tile[0] = part[0][j][0];
      of_tile[Shape::kPitch] = part[0][j][1];
      of_tile[8] = part[0][j][2];
      of_tile[Shape::kPitch + 8] = part[0][j][3];
    }
  }
  __syncthreads();
  sums.add(parts + (num_rounds - 1) % 2 * Shape::kWarps * Shape::kPartFloats, num_rounds - 1,
           num_groups - (num_rounds - 1) * Shape::kWarps);
  sums.write(args, tile, first_row);
  cp_async_wait<0>();
}

}  // namespace paceline::cuda
