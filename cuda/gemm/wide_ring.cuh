// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ring of a block of wide_kernel.cuh, and the warps that fill it. A stage has 128 columns of K:
// tokens, packed weights and their scales.

#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_weights.h"
#include "gemm/stage_boxes.h"
#include "gemm/tensor_map.h"
#include "gemm/token_copier.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

inline constexpr int32_t kMaxWideStages = 16;
inline constexpr int32_t kMaxWideBytes = 226 << 10;  // of 227 KB; barriers take their share

// 64 * groups weights by at most `tokens` tokens. `blocks` of a multiprocessor must have enough
// registers. `steps`: see kSteps.
template <WeightFormat format, int32_t groups, int32_t tokens, int32_t blocks = 1,
          int32_t steps = 4, bool moves_registers = false>
struct WideShape {
  static constexpr WeightFormat kFormat = format;
  static constexpr int32_t kGroups = groups;
  static constexpr int32_t kBlocks = blocks;
  static constexpr int32_t kTokens = tokens;
  static constexpr int32_t kWeights = 64 * groups;
  static constexpr int32_t kRowTiles = kWeights / kPackedRows;
  static constexpr int32_t kStageDepth = 2 * kPackedColumns;

  // Of a stage: two tiles of 64 columns for each row tile; a word of scales for each row, of kInt4
  // for each lane of a warp and each tile, of kNvfp4 the lines of each tile.
  static constexpr int32_t kRowTileBytes = 2 * packed_tile_bytes(format);
  static constexpr int32_t kWeightBytes = kRowTiles * kRowTileBytes;
  static constexpr int32_t kTokenBytes = tokens * 128;  // of 64 columns
  static constexpr int32_t kTileBytes = 2 * kTokenBytes + kWeightBytes;
  static constexpr int32_t kScaleBytes = format == WeightFormat::kInt4 ? kRowTiles * 2 * 128
                                         : format == WeightFormat::kNvfp4
                                             ? kRowTiles * 2 * kPackedNvfp4ScaleBytes
                                             : kWeights * 4;
  static constexpr int32_t kStageBytes = kTileBytes + kScaleBytes;
  static_assert(tokens % 16 == 0 && kTileBytes % 1024 == 0);

  static constexpr int32_t kConsumers = groups * 128;
  static constexpr int32_t kTokenWarps = tokens <= 32 ? 1 : 2;
  // A warp for the weights; where the warpgroups move registers, they must be whole.
  static constexpr bool kMovesRegisters = moves_registers;
  static constexpr int32_t kProducers = moves_registers ? 128 : 32 * (kTokenWarps + 1);
  static constexpr int32_t kThreads = kConsumers + kProducers;
  // Arrivals at a full stage: the announcement of the weights, the lanes that copy scales, and the
  // warps that copy tokens.
  static constexpr int32_t kArrivals = 1 + 32 + kTokenWarps;
  // Stages whose tokens are in flight before a warp waits for the oldest.
  static constexpr int32_t kStagesAhead = tokens <= 64 ? 3 : 2;
  static constexpr int32_t kStagedBytes = tokens * (kWeights + 4) * 4;
  static constexpr int32_t kMinStages =
      std::max(kStagesAhead + 2, (kStagedBytes + kTileBytes - 1) / kTileBytes);

  // Products of 16 columns of K whose operand is converted at once: a part of a stage.
  static constexpr int32_t kSteps = steps;
  static constexpr int32_t kParts = 8 / steps;
  static_assert(steps == 2 || steps == 4);

  // Whether a tile reads all its scales before its first stage, to know how to convert kMxfp4; else
  // each stage's own scales tell, by a branch for each of its parts. With 128 tokens reading them
  // first takes 7 % less time, with 32 tokens 2 % more.
  static constexpr bool kScansScales = format == WeightFormat::kMxfp4 && tokens > 64;

  static constexpr bool kWeightsAreRows = true;  // for StagedTile
  static constexpr int32_t kColumns = tokens;

  // Stages that fit `bytes` of shared memory.
  static constexpr int32_t stages_in(int32_t bytes) {
    return std::clamp((bytes - 1024) / kStageBytes, kMinStages, kMaxWideStages);
  }
  static constexpr int32_t shared_bytes(int32_t num_stages) {
    return 1024 + num_stages * kStageBytes;
  }
  static_assert(shared_bytes(kMinStages) <= kMaxWideBytes);
};

