// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products y = x W_e^T of few rows with packed mxfp4 or nvfp4 weights, e being the expert of the
// rows: like narrow_kernel.cuh, with the same bits, in fewer instructions, for products that have
// many warps on each multiprocessor and so are bound by their instructions.
//
// Every warp computes 16 * kRowTiles rows of weights with all tokens of its block, by `mma.sync`.
//
// - A lane copies the weights that it will convert into shared memory of its own (`cp.async`), some
//   groups of tiles ahead. Tiles behind the last one are zero, so no branch ends a group.
// - The warps share the tokens, in chunks of 512 columns with one barrier a chunk. Only rows that
//   exist are copied; the others are stale, and so are only outputs that are not written. A row is
//   16 bytes longer than its columns: so eight rows lie in different banks, and an address is a
//   lane's own one plus a constant.
// - A scale of mxfp4 too large for one multiplication is rare: the warp notices it at the end, and
//   the block computes its tile again with two.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/packed_copies.cuh"
#include "common/reduce.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/narrow_kernel.cuh"
#include "gemm/nvfp4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_elements.cuh"

namespace paceline::cuda {

// `warps` of 16 * row_tiles rows of weights by at most 8 * token_tiles tokens. `blocks` of a
// multiprocessor must have enough registers.
template <int32_t row_tiles, int32_t token_tiles, int32_t warps, int32_t blocks,
          WeightFormat format = WeightFormat::kMxfp4>
struct Mxfp4Shape {
  static constexpr WeightFormat kFormat = format;
  static constexpr int32_t kRowTiles = row_tiles;
  static constexpr int32_t kTokenTiles = token_tiles;
  static constexpr int32_t kBlocks = blocks;
  static constexpr int32_t kThreads = 32 * warps;
  static constexpr int32_t kTokens = 8 * token_tiles;
  static constexpr int32_t kWarpRows = kPackedRows * row_tiles;
  static constexpr int32_t kRows = kWarpRows * warps;
  static constexpr int32_t kTileBytes = packed_tile_bytes(kFormat);

  // What a lane has of the scales of a packed tile. Of mxfp4 it is a copy of the word that lanes
  // with the same rows share; of nvfp4 each of them has a part.
  static constexpr bool kIsNvfp4 = format == WeightFormat::kNvfp4;
  using Scales = std::conditional_t<kIsNvfp4, Nvfp4Lines, uint32_t>;
  static constexpr int32_t kScaleBytes = kIsNvfp4 ? kPackedNvfp4ScaleBytes : kPackedScaleBytes;

  // A group is what a lane requests and waits for at once: packed tiles along k of each row tile.
  // It holds one group in registers, and kSlots are in flight.
  static constexpr int32_t kGroupTiles = row_tiles == 1 ? 2 : 1;
  static constexpr int32_t kSlotTileBytes = kTileBytes + 32 * static_cast<int32_t>(sizeof(Scales));
  static constexpr int32_t kSlotBytes = row_tiles * kGroupTiles * kSlotTileBytes;
  static constexpr int32_t kSlots = 4;
  static constexpr int32_t kWarpBytes = kSlots * kSlotBytes;

