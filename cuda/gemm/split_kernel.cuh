// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products y = x W^T of few rows with one packed matrix of 4 or 8 bits: like narrow_kernel.cuh,
// with the same bits, for matrices that have only a few row tiles for each multiprocessor.
//
// There a warp that converts and multiplies its own weights takes twice as long as the chain of its
// sums, which must be added in order. So a block splits the work: four warps read and convert
// weights and leave the operands in shared memory; one copies tokens; and one does nothing but
// multiply. Shared memory is what they compete for, so weights go from the cache to registers.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/narrow_kernel.cuh"
#include "gemm/packed_elements.cuh"
#include "gemm/packed_weights.h"
#include "gemm/scale_args.h"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

// 16 or 32 rows of weights by at most 8 * token_tiles tokens.
template <WeightFormat format, int32_t row_tiles, int32_t token_tiles>
struct SplitShape {
  static constexpr WeightFormat kFormat = format;
  static constexpr int32_t kRowTiles = row_tiles;
  static constexpr int32_t kTokenTiles = token_tiles;
  static constexpr int32_t kTokens = 8 * token_tiles;
  static constexpr int32_t kRows = kPackedRows * kRowTiles;
  static constexpr int32_t kConverters = 4;
  static constexpr int32_t kThreads = 32 * (kConverters + 2);
  static constexpr int32_t kBlocks = 2;  // that share a multiprocessor

  // A group is what the converters hand over at once: two packed tiles of each of them. All
  // converters of a row tile share its columns.
  static constexpr int32_t kConvertersOfRow = kConverters / kRowTiles;
  static constexpr int32_t kGroupTiles = 2 * kConvertersOfRow;
  static constexpr int32_t kSteps = 4 * kGroupTiles;  // of 16 columns
  static constexpr int32_t kTileBytes = packed_tile_bytes(format);
  static constexpr bool kHasScaleBytes = format == WeightFormat::kMxfp4;
  static constexpr int32_t kGroupsAhead = 4;  // that a converter has requested

  // A slot has what the multiplying warp reads of a group: the operands, [row tile][step], and the
  // tokens.
  static constexpr int32_t kStepBytes = 512;
  static constexpr int32_t kGroupRowBytes = kGroupTiles * kPackedColumns * 2;
  static constexpr int32_t kTokensAt = kRowTiles * kSteps * kStepBytes;
  static constexpr int32_t kSlotBytes = kTokensAt + kTokens * kGroupRowBytes;
  static constexpr int32_t kSlots = 3;
  static constexpr int32_t kSharedBytes = kSlots * kSlotBytes;
  // Arrivals that complete a slot: one for each converter, and the lanes that copy.
  static constexpr int32_t kArrivals = kConverters + 32;
};

// The barriers of the slots.
struct SlotBarriers {
  uint64_t* full;   // a group is complete
  uint64_t* empty;  // it has been multiplied
};

// The next slot, and the parity of its phase.
template <class Shape>
struct SlotWalk {
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot < Shape::kSlots) return;
    slot = 0;
    parity ^= 1;
  }
};

// A lane's words of the two tiles of a converter in a group.
template <class Shape>
struct ConverterWords {
  static constexpr int32_t kParts = Shape::kTileBytes / 512;  // of 16 bytes
  uint4 words[2][kParts] = {};
  uint32_t scales[2] = {};  // of kMxfp4
};

