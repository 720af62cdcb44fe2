// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products y = x W_e^T of few rows with packed int4 weights, e being the expert of the rows: the
// loop of mxfp4_kernel.cuh with the elements of int4_elements.cuh. Each output is the sum that
// gemm_kernel.cuh computes on dequantised weights: K in steps of 16, ascending, in one float32
// accumulator; so the bits are equal.
//
// - A lane copies the codes that it will convert, and its word of scales or zero points, into
//   shared memory of its own (`cp.async`), some tiles ahead.
// - The warps share the tokens, in chunks of 512 columns with one barrier a chunk. Where the
//   columns of W have an order, the tokens are gathered in it, number by number.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/packed_copies.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/mxfp4_kernel.cuh"
#include "gemm/narrow_kernel.cuh"
#include "gemm/packed_args.h"

namespace paceline::cuda {

// `warps` of 16 * row_tiles rows of weights by at most 8 * token_tiles tokens. `blocks` of a
// multiprocessor must have enough registers. A general kernel takes groups of columns that end
// inside a packed tile, and orders of columns.
template <int32_t row_tiles, int32_t token_tiles, int32_t warps, int32_t blocks, bool is_float16,
          bool is_general>
struct Int4Shape : Mxfp4Shape<row_tiles, token_tiles, warps, blocks> {
  static constexpr WeightFormat kFormat = WeightFormat::kInt4;
  static constexpr bool kIsFloat16 = is_float16;
  static constexpr bool kIsGeneral = is_general;
};

// Copies the words of a lane to slots and loads them.
template <class Shape>
class Int4Slots {
 public:
  __device__ __forceinline__ Int4Slots(const PackedArgs& args, int32_t expert, int32_t first_row,
                                       uint32_t shared)
      : policy_(args.weight_policy),
        num_tiles_((args.k + kPackedColumns - 1) / kPackedColumns),
        // A tile behind the last one reads the last one; its outputs are not written.
        row_tile_(min(first_row / kPackedRows, (args.n - 1) / kPackedRows)),
        row_step_(row_tile_ < (args.n - 1) / kPackedRows ? 1 : 0),
        groups_(args, expert, row_tile_) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    words_at_ = shared + static_cast<uint32_t>(lane * 16);
    scales_at_ = shared + static_cast<uint32_t>(Shape::kTileBytes + lane * 4);
    data_ = args.data + expert * args.data_stride +
            int64_t{row_tile_} * num_tiles_ * Shape::kTileBytes + lane * 16;
    row_bytes_ = row_step_ * num_tiles_ * Shape::kTileBytes;
    row_words_ = row_step_ * groups_.row_bytes();
  }

  // Requests the group that is `ahead` groups behind the first one of the chunk. Tiles behind the
  // last one become zero. Commits nothing.
  __device__ __forceinline__ void request(int32_t ahead) const {
#pragma unroll
    for (int32_t t = 0; t < Shape::kGroupTiles; ++t) {
      const int32_t tile = first_ + ahead * Shape::kGroupTiles + t;
      const bool exists = tile < num_tiles_;
      const std::byte* const words = groups_.word_of(tile);
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint32_t at = offset(ahead, r, t);
        copy_or_zero_16(
            words_at_ + at,
            data_ + r * row_bytes_ + (ahead * Shape::kGroupTiles + t) * Shape::kTileBytes,
            exists ? 16 : 0, policy_);
        if (groups_.reads()) copy_weights_4(scales_at_ + at, words + r * row_words_, policy_);
      }
    }
  }

  // Loads that group.
  __device__ __forceinline__ void load(int32_t ahead, GroupWords<Shape>& to) const {
#pragma unroll
    for (int32_t t = 0; t < Shape::kGroupTiles; ++t) {
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint32_t at = offset(ahead, r, t);
        to[t].words[r] = load_shared_16(words_at_ + at);
        to[t].scales[r] = load_shared_4(scales_at_ + at);
      }
    }
  }

  // What the codes of a tile meet, of which `word` is the lane's word; the tile is `ahead` tiles
  // behind the first one of the chunk.
  __device__ __forceinline__ void multipliers(uint32_t word, int32_t ahead,
                                              Int4Multipliers (&by)[2]) const {
    groups_.template multipliers<Shape::kIsFloat16, Shape::kIsGeneral>(word, first_ + ahead, by);
  }

  // Goes on to the next chunk.
  __device__ __forceinline__ void advance() {
    constexpr int32_t kTiles = Shape::kChunkColumns / kPackedColumns;
    data_ += kTiles * Shape::kTileBytes;
    first_ += kTiles;
  }

 private:
  __device__ __forceinline__ static uint32_t offset(int32_t ahead, int32_t row_tile, int32_t tile) {
    return static_cast<uint32_t>(ahead % Shape::kSlots * Shape::kSlotBytes +
                                 (tile * Shape::kRowTiles + row_tile) * Shape::kSlotTileBytes);
  }

  uint64_t policy_;
  int32_t first_ = 0;  // tile of the chunk
  int32_t num_tiles_;
  int32_t row_tile_;
  int32_t row_step_;  // from a row tile of the warp to the next
  Int4Groups groups_;
  uint32_t words_at_;
  uint32_t scales_at_;
  const std::byte* data_;
  int64_t row_bytes_;
  int64_t row_words_;
};

