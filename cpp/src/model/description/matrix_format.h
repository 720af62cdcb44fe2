// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kinds of layers share in their descriptions: rotary embeddings and formats of matrices.

#include <cstdint>
#include <vector>

#include "ops/weight_matrix.h"

namespace paceline {

// Rotary embedding: angle = position * inv_freq[i]; cos and sin times `scale`. Pair i consists of
// elements i and i + head_dim / 2 (split halves) or, interleaved, of 2i and 2i + 1.
struct RopeConfig {
  std::vector<float> inv_freq;  // [head_dim / 2]
  float scale = 1.0f;
  bool is_interleaved = false;
};

// The scales of an fp8 matrix in a checkpoint.
enum class Fp8Scales : uint8_t {
  kTensor,  // one for the matrix
  kRow,
  kBlock,  // one for each tile of kFp8Block x kFp8Block elements
};
inline constexpr int32_t kFp8Block = 128;

struct MatrixFormat {
  WeightFormat format = WeightFormat::kPlain;
  Fp8Scales scales = Fp8Scales::kTensor;  // kFp8
  bool has_exact_scales = false;          // kFp8: every scale must be a power of two
  int32_t group = 0;       // kInt4: the columns that share a scale; 0: those of a row
  bool has_zeros = false;  // kInt4: each group has a zero point
  bool has_order = false;  // kInt4: the columns are not in the order of the inputs

  friend bool operator==(const MatrixFormat&, const MatrixFormat&) = default;
};

}  // namespace paceline
