// SPDX-License-Identifier: Apache-2.0
#pragma once

// The shapes of the paged attention kernel's instances, the plan of a launch and the layouts of
// shared memory and workspace.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention/attention_common.cuh"
#include "ops/ops.h"

namespace paceline::cuda::paged {

inline constexpr int32_t kThreads = kAttentionThreads;
inline constexpr int32_t kChunk = kAttentionChunk;
inline constexpr int32_t kWarps = kThreads / 32;
inline constexpr int32_t kWarpKeys = kChunk / kWarps;  // keys that a warp scores, and loads
inline constexpr int32_t kKeyTiles = kWarpKeys / 8;    // MMA tiles of 8 keys
inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr int32_t kIntMax = std::numeric_limits<int32_t>::max();
inline constexpr int32_t kMergeBatch = 16;  // chunks whose loads are in flight together

// Where few blocks run, what one of them has in flight decides, and not what a multiprocessor has.
enum class Ring : uint8_t {
  kShort,  // several blocks per SM keep about 100 KB of loads in flight
  kLong,   // a block has room for a chunk, whose loads then take one latency
  kThin,   // slices of 64 columns: four blocks share an SM, among which many tiles divide evenly
};

// What a block takes of the 228 KB of an SM: static and dynamic arrays, and what the system needs.
constexpr int32_t block_bytes(int32_t static_bytes, int32_t dynamic_bytes) {
  constexpr int32_t kSystemBytes = 1024;
  constexpr int32_t kUnit = 128;
  return ((static_bytes + kUnit - 1) / kUnit + (dynamic_bytes + kUnit - 1) / kUnit) * kUnit +
         kSystemBytes;
}

// The layout of one instance of the kernel.
template <int head_dim, int m_tiles, Ring ring>
struct Shape {
  static constexpr int32_t kHeadDim = head_dim;
  static constexpr int32_t kMTiles = m_tiles;  // MMA tiles of 16 packed rows
  static constexpr int32_t kRows = 16 * kMTiles;
  static constexpr int32_t kHeadUnits = kHeadDim / 8;  // of 16 bytes
  // Columns of a stage of the ring.
  static constexpr int32_t kSlice = ring == Ring::kThin ? 64 : std::min(kHeadDim, 128);
  static constexpr int32_t kSlices = kHeadDim / kSlice;  // of K, and of V
  static_assert(kHeadDim % kSlice == 0);
  static constexpr int32_t kSliceUnits = kSlice / 8;  // of 16 bytes
  static constexpr int32_t kWarpColumns = kSlice / kWarps;
  static constexpr int32_t kWarpColumnTiles = kWarpColumns / 8;
  static constexpr bool kIsLong = ring == Ring::kLong;
  static constexpr bool kMaySplit = ring != Ring::kThin;  // the chunks of a tile, over blocks
  // Whether old keys may be read before the predecessor has ended. Where four blocks share the
  // registers, two tiles of rows leave none for it.
  static constexpr bool kReadsAhead = kMaySplit || kMTiles == 1;
  // One stage is in use, and the others are in flight.
  static constexpr bool kHasThirdStage =
      (kHeadDim == 64 && (kMaySplit || kMTiles == 1)) || (kHeadDim == 256 && kMTiles == 1);
  static constexpr int32_t kStages = kIsLong ? 2 * kSlices + 1 : kHasThirdStage ? 3 : 2;
  // A block with one chunk keeps its result in the stage of its last keys, if its values have other
  // stages.
  static constexpr bool kHasResultStage = kStages > kSlices;
  static constexpr int32_t kResultOffset = (kSlices - 1) * kChunk * kSlice * 2;
  // Dynamic shared memory: the ring of K and V slices, then Q, P, and a result of another block.
  static constexpr int32_t kSliceBytes = kChunk * kSlice * 2;
  static constexpr int32_t kQBytes = kRows * kHeadDim * 2;
  static constexpr int32_t kPBytes = kRows * kChunk * 2;
  static constexpr int32_t kQOffset = kStages * kSliceBytes;
  static constexpr int32_t kPOffset = kQOffset + kQBytes;
  static constexpr int32_t kTurnsOffset = kPOffset + kPBytes;
  // What a block has of shared memory at least: the kernel's static arrays, too.
  static constexpr int32_t kStaticBytes = kRows * 4 * (4 + 2 * kWarps) + 32;
  static constexpr int32_t kBlockBytes = kTurnsOffset + kStaticBytes;
  // Blocks that share an SM; static arrays and the system take some of its 228 KB, too.
  static constexpr int32_t kMinBlocks = kIsLong          ? (kTurnsOffset <= 108 << 10 ? 2 : 1)
                                        : !kMaySplit     ? 4
                                        : kMTiles == 4   ? 2
                                        : kHeadDim == 64 ? 3
                                        : kHeadDim == 128 && kMTiles == 1 ? 3
                                                                          : 2;
  // A chunk's result: the accumulators of all rows, then their maxima, and their sums. Where there
  // is room for one behind P, two blocks may take the chunks of a tile by turns.
  static constexpr int32_t kResultBytes = kRows * kHeadDim * 4;
  static constexpr int32_t kTurnBytes = kResultBytes + kRows * 8;
  static constexpr bool kMayTakeTurns =
      kMaySplit && kMTiles <= 2 &&
      kMinBlocks * block_bytes(kStaticBytes, kTurnsOffset + kTurnBytes) <= 228 << 10;
  static constexpr int32_t kMaxSharedBytes = kTurnsOffset + (kMayTakeTurns ? kTurnBytes : 0);
};

// The division of the work into blocks. Grid: x tiles, y KV heads, z splits.
struct Plan {
  int32_t tiles_per_seq;   // 1: x is the sequence; else x counts the tiles of all sequences
  float* partials;         // with splits: [tiles, heads, chunk_capacity] of partial_floats
  int32_t* counters;       // [tiles, heads]
  int32_t chunk_capacity;  // tiles of more chunks are not split, unless blocks take turns
  int32_t partial_rows;    // rows of a tile that can be live
  int32_t cluster_blocks;  // splits in a cluster
  bool has_result_stage;   // the result of a chunk has room in shared memory
  bool takes_turns;        // the two blocks of a cluster take the chunks of a tile by turns
  int32_t max_seq_rows;    // sequences with more rows are left out
};

// Floats of the (max, sum, accumulator) of one chunk, a multiple of 16 bytes.
__host__ __device__ constexpr int64_t partial_floats(int64_t rows, int64_t head_dim) {
  return (rows * (head_dim + 2) + 3) / 4 * 4;
}

// Byte offset of a 16 byte unit: units of a row are permuted so that eight rows of the same unit,
// which ldmatrix reads at once, lie in different banks. `units` is a multiple of 8.
__device__ __forceinline__ uint32_t swizzled(int32_t row, int32_t unit, int32_t units) {
  return static_cast<uint32_t>((row * units + (unit ^ (row & 7))) * 16);
}

// The position of a thread in the block and in the fragments of an MMA: of every MMA tile of rows
// it holds rows quad_row and quad_row + 8.
struct ThreadPosition {
  int32_t thread;
  int32_t lane;
  int32_t warp;
  int32_t quad_row;
  int32_t quad_lane;
};

// The packed row of MMA tile `m` that a thread holds in its lower (0) or upper (1) half.
__device__ __forceinline__ int32_t packed_row(int32_t m, int32_t half, const ThreadPosition& at) {
  return m * 16 + half * 8 + at.quad_row;
}

// The tiles of a launch with tiles of `tile_rows` packed rows, at most.
struct Tiles {
  int64_t per_seq;
  int64_t count;

  Tiles(const PagedAttentionParams& p, int32_t tile_rows) {
    const int64_t heads_per_group = p.num_qo_heads / p.num_kv_heads;
    per_seq = (p.max_rows_per_seq * heads_per_group + tile_rows - 1) / tile_rows;
    count = p.max_seqs * per_seq;
    if (p.row_indptr == nullptr) return;
    // An upper bound for every batch: each sequence rounds up at most once.
    count = std::min(count, p.max_rows * heads_per_group / tile_rows + p.max_seqs);
  }
};

}  // namespace paceline::cuda::paged