  // One chunk of the tokens is in use and one in flight.
  static constexpr int32_t kChunkColumns = 512;
  static constexpr int32_t kRowPitch = kChunkColumns * 2 + 16;
  static constexpr int32_t kChunkBytes = kTokens * kRowPitch;
  static constexpr int32_t kChunkGroups = kChunkColumns / (kGroupTiles * kPackedColumns);
  static constexpr int32_t kSharedBytes = 2 * kChunkBytes + warps * kWarpBytes;
  static_assert(kChunkGroups % kSlots == 0);
};

// A lane's words of a packed tile along k of each row tile.
template <class Shape>
struct TileWords {
  uint4 words[Shape::kRowTiles];
  typename Shape::Scales scales[Shape::kRowTiles];
};
template <class Shape>
using GroupWords = TileWords<Shape>[Shape::kGroupTiles];

// Copies the words of a lane to slots and loads them.
template <class Shape>
class WeightSlots {
 public:
  __device__ __forceinline__ WeightSlots(const PackedArgs& args, int32_t expert, int32_t first_row,
                                         uint32_t shared)
      : policy_(args.weight_policy) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t num_tiles = (args.k + kPackedColumns - 1) / kPackedColumns;
    const int32_t last_tile = (args.n - 1) / kPackedRows;
    words_at_ = shared + static_cast<uint32_t>(lane * 16);
    scales_at_ = shared + static_cast<uint32_t>(Shape::kTileBytes + lane * kLaneBytes);
#pragma unroll
    for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
      // A tile behind the last one reads the last one; its outputs are not written.
      const int64_t tile = int64_t{min(first_row / kPackedRows + r, last_tile)} * num_tiles;
      data_[r] = args.data + expert * args.data_stride + tile * Shape::kTileBytes + lane * 16;
      scales_[r] = args.scales.scales + expert * args.scales.expert_stride +
                   tile * Shape::kScaleBytes + (Shape::kIsNvfp4 ? lane : lane / 4) * kLaneBytes;
    }
    left_ = num_tiles;
  }

  // Requests the group that is `ahead` groups behind the first one of the chunk. Tiles behind the
  // last one become zero. Commits nothing.
  __device__ __forceinline__ void request(int32_t ahead) const {
#pragma unroll
    for (int32_t t = 0; t < Shape::kGroupTiles; ++t) {
      const int32_t tile = ahead * Shape::kGroupTiles + t;
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint32_t at = offset(ahead, r, t);
        const bool exists = tile < left_;
        copy_or_zero_16(words_at_ + at, data_[r] + tile * Shape::kTileBytes, exists ? 16 : 0,
                        policy_);
        const std::byte* const scales = scales_[r] + tile * Shape::kScaleBytes;
        if constexpr (Shape::kIsNvfp4) {
          copy_or_zero_8(scales_at_ + at, scales, exists ? 8 : 0, policy_);
        } else {
          copy_or_zero_4(scales_at_ + at, scales, exists ? 4 : 0, policy_);
        }
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
        if constexpr (Shape::kIsNvfp4) {
          const uint2 words = load_shared_8(scales_at_ + at);
          to[t].scales[r] = {.slope = words.x, .offset = words.y};
        } else {
          to[t].scales[r] = load_shared_4(scales_at_ + at);
        }
      }
    }
  }

  // Goes on to the next chunk.
  __device__ __forceinline__ void advance() {
    constexpr int32_t kTiles = Shape::kChunkColumns / kPackedColumns;
#pragma unroll
    for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
      data_[r] += kTiles * Shape::kTileBytes;
      scales_[r] += kTiles * Shape::kScaleBytes;
    }
    left_ -= kTiles;
  }

 private:
  static constexpr auto kLaneBytes = static_cast<int32_t>(sizeof(typename Shape::Scales));

  __device__ __forceinline__ static uint32_t offset(int32_t ahead, int32_t row_tile, int32_t tile) {
    return static_cast<uint32_t>(ahead % Shape::kSlots * Shape::kSlotBytes +
                                 (tile * Shape::kRowTiles + row_tile) * Shape::kSlotTileBytes);
  }

  uint64_t policy_;
  int32_t left_;  // tiles from the chunk's first one on
  uint32_t words_at_;
  uint32_t scales_at_;
  const std::byte* data_[Shape::kRowTiles];
  const std::byte* scales_[Shape::kRowTiles];
};

// Copies chunks of the tokens of a block; a thread always copies the same piece of the same rows.
template <class Shape>
class TokenChunks {
 public:
  __device__ __forceinline__ TokenChunks(const PackedArgs& args, const ExpertTile& tile,
                                         uint32_t shared)
      : x_(args.x_of(tile.column_tile * Shape::kRows)),
        stride_(static_cast<int32_t>(args.x_stride) * 2),
        k_(args.k),
        num_rows_(tile.num_rows) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    first_row_ = thread / kPieces;
    column_ = thread % kPieces * 8;
    to_ = shared + static_cast<uint32_t>(first_row_ * Shape::kRowPitch + column_ * 2);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t of_y = tile.first_row + min(first_row_ + i * kRowStep, tile.num_rows - 1);
      if (i * kRowStep < num_rows_) rows_[i] = args.x_rows != nullptr ? args.x_rows[of_y] : of_y;
    }
  }

  __device__ __forceinline__ void request(int32_t chunk) const {
    const int32_t column = chunk * Shape::kChunkColumns + column_;
    // Tokens are zero beyond K, up to the end of a group.
    constexpr int32_t kColumns = Shape::kGroupTiles * kPackedColumns;
    if (column >= (k_ + kColumns - 1) / kColumns * kColumns) return;
    const bool is_inside = column < k_;
    const uint32_t to = to_ + static_cast<uint32_t>(chunk % 2 * Shape::kChunkBytes);
    const __nv_bfloat16* const from = x_ + (is_inside ? column : 0);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      if (i * kRowStep >= num_rows_) break;
      if (first_row_ + i * kRowStep >= num_rows_) break;
      cp_async_16(to + static_cast<uint32_t>(i * kRowStep * Shape::kRowPitch),
                  reinterpret_cast<const void*>(row_address(from, rows_[i], stride_)), is_inside);
    }
  }

 private:
  static constexpr int32_t kPieces = Shape::kChunkColumns / 8;
  static constexpr int32_t kRowStep = Shape::kThreads / kPieces;
  static constexpr int32_t kRows = Shape::kTokens / kRowStep;
  static_assert(kRowStep > 0 && kRows * kRowStep == Shape::kTokens);

  const __nv_bfloat16* x_;
  int32_t stride_;  // bytes
  int32_t k_;
  int32_t num_rows_;
  uint32_t to_;
  int32_t column_;
  int32_t first_row_;
  int32_t rows_[kRows];  // of x
};

