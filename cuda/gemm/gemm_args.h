// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arguments of a GEMM kernel, and the shape of its tiles.

#include <cstdint>

#include "gemm/stage_boxes.h"
#include "ops/ops.h"

namespace paceline::cuda {

// The end of a product whose rows of weights are gates and, from row `up_row` on, their ups. A tile
// has as many of both, and y is the activation of the product in bfloat16.
struct GatedRows {
  int32_t up_row = 0;  // 0: y is the product
  Activation activation = Activation::kSilu;
  float alpha = 0;
  float limit = 0;
};

struct GemmArgs {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* bias;  // [n], or null
  void* y;
  int64_t y_stride;
  int32_t n;  // of y
  int32_t k;
  int32_t num_stages;
  int32_t stage_bytes;   // bytes that arrive per stage
  int32_t block_tokens;  // tokens that a block computes, at most a tile's
  int32_t copy_steps;    // of the steps of a stage, those that one copy brings (stage_boxes.h)
  uint32_t token_step;   // from a step of the tokens to the next one, in 16 bytes
  GatedRows gated;
  // [max_rows, n], or null: y is added to it, and not written. Tiles of at most kMaxAddedTokens
  // tokens do it, with outputs of bfloat16.
  float* residual = nullptr;
  bool delays_successor = false;  // as in GemmParams
};
inline constexpr int32_t kMaxAddedTokens = 16;

// What a product ends in, beside writing y.
struct ProductEnd {
  // y is that of the activation; the product is bfloat16 and has no bias.
  const GatedActivationParams* activation = nullptr;
  // [max_rows, n]: y, in bfloat16, is added to it, and not written. At most kMaxAddedTokens rows.
  float* residual = nullptr;
};

// The operand that forms the rows of the product, 64 per warpgroup; the other forms its columns.
enum class RowsAre : uint8_t { kWeights, kTokens };

// The outputs of one block: `groups` warpgroups of 64 rows each by `columns`. A stage of the ring
// holds `steps` times 64 columns of K, with weights of `weight_bits` bits each. A thin tile has
// fewer weights than 64, `thin_rows`. The product still reads 64 rows; what it makes of those
// behind the weights, which are whatever lies there, is not used.
template <RowsAre rows_are, int32_t groups, int32_t columns, int32_t steps = 1,
          int32_t weight_bits = 16, int32_t thin_rows = 0>
struct Tile {
  static constexpr int32_t kGroups = groups;
  static constexpr int32_t kGroupRows = 64;
  static constexpr int32_t kRows = groups * kGroupRows;
  static constexpr int32_t kColumns = columns;
  static constexpr int32_t kSteps = steps;
  static constexpr bool kWeightsAreRows = rows_are == RowsAre::kWeights;
  static constexpr int32_t kWeights = thin_rows > 0     ? thin_rows
                                      : kWeightsAreRows ? kRows
                                                        : kColumns;
  static_assert(thin_rows == 0 || (kWeightsAreRows && groups == 1));
  static constexpr int32_t kTokens = kWeightsAreRows ? kColumns : kRows;

  static constexpr int32_t kDepth = kStepColumns;  // columns of K in one 128-byte row
  static constexpr int32_t kRowBytes = kDepth * 2;
  static constexpr int32_t kWeightBytes = kWeights * kDepth * weight_bits / 8;
  static constexpr int32_t kTokenBytes = kTokens * kRowBytes;
  static constexpr int32_t kStageBytes = kSteps * (kWeightBytes + kTokenBytes);
  static constexpr bool kWeightsArrive = true;  // by the copy engine
  // Read behind a ring.
  static constexpr int32_t kBehindBytes = thin_rows > 0 ? (kGroupRows - thin_rows) * kRowBytes : 0;

  static constexpr int32_t kConsumers = kGroups * 128;
  static constexpr int32_t kThreads = kConsumers + 32;
  static_assert(kWeights <= 256 && kTokens <= 256, "boxes have at most 256 rows");
  static_assert(kWeights % 8 == 0 && kTokens % 8 == 0, "the swizzle repeats after 8 rows");
};

}  // namespace paceline::cuda
