// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products y = x W_e^T of few rows with packed weights of 4 or 8 bits, e being the expert of the
// rows. Such a product is bound by reading weights and by converting them.
//
// Every warp computes 16 rows of weights with all tokens of its block, by `mma.sync`. Each output
// is the sum that gemm_kernel.cuh computes: K in steps of 16, ascending, in one float32
// accumulator; so the bits are equal.
//
// - A lane copies the weights that it will convert into shared memory of its own (`cp.async`), four
//   groups of 128 columns ahead. No other thread reads them, so warps do not wait for each other,
//   and many small warps keep as many bytes in flight as large tiles would.
// - The warps share the tokens, in chunks of 512 columns with one barrier a chunk. Only rows that
//   exist are copied; the others are stale, and so are only outputs that are not written.
// - A scale too large for one multiplication is rare: the warp notices it at the end, and the block
//   computes its tile again with two.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "elementwise/gate_up.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/narrow_loads.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_elements.cuh"

namespace paceline::cuda {

// `warps` of 16 rows of weights by at most 8 * token_tiles tokens.
template <WeightFormat format, int32_t token_tiles, int32_t warps, int32_t chunk_slots = 2>
struct NarrowShape {
  static constexpr WeightFormat kFormat = format;
  static constexpr int32_t kRowTiles = 1;
  static constexpr int32_t kTokenTiles = token_tiles;
  static constexpr int32_t kThreads = 32 * warps;
  static constexpr int32_t kTokens = 8 * token_tiles;
  static constexpr int32_t kWarpRows = kPackedRows;
  static constexpr int32_t kRows = kWarpRows * warps;

  // A group is what a warp requests and waits for at once: two packed tiles along k, which are 128
  // columns. It holds one group in registers, and four are in flight.
  static constexpr int32_t kTileBytes = packed_tile_bytes(format);
  static constexpr bool kHasScaleBytes = format == WeightFormat::kMxfp4;
  // Every lane has its own copy of the word of scales that lanes with the same rows share.
  static constexpr int32_t kSlotTileBytes = kTileBytes + (kHasScaleBytes ? 128 : 0);
  static constexpr int32_t kSlotBytes = 2 * kSlotTileBytes;
  static constexpr int32_t kSlots = 4;
  static constexpr int32_t kGroupStep = 1;  // from one group of a warp to its next

  // A chunk of the tokens has the columns of four groups. One is in use and one in flight.
  static constexpr int32_t kChunkGroups = kSlots;
  static constexpr int32_t kChunkColumns = kChunkGroups * 2 * kPackedColumns;
  static constexpr int32_t kChunkRowBytes = kChunkColumns * 2;
  static constexpr int32_t kChunkBytes = kTokens * kChunkRowBytes;
  static constexpr int32_t kChunkSlots = chunk_slots;
  static constexpr int32_t kTokensBytes = chunk_slots * kChunkBytes;
  static constexpr int32_t kWarpBytes = kSlots * kSlotBytes;
  static constexpr int32_t kSharedBytes = kTokensBytes + warps * kWarpBytes;

