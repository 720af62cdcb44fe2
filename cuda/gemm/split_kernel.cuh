// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products y = x W_e^T of few rows with few packed weights of 4 or 8 bits: like narrow_kernel.cuh,
// with the same bits, for matrices that have only a few row tiles for each multiprocessor.
//
// There a warp that converts and multiplies its own weights takes twice as long as the chain of its
// sums, which must be added in order. So a block of 32 rows of weights splits the work: four warps
// convert, two for each row tile, and leave the operands in shared memory; one copies tokens and
// scales; and one does nothing but multiply.

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

// 32 rows of weights by at most 8 * token_tiles tokens.
template <WeightFormat format, int32_t token_tiles>
struct SplitShape {
  static constexpr WeightFormat kFormat = format;
  static constexpr int32_t kRowTiles = 2;
  static constexpr int32_t kTokenTiles = token_tiles;
  static constexpr int32_t kTokens = 8 * token_tiles;
  static constexpr int32_t kRows = kPackedRows * kRowTiles;
  static constexpr int32_t kConverters = 4;
  static constexpr int32_t kThreads = 32 * (kConverters + 2);

  // A group is what a converter hands over at once: two packed tiles of its row tile. Its row tile
  // has another converter, so a group has 256 columns.
  static constexpr int32_t kGroupTiles = 4;
  static constexpr int32_t kTileBytes = packed_tile_bytes(format);
  static constexpr bool kHasScaleBytes = format == WeightFormat::kMxfp4;
  static constexpr int32_t kSlotTileBytes = kTileBytes + (kHasScaleBytes ? 128 : 0);
  static constexpr int32_t kWeightSlots = 6;  // groups in flight
  static constexpr int32_t kConverterBytes = kWeightSlots * 2 * kSlotTileBytes;

  // What the multiplying warp reads of a group: the operands of both row tiles, [tile][step], the
  // tokens, and the scales of its two tiles of 128 columns, [row][2].
  static constexpr int32_t kStepBytes = 512;
  static constexpr int32_t kOperandBytes = kRowTiles * kGroupTiles * 4 * kStepBytes;
  static constexpr int32_t kGroupRowBytes = kGroupTiles * kPackedColumns * 2;
  static constexpr int32_t kTokensAt = kOperandBytes;
  static constexpr int32_t kScalesAt = kTokensAt + kTokens * kGroupRowBytes;
  static constexpr int32_t kSlotBytes = kScalesAt + kRows * 8;
  static constexpr int32_t kSlots = 4;