// Copies chunks of the tokens of a block in the order of the columns.
template <class Shape>
class OrderedChunks {
 public:
  __device__ __forceinline__ OrderedChunks(const PackedArgs& args, const ExpertTile& tile,
                                           uint32_t shared)
      : args_(args), tile_(tile), shared_(shared) {}

  __device__ __forceinline__ void request(int32_t chunk) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t column = chunk * Shape::kChunkColumns + thread % kPieces * 8;
    // Tokens are zero beyond K, up to the end of a group.
    constexpr int32_t kColumns = Shape::kGroupTiles * kPackedColumns;
    if (column >= (args_.k + kColumns - 1) / kColumns * kColumns) return;
    const bool is_inside = column < args_.k;
    const __nv_bfloat16* const x = args_.x_of(tile_.column_tile * Shape::kRows);
    const int32_t* const order = args_.int4.order;
    int32_t inputs[8] = {};
    if (order != nullptr && is_inside) {
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) {
        inputs[i] = __ldg(order + int64_t{tile_.expert} * args_.k + column + i);
      }
    }
#pragma unroll 1
    for (int32_t row = thread / kPieces; row < tile_.num_rows; row += kRowStep) {
      const int32_t of_y = tile_.first_row + row;
      const int64_t source = args_.x_rows != nullptr ? args_.x_rows[of_y] : of_y;
      const __nv_bfloat16* const from = x + source * args_.x_stride;
      const auto* const bits = reinterpret_cast<const uint16_t*>(from);
      const uint32_t to =
          shared_ + static_cast<uint32_t>(chunk % 2 * Shape::kChunkBytes + row * Shape::kRowPitch +
                                          thread % kPieces * 16);
      if (order == nullptr || !is_inside) {
        cp_async_16(to, from + (is_inside ? column : 0), is_inside);
        continue;
      }
      uint32_t words[4];
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        words[i] = bits[inputs[2 * i]] | uint32_t{bits[inputs[2 * i + 1]]} << 16;
      }
      store_shared_16(to, words);
    }
  }

 private:
  static constexpr int32_t kPieces = Shape::kChunkColumns / 8;
  static constexpr int32_t kRowStep = Shape::kThreads / kPieces;
  static_assert(kRowStep * kPieces == Shape::kThreads);

  const PackedArgs& args_;
  const ExpertTile& tile_;
  uint32_t shared_;
};

