// SPDX-License-Identifier: Apache-2.0
#pragma once

// How weights, scales and tokens reach the threads of narrow_kernel.cuh.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/mma.cuh"
#include "common/packed_copies.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_weights.h"

namespace paceline::cuda {

// A lane's words of a group.
template <class Shape>
struct LaneGroup {
  static constexpr int32_t kParts = Shape::kTileBytes / 512;  // of 16 bytes
  uint4 words[Shape::kRowTiles][2][kParts];
  uint32_t scales[Shape::kRowTiles][2];  // of kMxfp4
};

// Where the weights of a lane come from, and where they lie in shared memory.
template <class Shape>
class LaneWeights {
 public:
  __device__ __forceinline__ LaneWeights(const PackedArgs& args, int32_t expert, int32_t first_row,
                                         uint32_t shared, int32_t first_group = 0)
      : policy_(args.weight_policy), num_tiles_((args.k + kPackedColumns - 1) / kPackedColumns) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t last_tile = (args.n - 1) / kPackedRows;
    shared_ = shared + static_cast<uint32_t>(lane) * 16;
    shared_scales_ = shared + static_cast<uint32_t>(lane) * 4;
#pragma unroll
    for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
      // A tile behind the last one reads the last one; its outputs are not written.
      const int64_t tile =
          int64_t{min(first_row / kPackedRows + r, last_tile)} * num_tiles_ + 2 * first_group;
      data_[r] = args.data + expert * args.data_stride + tile * Shape::kTileBytes + lane * 16;
      if constexpr (Shape::kHasScaleBytes) {
        scales_[r] = args.scales.scales + expert * args.scales.expert_stride +
                     tile * kPackedScaleBytes + lane / 4 * 4;
      }
    }
  }

  // Requests the next group, if there is one. Commits nothing.
  __device__ __forceinline__ void request(int32_t group, int32_t slot) {
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
      if (2 * group + t >= num_tiles_) break;
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint32_t at = offset(slot, r, t);
#pragma unroll
        for (int32_t part = 0; part < LaneGroup<Shape>::kParts; ++part) {
          copy_weights_16(shared_ + at + part * 512, data_[r] + t * Shape::kTileBytes + part * 512,
                          policy_);
        }
        if constexpr (Shape::kHasScaleBytes) {
          copy_weights_4(shared_scales_ + at + Shape::kTileBytes,
                         scales_[r] + t * kPackedScaleBytes, policy_);
        }
      }
    }
#pragma unroll
    for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
      data_[r] += Shape::kGroupStep * 2 * Shape::kTileBytes;
      if constexpr (Shape::kHasScaleBytes) scales_[r] += Shape::kGroupStep * 2 * kPackedScaleBytes;
    }
  }

  __device__ __forceinline__ void load(int32_t slot, LaneGroup<Shape>& group) const {
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
#pragma unroll
      for (int32_t r = 0; r < Shape::kRowTiles; ++r) {
        const uint32_t at = offset(slot, r, t);
#pragma unroll
        for (int32_t part = 0; part < LaneGroup<Shape>::kParts; ++part) {
          group.words[r][t][part] = load_shared_16(shared_ + at + part * 512);
        }
        if constexpr (Shape::kHasScaleBytes) {
          group.scales[r][t] = load_shared_4(shared_scales_ + at + Shape::kTileBytes);
        }
      }
    }
  }

  // Packed tiles along k.
  __device__ __forceinline__ int32_t num_tiles() const { return num_tiles_; }

 private:
  __device__ __forceinline__ static uint32_t offset(int32_t slot, int32_t row_tile, int32_t tile) {
    return static_cast<uint32_t>(slot * Shape::kSlotBytes +
                                 (2 * row_tile + tile) * Shape::kSlotTileBytes);
  }

  uint64_t policy_;
  int32_t num_tiles_;
  uint32_t shared_;
  uint32_t shared_scales_;
  const std::byte* data_[Shape::kRowTiles];
  const std::byte* scales_[Shape::kHasScaleBytes ? Shape::kRowTiles : 1];
};

