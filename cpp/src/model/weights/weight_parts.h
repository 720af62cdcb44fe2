// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the list of a model's weights states one of them: its tensors, its shape, what reads it.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/description/matrix_format.h"
#include "model/weights/linear.h"

namespace paceline {

// One of the tensors of a checkpoint that are adjacent in one region of the arena. It has `rows`
// rows of the matrix, or elements of the vector.
struct WeightPart {
  std::string name;  // canonical, without ".weight", ".scales" or ".bias"
  int64_t rows;
  // Above 0: one tensor has `rows` rows for each expert (of a convolution: for the input and for
  // the output of its branch), or each expert has a tensor of its own (LinearShape::is_per_expert),
  // whose name ends with the expert's number.
  int32_t num_experts = 0;
  // The row of the tensor in a checkpoint with which the part begins, where ranks share its rows.
  int64_t first_row = 0;
  // Of `floats`: NaN and infinity are refused, since one of them would spoil every later row.
  bool needs_finite = false;
};

// The rows that a product is computed for.
enum class LinearRows : uint8_t {
  kPass,     // all rows of a pass
  kStreams,  // every residual stream of these rows
  kLogits,   // rows whose logits are computed
};

struct LinearShape {
  std::string name;  // of the product, e.g. "layers.0.attn.qkv"
  std::vector<WeightPart> parts;
  int64_t cols;
  ShardAxis shard = ShardAxis::kNone;
  LinearRows rows = LinearRows::kPass;
  bool has_float_output = false;  // float32; otherwise the dtype of the activations
  MatrixFormat format = {};
  // Each head uses rows of its own: the ops of ops/latent.h multiply by the matrix, not `gemm`.
  bool is_by_head = false;
  int32_t num_groups = 1;      // GemmParams::num_groups; cols are those that a group reads
  int32_t top_k = 0;           // of experts: how many a row chooses
  bool is_transposed = false;  // of experts: the tensors are [num_experts, cols, rows]
  bool is_per_expert = false;  // of experts: the parts of an expert follow each other
  bool has_room = false;       // of experts: for one more matrix after that of the last
  std::string room_of = {};    // the name of the experts in whose room the matrix is; or empty
  // false: the matrix is the embedding table or belongs to the target. The model has no tensors
  // for it.
  bool is_owned = true;

  // Rows of the whole matrix.
  [[nodiscard]] int64_t num_rows() const {
    int64_t rows_so_far = 0;
    for (const WeightPart& part : parts) rows_so_far += part.rows;
    return rows_so_far;
  }
  // 0: the matrix is no expert's.
  [[nodiscard]] int32_t num_experts() const { return parts.front().num_experts; }
};

// What a vector of floats is.
enum class VectorKind : uint8_t { kNorm, kBias, kSinks, kScale };

// A visitor has the members
//   linear(Linear&, const LinearShape&)
//   experts(ExpertLinears&, const LinearShape&)
//   vector(const float*&, VectorKind, const std::vector<WeightPart>&)
//   table(const std::byte*&, const WeightPart&, int64_t cols)     rows are looked up by token
//   floats(const float*&, const WeightPart&, int64_t cols)        a float32 matrix outside products
//   tokens(const int32_t*&, const WeightPart&, bool is_optional)  ids of tokens
//   experts_of_tokens(const int32_t*&, const WeightPart&, int32_t top_k, int32_t num_experts)
// where the first argument is the member of `weights`, const if those are.

// Calls the visitor for the weights of one layer, whose names begin with `name`.
template <class Visitor>
struct LayerVisitor {
  std::string name;  // e.g. "layers.3."
  Visitor& visit;

  void norm(auto& vector, const char* which, int64_t size) const {
    visit.vector(vector, VectorKind::kNorm, {{name + which, size}});
  }
  void bias(auto& matrix, const std::vector<WeightPart>& parts) const {
    visit.vector(matrix.bias, VectorKind::kBias, parts);
  }
  void linear(auto& matrix, const char* which, std::vector<WeightPart> parts, int64_t cols,
              ShardAxis shard, const MatrixFormat& format, bool is_by_head = false) const {
    visit.linear(matrix, {.name = name + which,
                          .parts = std::move(parts),
                          .cols = cols,
                          .shard = shard,
                          .format = format,
                          .is_by_head = is_by_head});
  }
};

// What the weights of a kind of layer depend on besides its configuration.
struct WeightSizes {
  int64_t hidden;
  int64_t inputs = 0;      // of attention: DecoderConfig::qkv_inputs
  int64_t vocab_size = 0;  // of an MLP
};

// Each kind of layer has its weights, as KindWeights<Kind>::Type, and their list,
//   visit_kind_weights(kind, sizes, weights, layer)
// where `weights` are const or not, and `layer` is a LayerVisitor.
template <class Kind>
struct KindWeights;
template <class Kind>
using WeightsOf = typename KindWeights<Kind>::Type;

}  // namespace paceline