// Multiplies a tile. tokens: the lane's address of the tile's first column.
template <class Shape, bool kIsTwice>
__device__ __forceinline__ void multiply_words(const TileWords<Shape>& now, uint32_t tokens,
                                               WarpSums<Shape>& sums) {
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
      convert_elements<kIsTwice>(word, now.scales[r], step, a);
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

// Computes the sums of a tile whose first kSlots groups have been requested and committed. Without
// kIsTwice it returns whether a scale was too large, and then the sums are wrong. All threads of
// the block call it.
template <class Shape, bool kIsTwice>
__device__ __forceinline__ bool sum_groups(const PackedArgs& args, WeightSlots<Shape>& weights,
                                           const TokenChunks<Shape>& chunks, uint32_t shared,
                                           WarpSums<Shape>& sums) {
  constexpr int32_t kColumns = Shape::kGroupTiles * kPackedColumns;  // of a group
  // Every group commits once, and has kSlots - 1 commits behind it when it must have arrived. So
  // has a chunk, which is requested with the first group of the chunk before.
  constexpr int32_t kPending = Shape::kSlots - 1;
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  // The row and the piece of the lane in a load of four matrices.
  const int32_t row = Shape::kTokenTiles > 1 ? lane / 16 * 8 + lane % 8 : lane % 8;
  const int32_t piece = Shape::kTokenTiles > 1 ? lane / 8 % 2 : lane / 8;
  const uint32_t of_lane = shared + static_cast<uint32_t>(row * Shape::kRowPitch + piece * 16);
  uint32_t scale_bits = 0;  // of all bytes
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
#pragma unroll
        for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
          if constexpr (!Shape::kIsNvfp4) scale_bits |= now[t].scales[r];
        }
        multiply_words<Shape, kIsTwice>(
            now[t],
            tokens + static_cast<uint32_t>((i * Shape::kGroupTiles + t) * kPackedColumns * 2),
            sums);
        now[t] = next[t];
      }
    }
    weights.advance();
  }
  cp_async_wait<0>();  // of groups behind the last one
  // Bytes of 128 and more; 128 alone would not be too large.
  return (scale_bits & 0x80808080u) != 0;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    mxfp4_gemm_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte packed_storage[];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const uint32_t tokens_at = shared_address(packed_storage);
  const bool is_mixture = args.rows.expert_begin != nullptr;
  // As in expert_kernel.cuh: what follows a mixture's blocks starts when they have waited for
  // expert_begin, so that a product behind them may read it before its own predecessor has ended.
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
  WeightSlots<Shape> weights(args, tile.expert, first_row, slots_at);
  const auto request_first = [&] {
#pragma unroll
    for (int32_t i = 0; i < Shape::kSlots; ++i) {
      weights.request(i);
      cp_async_commit();
    }
  };
  request_first();
  if (is_early) wait_for_predecessor();
  if (!is_mixture) {
    tile = find_tile(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      cp_async_wait<0>();
      return;
    }
  }
  const TokenChunks<Shape> chunks(args, tile, tokens_at);
  WarpSums<Shape> sums = {};
  const bool is_large = sum_groups<Shape, false>(args, weights, chunks, tokens_at, sums);
  if constexpr (!Shape::kIsNvfp4) {
    if (__syncthreads_or(is_large ? 1 : 0) != 0) {
      weights = WeightSlots<Shape>(args, tile.expert, first_row, slots_at);
      request_first();
#pragma unroll
      for (auto& of_tile : sums) {
#pragma unroll
        for (auto& four : of_tile) {
#pragma unroll
          for (float& sum : four) sum = 0.0f;
        }
      }
      sum_groups<Shape, true>(args, weights, chunks, tokens_at, sums);
    }
  }
  write_sums<Shape>(args, tile, first_row, sums);
}

}  // namespace paceline::cuda