// Reads the weights of a converter, group by group.
template <class Shape>
class ConverterReader {
 public:
  __device__ __forceinline__ ConverterReader(const PackedArgs& args, int32_t first_row,
                                             int32_t row_tile, int32_t part)
      : policy_(args.weight_policy),
        left_((args.k + kPackedColumns - 1) / kPackedColumns - 2 * part),
        tile_(2 * part) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t last_tile = (args.n - 1) / kPackedRows;
    const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
    // A tile behind the last one reads the last one; its outputs are not written.
    const int64_t first_tile =
        int64_t{min(first_row / kPackedRows + row_tile, last_tile)} * num_tiles + 2 * part;
    data_ = args.data + first_tile * Shape::kTileBytes + lane * 16;
    if constexpr (Shape::kHasScaleBytes) {
      scales_ = args.scales.scales + first_tile * kPackedScaleBytes + lane / 4 * 4;
    }
  }

  // Reads the tiles that the next group has.
  __device__ __forceinline__ void next(ConverterWords<Shape>& to) {
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
      if (t >= left_) break;
#pragma unroll
      for (int32_t part = 0; part < ConverterWords<Shape>::kParts; ++part) {
        to.words[t][part] = read_weights_16(data_ + t * Shape::kTileBytes + part * 512, policy_);
      }
      if constexpr (Shape::kHasScaleBytes) {
        to.scales[t] = read_weights_4(scales_ + t * kPackedScaleBytes, policy_);
      }
    }
    left_ -= Shape::kGroupTiles;
    tile_ += Shape::kGroupTiles;
    data_ += Shape::kGroupTiles * Shape::kTileBytes;
    if constexpr (Shape::kHasScaleBytes) scales_ += Shape::kGroupTiles * kPackedScaleBytes;
  }

 private:
  uint64_t policy_;
  int32_t left_;  // tiles of the row, from this converter's next ones on
  int32_t tile_;  // the first of these
  const std::byte* data_;
  const std::byte* scales_ = nullptr;
};

// The scales of kFp8 that are part of the values, of rows g and g + 8; read a group ahead. A scale
// is for 128 columns, the two tiles of a converter in a group, or for all columns.
template <class Shape>
class ConverterScales {
 public:
  __device__ __forceinline__ ConverterScales(const PackedArgs& args, int32_t first_row,
                                             int32_t row_tile, int32_t part)
      : columns_(args.scales.use == ScaleUse::kValues ? args.scales.columns : 0), column_(part) {
    if (columns_ == 0) return;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t row = min(first_row + row_tile * kPackedRows + lane / 4 + 8 * i, args.n - 1);
      rows_[i] = reinterpret_cast<const float*>(args.scales.scales) +
                 int64_t{row >> args.scales.row_shift} * columns_;
    }
    read();
  }

  __device__ __forceinline__ void next(float (&scales)[2]) {
    scales[0] = ahead_[0];
    scales[1] = ahead_[1];
    if (columns_ == 0) return;
    column_ += Shape::kConvertersOfRow;
    read();
  }

 private:
  __device__ __forceinline__ void read() {
    const int32_t column = min(column_, columns_ - 1);
    ahead_[0] = __ldg(rows_[0] + column);
    ahead_[1] = __ldg(rows_[1] + column);
  }

  int32_t columns_;  // 0: the values have no scales
  int32_t column_;
  const float* rows_[2] = {};
  float ahead_[2] = {1.0f, 1.0f};
};

// Converts a tile and stores its operands at `to`. kIsTwice: a scale needs its second factor.
template <class Shape, bool kIsTwice>
__device__ __forceinline__ void store_operands(const uint4 (&words)[ConverterWords<Shape>::kParts],
                                               uint32_t scale_bytes, const float (&scales)[2],
                                               uint32_t to) {
  RowMultipliers by[2];
  if constexpr (Shape::kFormat == WeightFormat::kFp8) {
    by[0] = by[1] = fp8_multipliers<kIsTwice>(scales[0], scales[1]);
  } else {
    by[0] = mxfp4_multipliers<kIsTwice>(scale_bytes, 0);
    by[1] = mxfp4_multipliers<kIsTwice>(scale_bytes, 1);
  }
#pragma unroll
  for (int32_t step = 0; step < 4; ++step) {
    uint32_t a[4];
    convert_step<Shape, kIsTwice>(words, step, by, a);
    store_shared_16(to + static_cast<uint32_t>(step * Shape::kStepBytes), a);
  }
}

