// SPDX-License-Identifier: Apache-2.0
#pragma once

// The shapes of the latent attention kernel, the division of its work, and the rule by which parts
// of the context are merged.
//
// A row's context is cut at absolute positions into chunks of 64 entries, and 16 chunks are a
// segment. A chunk starts with a fresh (max, sum, accumulator). Chunks are merged into their
// segment in ascending order, and segments into the row's result. Which block computes a chunk, and
// whether states are merged in registers or from the workspace, does not change a bit:
// - The maximum of a state is rounded up to an integer, in units of log2. So the factors that merge
//   two states are powers of two, and scale weights exactly before or after their products.
// - Weights below 2^-40 of that maximum, and factors below 2^-40, are zero, so that scaled weights
//   stay far above the least float32.

#include <algorithm>
#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_rows.cuh"
#include "common/ordering.cuh"

namespace paceline::cuda::latent {

using paged::kFullWarp;
using paged::Tile;
using paged::TileKeys;
using paged::TileRows;

inline constexpr int32_t kRank = 512;  // values are the first kRank elements of an entry
inline constexpr int32_t kWidth = 576;
inline constexpr int32_t kChunk = 64;
inline constexpr int32_t kSegmentChunks = 16;

// A slice is 64 columns of a chunk, 128 bytes of each entry: an operand of products.
inline constexpr int32_t kSliceColumns = 64;
inline constexpr int32_t kSlices = kWidth / kSliceColumns;
inline constexpr int32_t kValueSlices = kRank / kSliceColumns;
inline constexpr int32_t kSliceBytes = kChunk * kSliceColumns * 2;
static_assert(kSliceColumns * 2 == 128);

// Two warpgroups add values, and a third one scores. Of a fourth, two warps copy, and one tells the
// others of what has arrived; these three ask the copy engine.
inline constexpr int32_t kGroups = 2;
inline constexpr int32_t kAdders = 128 * kGroups;
inline constexpr int32_t kScorers = 128;
inline constexpr int32_t kConsumers = kAdders + kScorers;
inline constexpr int32_t kCopiers = kChunk;  // each looks up the address of one entry of a chunk
inline constexpr int32_t kThreads = kConsumers + 128;
static_assert(kCopiers % 32 == 0 && kCopiers + 32 <= kThreads - kConsumers);
inline constexpr int32_t kRequesters = kCopiers / 32 + 1;
inline constexpr int32_t kGroupSlices = kValueSlices / kGroups;
inline constexpr int32_t kMaxSlots = 24;
inline constexpr int32_t kMaxSharedBytes = (227 << 10) - 6144;  // the rest are static arrays

// `rows` packed rows (row of the sequence x head) of one sequence.
template <int32_t rows>
struct Shape {
  static constexpr int32_t kRows = rows;
  static constexpr int32_t kRowTiles = kRows / 8;  // columns of an MMA
  // Rows of a product of values; all 80 at once would take too many registers.
  static constexpr int32_t kPartRows = kRows > 64 ? kRows / 2 : kRows;
  // Registers of a thread; together, the 128 of each of 512.
  static constexpr int32_t kAdderRegisters = kRows > 64 ? 192 : 176;
  static constexpr int32_t kScorerRegisters = 96;
  static constexpr int32_t kCopierRegisters = kRows > 64 ? 32 : 64;
  static_assert(2 * kAdderRegisters + kScorerRegisters + kCopierRegisters == 4 * 128);
  // Dynamic shared memory: queries (slice by slice), weights, ring of slices.
  static constexpr int32_t kQSliceBytes = kRows * 128;
  static constexpr int32_t kQBytes = kSlices * kQSliceBytes;
  static constexpr int32_t kPBytes = kRows * 128;
  static constexpr int32_t kRingOffset = kQBytes + kPBytes;
  static constexpr int32_t kSlots =
      std::min(kMaxSlots, (kMaxSharedBytes - 1024 - kRingOffset) / kSliceBytes);
  static constexpr int32_t kSharedBytes = 1024 + kRingOffset + kSlots * kSliceBytes;
  static_assert(kRows % 16 == 0 && kRows <= kScorers && kRingOffset % 1024 == 0);
  static_assert(kPartRows % 8 == 0);  // of the swizzle
  static_assert(kSlots > kSlices);
  // Results on their way out take the place of the queries.
  static constexpr int32_t kStagedRowBytes = kRank * 2 + 16;
  static_assert(kRows * kStagedRowBytes <= kQBytes);
  // A state in the workspace: accumulators as the threads hold them, then (max, sum) of each row.
  static constexpr int32_t kStateValues = kRows * kRank;
  static constexpr int32_t kStateFloats = kStateValues + 2 * kRows;
};

// The division of the work into blocks. Grid: x tiles, y splits of the context.
struct Plan {
  int32_t num_tiles;      // of the largest batch
  int32_t tiles_per_seq;  // 1: a tile is a sequence; else tiles of all sequences are counted
  int32_t splits;
  int32_t capacity;    // states of a tile in the workspace
  float* states;       // [num_tiles, capacity] where splits > 1
  float* totals;       // [blocks] a state of each block
  uint32_t* counters;  // [num_tiles] where splits > 1
};

// How a tile's chunks are divided. Block `split` takes pieces split, split + num_splits, ...
struct Work {
  int32_t num_chunks;
  int32_t piece_chunks;
  int32_t num_pieces;
  int32_t num_splits;
  bool stores_states;  // pieces are merged by merge_states