  static constexpr int32_t kWeightsAt = kSlots * kSlotBytes;
  static constexpr int32_t kSharedBytes = kWeightsAt + kConverters * kConverterBytes;
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

__device__ __forceinline__ void copy_scale(uint32_t to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Converts the weights of a row tile: the tiles 4 i + 2 h and 4 i + 2 h + 1 along k, h being 0
// or 1.
template <class Shape, bool kHasTileSums>
__device__ __forceinline__ void convert_weights(const PackedArgs& args, int32_t expert,
                                                int32_t first_row, int32_t converter,
                                                uint32_t shared, const SlotBarriers& barriers) {
  constexpr bool kIsFp8 = Shape::kFormat == WeightFormat::kFp8;
  constexpr int32_t kParts = Shape::kTileBytes / 512;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t row_tile = converter / 2;
  const int32_t half = converter % 2;
  const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
  const int32_t num_groups = (num_tiles + Shape::kGroupTiles - 1) / Shape::kGroupTiles;
  const int32_t last_tile = (args.n - 1) / kPackedRows;
  const int64_t first_tile =
      int64_t{min(first_row / kPackedRows + row_tile, last_tile)} * num_tiles + 2 * half;
  const std::byte* data =
      args.data + expert * args.data_stride + first_tile * Shape::kTileBytes + lane * 16;
  const std::byte* scale_bytes = nullptr;
  if constexpr (Shape::kHasScaleBytes) {
    scale_bytes = args.scales.scales + expert * args.scales.expert_stride +
                  first_tile * kPackedScaleBytes + lane / 4 * 4;
  }
  const uint32_t weights_at =
      shared + Shape::kWeightsAt + static_cast<uint32_t>(converter * Shape::kConverterBytes);
  const uint32_t weights_16 = weights_at + static_cast<uint32_t>(lane) * 16;
  const uint32_t weights_4 = weights_at + static_cast<uint32_t>(lane) * 4 + Shape::kTileBytes;
  const auto request = [&](int32_t group, int32_t slot) {
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
      if (Shape::kGroupTiles * group + 2 * half + t >= num_tiles) break;
      const auto at = static_cast<uint32_t>((2 * slot + t) * Shape::kSlotTileBytes);
#pragma unroll
      for (int32_t part = 0; part < kParts; ++part) {
        copy_weights_16(weights_16 + at + part * 512, data + t * Shape::kTileBytes + part * 512,
                        args.weight_policy);
      }
      if constexpr (Shape::kHasScaleBytes) {
        copy_weights_4(weights_4 + at, scale_bytes + t * kPackedScaleBytes, args.weight_policy);
      }
    }
    data += Shape::kGroupTiles * Shape::kTileBytes;
    if constexpr (Shape::kHasScaleBytes) scale_bytes += Shape::kGroupTiles * kPackedScaleBytes;
    cp_async_commit();
  };
#pragma unroll
  for (int32_t slot = 0; slot < Shape::kWeightSlots; ++slot) request(slot, slot);

  // A scale of kFp8 is for 128 columns, the two tiles of this converter in a group, or for all.
  const float* scale_rows[2] = {};
  if constexpr (kIsFp8 && !kHasTileSums) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t row = min(first_row + row_tile * kPackedRows + lane / 4 + 8 * i, args.n - 1);
      scale_rows[i] =
          reinterpret_cast<const float*>(args.scales.scales + expert * args.scales.expert_stride) +
          int64_t{row >> args.scales.row_shift} * args.scales.columns;
    }
  }
  int32_t slot = 0;
  SlotWalk<Shape> to_fill;
  for (int32_t group = 0; group < num_groups; ++group) {
    float scales[2] = {1.0f, 1.0f};
    if constexpr (kIsFp8 && !kHasTileSums) {
      if (args.scales.use == ScaleUse::kValues) {
        const int32_t column = min(2 * group + half, args.scales.columns - 1);
        scales[0] = __ldg(scale_rows[0] + column);
        scales[1] = __ldg(scale_rows[1] + column);
      }
    }
    cp_async_wait<Shape::kWeightSlots - 1>();
    uint4 words[2][kParts];
    uint32_t bytes[2] = {};
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
      const auto at = static_cast<uint32_t>((2 * slot + t) * Shape::kSlotTileBytes);
#pragma unroll
      for (int32_t part = 0; part < kParts; ++part) {
        words[t][part] = load_shared_16(weights_16 + at + part * 512);
      }
      if constexpr (Shape::kHasScaleBytes) bytes[t] = load_shared_4(weights_4 + at);
    }
    request(group + Shape::kWeightSlots, slot);
    if (++slot == Shape::kWeightSlots) slot = 0;
    // The first round finds the slots empty.
    if (group >= Shape::kSlots) barrier_wait(&barriers.empty[to_fill.slot], to_fill.parity ^ 1);
    const uint32_t to =
        shared +
        static_cast<uint32_t>(to_fill.slot * Shape::kSlotBytes + lane * 16 +
                              (row_tile * Shape::kGroupTiles + 2 * half) * 4 * Shape::kStepBytes);
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
      if (Shape::kGroupTiles * group + 2 * half + t >= num_tiles) break;
      const auto store = [&]<bool kIsTwice>() {
        RowMultipliers by[2];
        if constexpr (kIsFp8) {
          by[0] = by[1] = fp8_multipliers<kIsTwice>(scales[0], scales[1]);
        } else {
          by[0] = mxfp4_multipliers<kIsTwice>(bytes[t], 0);
          by[1] = mxfp4_multipliers<kIsTwice>(bytes[t], 1);
        }
#pragma unroll
        for (int32_t step = 0; step < 4; ++step) {
          uint32_t a[4];
          convert_step<Shape, kIsTwice>(words[t], step, by, a);
          store_shared_16(to + static_cast<uint32_t>((4 * t + step) * Shape::kStepBytes), a);
        }
      };
      using Elements = PackedElements<Shape::kFormat>;
      bool is_large;
      if constexpr (kIsFp8) {
        is_large = fabsf(scales[0]) > Elements::kMaxScale || fabsf(scales[1]) > Elements::kMaxScale;
      } else {
        is_large = (bytes[t] & 0x80808080u) != 0;
      }
      is_large ? store.template operator()<true>() : store.template operator()<false>();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&barriers.full[to_fill.slot]);
    to_fill.advance();
  }
}

// Copies tokens and, with kHasTileSums, scales; called by one warp.
template <class Shape, bool kHasTileSums>
__device__ __forceinline__ void copy_tokens(const PackedArgs& args, const ExpertTile& tile,
                                            int32_t first_row, uint32_t shared,
                                            const SlotBarriers& barriers) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
  const int32_t num_groups = (num_tiles + Shape::kGroupTiles - 1) / Shape::kGroupTiles;
  const __nv_bfloat16* const x = args.x_of(first_row);
  const __nv_bfloat16* rows[Shape::kTokens];