// Converts the weights of a row tile: of each group the tiles 2 p and 2 p + 1, p being the
// converter's place among those of the row tile. Called by one warp.
template <class Shape>
__device__ __forceinline__ void convert_weights(const PackedArgs& args, int32_t first_row,
                                                int32_t converter, uint32_t shared,
                                                const SlotBarriers& barriers) {
  constexpr bool kIsFp8 = Shape::kFormat == WeightFormat::kFp8;
  constexpr int32_t kAhead = Shape::kGroupsAhead;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t row_tile = converter / Shape::kConvertersOfRow;
  const int32_t part = converter % Shape::kConvertersOfRow;
  const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
  const int32_t num_groups = (num_tiles + Shape::kGroupTiles - 1) / Shape::kGroupTiles;
  ConverterReader<Shape> reader(args, first_row, row_tile, part);
  ConverterWords<Shape> ahead[kAhead];
#pragma unroll
  for (int32_t i = 0; i < kAhead; ++i) reader.next(ahead[i]);
  ConverterScales<Shape> scale_reader(args, first_row, row_tile, part);
  const uint32_t to_first =
      shared + static_cast<uint32_t>(lane * 16 + (row_tile * Shape::kGroupTiles + 2 * part) * 4 *
                                                     Shape::kStepBytes);
  SlotWalk<Shape> to_fill;
  for (int32_t first_group = 0; first_group < num_groups; first_group += kAhead) {
#pragma unroll
    for (int32_t i = 0; i < kAhead; ++i) {
      const int32_t group = first_group + i;
      if (group >= num_groups) break;
      const ConverterWords<Shape> now = ahead[i];
      reader.next(ahead[i]);
      float scales[2] = {1.0f, 1.0f};
      if constexpr (kIsFp8) scale_reader.next(scales);
      // The first round finds the slots empty.
      if (group >= Shape::kSlots) barrier_wait(&barriers.empty[to_fill.slot], to_fill.parity ^ 1);
      const uint32_t to = to_first + static_cast<uint32_t>(to_fill.slot * Shape::kSlotBytes);
#pragma unroll
      for (int32_t t = 0; t < 2; ++t) {
        const int32_t tile = Shape::kGroupTiles * group + 2 * part + t;
        if (tile >= num_tiles) break;
        const uint32_t to_tile = to + static_cast<uint32_t>(4 * t * Shape::kStepBytes);
        using Elements = PackedElements<Shape::kFormat>;
        bool is_large;
        if constexpr (kIsFp8) {
          is_large = fmaxf(fabsf(scales[0]), fabsf(scales[1])) > Elements::kMaxScale;
        } else {
          is_large = (now.scales[t] & 0x80808080u) != 0;
        }
        if (is_large) {
          store_operands<Shape, true>(now.words[t], now.scales[t], scales, to_tile);
        } else {
          store_operands<Shape, false>(now.words[t], now.scales[t], scales, to_tile);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&barriers.full[to_fill.slot]);
      to_fill.advance();
    }
  }
}

// Copies tokens; called by one warp.
template <class Shape>
__device__ __forceinline__ void copy_tokens(const PackedArgs& args, const ExpertTile& tile,
                                            int32_t first_row, uint32_t shared,
                                            const SlotBarriers& barriers) {
  constexpr int32_t kPieces = Shape::kGroupRowBytes / 512;  // of 16 bytes a lane
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
  const int32_t num_groups = (num_tiles + Shape::kGroupTiles - 1) / Shape::kGroupTiles;
  const __nv_bfloat16* const x = args.x_of(first_row);
  const __nv_bfloat16* rows[Shape::kTokens];
#pragma unroll
  for (int32_t row = 0; row < Shape::kTokens; ++row) {
    const int32_t of_y = tile.first_row + min(row, max(tile.num_rows - 1, 0));
    const int64_t source = args.x_rows != nullptr ? args.x_rows[of_y] : of_y;
    rows[row] = x + source * args.x_stride;
  }
  SlotWalk<Shape> to_fill;
  for (int32_t group = 0; group < num_groups; ++group) {
    if (group >= Shape::kSlots) barrier_wait(&barriers.empty[to_fill.slot], to_fill.parity ^ 1);
    const uint32_t slot =
        shared + static_cast<uint32_t>(to_fill.slot * Shape::kSlotBytes + Shape::kTokensAt);
    // The lanes copy 512 bytes of a row together; columns beyond K are zero.
#pragma unroll
    for (int32_t piece = 0; piece < kPieces; ++piece) {
      const int32_t at = piece * 32 + lane;
      const int32_t column = group * Shape::kGroupTiles * kPackedColumns + at * 8;
      const bool is_inside = column < args.k;
#pragma unroll
      for (int32_t row = 0; row < Shape::kTokens; ++row) {
        if (row >= tile.num_rows) break;
        cp_async_16(
            slot + static_cast<uint32_t>(row * Shape::kGroupRowBytes + (at ^ (row % 8)) * 16),
            rows[row] + (is_inside ? column : 0), is_inside);
      }
    }
    arrive_after_copies(&barriers.full[to_fill.slot]);
    to_fill.advance();
  }
  cp_async_wait<0>();
}

// What a lane needs of four steps, which are 64 columns.
template <class Shape>
class StepOperands {
 public:
  static constexpr int32_t kSteps = 4;

  // Loads the steps from `first_step` on of the group in `slot`.
  __device__ __forceinline__ void load(uint32_t slot, int32_t first_step) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const uint32_t tokens = slot + Shape::kTokensAt;
#pragma unroll
    for (int32_t i = 0; i < kSteps; ++i) {
      const int32_t step = first_step + i;
      if constexpr (Shape::kTokenTiles == 1) {
        // Both halves of two steps.
        if (i % 2 == 0) {
          const int32_t piece = step * 2 + lane / 8;
          ldmatrix_x4(b_[i / 2], tokens + static_cast<uint32_t>(lane % 8 * Shape::kGroupRowBytes +
                                                                (piece ^ (lane % 8)) * 16));
        }
      } else {
        // Both halves of a step for two tiles of tokens.
        const int32_t piece = step * 2 + lane / 8 % 2;
#pragma unroll
        for (int32_t j = 0; j < kPairs; ++j) {
          const int32_t row = j * 16 + lane / 16 * 8 + lane % 8;
          ldmatrix_x4(b_[i * kPairs + j],
                      tokens + static_cast<uint32_t>(row * Shape::kGroupRowBytes +
                                                     (piece ^ (lane % 8)) * 16));
        }
      }
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint4 words =
            load_shared_16(slot + static_cast<uint32_t>(
                                      (r * Shape::kSteps + step) * Shape::kStepBytes + lane * 16));
        a_[i][r][0] = words.x;
        a_[i][r][1] = words.y;
        a_[i][r][2] = words.z;
        a_[i][r][3] = words.w;
      }
    }
  }

  // Multiplies steps `begin` to `end` - 1 of the four.
  __device__ __forceinline__ void multiply(int32_t begin, int32_t end,
                                           WarpSums<Shape>& sums) const {
#pragma unroll
    for (int32_t i = begin; i < end; ++i) {
#pragma unroll
      for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
        const uint32_t (&four)[4] = Shape::kTokenTiles == 1 ? b_[i / 2] : b_[i * kPairs + j / 2];
        const int32_t first = Shape::kTokenTiles == 1 ? i % 2 * 2 : j % 2 * 2;
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
          mma_16x8x16(sums[r][j], a_[i][r], four[first], four[first + 1]);
        }
      }
    }
  }

 private:
  static constexpr int32_t kPairs = (Shape::kTokenTiles + 1) / 2;
  static constexpr int32_t kTokenLoads = Shape::kTokenTiles == 1 ? kSteps / 2 : kSteps * kPairs;
  uint32_t a_[kSteps][Shape::kRowTiles][4];
  uint32_t b_[kTokenLoads][4];
};