  // Copies of a thread that may be in flight when a group or a chunk must have arrived: every step
  // commits one group, and both have three commits behind them (compute_tile).
  static constexpr int32_t kPending = 3;
};

// The operands of a row tile for step `step` (0 to 3) of a packed tile.
template <class Shape, bool kIsTwice>
__device__ __forceinline__ void convert_step(const uint4 (&words)[LaneGroup<Shape>::kParts],
                                             int32_t step, const RowMultipliers (&by)[2],
                                             uint32_t (&a)[4]) {
  if constexpr (Shape::kFormat == WeightFormat::kMxfp4) {
    const uint4& w = words[0];
    const uint32_t word = word_of_step(w, step);
    PackedElements<WeightFormat::kMxfp4>::convert<kIsTwice>(word, by[step / 2], a);
  } else {
    const uint4& w = words[step / 2];
    PackedElements<WeightFormat::kFp8>::convert<kIsTwice>(
        step % 2 == 0 ? w.x : w.z, step % 2 == 0 ? w.y : w.w, by[step / 2], a);
  }
}

template <class Shape>
using WarpSums = float[Shape::kRowTiles][Shape::kTokenTiles][4];

// Multiplies tile t of a group. tokens: the shared address of the chunk of tokens; first_step: the
// tile's first step in the chunk.
template <class Shape, bool kIsTwice>
__device__ __forceinline__ void multiply_tile(const LaneGroup<Shape>& group, int32_t t,
                                              const RowMultipliers (&by)[Shape::kRowTiles][2],
                                              uint32_t tokens, int32_t first_step,
                                              WarpSums<Shape>& sums) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  constexpr bool kHasPairs = Shape::kTokenTiles > 1;
  static_assert(!kHasPairs || Shape::kTokenTiles % 2 == 0);
  uint32_t b[4];
#pragma unroll
  for (int32_t step = 0; step < 4; ++step) {
    uint32_t a[Shape::kRowTiles][4];
#pragma unroll
    for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
      convert_step<Shape, kIsTwice>(group.words[r][t], step, by[r], a[r]);
    }
    if constexpr (kHasPairs) {
      // A load of four matrices: both halves of a step for two tiles of tokens.
      const int32_t piece = (first_step + step) * 2 + lane / 8 % 2;
#pragma unroll
      for (int32_t j = 0; j < Shape::kTokenTiles; j += 2) {
        const int32_t row = j * 8 + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(b, tokens + static_cast<uint32_t>(row * Shape::kChunkRowBytes +
                                                      (piece ^ (lane % 8)) * 16));
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
          mma_16x8x16(sums[r][j], a[r], b[0], b[1]);
          mma_16x8x16(sums[r][j + 1], a[r], b[2], b[3]);
        }
      }
    } else {
      // Both halves of two steps.
      if (step % 2 == 0) {
        const int32_t piece = (first_step + step) * 2 + lane / 8;
        ldmatrix_x4(b, tokens + static_cast<uint32_t>(lane % 8 * Shape::kChunkRowBytes +
                                                      (piece ^ (lane % 8)) * 16));
      }
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        mma_16x8x16(sums[r][0], a[r], b[step % 2 * 2], b[step % 2 * 2 + 1]);
      }
    }
  }
}

// Multiplies the sums of rows by their scales.
template <class Shape>
__device__ __forceinline__ void multiply_by_scales(const LaneScales<Shape>& scales,
                                                   WarpSums<Shape>& sums) {
#pragma unroll
  for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        sums[r][j][e] = __fmul_rn(scales.of(r, e / 2), sums[r][j][e]);
      }
    }
  }
}