#pragma unroll
  for (int32_t row = 0; row < Shape::kTokens; ++row) {
    const int32_t of_y = tile.first_row + min(row, max(tile.num_rows - 1, 0));
    const int64_t source = args.x_rows != nullptr ? args.x_rows[of_y] : of_y;
    rows[row] = x + source * args.x_stride + lane * 8;
  }
  const int32_t scale_row = min(first_row + lane, args.n - 1) >> args.scales.row_shift;
  const float* const scales =
      reinterpret_cast<const float*>(args.scales.scales + tile.expert * args.scales.expert_stride) +
      int64_t{scale_row} * args.scales.columns;
  SlotWalk<Shape> to_fill;
  for (int32_t group = 0; group < num_groups; ++group) {
    if (group >= Shape::kSlots) barrier_wait(&barriers.empty[to_fill.slot], to_fill.parity ^ 1);
    const uint32_t slot = shared + static_cast<uint32_t>(to_fill.slot * Shape::kSlotBytes);
    // The lanes copy a row's 512 bytes of a group together; columns beyond K are zero.
    const int32_t first_column = group * Shape::kGroupTiles * kPackedColumns;
    const bool is_inside = first_column + lane * 8 < args.k;
    const int32_t from = is_inside ? first_column : -lane * 8;
#pragma unroll
    for (int32_t row = 0; row < Shape::kTokens; ++row) {
      if (row >= tile.num_rows) break;
      cp_async_16(slot + static_cast<uint32_t>(Shape::kTokensAt + row * Shape::kGroupRowBytes +
                                               (lane ^ (row % 8)) * 16),
                  rows[row] + from, is_inside);
    }
    if constexpr (kHasTileSums) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        copy_scale(slot + static_cast<uint32_t>(Shape::kScalesAt + lane * 8 + i * 4),
                   scales + min(2 * group + i, args.scales.columns - 1));
      }
    }
    arrive_after_copies(&barriers.full[to_fill.slot]);
    to_fill.advance();
  }
  cp_async_wait<0>();
}

// What a lane needs of half a group: the operands of 128 columns.
template <class Shape>
struct HalfGroup {
  static constexpr int32_t kTokenLoads = Shape::kTokenTiles == 1 ? 4 : 4 * Shape::kTokenTiles;
  uint32_t a[8][Shape::kRowTiles][4];
  uint32_t b[kTokenLoads][4];
  float scales[2 * Shape::kRowTiles];

  // `half`: 0 or 1. Tiles that a group does not have are loaded as well.
  template <bool kHasTileSums>
  __device__ __forceinline__ void load(uint32_t slot, int32_t half) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const uint32_t operands = slot + static_cast<uint32_t>(lane * 16);
    const uint32_t tokens = slot + Shape::kTokensAt;
#pragma unroll
    for (int32_t step = 0; step < 8; ++step) {
      const int32_t at = 8 * half + step;
      if constexpr (Shape::kTokenTiles == 1) {
        // Both halves of two steps.
        if (step % 2 == 0) {
          const int32_t piece = at * 2 + lane / 8;
          ldmatrix_x4(b[step / 2], tokens + static_cast<uint32_t>(lane % 8 * Shape::kGroupRowBytes +
                                                                  (piece ^ (lane % 8)) * 16));
        }
      } else {
        // Both halves of a step for two tiles of tokens.
        const int32_t piece = at * 2 + lane / 8 % 2;
#pragma unroll
        for (int32_t j = 0; j < Shape::kTokenTiles / 2; ++j) {
          const int32_t row = j * 16 + lane / 16 * 8 + lane % 8;
          ldmatrix_x4(b[step * (Shape::kTokenTiles / 2) + j],
                      tokens + static_cast<uint32_t>(row * Shape::kGroupRowBytes +
                                                     (piece ^ (lane % 8)) * 16));
        }
      }
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint4 words =
            load_shared_16(operands + static_cast<uint32_t>((r * Shape::kGroupTiles * 4 + at) *
                                                            Shape::kStepBytes));
        a[step][r][0] = words.x;
        a[step][r][1] = words.y;
        a[step][r][2] = words.z;
        a[step][r][3] = words.w;
      }
    }
    if constexpr (kHasTileSums) {
#pragma unroll
      for (int32_t i = 0; i < 2 * Shape::kRowTiles; ++i) {
        scales[i] = __uint_as_float(load_shared_4(
            slot + static_cast<uint32_t>(Shape::kScalesAt + (lane / 4 + 8 * i) * 8 + half * 4)));
      }
    }
  }

  // Multiplies the first `num_tiles` tiles, 1 or 2.
  template <bool kHasTileSums>
  __device__ __forceinline__ void multiply(int32_t num_tiles, WarpSums<Shape>& sums) const {
    WarpSums<Shape> parts = {};
    WarpSums<Shape>& running = kHasTileSums ? parts : sums;
#pragma unroll
    for (int32_t step = 0; step < 8; ++step) {
      if (step == 4 && num_tiles < 2) break;
#pragma unroll
      for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
        const uint32_t (&four)[4] =
            Shape::kTokenTiles == 1 ? b[step / 2] : b[step * (Shape::kTokenTiles / 2) + j / 2];
        const int32_t first = Shape::kTokenTiles == 1 ? step % 2 * 2 : j % 2 * 2;
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
          mma_16x8x16(running[r][j], a[step][r], four[first], four[first + 1]);
        }
      }
    }
    if constexpr (kHasTileSums) {
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
        for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
#pragma unroll
          for (int32_t e = 0; e < 4; ++e) {
            sums[r][j][e] = __fmaf_rn(scales[2 * r + e / 2], parts[r][j][e], sums[r][j][e]);
          }
        }
      }
    }
  }
};