// Multiplies what the other warps leave; called by one warp. While it multiplies a tile of 64
// columns, the next one is on its way to registers.
template <class Shape>
__device__ __forceinline__ void multiply_operands(const PackedArgs& args, uint32_t shared,
                                                  const SlotBarriers& barriers,
                                                  WarpSums<Shape>& sums) {
  using Operands = StepOperands<Shape>;
  constexpr int32_t kTiles = Shape::kGroupTiles;
  static_assert(kTiles % 2 == 0 && kTiles * Operands::kSteps == Shape::kSteps);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const auto slot_at = [&](const SlotWalk<Shape>& walk) {
    return shared + static_cast<uint32_t>(walk.slot * Shape::kSlotBytes);
  };
  SlotWalk<Shape> full;
  Operands operands[2];
  barrier_wait(&barriers.full[0], 0);
  operands[0].load(shared, 0);
  int32_t left = (args.k + kPackedColumns - 1) / kPackedColumns;  // tiles
  for (; left > kTiles; left -= kTiles) {
    const uint32_t slot = slot_at(full);
    SlotWalk<Shape> next = full;
    next.advance();
#pragma unroll
    for (int32_t tile = 0; tile < kTiles; ++tile) {
      Operands& now = operands[tile % 2];
      Operands& then = operands[(tile + 1) % 2];
      // The first product hides the wait, and the others the loads.
      now.multiply(0, 1, sums);
      if (tile + 1 < kTiles) {
        then.load(slot, (tile + 1) * Operands::kSteps);
      } else {
        // All of this group is in registers.
        __syncwarp();
        if (is_first_lane) barrier_arrive(&barriers.empty[full.slot]);
        barrier_wait(&barriers.full[next.slot], next.parity);
        then.load(slot_at(next), 0);
      }
      now.multiply(1, Operands::kSteps, sums);
    }
    full = next;
  }
  const uint32_t slot = slot_at(full);
#pragma unroll
  for (int32_t tile = 0; tile < kTiles; ++tile) {
    if (tile >= left) break;
    // A tile that the last group does not have is loaded and not multiplied.
    if (tile + 1 < kTiles) operands[(tile + 1) % 2].load(slot, (tile + 1) * Operands::kSteps);
    operands[tile % 2].multiply(0, Operands::kSteps, sums);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    split_gemm_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ uint64_t full[Shape::kSlots];
  __shared__ uint64_t empty[Shape::kSlots];
  const SlotBarriers barriers = {.full = full, .empty = empty};
  const uint32_t shared = shared_address(storage);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int32_t slot = 0; slot < Shape::kSlots; ++slot) {
      barrier_init(&full[slot], Shape::kArrivals);
      barrier_init(&empty[slot], 1);
    }
  }
  __syncthreads();
  if (!args.rows.delays_successor) let_successor_start();
  const int32_t first_row = column_tile_of(args.rows, Shape::kTokens) * Shape::kRows;
  if (warp < Shape::kConverters) {
    convert_weights<Shape>(args, first_row, warp, shared, barriers);
    wait_for_predecessor();
    return;
  }
  wait_for_predecessor();
  const ExpertTile tile = find_tile(args.rows, Shape::kTokens);
  if (warp == Shape::kConverters) {
    copy_tokens<Shape>(args, tile, first_row, shared, barriers);
    return;
  }
  WarpSums<Shape> sums = {};
  multiply_operands<Shape>(args, shared, barriers, sums);
  if constexpr (Shape::kFormat == WeightFormat::kFp8) {
    if (args.scales.use == ScaleUse::kRowSums) {
      LaneScales<Shape> scales(args.scales, tile.expert, first_row, args.n);
      scales.advance(0);
      multiply_by_scales<Shape>(scales, sums);
    }
  }
  write_sums<Shape>(args, tile, first_row, sums);
}

}  // namespace paceline::cuda