// Computes the sums of the tile, from the first request on. The first `num_requested` groups have
// been requested and committed. Without kIsTwice it returns whether a scale was too large, and then
// the sums are wrong. All threads of the block call it.
template <class Shape, bool kHasTileSums, bool kIsTwice>
__device__ __forceinline__ bool compute_sums(const PackedArgs& args, LaneWeights<Shape>& weights,
                                             const ChunkCopier<Shape>& tokens,
                                             LaneScales<Shape>& scales, uint32_t shared,
                                             WarpSums<Shape>& sums) {
  constexpr bool kIsFp8 = Shape::kFormat == WeightFormat::kFp8;
  const int32_t num_tiles = weights.num_tiles();
  const int32_t num_groups = (num_tiles + 1) / 2;
  const int32_t num_chunks = (num_groups + Shape::kChunkGroups - 1) / Shape::kChunkGroups;
  WarpSums<Shape> parts = {};  // of a group
  uint32_t scale_bits = 0;     // of all bytes
  bool is_large = false;
  tokens.request(0);
  cp_async_commit();
  cp_async_wait<0>();
  LaneGroup<Shape> now;
  weights.load(0, now);
  weights.request(Shape::kSlots, 0);
  cp_async_commit();
  for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
    cp_async_wait<Shape::kPending>();
    __syncthreads();
    if (chunk + 1 < num_chunks) tokens.request(chunk + 1);
    const uint32_t chunk_at = shared + static_cast<uint32_t>(chunk % 2 * Shape::kChunkBytes);
#pragma unroll
    for (int32_t i = 0; i < Shape::kChunkGroups; ++i) {
      const int32_t group = chunk * Shape::kChunkGroups + i;
      if (group >= num_groups) break;
      // The next group goes to registers, and another one is requested in its place.
      constexpr int32_t kSlots = Shape::kSlots;
      LaneGroup<Shape> next;
      cp_async_wait<Shape::kPending>();
      weights.load((i + 1) % kSlots, next);
      weights.request(group + 1 + kSlots, (i + 1) % kSlots);
      cp_async_commit();

      if constexpr (kIsFp8) scales.advance(group);
#pragma unroll
      for (int32_t t = 0; t < 2; ++t) {
        if (t == 1 && 2 * group + 1 >= num_tiles) break;
        RowMultipliers by[Shape::kRowTiles][2];
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
          if constexpr (kIsFp8) {
            const bool is_value = !kHasTileSums && args.scales.use == ScaleUse::kValues;
            const float low = is_value ? scales.of(r, 0) : 1.0f;
            const float high = is_value ? scales.of(r, 1) : 1.0f;
            is_large |=
                fmaxf(fabsf(low), fabsf(high)) > PackedElements<WeightFormat::kFp8>::kMaxScale;
            by[r][0] = by[r][1] = fp8_multipliers<kIsTwice>(low, high);
          } else {
            scale_bits |= now.scales[r][t];
            by[r][0] = mxfp4_multipliers<kIsTwice>(now.scales[r][t], 0);
            by[r][1] = mxfp4_multipliers<kIsTwice>(now.scales[r][t], 1);
          }
        }
        multiply_tile<Shape, kIsTwice>(now, t, by, chunk_at, (2 * i + t) * 4,
                                       kHasTileSums ? parts : sums);
      }
      if constexpr (kHasTileSums) {
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
          for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
#pragma unroll
            for (int32_t e = 0; e < 4; ++e) {
              sums[r][j][e] = __fmaf_rn(scales.of(r, e / 2), parts[r][j][e], sums[r][j][e]);
              parts[r][j][e] = 0.0f;
            }
          }
        }
      }
      now = next;
    }
  }
  if constexpr (kIsFp8 && !kHasTileSums) {
    if (args.scales.use == ScaleUse::kRowSums) multiply_by_scales<Shape>(scales, sums);
  }
  // Bytes of 128 and more; 128 alone would not be too large.
  if constexpr (!kIsFp8) is_large = (scale_bits & 0x80808080u) != 0;
  return is_large;
}

// Stores one output, with its bias.
__device__ __forceinline__ void store_output(const PackedArgs& args, int64_t at, float value) {
  if (args.is_y_float) {
    static_cast<float*>(args.y)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(args.y)[at] = __float2bfloat16_rn(value);
  }
}

// Writes the activation of gate and up, which are rows 2 i and 2 i + 1 of the product, in lanes
// four apart. Of two tokens, each lane of such a pair computes one.
template <class Shape>
__device__ __forceinline__ void write_gated(const PackedArgs& args, const ExpertTile& tile,
                                            int32_t first_row, const float* bias,
                                            const WarpSums<Shape>& sums) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const bool is_up = lane / 4 % 2 != 0;
  auto* const y = static_cast<__nv_bfloat16*>(args.y);
#pragma unroll
  for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t column = first_row + r * kPackedRows + half * 8 + lane / 4;
      const float add = bias != nullptr && column < args.n ? bias[column] : 0.0f;
#pragma unroll
      for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
        float own[2];  // as the product alone would store them
