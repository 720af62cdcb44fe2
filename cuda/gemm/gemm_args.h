// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a GEMM kernel is told, and the shape of its tiles.

#include <cstdint>

namespace paceline::cuda {

struct GemmArgs {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* bias;  // [n], or null
  void* y;
  int64_t y_stride;
  int32_t n;
  int32_t k;
  int32_t num_stages;
  int32_t stage_bytes;  // that arrive for each
};

// Which operand of the product is the one of 64 rows a warpgroup; the other is its columns.
enum class RowsAre : uint8_t { kWeights, kTokens };

// Outputs of one block: `groups` warpgroups of `blocks` times 64 rows each by `columns`. A stage of
// the ring holds `steps` times 64 columns of K. `cluster` neighbouring tiles of weights share their
// tile of tokens: each block fetches its part of it for all.
template <RowsAre rows_are, int32_t groups, int32_t blocks, int32_t columns, int32_t steps = 1,
          int32_t cluster = 1>
struct Tile {
  static constexpr int32_t kGroups = groups;
  static constexpr int32_t kBlocks = blocks;
  static constexpr int32_t kBlockRows = 64;
  static constexpr int32_t kGroupRows = blocks * kBlockRows;
  static constexpr int32_t kRows = groups * kGroupRows;
  static constexpr int32_t kColumns = columns;
  static constexpr int32_t kSteps = steps;
  static constexpr int32_t kCluster = cluster;
  static constexpr bool kWeightsAreRows = rows_are == RowsAre::kWeights;
  static constexpr int32_t kWeights = kWeightsAreRows ? kRows : kColumns;
  static constexpr int32_t kTokens = kWeightsAreRows ? kColumns : kRows;

  static constexpr int32_t kDepth = 64;  // columns of K in one 128-byte row
  static constexpr int32_t kRowBytes = kDepth * 2;
  static constexpr int32_t kWeightBytes = kWeights * kRowBytes;
  static constexpr int32_t kTokenBytes = kTokens * kRowBytes;
  static constexpr int32_t kStageBytes = kSteps * (kWeightBytes + kTokenBytes);

  static constexpr int32_t kConsumers = kGroups * 128;
  // With more accumulators than a thread can have beside all others, the producer is a warpgroup,
  // too, and gives most of its registers to the others.
  static constexpr bool kTradesRegisters = kBlocks * kColumns / 2 > 128;
  static constexpr int32_t kThreads = kConsumers + (kTradesRegisters ? 128 : 32);
  static constexpr int32_t kTokenBox = kTokens / kCluster;
  static_assert(!kTradesRegisters || kGroups == 2, "the trade is for two groups, see gemm_kernel");
  static_assert(kWeights <= 256 && kTokenBox <= 256, "boxes have at most 256 rows");
  static_assert(kTokenBox % 8 == 0 && kTokens % kCluster == 0, "the swizzle repeats after 8 rows");
};

}  // namespace paceline::cuda