// Multiplies what the other warps leave; called by one warp. While it multiplies half a group, the
// other half is on its way to registers.
template <class Shape, bool kHasTileSums>
__device__ __forceinline__ void multiply_operands(const PackedArgs& args, uint32_t shared,
                                                  const SlotBarriers& barriers,
                                                  WarpSums<Shape>& sums) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
  SlotWalk<Shape> full;
  const auto slot = [&] { return shared + static_cast<uint32_t>(full.slot * Shape::kSlotBytes); };
  const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
  HalfGroup<Shape> first;
  HalfGroup<Shape> second;
  barrier_wait(&barriers.full[0], 0);
  first.template load<kHasTileSums>(slot(), 0);
  for (int32_t left = num_tiles; left > 0; left -= Shape::kGroupTiles) {
    second.template load<kHasTileSums>(slot(), 1);
    first.template multiply<kHasTileSums>(min(left, 2), sums);
    __syncwarp();
    if (is_first_lane) barrier_arrive(&barriers.empty[full.slot]);
    full.advance();
    if (left > Shape::kGroupTiles) {
      barrier_wait(&barriers.full[full.slot], full.parity);
      first.template load<kHasTileSums>(slot(), 0);
    }
    if (left > 2) second.template multiply<kHasTileSums>(min(left - 2, 2), sums);
  }
}

template <class Shape, bool kHasTileSums>
__global__ void __launch_bounds__(Shape::kThreads)
    split_gemm_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ uint64_t full[Shape::kSlots];
  __shared__ uint64_t empty[Shape::kSlots];
  const SlotBarriers barriers = {.full = full, .empty = empty};
  const uint32_t shared = shared_address(storage);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const bool is_mixture = args.rows.expert_begin != nullptr;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int32_t slot = 0; slot < Shape::kSlots; ++slot) {
      barrier_init(&full[slot], Shape::kArrivals);
      barrier_init(&empty[slot], 1);
    }
  }
  __syncthreads();
  let_successor_start();
  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    wait_for_predecessor();
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) return;
  }
  const int32_t first_row = tile.column_tile * Shape::kRows;
  if (warp < Shape::kConverters) {
    convert_weights<Shape, kHasTileSums>(args, tile.expert, first_row, warp, shared, barriers);
    if (!is_mixture) wait_for_predecessor();
    return;
  }
  if (!is_mixture) {
    wait_for_predecessor();
    tile = find_tile(args.rows, Shape::kTokens);
  }
  if (warp == Shape::kConverters) {
    copy_tokens<Shape, kHasTileSums>(args, tile, first_row, shared, barriers);
    return;
  }
  WarpSums<Shape> sums = {};
  multiply_operands<Shape, kHasTileSums>(args, shared, barriers, sums);
  if constexpr (Shape::kFormat == WeightFormat::kFp8 && !kHasTileSums) {
    if (args.scales.use == ScaleUse::kRowSums) {
      LaneScales<Shape> scales(args.scales, tile.expert, first_row, args.n);
      scales.advance(0);
      multiply_by_scales<Shape>(scales, sums);
    }
  }
  write_sums<Shape>(args, tile, first_row, sums);
}

}  // namespace paceline::cuda