// Shared addresses of a ring: tokens and weights stage by stage, then the scales of all stages.
template <class Shape>
struct WideRing {
  uint32_t data;
  uint32_t scale_data;
  uint64_t* full;   // one phase per filling: all bytes of the stage have arrived
  uint64_t* empty;  // one phase per use: every warp of the consumers has read the stage
  int32_t num_stages;

  __device__ __forceinline__ uint32_t tokens(int32_t stage) const {
    return data + static_cast<uint32_t>(stage * Shape::kTileBytes);
  }
  __device__ __forceinline__ uint32_t weights(int32_t stage) const {
    return tokens(stage) + 2 * Shape::kTokenBytes;
  }
  __device__ __forceinline__ uint32_t scales(int32_t stage) const {
    return scale_data + static_cast<uint32_t>(stage * Shape::kScaleBytes);
  }
};

// Walks the stages of a ring.
struct RingPlace {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next(int32_t num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Copies the scales of a tile, stage by stage; one object for each lane of a warp. A stage has
//   kMxfp4, kNvfp4: for each row tile, the scales of its first and of its second tile of 64 columns
//   kFp8:           for each row, a float
// A row tile behind the last one has the scales of the last one.
template <class Shape>
class ScaleCopier {
 public:
  __device__ __forceinline__ ScaleCopier(const PackedArgs& args, const ExpertTile& tile,
                                         int32_t lane)
      : lane_(lane) {
    const std::byte* const table = args.scales.scales + tile.expert * args.scales.expert_stride;
    if constexpr (kIsPacked) {
      tile_cols_ = (args.k + kPackedColumns - 1) / kPackedColumns;
      const int32_t last = (args.n - 1) / kPackedRows;
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) {
        const int32_t row_tile = tile.column_tile * Shape::kRowTiles + (lane + 32 * i) / kPieces;
        from_[i] = table + int64_t{min(row_tile, last)} * tile_cols_ * kTileScaleBytes +
                   lane % kPieces * 16;
      }
    } else {
      is_needed_ = args.scales.use == ScaleUse::kValues || args.scales.use == ScaleUse::kTileSums;
      columns_ = args.scales.columns;
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) {
        const int32_t row = tile.column_tile * Shape::kWeights + lane + 32 * i;
        from_[i] = table + int64_t{min(row, args.n - 1) >> args.scales.row_shift} * columns_ * 4;
      }
    }
  }

  __device__ __forceinline__ void copy(uint32_t to, int32_t block) const {
    if constexpr (kIsPacked) {
      // Scales of columns beyond K are zero.
      const bool is_inside = 2 * block + lane_ % kPieces / (kPieces / 2) < tile_cols_;
      const int32_t at = is_inside ? block * 2 * kTileScaleBytes : 0;
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) {
        if (lane_ + 32 * i < Shape::kRowTiles * kPieces) {
          cp_async_16(to + static_cast<uint32_t>((lane_ + 32 * i) * 16), from_[i] + at, is_inside);
        }
      }
    } else {
      if (!is_needed_) return;
      const int32_t at = min(block, columns_ - 1) * 4;
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) {
        cp_async_4(to + static_cast<uint32_t>((lane_ + 32 * i) * 4), from_[i] + at);
      }
    }
  }

 private:
  static constexpr bool kIsPacked = Shape::kFormat != WeightFormat::kFp8;
  static constexpr int32_t kTileScaleBytes =
      Shape::kFormat == WeightFormat::kNvfp4 ? kPackedNvfp4ScaleBytes : kPackedScaleBytes;
  static constexpr int32_t kPieces = 2 * kTileScaleBytes / 16;  // of a row tile
  static_assert(32 % kPieces == 0);
  static constexpr int32_t kCount =
      kIsPacked ? (Shape::kRowTiles * kPieces + 31) / 32 : Shape::kWeights / 32;

  int32_t lane_;
  int32_t tile_cols_ = 0;   // kMxfp4, kNvfp4
  int32_t columns_ = 0;     // kFp8
  bool is_needed_ = false;  // kFp8
  const std::byte* from_[kCount];
};