// Multiplies a tile. tokens: the lane's address of the tile's first column; by: of each row tile,
// of the first and of the last 32 columns.
template <class Shape>
__device__ __forceinline__ void multiply_codes(const TileWords<Shape>& now,
                                               const Int4Multipliers (&by)[Shape::kRowTiles][2],
                                               uint32_t tokens, WarpSums<Shape>& sums) {
  constexpr bool kHasPairs = Shape::kTokenTiles > 1;
  static_assert(!kHasPairs || Shape::kTokenTiles % 2 == 0);
  constexpr int32_t kLoads = kHasPairs ? Shape::kTokenTiles / 2 : 1;
  uint32_t b[kLoads][4];
#pragma unroll
  for (int32_t step = 0; step < 4; ++step) {
    if constexpr (kHasPairs) {
      // Both halves of a step for two tiles of tokens.
#pragma unroll
      for (int32_t j = 0; j < kLoads; ++j) {
        ldmatrix_x4(b[j], tokens + static_cast<uint32_t>(j * 16 * Shape::kRowPitch + step * 32));
      }
    } else if (step % 2 == 0) {
      // Both halves of two steps.
      ldmatrix_x4(b[0], tokens + static_cast<uint32_t>(step * 32));
    }
#pragma unroll
    for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
      const uint4& w = now.words[r];
      const uint32_t word = word_of_step(w, step);
      uint32_t a[4];
      convert_int4<Shape::kIsFloat16>(word, by[r][step / 2], a);
      if constexpr (kHasPairs) {
#pragma unroll
        for (int32_t j = 0; j < Shape::kTokenTiles; ++j) {
          mma_16x8x16(sums[r][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      } else {
        mma_16x8x16(sums[r][0], a, b[0][step % 2 * 2], b[0][step % 2 * 2 + 1]);
      }
    }
  }
}

// Computes the sums of a tile whose first kSlots groups have been requested and committed. All
// threads of the block call it.
template <class Shape, class Chunks>
__device__ __forceinline__ void sum_codes(const PackedArgs& args, Int4Slots<Shape>& weights,
                                          const Chunks& chunks, uint32_t shared,
                                          WarpSums<Shape>& sums) {
  constexpr int32_t kColumns = Shape::kGroupTiles * kPackedColumns;  // of a group
  // As in mxfp4_kernel.cuh: every group, and every chunk, has this many commits behind it.
  constexpr int32_t kPending = Shape::kSlots - 1;
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  // The row and the piece of the lane in a load of four matrices.
  const int32_t row = Shape::kTokenTiles > 1 ? lane / 16 * 8 + lane % 8 : lane % 8;
  const int32_t piece = Shape::kTokenTiles > 1 ? lane / 8 % 2 : lane / 8;
  const uint32_t of_lane = shared + static_cast<uint32_t>(row * Shape::kRowPitch + piece * 16);
  chunks.request(0);
  cp_async_commit();
  cp_async_wait<0>();
  GroupWords<Shape> now;
  weights.load(0, now);
  weights.request(Shape::kSlots);
  cp_async_commit();
#pragma unroll 1
  for (int32_t chunk = 0; chunk * Shape::kChunkColumns < args.k; ++chunk) {
    cp_async_wait<kPending>();
    __syncthreads();
    chunks.request(chunk + 1);
    const uint32_t tokens = of_lane + static_cast<uint32_t>(chunk % 2 * Shape::kChunkBytes);
    const int32_t left = args.k - chunk * Shape::kChunkColumns;  // columns
#pragma unroll
    for (int32_t i = 0; i < Shape::kChunkGroups; ++i) {
      if (i * kColumns >= left) break;
      // The next group goes to registers, and another one is requested in its place.
      GroupWords<Shape> next;
      cp_async_wait<kPending>();
      weights.load(i + 1, next);
      weights.request(i + 1 + Shape::kSlots);
      cp_async_commit();
#pragma unroll
      for (int32_t t = 0; t < Shape::kGroupTiles; ++t) {
        const int32_t tile = i * Shape::kGroupTiles + t;  // of the chunk
        Int4Multipliers by[Shape::kRowTiles][2];
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
          weights.multipliers(now[t].scales[r], tile, by[r]);
        }
        multiply_codes<Shape>(now[t], by, tokens + static_cast<uint32_t>(tile * kPackedColumns * 2),
                              sums);
        now[t] = next[t];
      }
    }
    weights.advance();
  }
  cp_async_wait<0>();  // of groups behind the last one
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    int4_gemm_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte packed_storage[];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const uint32_t tokens_at = shared_address(packed_storage);
  const bool is_mixture = args.rows.expert_begin != nullptr;
  // As in mxfp4_kernel.cuh.
  const bool is_early = !is_mixture || args.follows_product;
  if (is_early && !args.rows.delays_successor) let_successor_start();
  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    if (!is_early) {
      wait_for_predecessor();
      let_successor_start();
    }
    tile = find_tile</*kIsEarly=*/true>(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      wait_for_predecessor();
      return;
    }
  }
  const int32_t first_row = tile.column_tile * Shape::kRows + warp * Shape::kWarpRows;
  const uint32_t slots_at =
      tokens_at + static_cast<uint32_t>(2 * Shape::kChunkBytes + warp * Shape::kWarpBytes);
  Int4Slots<Shape> weights(args, tile.expert, first_row, slots_at);
#pragma unroll
  for (int32_t i = 0; i < Shape::kSlots; ++i) {
    weights.request(i);
    cp_async_commit();
  }
  if (is_early) wait_for_predecessor();
  if (!is_mixture) {
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      cp_async_wait<0>();
      return;
    }
  }
  WarpSums<Shape> sums = {};
  if constexpr (Shape::kIsGeneral) {
    sum_codes<Shape>(args, weights, OrderedChunks<Shape>(args, tile, tokens_at), tokens_at, sums);
  } else {
    sum_codes<Shape>(args, weights, TokenChunks<Shape>(args, tile, tokens_at), tokens_at, sums);
  }
  write_sums<Shape>(args, tile, first_row, sums);
}

}  // namespace paceline::cuda