  __device__ __forceinline__ int32_t first_chunk(int32_t piece) const {
    return piece * piece_chunks;
  }
  __device__ __forceinline__ int32_t end_chunk(int32_t piece) const {
    return min((piece + 1) * piece_chunks, num_chunks);
  }
};

// Pieces are segments, or single chunks where those end earlier by the estimate below, in tenths of
// the time of a chunk: storing a state takes 0.7, merging 2 and 1/60 for each state of all tiles.
__device__ __forceinline__ Work divide(const Plan& plan, int32_t num_keys) {
  const int32_t chunks = (num_keys + kChunk - 1) / kChunk;
  const int32_t segments = (chunks + kSegmentChunks - 1) / kSegmentChunks;
  Work work = {.num_chunks = chunks,
               .piece_chunks = kSegmentChunks,
               .num_pieces = segments,
               .num_splits = 1,
               .stores_states = false};
  if (plan.splits == 1 || chunks <= 1) return work;
  const auto rounds = [&](int32_t count) { return (count + plan.splits - 1) / plan.splits; };
  const bool can_split = segments > 1 && segments <= plan.capacity;
  const int32_t of_segments =
      can_split ? rounds(segments) * (10 * kSegmentChunks + 7) + 20 : 10 * chunks;
  const int32_t of_chunks = rounds(chunks) * 17 + 20 + chunks * plan.num_tiles / 6;
  if (chunks <= plan.capacity && of_chunks < of_segments) {
    work.piece_chunks = 1;
    work.num_pieces = chunks;
  } else if (!can_split) {
    return work;
  }
  work.num_splits = min(plan.splits, work.num_pieces);
  work.stores_states = true;
  return work;
}

// The tile of a block, in shared memory, so that it takes no registers where it is not needed.
struct BlockTile {
  int32_t index;  // in the batch
  int32_t seq_slot;
  int32_t common_end;  // all live rows see the entries below
  int32_t end;         // and none sees one from here on
  Work work;
};

// The tile `at` of the batch; false: there is none. Every thread of a warp calls it.
__device__ __forceinline__ bool find_tile(const PagedAttentionParams& p, const Plan& plan,
                                          int32_t rows, int32_t at, Tile* tile) {
  const int32_t num_rows = min(__ldcg(p.num_rows), p.max_rows);
  if (p.row_indptr == nullptr) {
    *tile = {.first_row = at / plan.tiles_per_seq, .num_rows = 1, .index = at % plan.tiles_per_seq};
    return tile->first_row < num_rows;
  }
  const int32_t num_seqs = min(__ldcg(p.num_seqs), p.max_seqs);
  if (plan.tiles_per_seq > 1) {
    // Later tiles of a prompt see more keys and take longer, so they go first.
    return paged::find_tile(p.row_indptr, num_seqs, p.num_qo_heads, rows, plan.num_tiles - 1 - at,
                            tile);
  }
  // Loads come before the branch on another one: the way to the first entry is a chain of
  // latencies.
  const int32_t first = __ldcg(p.row_indptr + at);
  const int32_t end = __ldcg(p.row_indptr + at + 1);
  *tile = {.first_row = first, .num_rows = end - first, .index = 0};
  return at < num_seqs && end > first;
}

// Numbers of barriers; 0 is __syncthreads.
inline constexpr int32_t kConsumerBarrier = 1;
inline constexpr int32_t kAdderBarrier = 2;
inline constexpr int32_t kScorerBarrier = 3;
inline constexpr int32_t kReadyBarrier = 4;  // of consumers: P of a chunk is in shared memory
inline constexpr int32_t kDoneBarrier = 5;   // of consumers: and is no longer needed
inline constexpr int32_t kCopierBarrier = 6;
// Of all threads. Not __syncthreads, since each role of warps has a call of its own, in a branch.
inline constexpr int32_t kBlockBarrier = 7;

// Weights and factors below this power of two are zero.
inline constexpr float kLeastPower = -40.0f;

// 2^x of an integer of at most 0, exactly; 0 below kLeastPower and for NaN, the difference of the
// maxima of two empty states.
__device__ __forceinline__ float power_of_two(float x) {
  return x >= kLeastPower ? __int_as_float((127 + static_cast<int32_t>(x)) << 23) : 0.0f;
}

// The factors that merge a part into a state. An empty one has the maximum -inf.
struct Factors {
  float max;
  float keep;  // of the state's sum and accumulator
  float take;  // of the part's
};
__device__ __forceinline__ Factors merge_factors(float max, float part_max) {
  const float new_max = fmaxf(max, part_max);
  return {.max = new_max,
          .keep = power_of_two(__fsub_rn(max, new_max)),
          .take = power_of_two(__fsub_rn(part_max, new_max))};
}
__device__ __forceinline__ float merged(float value, float part, float keep, float take) {
  return __fmaf_rn(part, take, __fmul_rn(value, keep));
}

// The position of a thread of a warpgroup.
struct Position {
  int32_t group;   // of the two that add values
  int32_t thread;  // of the group
  int32_t warp;
  int32_t lane;
  int32_t quad_row;
  int32_t quad_lane;
};

// A thread's floats of a state: four for each slice of the values and tile of eight rows. With
// g = lane / 4 and t = lane % 4 of warp w they are columns 64 slice + 16 w + g (+ 8 in the second
// pair) of rows 8 tile + 2 t (+ 1).
template <class S>
__device__ __forceinline__ int32_t state_at(int32_t slice, int32_t row_tile, int32_t warp,
                                            int32_t lane) {
  return (((slice * S::kRowTiles + row_tile) * 4 + warp) * 32 + lane) * 4;
}

}  // namespace paceline::cuda::latent