// The same of kInt4: of each row tile and each of its two tiles of 64 columns, the words that the
// lanes of a warp need (Int4Groups). A lane copies its own.
template <class Shape>
class Int4ScaleCopier {
 public:
  __device__ __forceinline__ Int4ScaleCopier(const PackedArgs& args, const ExpertTile& tile,
                                             int32_t lane)
      : lane_(lane),
        last_((args.n - 1) / kPackedRows - tile.column_tile * Shape::kRowTiles),
        groups_(args, tile.expert, tile.column_tile * Shape::kRowTiles) {}

  __device__ __forceinline__ void copy(uint32_t to, int32_t block) const {
    if (!groups_.reads()) return;
#pragma unroll
    for (int32_t t = 0; t < 2; ++t) {
      const std::byte* const from = groups_.word_of(2 * block + t);
#pragma unroll
      for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
        cp_async_4(to + static_cast<uint32_t>((2 * i + t) * 128 + lane_ * 4),
                   from + int64_t{min(i, last_)} * groups_.row_bytes());
      }
    }
  }

 private:
  int32_t lane_;
  int32_t last_;  // row tile of the matrix, counted from the block's first
  Int4Groups groups_;
};

// The weights of WideShape `Shape`, for the copy engine: a box is those of a stage.
template <class Shape>
CUtensorMap wide_weight_map(const ExpertMatrices& matrices) {
  const WeightMatrix& w = matrices.first;
  const int64_t row_bytes =
      int64_t{(w.k + kPackedColumns - 1) / kPackedColumns} * (Shape::kRowTileBytes / 2);
  const int32_t row_tiles = (w.n + kPackedRows - 1) / kPackedRows;
  return packed_map(w.data,
                    packed_boxes(row_tiles, row_bytes, matrices.num_experts, matrices.data_stride,
                                 Shape::kRowTiles, Shape::kRowTileBytes));
}

// Fills the ring with weights and scales; called by a warp. map: wide_weight_map.
template <class Shape>
__device__ __forceinline__ void produce_weights(const WideRing<Shape>& ring, const PackedArgs& args,
                                                const CUtensorMap* map, const ExpertTile& tile,
                                                int32_t num_blocks) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  using Scales = std::conditional_t<Shape::kFormat == WeightFormat::kInt4, Int4ScaleCopier<Shape>,
                                    ScaleCopier<Shape>>;
  const Scales scales(args, tile, lane);
  const int32_t first = tile.column_tile * Shape::kRowTiles;
  RingPlace place;
  place.parity = 1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    // The first round finds the stages empty.
    if (block >= ring.num_stages) barrier_wait_idle(&ring.empty[place.stage], place.parity);
    uint64_t* const full = &ring.full[place.stage];
    if (lane == 0) {
      barrier_expect(full, Shape::kWeightBytes);
      copy_box(ring.weights(place.stage), map, block * (Shape::kRowTileBytes / kPackedWordBytes),
               first, tile.expert, full, args.weight_policy);
    }
    __syncwarp();
    scales.copy(ring.scales(place.stage), block);
    arrive_after_copies(full);
    place.next(ring.num_stages);
  }
}

// Fills the ring with tokens; called by all threads of the token warps.
template <class Shape>
__device__ __forceinline__ void produce_tokens(const WideRing<Shape>& ring, const PackedArgs& args,
                                               const ExpertTile& tile, int32_t thread,
                                               int32_t num_blocks) {
  const TokenCopier<Shape> copier(args.x_of(tile.column_tile * Shape::kWeights), args.x_stride,
                                  args.x_rows, args.k, tile, thread);
  // The tokens of this warp have arrived in the stage.
  const auto arrive = [&](int32_t stage) {
    fence_shared_for_wgmma();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(&ring.full[stage]);
  };
  RingPlace place;
  place.parity = 1;
  RingPlace oldest;  // the stage whose tokens have been in flight longest
  for (int32_t block = 0; block < num_blocks; ++block) {
    if (block >= ring.num_stages) barrier_wait_idle(&ring.empty[place.stage], place.parity);
    copier.copy(ring.tokens(place.stage), block);
    cp_async_commit();
    if (block >= Shape::kStagesAhead) {
      cp_async_wait<Shape::kStagesAhead>();
      arrive(oldest.stage);
      oldest.next(ring.num_stages);
    }
    place.next(ring.num_stages);
  }
  cp_async_wait<0>();
  for (int32_t left = min(Shape::kStagesAhead, num_blocks); left > 0; --left) {
    arrive(oldest.stage);
    oldest.next(ring.num_stages);
  }
}

}  // namespace paceline::cuda