#pragma unroll
        for (int32_t e = 0; e < 2; ++e) {
          own[e] = __bfloat162float(__float2bfloat16_rn(__fadd_rn(sums[r][j][2 * half + e], add)));
        }
        const float other = __shfl_xor_sync(kAllLanes, is_up ? own[0] : own[1], 4);
        const int32_t row = j * 8 + lane % 4 * 2 + (is_up ? 1 : 0);
        if (row >= tile.num_rows || column >= args.n) continue;
        const float value = gate_up(args.end.activation, is_up ? other : own[0],
                                    is_up ? own[1] : other, args.end.alpha, args.end.limit);
        y[(tile.first_row + row) * args.y_stride + column / 2] = __float2bfloat16_rn(value);
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void write_sums(const PackedArgs& args, const ExpertTile& tile,
                                           int32_t first_row, const WarpSums<Shape>& sums) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const float* const bias =
      args.bias != nullptr ? args.bias + int64_t{tile.expert} * args.n : nullptr;
  if constexpr (Shape::kFormat == WeightFormat::kMxfp4) {
    if (args.end.is_gated) return write_gated<Shape>(args, tile, first_row, bias, sums);
  }
#pragma unroll
  for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t column = first_row + r * kPackedRows + half * 8 + lane / 4;
      if (column >= args.n) continue;
      const float add = bias != nullptr ? bias[column] : 0.0f;
#pragma unroll
      for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
#pragma unroll
        for (int32_t e = 0; e < 2; ++e) {
          const int32_t row = j * 8 + lane % 4 * 2 + e;
          if (row >= tile.num_rows) continue;
          store_output(args, (tile.first_row + row) * args.y_stride + column,
                       __fadd_rn(sums[r][j][2 * half + e], add));
        }
      }
    }
  }
}

template <class Shape, bool kHasTileSums>
__global__ void __launch_bounds__(Shape::kThreads)
    narrow_gemm_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte packed_storage[];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const uint32_t tokens_at = shared_address(packed_storage);
  const uint32_t weights_at =
      tokens_at + static_cast<uint32_t>(Shape::kTokensBytes + warp * Shape::kWarpBytes);
  const bool is_mixture = args.rows.expert_begin != nullptr;
  if (!args.rows.delays_successor) let_successor_start();
  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    wait_for_predecessor();
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) return;
  }
  const int32_t first_row = tile.column_tile * Shape::kRows + warp * Shape::kWarpRows;
  LaneWeights<Shape> weights(args, tile.expert, first_row, weights_at);
  const auto request_first = [&] {
#pragma unroll
    for (int32_t slot = 0; slot < Shape::kSlots; ++slot) {
      weights.request(slot, slot);
      cp_async_commit();
    }
  };
  request_first();
  if (!is_mixture) {
    wait_for_predecessor();
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      cp_async_wait<0>();
      return;
    }
  }
  const ChunkCopier<Shape> tokens(args, tile, tokens_at);
  LaneScales<Shape> scales(args.scales, tile.expert, first_row, args.n);
  WarpSums<Shape> sums = {};
  const bool is_large =
      compute_sums<Shape, kHasTileSums, false>(args, weights, tokens, scales, tokens_at, sums);
  if constexpr (!kHasTileSums) {
    if (__syncthreads_or(is_large ? 1 : 0) != 0) {
      weights = LaneWeights<Shape>(args, tile.expert, first_row, weights_at);
      scales = LaneScales<Shape>(args.scales, tile.expert, first_row, args.n);
      request_first();
#pragma unroll
      for (auto& of_tile : sums) {
#pragma unroll
        for (auto& four : of_tile) {
#pragma unroll
          for (float& sum : four) sum = 0.0f;
        }
      }
      compute_sums<Shape, kHasTileSums, true>(args, weights, tokens, scales, tokens_at, sums);
    }
  }
  write_sums<Shape>(args, tile, first_row, sums);
}

}  // namespace paceline::cuda