// Copies chunks of the tokens of a block; a thread always copies the same piece of the same rows.
template <class Shape>
class ChunkCopier {
 public:
  __device__ __forceinline__ ChunkCopier(const PackedArgs& args, const ExpertTile& tile,
                                         uint32_t shared)
      : x_(args.x_of(tile.column_tile * Shape::kRows)),
        stride_(args.x_stride),
        k_(args.k),
        shared_(shared) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    piece_ = thread % kPieces;
    first_row_ = thread / kPieces;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * kRowStep;
      const int32_t of_y = tile.first_row + row;
      rows_[i] = row >= tile.num_rows ? -1 : args.x_rows != nullptr ? args.x_rows[of_y] : of_y;
    }
  }

  __device__ __forceinline__ void request(int32_t chunk) const {
    const int32_t column = chunk * Shape::kChunkColumns + piece_ * 8;
    // The last packed tile has columns up to a multiple of 64; tokens are zero beyond K.
    if (column >= (k_ + kPackedColumns - 1) / kPackedColumns * kPackedColumns) return;
    const bool is_inside = column < k_;
    const uint32_t to =
        shared_ + static_cast<uint32_t>(chunk % Shape::kChunkSlots * Shape::kChunkBytes);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      if (rows_[i] < 0) continue;
      const int32_t row = first_row_ + i * kRowStep;
      const auto at =
          static_cast<uint32_t>(row * Shape::kChunkRowBytes + (piece_ ^ (row % 8)) * 16);
      cp_async_16(to + at, x_ + rows_[i] * stride_ + (is_inside ? column : 0), is_inside);
    }
  }

 private:
  static constexpr int32_t kPieces = Shape::kChunkRowBytes / 16;
  static constexpr int32_t kRowStep = Shape::kThreads / kPieces;
  static constexpr int32_t kRows = Shape::kTokens / kRowStep;
  static_assert(kRowStep > 0 && kRows * kRowStep == Shape::kTokens);

  const __nv_bfloat16* x_;
  int64_t stride_;
  int32_t k_;
  uint32_t shared_;
  int32_t piece_;
  int32_t first_row_;
  int32_t rows_[kRows];  // of x; -1: none
};

// The scales of kFp8 that a lane needs, read one tile of 128 columns ahead.
template <class Shape>
class LaneScales {
 public:
  __device__ __forceinline__ LaneScales(const ScaleArgs& args, int32_t expert, int32_t first_row,
                                        int32_t n)
      : columns_(args.columns) {
    const auto* const table =
        reinterpret_cast<const float*>(args.scales + expert * args.expert_stride);
    const int32_t group = static_cast<int32_t>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int32_t i = 0; i < 2 * Shape::kRowTiles; ++i) {
      const int32_t row = min(first_row + group + 8 * i, n - 1);
      rows_[i] = table + int64_t{row >> args.row_shift} * args.columns;
      next_[i] = __ldg(rows_[i]);
    }
  }

  // Makes the scales of tile `column` current.
  __device__ __forceinline__ void advance(int32_t column) {
    const int32_t next = min(column + 1, columns_ - 1);
#pragma unroll
    for (int32_t i = 0; i < 2 * Shape::kRowTiles; ++i) {
      now_[i] = next_[i];
      next_[i] = __ldg(rows_[i] + next);
    }
  }

  // Of row g (half 0) or g + 8 (half 1) of row tile r.
  __device__ __forceinline__ float of(int32_t r, int32_t half) const { return now_[2 * r + half]; }

 private:
  int32_t columns_;
  const float* rows_[2 * Shape::kRowTiles];
  float now_[2 * Shape::kRowTiles];
  float next_[2 * Shape::kRowTiles];
};

}  // namespace paceline::cuda
